"""`vitral doctor`: the environment in one screen, for bug reports."""

from dataclasses import dataclass
from typing import Any

from vitral.cli.output import human, print_json

LABEL = 11
"""Width of the first column."""


@dataclass(frozen=True)
class Options:
    """Describe this installation: versions, hardware, extras, caches, the model hub, and a speed check of some seconds.

    Paste the output into bug reports: it contains no names of users, passwords or tokens, and the home folder is
    written as ~. Whatever is missing is reported, and the exit code is 0.

    Examples:
      vitral doctor --json
    """

    json: bool = False
    """Print JSON instead of text."""


def run(options: Options) -> None:
    """Collect the report and print it."""
    from vitral.inference.environment import describe_environment

    report = describe_environment()
    if options.json:
        print_json(report)
        return
    for label, text in lines(report):
        print(f"{label:<{LABEL}} {text}".rstrip())


def lines(report: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the report as lines of a label and a text."""
    shown = []
    for name, describe in PARTS.items():
        part = report[name]
        shown += [(name, f"unknown ({part['error']})")] if "error" in part else describe(part)
    return shown


def _versions(part: dict[str, Any]) -> list[tuple[str, str]]:
    rest = {name: version for name, version in part.items() if name not in ("vitral", "python", "platform")}
    return [
        ("vitral", f"{part['vitral']}, Python {part['python']}, {part['platform']}"),
        ("packages", _listed(rest)),
    ]


def _listed(packages: dict[str, str | None]) -> str:
    return ", ".join(f"{name} {version or 'missing'}" for name, version in packages.items())


def _machine(part: dict[str, Any]) -> list[tuple[str, str]]:
    cores = f"{part['cores']} cores"
    if part["usable_cores"] != part["cores"]:
        cores += f", {part['usable_cores']} of them usable"
    available = part["memory_available"]
    free = f", {human(available, 'B')} available" if available is not None else ""
    memory = human(part["memory"], "B") if part["memory"] is not None else "unknown"
    return [("processor", f"{part['processor']}, {cores}"), ("memory", memory + free)]


def _torch(part: dict[str, Any]) -> list[tuple[str, str]]:
    gpus = [f"{gpu['name']} ({human(gpu['memory'], 'B')})" for gpu in part["gpus"]] + ["Apple MPS"] * part["mps"]
    cuda = f"CUDA {part['cuda']}" if part["cuda"] else "built without CUDA"
    return [
        ("torch", f"{part['threads']} threads, {part['instructions']}, {cuda}"),
        ("GPU", ", ".join(gpus) or "none"),
    ]


def _variables(part: dict[str, str]) -> list[tuple[str, str]]:
    return [("variables", ", ".join(f"{name}={value}" for name, value in part.items()) or "none set")]


def _extras(part: dict[str, Any]) -> list[tuple[str, str]]:
    rows = [("extras", "")]
    for name, extra in part.items():
        missing = [package for package, version in extra["packages"].items() if version is None]
        state = f"missing {', '.join(missing)}: pip install 'vitral[{name}]'" if missing else _listed(extra["packages"])
        rows.append((f"  {name}", f"{extra['purpose']}: {state}"))
    return rows


def _cache(part: dict[str, Any]) -> list[tuple[str, str]]:
    kinds = [(f"  {name}", _size(size)) for name, size in part["kinds"].items()]
    hub = part["hub"]
    return [
        ("cache", part["folder"] + " (empty)" * (not kinds)),
        *kinds,
        ("hub cache", f"{hub['folder']}: {_size(hub)}"),
    ]


def _size(size: dict[str, int]) -> str:
    return f"{human(size['bytes'], 'B')} in {size['files']:,} file{'s' * (size['files'] != 1)}"


def _hub(part: dict[str, Any]) -> list[tuple[str, str]]:
    answer = "reachable" if part["reachable"] else "not reachable"
    state = "not tried, offline mode is on (HF_HUB_OFFLINE)" if part["offline"] else answer
    return [("hub", f"{part['endpoint']}: {state}")]


def _speed(part: dict[str, Any]) -> list[tuple[str, str]]:
    height, width = part["jpeg_size"]
    forward, decode = (part[f"{name}_images_per_second"] for name in ("forward", "decode"))
    return [
        (
            "speed",
            f"{human(forward)} images/s through {part['model']} (batches of {part['batch_size']}), "
            f"{human(decode)} images/s read from JPEG ({width} x {height})",
        )
    ]


PARTS = {
    "versions": _versions,
    "machine": _machine,
    "torch": _torch,
    "variables": _variables,
    "extras": _extras,
    "cache": _cache,
    "hub": _hub,
    "speed": _speed,
}
"""How each part of the report is printed, in order."""
