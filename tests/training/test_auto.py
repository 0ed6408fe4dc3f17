"""What `--model auto` chooses, and that everything else follows from the options given."""

import numpy as np
import pytest
from PIL import Image

from vitral.api import resolve_training
from vitral.config import TrainConfig
from vitral.data.sources.open import open_data
from vitral.models.zoo import is_model
from vitral.training.auto import PRETRAINED, SMALL, Facts, accumulation, choose, image_size, survey
from vitral.weights.pretrained import find_pretrained

TASKS = ("classify", "multilabel", "regress", "segment", "detect", "caption")


def nothing(name):
    return False


def everything(name):
    return True


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("side", [SMALL, 500])
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("images", [20, 500, 3000, 50_000])
@pytest.mark.parametrize("find", [nothing, everything])
def test_every_choice_is_a_valid_config_with_enough_steps(task, side, channels, images, find):
    choice = choose(Facts(images, side, channels, task), find)
    config = TrainConfig.from_dict(choice.options)
    assert is_model(config.model) or find_pretrained(config.model)
    assert config.epochs * images / config.batch_size >= min(250, images / 2)
    assert config.warmup_epochs <= config.epochs / 5
    assert len(choice.lines) == 2
    assert "--" in choice.lines[1] or "vitral" in choice.lines[1]


def test_colour_images_get_pretrained_weights_if_there_are_any():
    assert choose(Facts(400, 300, 3, "classify"), everything).options["model"] == PRETRAINED[0]
    second = choose(Facts(400, 300, 3, "classify"), lambda name: name == PRETRAINED[1])
    assert (second.options["model"], second.options["probe"]) == (PRETRAINED[1], "first")
    assert PRETRAINED[1] in second.reason


@pytest.mark.parametrize("facts", [Facts(400, 300, 1, "classify"), Facts(400, SMALL, 3, "classify")])
def test_grey_and_tiny_images_are_trained_from_scratch(facts):
    assert choose(facts, everything).options["model"] == "vit_lite_conv_patch4_32"


def test_without_weights_the_override_names_the_command_that_gets_them():
    choice = choose(Facts(400, 300, 3, "classify"), nothing)
    assert is_model(choice.options["model"])
    assert f"vitral fetch {PRETRAINED[-1]}" in choice.override


@pytest.mark.parametrize(
    ("side", "task", "size"),
    [(33, "classify", 56), (60, "classify", 84), (115, "classify", 140), (900, "classify", 140), (900, "segment", 168)],
)
def test_the_image_size_follows_from_the_images_and_the_task(side, task, size):
    assert image_size(Facts(400, side, 3, task)) == size


def test_lora_freezes_the_blocks_by_itself():
    given = {"lora": {"rank": 8}}
    options = choose(Facts(400, 300, 3, "classify"), everything, given).options
    assert TrainConfig.from_dict({**options, **given}).freeze_layers == 0
    assert choose(Facts(400, 300, 3, "classify"), everything).options["freeze_layers"] > 0


def test_other_options_follow_from_those_given():
    usual = choose(Facts(400, 300, 3, "classify"), everything).options
    given = choose(Facts(400, 300, 3, "classify"), everything, {"epochs": 2, "batch_size": 8}).options
    assert given["warmup_epochs"] == pytest.approx(0.1 * 2)
    assert given["warmup_epochs"] < usual["warmup_epochs"]


def test_a_batch_that_does_not_fit_is_computed_in_parts():
    facts = Facts(400, 300, 3, "classify")
    roomy, tight = (choose(facts, everything, memory=gib * 2**30) for gib in (64, 1))
    assert "accumulate" not in roomy.options
    parts = tight.options["accumulate"]
    assert parts > 1
    assert tight.options["batch_size"] % parts == 0
    assert f"in {parts} parts" in tight.reason
    assert accumulation(tight.options, 3, 2**29) >= parts


@pytest.fixture
def photos(tmp_path):
    """Two classes of colour images of 40 x 60 and 80 x 50 pixels."""
    for i in range(24):
        folder = tmp_path / "photos" / ("dark", "light")[i % 2]
        folder.mkdir(parents=True, exist_ok=True)
        size = (40, 60) if i < 18 else (80, 50)
        pixels = np.random.default_rng(i).integers(0, 100, (*size, 3), np.uint8) + 100 * np.uint8(i % 2)
        Image.fromarray(pixels).save(folder / f"{i}.png")
    return open_data(tmp_path / "photos")


def test_the_survey_measures_the_data(photos):
    assert survey(photos, "classify") == Facts(24, 40, 3, "classify")


class TestResolve:
    """How the choice meets the options given."""

    @pytest.fixture(autouse=True)
    def offline(self, monkeypatch, tmp_path):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))

    def test_auto_is_resolved_and_explained(self, photos):
        config, notes = resolve_training(photos, {})
        assert config.model == choose(survey(photos, "classify"), nothing).options["model"]
        assert notes[0].startswith(f"chosen: {config.model} from scratch")

    def test_options_given_win(self, photos):
        config, _ = resolve_training(photos, {"epochs": 3, "lr": 0.5, "augment": {"flip": 0.0}})
        assert (config.epochs, config.lr, config.augment.flip) == (3, 0.5, 0.0)
        assert config.augment.crop_scale == 0.3

    def test_a_model_that_is_given_is_not_second_guessed(self, photos):
        config, notes = resolve_training(photos, {"model": "vit_nano_patch2_8"})
        assert (config, notes) == (TrainConfig(model="vit_nano_patch2_8"), [])

    def test_a_recipe_is_unchanged(self):
        config, notes = resolve_training(open_data("digits"), {})
        assert config.model == "vit_nano_conv_patch2_8"
        assert not notes
