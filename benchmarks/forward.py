"""Forward pass, eager, fp32: vitral beside transformers (SDPA) and timm, with the same weights, in the same run.

    python benchmarks/forward.py [--seconds 20] [--sizes tiny small base] [--batches 1 8]

Prints images per second, the ratio to the faster rival with its standard error, and the share of the machine's
matrix-product rate that the multiply-adds really done reach; writes benchmarks/results/forward.json. About 4 minutes on
2 cores.
"""

import argparse
import statistics
from collections.abc import Callable

import torch
from torch import Tensor

from measure import gemm_rate, interleave, multiply_adds, ratio, write_json
from peers import import_timm, import_transformers
from vitral import create_model
from vitral.config import ViTConfig


def rivals(size: str) -> dict[str, Callable[[Tensor], Tensor]]:
    """The same ViT three times; timm's and ours share their weights, and must agree."""
    timm, transformers = import_timm(), import_transformers()
    ours = create_model(f"vit_{size}_patch16_224", seed=0).eval()
    from_timm = timm.create_model(f"vit_{size}_patch16_224").eval()
    from_timm.load_state_dict(ours.state_dict())
    c = ours.config
    assert isinstance(c, ViTConfig)
    config = transformers.ViTConfig(
        hidden_size=c.embed_dim,
        num_hidden_layers=c.depth,
        num_attention_heads=c.num_heads,
        intermediate_size=c.mlp_width,
        num_labels=c.num_classes,
    )
    hugging_face = transformers.ViTForImageClassification(config).eval()
    assert hugging_face.config._attn_implementation == "sdpa"
    return {"vitral": ours, "timm": from_timm, "transformers": lambda x: hugging_face(x).logits}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20, help="time for each row")
    parser.add_argument("--sizes", nargs="+", default=["tiny", "small", "base"])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8])
    options = parser.parse_args()

    rows = []
    print(f"{torch.get_num_threads()} threads, torch {torch.__version__}; images per second, medians")
    print("   model batch    vitral      timm   transf.   ratio to the faster   of GEMM rate")
    for size in options.sizes:
        models = rivals(size)
        macs = multiply_adds(models["vitral"], (3, 224, 224))
        for batch in options.batches:
            x = torch.randn(batch, 3, 224, 224)
            with torch.inference_mode():
                difference = (models["vitral"](x) - models["timm"](x)).abs().max().item()
                assert difference < 1e-4, f"vitral and timm disagree by {difference}"
                rate = gemm_rate()
                calls = {name: (lambda model=model, x=x: model(x)) for name, model in models.items()}
                times = interleave(calls, options.seconds)
            speed = {name: batch / statistics.median(t) for name, t in times.items()}
            faster = max(("timm", "transformers"), key=speed.__getitem__)
            value, error = ratio(times, faster, "vitral")
            share = speed["vitral"] * macs / rate
            rows.append(
                {"model": size, "batch": batch, "images_per_second": speed, "faster_rival": faster, "ratio": value}
                | {"ratio_error": error, "gemm_gmacs_per_second": rate / 1e9, "share_of_gemm_rate": share}
                | {"rounds": len(times["vitral"])}
            )
            print(
                f"{size:>8} {batch:>5} {speed['vitral']:>9.2f} {speed['timm']:>9.2f} {speed['transformers']:>9.2f} "
                f"{value:>12.3f} ± {error:.3f} {'':>2}{share:>12.0%}"
            )
    print(f"wrote {write_json('forward', {'rows': rows})}")


if __name__ == "__main__":
    main()
