"""The whole comparison on the embedded digits, with models and budgets as small as they get."""

import json
import random
import re
from dataclasses import replace

import pytest

import vitral
from helpers import stop_after
from vitral.cli.main import main
from vitral.comparison.experiment import Result
from vitral.comparison.plan import make_plan
from vitral.comparison.verdict import TIMES, judge, summarize
from vitral.config import CompareConfig, TrainConfig
from vitral.data.sources.open import open_data
from vitral.errors import CheckpointError, ConfigError, DataError
from vitral.models.cost import model_cost
from vitral.models.zoo import model_spec
from vitral.training import session
from vitral.weights.lock import BusyError, locked
from vitral.weights.rundir import read_run_config

TWO = ["vit_nano_patch2_8", "vit_nano_conv_patch2_8"]
SMALL = {"models": TWO, "fractions": [0.1, 1.0], "seeds": 2, "patch_sizes": [2, 4], "max_steps": 3, "images": 12}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return vitral.compare("digits", out=tmp_path_factory.mktemp("compare") / "two", quiet=True, **SMALL)


@pytest.fixture(scope="module")
def digits():
    return open_data("digits").with_splits(0.05, 0.0, seed=0)


class TestPlan:
    def trials(self, digits, tmp_path, train=None, **options):
        compare = CompareConfig(**({"models": TWO, "fractions": (0.1, 1.0), "seeds": 1} | options))
        return make_plan(digits, compare, train or TrainConfig(batch_size=64, epochs=3), tmp_path).trials

    def test_epochs_are_steps_over_all_images_whatever_the_share(self, digits, tmp_path):
        trials = self.trials(digits, tmp_path)
        assert {t.train.max_steps for t in trials} == {3 * (len(digits.splits["train"]) // 64)}
        assert [t.images for t in trials] == [len(digits.with_label_fraction(0.1, 0).splits["train"])] * 2 + [1367] * 2

    def test_equal_multiply_adds_give_the_dearer_model_fewer_steps(self, digits, tmp_path):
        trials = self.trials(digits, tmp_path, max_macs=1e11)
        for trial in trials:
            forward = model_cost(model_spec(trial.train.model).config).macs
            assert trial.macs(trial.train.max_steps) == 3 * forward * 64 * trial.train.max_steps
            assert trial.macs(trial.train.max_steps) == pytest.approx(1e11, rel=0.01)
        assert trials[1].train.max_steps < trials[0].train.max_steps

    def test_minutes_end_a_run_and_nothing_else_does(self, digits, tmp_path):
        train = TrainConfig(max_minutes=2, batch_size=64, epochs=5, warmup_epochs=1)
        (trial, *_) = self.trials(digits, tmp_path, train)
        assert trial.train.max_minutes == 2
        assert trial.train.max_steps > 10**8
        assert trial.train.warmup_epochs / trial.train.epochs == 0.2  # the recipe's share of warm-up

    def test_small_shares_are_validated_as_often_in_steps(self, digits, tmp_path):
        small, _, large, _ = self.trials(digits, tmp_path)
        assert large.train.eval_every == 1
        per_epoch = small.images // 64
        assert small.train.eval_every * per_epoch == pytest.approx(1367 // 64, abs=1)

    def test_one_seed_after_another_and_the_own_patch_once(self, digits, tmp_path):
        trials = self.trials(digits, tmp_path, seeds=2, patch_sizes=(4, 2))
        seen = [(t.train.seed, t.candidate.label, t.train.label_fraction) for t in trials]
        first = [(0, TWO[0], 0.1), (0, TWO[1], 0.1), (0, TWO[0], 1.0), (0, TWO[1], 1.0), (0, f"{TWO[0]}-P4", 1.0)]
        assert seen == first + [(1, *rest) for _, *rest in first]
        assert trials[4].train.patch_size == 4

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"models": ("vit_nano_patch2_9",)}, "unknown model 'vit_nano_patch2_9'; did you mean vit_nano_patch2_8"),
            ({"patch_sizes": (3,)}, r"img_size must be a multiple of patch_size \(3\), got 8"),
        ],
    )
    def test_what_cannot_be_is_said_before_anything_is_trained(self, digits, tmp_path, options, message):
        with pytest.raises((ConfigError, LookupError), match=message):
            self.trials(digits, tmp_path, **options)

    def test_two_budgets_are_one_too_many(self, digits, tmp_path):
        with pytest.raises(ConfigError, match="one budget, got --max-macs 1e\\+09 and --max-minutes 2; give one"):
            self.trials(digits, tmp_path, TrainConfig(max_minutes=2), max_macs=1e9)

    def test_only_classes_are_compared(self, digits, tmp_path):
        numbers = replace(digits, targets=digits.targets[:, None].double(), kind="numbers")
        with pytest.raises(DataError, match="images with one class each"):
            self.trials(numbers, tmp_path)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"models": ()}, "names of one or more models"),
            ({"models": ("a", "a")}, "must differ from each other, got a, a"),
            ({"fractions": (0.0, 1.0)}, "above 0 and at most 1, got"),
            ({"fractions": (1.5,)}, "above 0 and at most 1, got"),
            ({"patch_sizes": (0,)}, "positive whole numbers"),
            ({"seeds": 0}, "seeds must be a whole number of at least 1, got 0"),
            ({"max_macs": 0}, "max_macs must be a number of at least 1, got 0"),
        ],
    )
    def test_options_are_checked(self, options, message):
        with pytest.raises(ConfigError, match=message):
            CompareConfig(**({"models": ("a",)} | options))


