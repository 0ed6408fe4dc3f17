"""Every error that is the user's to mend.

    VitralError
    ├── ConfigError        an option, or a combination of options, that cannot be
    ├── UnknownNameError   a name that is in no table of ours
    ├── InputError         a tensor the model cannot take
    ├── ImageError         a file or bytes that do not become an image
    ├── DataError          a data set that cannot be used as asked
    ├── CheckpointError    a checkpoint or run that cannot be written, read or gone on with
    ├── TrainingError      a training run that cannot go on
    └── UnreachableError   a server that is needed, and does not answer or let in

A message says what is wrong, what was received and how to mend it, in one sentence that the command line and the
server show unchanged. Our own mistakes are assertions, not members of this tree.
"""

from collections.abc import Iterable
from difflib import get_close_matches


class VitralError(Exception):
    """Root of the tree: catch this to catch all of them."""


class ConfigError(VitralError, ValueError):
    """An option, or a combination of options, that cannot be."""


class UnknownNameError(VitralError, LookupError):
    """A name that is in no table of ours; the message offers the nearest ones."""


class InputError(VitralError, ValueError):
    """What was asked for, or given to a model, that it cannot take: a tensor, a text, a number, a name."""


class ImageError(VitralError, ValueError):
    """A file or bytes that do not become an image."""


class DataError(VitralError, ValueError):
    """A data set that cannot be used as asked."""


class CheckpointError(VitralError):
    """A checkpoint or run that cannot be written, read or gone on with."""


class TrainingError(VitralError):
    """A training run that cannot go on."""


class UnreachableError(VitralError):
    """A server that is needed, and does not answer or let in."""


def unknown_name(what: str, name: object, known: Iterable[str], list_with: str = "") -> UnknownNameError:
    """Return the error for `name`, with the nearest known names, or all of them when they are few."""
    known = sorted(known)
    near = get_close_matches(str(name).lower(), known, n=3, cutoff=0.5)
    if near:
        remedy = f"did you mean {' or '.join(near)}?"
    elif len(known) <= 12:
        remedy = f"known: {', '.join(known)}."
    else:
        remedy = "nothing known comes near it."
    if list_with:
        remedy += f" {list_with} lists all."
    return UnknownNameError(f"unknown {what} {name!r}; {remedy}")
