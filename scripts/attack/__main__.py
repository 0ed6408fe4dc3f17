"""Run the attack campaign and print a table of tries and failures; the exit code is 1 if anything failed."""

import argparse
import json
import os
import platform
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PLACES = ("scripts", "tests", "tests/serving")
"""Where modules are found, as in the tests."""
sys.path[0:1] = [str(ROOT / place) for place in PLACES]

from attack.campaigns import CAMPAIGNS  # noqa: E402
from attack.stage import Campaign, Stage  # noqa: E402


def main(args: Sequence[str] | None = None) -> int:
    """Run the campaigns that are asked for and return the exit code."""
    parser = argparse.ArgumentParser(prog="python scripts/attack", description=__doc__)
    parser.add_argument("--scale", type=float, default=1.0, help="share of the full size, such as 0.1 (default: 1)")
    parser.add_argument("--only", nargs="+", choices=list(CAMPAIGNS), default=list(CAMPAIGNS), metavar="CAMPAIGN",
                        help=f"campaigns to run: {', '.join(CAMPAIGNS)} (default: all)")  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, help="another seed makes other damage (default: 0)")
    parser.add_argument("--number", type=int, help="run only this try of each campaign, to reproduce a failure")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the table as JSON")
    parser.add_argument("--out", type=Path, default=Path("attack-failures"), metavar="DIR",
                        help="folder for what reproduces each failure (default: attack-failures)")  # fmt: skip
    options = parser.parse_args(args)
    if not 0 < options.scale <= 1:
        parser.error(f"--scale must be above 0 and at most 1, got {options.scale:g}.")
    os.environ["OMP_NUM_THREADS"] = "1"  # for all children: two of them share two cores
    rows = [run(CAMPAIGNS[name], options) for name in options.only]
    print(table(rows))
    if options.json:
        about = {"seed": options.seed, "scale": options.scale, "python": platform.python_version()}
        options.json.write_text(json.dumps({**about, "campaigns": rows}, indent=1) + "\n")
    return int(any(row["failures"] for row in rows))


def run(campaign: Campaign, options: argparse.Namespace) -> dict[str, Any]:
    """One campaign, and its row of the table."""
    with tempfile.TemporaryDirectory(prefix="attack-", ignore_cleanup_errors=True) as work:
        count = max(1, round(campaign.size * options.scale))
        stage = Stage(campaign.name, options.seed, count, Path(work), options.out.resolve(), options.number)
        campaign.run(stage)
    stage.report()
    return {
        "campaign": campaign.name, "tries": stage.done, "failures": len(stage.failed), "failure": campaign.failure,
        "seconds": round(stage.seconds), "failed": stage.failed,
    }  # fmt: skip


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Rows as Markdown."""
    lines = ["| campaign | tries | failures | what counts as a failure |", "|---|---:|---:|---|"]
    lines += [f"| {row['campaign']} | {row['tries']:,} | {row['failures']:,} | {row['failure']} |" for row in rows]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