def result(label, fraction, accuracy, seed=0):
    return Result(label, label, None, fraction, seed, 10, accuracy, (0.0, 1.0), 1, 2.0, 3, [], "")


class TestVerdict:
    def test_a_gap_beyond_the_spread(self):
        rows = summarize(
            [result("a", 1.0, 0.5), result("a", 1.0, 0.52, 1), result("b", 1.0, 0.6), result("b", 1.0, 0.62, 1)]
        )
        assert [row.accuracy for row in rows] == [pytest.approx(0.51), pytest.approx(0.61)]
        assert rows[0].spread == pytest.approx(0.02 / 2**0.5)
        ((verdict, sentence),) = judge(rows)
        assert (verdict.best, verdict.second, verdict.clear) == ("b", "a", True)
        assert verdict.spread == pytest.approx(0.02)  # the hypotenuse of two spreads of 0.0141
        assert sentence == (
            "With 100 % of the training images b is best (61.00 %), 10.00 points before a: more than chance gives "
            "with 2 seeds (6.08 points)."
        )

    def test_a_gap_within_the_spread_and_each_share_for_itself(self):
        values = {("a", 0.1): (0.3, 0.5), ("b", 0.1): (0.4, 0.42), ("a", 1.0): (0.9, 0.9), ("b", 1.0): (0.8, 0.8)}
        rows = summarize([result(*key, v, i) for key, pair in values.items() for i, v in enumerate(pair)])
        verdicts = judge(rows)
        assert [(v.fraction, v.best, v.clear) for v, _ in verdicts] == [(0.1, "b", False), (1.0, "a", True)]
        assert ": not more than chance gives with 2 seeds" in verdicts[0][1]

    def test_two_equal_models_are_called_different_in_one_case_of_twenty(self):
        """Drawn from one normal distribution, for each number of seeds that the table has."""
        numbers = random.Random(0)
        for seeds in TIMES:
            called = 0
            for _ in range(4000):
                values = {m: [numbers.gauss(0.5, 0.01) for _ in range(seeds)] for m in "ab"}
                rows = summarize([result(m, 1.0, v, i) for m, some in values.items() for i, v in enumerate(some)])
                called += bool(judge(rows)[0][0].clear)
            assert called / 4000 == pytest.approx(0.05, abs=0.013)

    def test_one_seed_and_one_model_claim_nothing(self):
        ((verdict, sentence),) = judge(summarize([result("a", 0.2, 0.5), result("b", 0.2, 0.4)]))
        assert verdict.clear is None
        assert sentence.endswith("with one seed nobody knows whether that is more than chance.")
        assert judge(summarize([result("a", 0.2, 0.5)]))[0][1].endswith("it is the only one.")


