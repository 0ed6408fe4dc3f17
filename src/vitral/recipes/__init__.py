"""Recipes: settings that were measured, one TOML file each, with command, time and accuracy in its header."""

import tomllib
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any, get_args

from vitral.config import Preset
from vitral.errors import ConfigError, unknown_name


def list_recipes() -> list[str]:
    """Names of the recipes that come with vitral."""
    return sorted(Path(entry.name).stem for entry in files("vitral.recipes").iterdir() if entry.name.endswith(".toml"))


def read_recipe(name: str) -> dict[str, Any]:
    """The options of a recipe that comes with vitral."""
    if name not in list_recipes():
        raise unknown_name("recipe", name, list_recipes())
    return tomllib.loads(files("vitral.recipes").joinpath(f"{name}.toml").read_text())


def read_preset(name: str) -> dict[str, Any]:
    """The options of a way to fine-tune, one of `vitral.config.Preset`."""
    if name not in get_args(Preset):
        raise unknown_name("preset", name, get_args(Preset))
    return tomllib.loads(files("vitral.recipes").joinpath(f"presets/{name}.toml").read_text())


def read_config_file(path: Path) -> dict[str, Any]:
    """The options of a TOML file of the user's, or of a recipe that is called by its name."""
    if str(path) in list_recipes() and not path.exists():
        return read_recipe(str(path))
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}).") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML ({error}).") from None


def layered(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of all layers, each put over those before; groups of options, such as `augment`, are merged.

    A layer that gives steps or epochs removes the minutes below it, and one that gives epochs removes the steps.
    Minutes remove nothing: epochs and steps below them stay as an upper limit.
    """
    options: dict[str, Any] = {}
    for layer in layers:
        groups = {
            key: options[key] | dict(layer[key])
            for key in options
            if isinstance(options[key], dict) and isinstance(layer.get(key), Mapping)
        }
        given = {key for key in ("epochs", "max_steps") if layer.get(key) is not None}
        removed = {"max_minutes": None} if given else {}
        removed |= {"max_steps": None} if "epochs" in given else {}
        options = {**options, **removed, **layer, **groups}
    return options
