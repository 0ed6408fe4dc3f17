"""Recipes: settings that were measured, one TOML file each, with command, time and accuracy in its header."""

import tomllib
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
