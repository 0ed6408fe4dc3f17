"""Writing text, fp32: with a key/value cache against without, and vitral beside transformers' generate (BART).

    python benchmarks/generate.py [--seconds 20] [--length 128] [--batch 16] [--width 256] [--layers 4]

Both models have the same weights and must write the same; EOS never comes, so each call writes batch x length tokens.
Prints tokens per second, and ratios with their standard errors; writes benchmarks/results/generate.json. Without the
cache only greedy writing is timed: a beam would take minutes a call.
"""

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from measure import interleave, ratio, write_json
from peers import import_transformers
from vitral.config import Seq2SeqConfig, TextConfig
from vitral.models.generate import generate
from vitral.models.seq2seq import Seq2Seq
from vitral.weights.seq2seq import from_hugging_face

PAD, EOS, START = 1, 2, 3
VOCABULARY, SOURCE = 8000, 32


def rivals(width: int, layers: int, length: int) -> tuple[Any, Seq2Seq]:
    """The same encoder-decoder twice, with weights drawn wide enough that rounding does not choose the token."""
    transformers = import_transformers()
    heads = width // 64 or 1
    sizes = {f"{part}_{name}": size for part in ("encoder", "decoder")
             for name, size in (("layers", layers), ("ffn_dim", 4 * width), ("attention_heads", heads))}  # fmt: skip
    config = transformers.BartConfig(
        vocab_size=VOCABULARY, d_model=width, max_position_embeddings=max(length, SOURCE), init_std=0.1,
        pad_token_id=PAD, eos_token_id=EOS, decoder_start_token_id=START, forced_eos_token_id=None, **sizes,
    )  # fmt: skip
    torch.manual_seed(0)
    theirs = transformers.BartForConditionalGeneration(config).eval()
    assert theirs.config._attn_implementation == "sdpa"
    theirs.final_logits_bias[0, EOS] = -1e4
    part = TextConfig(
        vocab_size=VOCABULARY, max_length=max(length, SOURCE), embed_dim=width, depth=layers, num_heads=heads,
        mlp_width=4 * width, act="gelu", block="post", positions="learned", scale_embedding=False, norm_embedding=True,
        output_bias=True,
    )  # fmt: skip
    ours = Seq2Seq(Seq2SeqConfig(encoder=part, decoder=part)).eval()
    ours.load_state_dict(from_hugging_face(theirs.state_dict(), ours.config))
    return theirs, ours


def calls(theirs: Any, ours: Seq2Seq, x: Tensor, length: int, beam: int) -> dict[str, Callable[[], list[list[int]]]]:
    """What to time: each writes `length` tokens for each source."""
    options: dict[str, Any] = {"method": "beam", "beam": beam, "early_stopping": "never"} if beam > 1 else {}

    def vitral(cache: bool = True) -> list[list[int]]:
        found = generate(ours, x, max_length=length, bos=START, eos=EOS, pad=PAD, cache=cache, **options)
        return [each[0].tokens for each in found]

    def transformers() -> list[list[int]]:
        return theirs.generate(
            input_ids=x, attention_mask=torch.ones_like(x), max_new_tokens=length, do_sample=False, num_beams=beam,
            early_stopping="never" if beam > 1 else False,
        )[:, 1:].tolist()  # fmt: skip

    return {"vitral": vitral, "uncached": lambda: vitral(cache=False), "transformers": transformers}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20, help="time for each row, beyond 7 rounds")
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--beams", nargs="+", type=int, default=[1, 4])
    options = parser.parse_args()

    theirs, ours = rivals(options.width, options.layers, options.length)
    x = torch.randint(4, VOCABULARY, (options.batch, SOURCE), generator=torch.Generator().manual_seed(0))
    written, rows = options.batch * options.length, []
    print(f"{torch.get_num_threads()} threads, torch {torch.__version__}; tokens per second, medians")
    for beam in options.beams:
        rival = calls(theirs, ours, x, options.length, beam)
        if beam > 1:
            del rival["uncached"]  # minutes a call
        outputs = {name: call() for name, call in rival.items()}
        agree = sum(a == b for a, b in zip(outputs["vitral"], outputs["transformers"], strict=True))
        assert all(len(tokens) == options.length for found in outputs.values() for tokens in found)
        row: dict[str, Any] = {"beam": beam, "same_output": agree / options.batch}
        print(f"beam {beam}: the same output for {agree} of {options.batch}")
        for slow in (name for name in rival if name != "vitral"):
            times = interleave({name: rival[name] for name in ("vitral", slow)}, options.seconds, warmup=1)
            value, error = ratio(times, slow, "vitral")
            speed = {name: written / statistics.median(t) for name, t in times.items()}
            row[slow] = {"tokens_per_second": speed, "ratio": value, "ratio_error": error, "rounds": len(times[slow])}
            print(f"  vitral {speed['vitral']:>8.0f}  {slow} {speed[slow]:>8.0f}  ratio {value:.2f} ± {error:.2f}")
        rows.append(row)
    sizes = {name: getattr(options, name) for name in ("length", "batch", "width", "layers")}
    print(f"wrote {write_json('generate', {'sizes': sizes, 'rows': rows})}")


if __name__ == "__main__":
    main()
