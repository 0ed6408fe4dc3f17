"""Files of the Hugging Face hub, through its own client: its cache, offline mode, mirrors (HF_ENDPOINT) and tokens.

The hash of every download is compared with the one that the server states; a file that differs is removed and refused.
"""

import contextlib
import hashlib
import re
import threading
from pathlib import Path

from vitral.config import HUB
from vitral.errors import CheckpointError
from vitral.weights.files import DOCUMENTS, WEIGHT_FILES, read_shard_index


def fetch_folder(source: str) -> Path:
    """Fetch `hf-hub:owner/name[@revision]`: the folder in the cache with the weights and the documents next to them."""
    name, _, revision = source.removeprefix(HUB).partition("@")
    if name.count("/") != 1 or not all(name.split("/")):
        raise CheckpointError(f"{source} should be hf-hub:owner/name, with @revision if wanted.")
    for document in DOCUMENTS:
        _fetch_or_cached(source, name, document, revision)
    for weights in WEIGHT_FILES:
        found = _fetch_or_cached(source, name, weights, revision)
        if found is None:
            continue
        if weights.endswith(".index.json"):
            for shard in sorted(set(read_shard_index(found).values())):
                _fetch_or_cached(source, name, shard, revision)
        return found.parent
    raise CheckpointError(f"{source} has none of {', '.join(WEIGHT_FILES)}.")


def _fetch_or_cached(source: str, name: str, file: str, revision: str) -> Path | None:
    """One file of a repository, or None if the repository does not have it."""
    try:
        return fetch_file(source, name, file, revision)
    except AbsentError:
        return None
    except UnreachableError:
        if not any(cached_file(name, each, revision) for each in ("config.json", *WEIGHT_FILES)):
            raise
        return cached_file(name, file, revision)  # the repository was fetched before, perhaps without this file


class AbsentError(CheckpointError):
    """A repository does not have a file."""


class UnreachableError(CheckpointError):
    """The hub does not answer, or may not be asked."""


def fetch_file(source: str, repository: str, file: str, revision: str = "") -> Path:
    """Download one file unless it is in the cache, and compare its hash with the server's.

    Args:
        source: What the user asked for; errors name it.
        repository: `owner/name` on the hub.
        file: Path of the file in the repository.
        revision: Branch, tag or commit; the default branch if empty.

    Returns:
        The path in the hub's cache; the folder that holds it is named after the commit.

    Raises:
        CheckpointError: The file cannot be downloaded, or is not the one that the server describes.
    """
    from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url

    def stated(revision: str) -> tuple[str | None, str | None]:
        about = get_hf_file_metadata(hf_hub_url(repository, file, revision=revision or None))
        return about.commit_hash, about.etag

    try:
        commit, etag = stated(revision)
        path = Path(hf_hub_download(repository, file, revision=revision or None))
        if commit_of(path) != commit:  # the branch moved between the two requests
            _, etag = stated(commit_of(path))
    except Exception as error:  # the client passes on the errors of whichever HTTP library it uses
        raise _explained(source, repository, file, revision, error) from error
    try:
        verify(path, etag or "")
    except CheckpointError:
        path.resolve().unlink(missing_ok=True)
        path.unlink(missing_ok=True)
        raise
    return path


def cached_file(repository: str, file: str, revision: str = "") -> Path | None:
    """The path of a file in the hub's cache, or None if it was not downloaded. Uses no network."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(repository, file, revision=revision or None)
    return Path(found) if isinstance(found, str) else None


def commit_of(path: Path) -> str:
    """The commit that a file in the hub's cache belongs to."""
    parts = path.parts
    return parts[parts.index("snapshots") + 1]


def verify(path: Path, stated: str) -> None:
    """Raise unless a file has the stated hash: SHA-256, or git's for small files (40 digits)."""
    if re.fullmatch(r"[0-9a-f]{64}", stated):
        actual = sha256_of(path)
    elif re.fullmatch(r"[0-9a-f]{40}", stated):
        content = path.read_bytes()
        actual = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()  # noqa: S324  # as git does
    else:
        raise CheckpointError(
            f"the server states no hash for {path.name} (ETag {stated!r}), so the download cannot be verified; use the "
            f"hub itself, or vitral fetch NAME --from URL for a mirror that you trust."
        )
    if actual != stated:
        raise CheckpointError(
            f"{path.name} is damaged: the server states the hash {stated}, the file has {actual}. It was not used; "
            f"fetch it again."
        )


def sha256_of(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def hub_reachable(timeout: float = 2.0) -> bool:
    """Whether the hub, or the mirror that HF_ENDPOINT names, answers within `timeout` seconds; no in offline mode."""
    from huggingface_hub import constants, get_session

    if constants.HF_HUB_OFFLINE:
        return False
    answers: list[int] = []

    def ask() -> None:
        with contextlib.suppress(Exception):  # errors of whichever HTTP library the client uses
            answers.append(get_session().head(constants.ENDPOINT, timeout=timeout).status_code)

    # A name server that does not answer is not covered by the client's timeout, hence the thread.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(timeout)
    return bool(answers) and answers[0] < 500


def _explained(source: str, repository: str, file: str, revision: str, error: Exception) -> CheckpointError:
    """What went wrong, and what to do about it."""
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        HfHubHTTPError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    page = f"{constants.ENDPOINT}/{repository}"
    log_in = "log in with `hf auth login` or set HF_TOKEN"
    elsewhere = f"or get the weights another way: vitral fetch {source} --from DIR or URL"
    if source.startswith(HUB):
        elsewhere = "or download the folder elsewhere and give its path"
    status = error.response.status_code if isinstance(error, HfHubHTTPError) else None
    if isinstance(error, GatedRepoError):
        return CheckpointError(f"{source} is gated: accept its terms at {page}, then {log_in}.")
    if isinstance(error, RevisionNotFoundError):
        return CheckpointError(f"{source}: {repository} has no revision {revision!r}; {page}/commits/main lists them.")
    if isinstance(error, RepositoryNotFoundError):
        return CheckpointError(f"{source}: {page} does not exist or is private; check the name, or {log_in}.")
    if isinstance(error, EntryNotFoundError) and status == 404:
        return AbsentError(f"{source}: {page} has no file {file}.")
    if status in (401, 403):
        return CheckpointError(f"{source}: the hub refused access to {page} (status {status}); {log_in}.")
    if status == 429:
        return UnreachableError(
            f"{source}: the hub answered that there were too many requests (status 429); wait some minutes, {log_in} "
            f"for a higher limit, {elsewhere}."
        )
    if isinstance(error, OfflineModeIsEnabled):
        return UnreachableError(
            f"{source} is not in the cache, and offline mode (HF_HUB_OFFLINE) is on; turn it off once, {elsewhere}."
        )
    reason = f"status {status}" if status else (str(error).splitlines() or [type(error).__name__])[0]
    return UnreachableError(
        f"{source} is not in the cache, and the hub cannot be reached at {constants.ENDPOINT} ({reason.rstrip('.')}); "
        f"set HF_ENDPOINT to a mirror, {elsewhere}."
    )
