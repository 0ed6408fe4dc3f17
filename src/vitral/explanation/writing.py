"""Where a decoder looks while it writes: for each token, the patches of the image or the tokens of the text."""

import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vitral.data.inputs import TextInputs
from vitral.data.tokenizer import EOS, SOS, SPECIAL, Tokenizer
from vitral.errors import InputError
from vitral.inference.predictor import Predictor
from vitral.models.seq2seq import Seq2Seq
from vitral.tasks.write import Write

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def writer_of(predictor: Predictor) -> tuple[Seq2Seq, Write]:
    """The model and its task, which must be to write while looking at something."""
    if not isinstance(predictor.model, Seq2Seq) or not isinstance(predictor.task, Write):
        raise InputError("this model does not look at one thing while it writes another; it has no such maps.")
    return predictor.model, predictor.task


@torch.inference_mode()
def looks(predictor: Predictor, x: Tensor, layer: int | None, head: int | None) -> tuple[list[int], Tensor]:
    """The tokens that are written for one input (1, ...), and the rows (T, M) by which each looked at the memory.

    `layer` is a block of the decoder, the last by default, `head` one head instead of the mean of all.
    """
    model, task = writer_of(predictor)
    best = task.run(model, x)[0][0]
    written = [*best.tokens, *([EOS] if best.ended else [])]
    read = torch.tensor([[SOS, *best.tokens][: len(written)]], device=x.device)
    rows = model.attention(read, model.encode(x))[-1 if layer is None else layer][1][0]  # (h, T, M)
    return written, (rows.mean(0) if head is None else rows[head]).cpu()


def words(tokenizer: Tokenizer, tokens: list[int]) -> list[str]:
    """Tokens as one would write them down."""
    return [SPECIAL[t] if t < len(SPECIAL) else tokenizer.decode([t]) for t in tokens]


@dataclass(frozen=True)
class Alignment:
    """Which tokens of a text a decoder looked at while it wrote each of its own."""

    source: list[str]
    written: list[str]
    rows: Tensor
    """(written, source): each row sums to 1."""
    about: str = ""

    def table(self, most: int = 3) -> list[list[str]]:
        """For each token that was written, those that it looked at most."""
        lines = []
        for word, row in zip(self.written, self.rows, strict=True):
            weights, places = row.topk(min(most, len(row)))
            seen = (f"{self.source[i]} {100 * w:.0f} %" for w, i in zip(weights.tolist(), places.tolist(), strict=True))
            lines.append([word, "  ".join(seen)])
        return lines

    def figure(self) -> "Figure":
        """The rows as a picture, what was read along the top."""
        from matplotlib.figure import Figure

        T, M = self.rows.shape
        width = 1.6 + 0.34 * M
        title = textwrap.fill(self.about, int(width * 13))
        figure = Figure(figsize=(width, 1.2 + 0.28 * T + 0.15 * title.count("\n")), layout="constrained")
        ax = figure.subplots()
        shown = ax.imshow(self.rows.numpy(), cmap="Blues", vmin=0, aspect="auto")
        ax.set_xticks(range(M), self.source, rotation=60, ha="left", fontsize=8, parse_math=False)
        ax.set_yticks(range(T), self.written, fontsize=8, parse_math=False)
        ax.xaxis.tick_top()
        ax.tick_params(length=0)
        figure.colorbar(shown, shrink=0.8).ax.tick_params(labelsize=7)
        figure.suptitle(title, fontsize=9, parse_math=False)
        return figure

    def save(self, path: str | Path) -> Path:
        """Write a picture (.png, .svg, .pdf, .jpg)."""
        self.figure().savefig(path, dpi=150)
        return Path(path)


def align(predictor: Predictor, text: str, layer: int | None = None, head: int | None = None) -> Alignment:
    """Let a model write, and tell which tokens of the text each of its own looked at."""
    model, task = writer_of(predictor)
    if not isinstance(predictor.inputs, TextInputs):
        raise InputError("this model reads images; explain shows where it looks on them.")
    for name, value, count in (("layer", layer, model.decoder.depth), ("head", head, model.config.decoder.num_heads)):
        if value is not None and not -count <= value < count:
            raise InputError(f"{name} must be from {-count} to {count - 1}, got {value}.")
    x = predictor.prepare(text)
    written, rows = looks(predictor, x[None].to(predictor.device), layer, head)
    source = words(predictor.inputs.tokenizer, x.tolist())
    which = f"block {(-1 if layer is None else layer) % model.decoder.depth}"
    about = (
        f"{text} -> {task.tokenizer.decode(written)} ({which}, {'mean of heads' if head is None else f'head {head}'})"
    )
    return Alignment(source, words(task.tokenizer, written), rows, about)