class TestRuns:
    def test_every_run_is_an_ordinary_one(self, made):
        runs = made.results["runs"]
        assert len(runs) == 2 * (2 * 2 + 1)
        for run in runs:
            document = read_run_config(made.path / run["path"]).document
            assert document["train"]["max_steps"] == document["spent"]["steps"] == run["steps"] == 3
            assert document["seed"] == run["seed"]
            assert document["metrics"]["test"]["accuracy"] == run["accuracy"]
            assert document["data"]["splits"]["train"] == run["images"]
        assert vitral.Predictor(made.path / runs[0]["path"]).labels == [str(i) for i in range(10)]

    def test_all_models_share_one_recipe(self, made):
        trains = [read_run_config(made.path / run["path"]).document["train"] for run in made.results["runs"]]
        for train in trains:
            for name in ("model", "seed", "label_fraction", "patch_size", "eval_every"):
                train.pop(name)
        assert all(train == trains[0] for train in trains)
        assert trains[0]["optimizer"] == "muon"  # of the recipe of the digits

    def test_results_hold_together(self, made):
        results = made.results
        assert json.loads((made.path / "results.json").read_text()) == json.loads(json.dumps(results))
        assert results["judged_on"] == "test"
        assert [v["fraction"] for v in results["verdicts"]] == [0.1, 1.0]
        assert set(results["measures"]) == set(TWO)
        for row in results["summary"]:
            values = [
                r["accuracy"] for r in results["runs"] if (r["label"], r["fraction"]) == (row["label"], row["fraction"])
            ]
            assert row["accuracy"] == pytest.approx(sum(values) / 2)
            assert (row["low"], row["high"], row["seeds"]) == (min(values), max(values), 2)

    def test_finished_runs_are_kept_and_more_may_be_added(self, tmp_path, monkeypatch):
        trained = []
        train_model = session.train_model
        monkeypatch.setattr(
            "vitral.comparison.experiment.train_model",
            lambda data, config, out, **more: trained.append(out) or train_model(data, config, out, **more),
        )
        one = {"models": TWO[:1], "fractions": [1.0], "seeds": 1, "max_steps": 1, "images": 0}
        first = vitral.compare("digits", out=tmp_path / "one", quiet=True, **one)
        assert len(trained) == 1
        vitral.compare("digits", out=tmp_path / "one", quiet=True, **(one | {"fractions": [0.1, 1.0]}))
        assert [path.relative_to(tmp_path / "one" / "runs").parts[:2] for path in trained] == [
            (TWO[0], "fraction-1"),
            (TWO[0], "fraction-0.1"),
        ]
        assert (
            json.loads(json.dumps(first.results["runs"][0]))
            in json.loads((tmp_path / "one" / "results.json").read_text())["runs"]
        )

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"max_steps": 4}, r"max_steps: 3 in the run, 4 now\); use the same, or another --out"),
            ({"lr": 0.5}, "lr: 0.003 in the run, 0.5 now"),
            (
                {"max_steps": None, "max_minutes": 1},
                "max_steps: 3 in the run, None now; max_minutes: None in the run, 1",
            ),
            ({"max_steps": None, "max_macs": 1e9}, "max_steps: 3 in the run"),
        ],
    )
    def test_changed_options_are_refused(self, made, change, message):
        with pytest.raises(CheckpointError, match=message):
            vitral.compare("digits", out=made.path, quiet=True, **(SMALL | change))

    def test_other_data_and_other_places_are_refused(self, made, tmp_path):
        data = open_data("digits")
        fewer = replace(data, splits=data.splits | {"test": data.splits["test"][:100]})
        with pytest.raises(CheckpointError, match=r"70 val, 360 test.*not on.*100 test"):
            vitral.compare(fewer, out=made.path, quiet=True, **SMALL)
        (tmp_path / "letter.txt").write_text("mine")
        with pytest.raises(CheckpointError, match="is not empty and holds no comparison"):
            vitral.compare("digits", out=tmp_path, quiet=True, **SMALL)

    def test_a_second_comparison_into_the_same_place_is_refused(self, tmp_path):
        with locked(tmp_path), pytest.raises(BusyError, match="another process is writing to"):
            vitral.compare("digits", out=tmp_path, quiet=True, **SMALL)
        assert [path.name for path in tmp_path.iterdir()] == [".lock"]

    def test_the_lock_is_held_until_the_results_are_written(self, tmp_path, monkeypatch):
        refused = []

        def report(out, *parts):
            with pytest.raises(BusyError), locked(out):
                pass
            refused.append(out)

        monkeypatch.setattr("vitral.comparison.compare.write_comparison", report)
        one = {"models": TWO[:1], "fractions": [1.0], "seeds": 1, "max_steps": 1, "images": 0}
        vitral.compare("digits", out=tmp_path, quiet=True, **one)
        assert refused == [tmp_path]

    def test_several_processes_of_torchrun_are_refused(self, tmp_path, monkeypatch):
        monkeypatch.setenv("WORLD_SIZE", "2")
        with pytest.raises(ConfigError, match=r"runs in one process; start it without torchrun"):
            vitral.compare("digits", out=tmp_path / "out", quiet=True, **SMALL)
        assert not (tmp_path / "out").exists()

    def test_an_interrupted_comparison_goes_on_and_ends_as_an_unbroken_one(self, made, tmp_path, monkeypatch):
        options = SMALL | {"patch_sizes": [], "fractions": [1.0], "seeds": 1, "images": 0}
        with stop_after(monkeypatch, session, 5), pytest.raises(KeyboardInterrupt):
            vitral.compare("digits", out=tmp_path / "broken", quiet=True, **options)
        first, second = (tmp_path / "broken" / "runs" / name / "fraction-1" / "seed-0" for name in TWO)
        assert "metrics" in read_run_config(first).document
        assert "metrics" not in read_run_config(second).document
        again = vitral.compare("digits", out=tmp_path / "broken", quiet=True, **options)
        whole = {(r["label"], r["fraction"], r["seed"]): r["accuracy"] for r in made.results["runs"]}
        assert {r["label"]: r["accuracy"] for r in again.results["runs"]} == {n: whole[n, 1.0, 0] for n in TWO}
        for name in TWO:
            place = f"runs/{name}/fraction-1/seed-0/model.safetensors"
            assert (tmp_path / "broken" / place).read_bytes() == (made.path / place).read_bytes()

    def test_of_one_model_alone_the_patch_sizes_are_judged(self, tmp_path):
        options = SMALL | {"models": TWO[:1], "fractions": [1.0], "seeds": 1, "images": 0}
        made = vitral.compare("digits", out=tmp_path / "one", quiet=True, **options)
        best, second = sorted(made.results["summary"], key=lambda row: -row["accuracy"])
        (verdict,) = made.results["verdicts"]
        assert (verdict["best"], verdict["second"]) == (best["label"], second["label"])
        assert verdict["sentence"] in (made.path / "report.html").read_text()


