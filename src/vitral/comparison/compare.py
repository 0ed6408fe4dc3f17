"""The whole comparison: plan, runs, verdict, measures, report."""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vitral.comparison.experiment import judged_on, open_comparison, run_trials
from vitral.comparison.measure import Measured, measure_run
from vitral.comparison.plan import Plan, make_plan
from vitral.comparison.report import write_comparison
from vitral.comparison.verdict import judge, summarize
from vitral.config import CompareConfig, TrainConfig
from vitral.data.sources.base import Data
from vitral.training.session import provenance
from vitral.weights.atomic import write_atomically

RESULTS = "results.json"


@dataclass(frozen=True)
class Comparison:
    """A finished comparison: where it lies, and what `results.json` holds."""

    path: Path
    results: dict[str, Any]


def compare_models(
    data: Data, compare: CompareConfig, train: TrainConfig, out: Path, *, say: Callable[[str], None], quiet: bool,
    command: str,
) -> Comparison:  # fmt: skip
    """Train every model on every share of the data with every seed, and write results.json and report.html."""
    cut = data.with_splits(train.val_fraction, train.test_fraction, train.split_seed)
    plan = make_plan(cut, compare, train, out)
    with open_comparison(out, cut, compare, train):
        say(f"{cut.describe()}; {len(plan.trials)} runs, each with {plan.budget}")
        results = run_trials(data, plan, say, quiet, command)
        rows = summarize(results)
        made = provenance(cut, train, [], command)
        document = {
            "format_version": 1,
            **{key: made[key] for key in ("data", "train", "command", "versions", "git_revision")},
            "compare": compare.to_dict(),
            "budget": plan.budget,
            "judged_on": judged_on(cut.splits),
            "models": {
                each.label: {"model": each.model, "patch_size": each.patch_size, "params": each.cost.params,
                             "macs": each.cost.macs, "config": each.config.to_dict()}
                for each in (*plan.candidates, *plan.patched)
            },
            "verdicts": [
                {"sentence": sentence, "clear": verdict.clear, **vars(verdict)}
                for verdict, sentence in judge([row for row in rows if row.label in plan.rivals])
            ],
            "summary": [asdict(row) for row in rows],
            "runs": [asdict(result) for result in results],
        }  # fmt: skip
        found = _measured(cut, compare, plan, say) if compare.images else {}
        document["measures"] = {label: each.found for label, each in found.items()}
        write_comparison(out, document, plan, results, rows, train, found)
        write_atomically(out / RESULTS, (json.dumps(document, indent=1) + "\n").encode())
    return Comparison(out, document)


def _measured(data: Data, compare: CompareConfig, plan: Plan, say: Callable[[str], None]) -> dict[str, Measured]:
    """Measures of the first seed's model of the largest share, on images spread over the part that judges."""
    part = data.splits[judged_on(data.splits)]
    chosen = part[:: max(len(part) // compare.images, 1)][: compare.images]
    found = {}
    for each in plan.candidates:
        fits = (t for t in plan.trials if t.candidate is each and t.train.label_fraction == compare.fractions[-1])
        say(f"measuring {each.label} on {len(chosen):,} images")
        found[each.label] = measure_run(next(fits).path, data, chosen)
    return found
