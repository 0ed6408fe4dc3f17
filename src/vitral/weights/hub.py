"""`hf-hub:owner/name[@revision]`: files of the Hugging Face hub, through its own library, cache and offline mode."""

import contextlib
import threading
from pathlib import Path

from vitral.config import HUB
from vitral.errors import CheckpointError
from vitral.weights.files import DOCUMENTS, WEIGHT_FILES, read_json


def locate(source: str | Path) -> Path:
    """Where a source lies: its own path, or the hub's cache once it is fetched."""
    return _fetch(str(source)) if str(source).startswith(HUB) else Path(source)


def _fetch(source: str) -> Path:
    """The folder in the cache that holds the weights and what lies beside them."""
    name, _, revision = source.removeprefix(HUB).partition("@")
    if name.count("/") != 1 or not all(name.split("/")):
        raise CheckpointError(f"{source} should be hf-hub:owner/name, with @revision if need be.")
    for document in DOCUMENTS:
        _get(source, name, document, revision)
    for weights in WEIGHT_FILES:
        found = _get(source, name, weights, revision)
        if found is None:
            continue
        if weights.endswith(".index.json"):
            for shard in sorted({str(file) for file in read_json(found).get("weight_map", {}).values()}):
                _get(source, name, shard, revision)
        return found.parent
    raise CheckpointError(f"{source} has none of {', '.join(WEIGHT_FILES)}.")


def _get(source: str, name: str, file: str, revision: str) -> Path | None:
    """One file, None where the repository has it not."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled

    try:
        return Path(hf_hub_download(name, file, revision=revision or None))
    except LocalEntryNotFoundError:
        if _is_cached(name, revision):
            return None  # offline, and the repository was fetched before without this file
        raise CheckpointError(
            f"{source} is not in the cache, and the hub cannot be reached; "
            f"go online once, or download the folder elsewhere and give its path."
        ) from None
    except EntryNotFoundError:
        return None
    except (OfflineModeIsEnabled, HfHubHTTPError, OSError, ValueError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise CheckpointError(f"{source} cannot be fetched ({reason}).") from error


def _is_cached(name: str, revision: str) -> bool:
    from huggingface_hub import try_to_load_from_cache

    files = ("config.json", *WEIGHT_FILES)
    return any(isinstance(try_to_load_from_cache(name, file, revision=revision or None), str) for file in files)


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