class TestReport:
    def test_it_says_which_is_best_and_how_it_was_made(self, made):
        text = (made.path / "report.html").read_text()
        for verdict in made.results["verdicts"]:
            assert verdict["sentence"] in text
        assert "All models use one recipe: " in text
        assert "optimizer muon" in text
        assert "each run with 3 steps" in text
        assert "http" not in re.sub(r"http://www\.w3\.org/\S+", "", text)  # needs nothing else

    def test_every_number_of_the_tables_is_that_of_the_results(self, made):
        text = (made.path / "report.html").read_text()
        for row in made.results["summary"]:
            told = f"<td>{100 * row['accuracy']:.2f} ± {100 * row['spread']:.2f}</td>"
            assert told.replace(" ", "\N{NO-BREAK SPACE}") in text
        for model in made.results["models"].values():
            assert f"<td>{model['macs'] / 1e6:.2f}</td>" in text

    def test_every_measure_has_its_section(self, made):
        titles = re.findall("<h2>(.*?)</h2>", (made.path / "report.html").read_text())
        wanted = [
            "Which is best", "Accuracy against data", "Accuracy against multiply-adds", "Accuracy against time",
            "What they cost", "Accuracy against patch size", "What a cell looks at", "Equivariance error by layer",
            "Answers of shifted images", "Attention distance", "Noise", "Hidden pieces", "Shuffled pieces",
            "Cost as images grow", "How it was made",
        ]  # fmt: skip
        assert [title for title in wanted if title not in titles] == []

    def test_pictures_for_documents(self, made):
        names = {path.stem for path in (made.path / "pictures").glob("*.png")}
        assert {"accuracy-data", "accuracy-time", "accuracy-macs", "receptive-fields", "growth", "patch-cost"} <= names


def test_the_command_line(capsys, tmp_path):
    place = str(tmp_path / "one")
    lists = ["--models", ",".join(TWO), "--fractions", "0.1,1", "--patch-sizes", "2", "4"]
    args = ["compare", "digits", *lists, "--seeds", "1", "--max-steps", "1", "--images", "0", "--out", place]
    assert main([*args, "--json"]) == 0
    out, err = capsys.readouterr()
    results = json.loads(out)
    assert err == ""
    assert main(args) == 0
    out, err = capsys.readouterr()
    assert f"run 5 of 5: {TWO[0]}-P4, 100 % of the training images, seed 0 is kept: " in err
    for verdict in results["verdicts"]:
        assert verdict["sentence"] in out


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--fractions", "half"], "--fractions takes numbers, separated by commas or spaces, got half."),
        (["--model", TWO[1]], "unknown option or surplus word --model"),
        (["--max-steps", "3", "--max-minutes", "1"], "every run has one budget"),
    ],
)
def test_mistakes_on_the_command_line(capsys, tmp_path, more, message):
    assert main(["compare", "digits", "--models", TWO[0], "--out", str(tmp_path / "x"), *more]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "x").exists()
