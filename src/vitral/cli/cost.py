"""`vitral cost`: what a model costs, and how the patch size drives it."""

from dataclasses import dataclass, fields, replace
from typing import Annotated, Any

import tyro

from vitral.cli.output import human, print_json, print_table
from vitral.config import ResNetConfig, SwinConfig, ViTConfig
from vitral.models.cost import Cost, model_cost, receptive_fields
from vitral.models.zoo import model_spec


def _over(metavar: str) -> Any:
    """An option that is put over the named model's own."""
    return tyro.conf.arg(metavar=metavar, help_behavior_hint="(default: the model's)")


@dataclass(frozen=True)
class Options:
    """Say what a model costs, without building it, and how that grows as patches get smaller.

    Examples:
      vitral cost vit_base_patch16_224
      vitral cost vit_small_patch16_224 --img-size 480 640 --json
      vitral cost swin_tiny_patch4_window7_224 --img-size 896
      vitral cost resnet50
    """

    model: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="MODEL")]
    """Name of a model; `vitral models` lists them. Options may follow it: NAME+block=post+reg_tokens=4."""
    img_size: Annotated[tuple[int, ...] | None, _over("H [W]")] = None
    """Height and width of the image, or one number for both."""
    patch_size: Annotated[tuple[int, ...] | None, _over("P_H [P_W]")] = None
    """Height and width of a patch, or one number for both."""
    in_chans: Annotated[int | None, _over("C")] = None
    """Channels of the image."""
    num_classes: Annotated[int | None, _over("K")] = None
    """Outputs of the head; 0 for none."""
    embed_dim: Annotated[int | None, _over("D")] = None
    """Width of a token; of a Swin that of the first stage."""
    depth: Annotated[int | None, _over("L")] = None
    """Number of blocks of a ViT."""
    num_heads: Annotated[int | None, _over("h")] = None
    """Number of attention heads of a ViT."""
    window_size: Annotated[int | None, _over("M")] = None
    """Side of a Swin's windows, in tokens."""
    mlp_ratio: Annotated[float | None, _over("RATIO")] = None
    """Width of the MLP as a multiple of D."""
    reg_tokens: Annotated[int | None, _over("R")] = None
    """Number of register tokens."""
    json: bool = False
    """Print JSON instead of tables."""


def run(options: Options) -> None:
    """Print the costs."""
    config = model_spec(options.model, **_overrides(options)).config
    cost, sweep = model_cost(config), patch_sweep(config) if isinstance(config, ViTConfig) else {}
    if options.json:
        print_json(
            {
                "model": options.model,
                "config": config.to_dict(),
                "cost": cost.to_dict(),
                "patch_sizes": [
                    {
                        "patch_size": p,
                        "tokens": c.tokens,
                        "macs": c.macs,
                        "attention_entries": c.attention_entries,
                    }
                    for p, c in sweep.items()
                ],
            }
        )
        return
    if isinstance(config, ResNetConfig):
        _print_cnn(options.model, config, cost)
        return
    _print_cost(options.model, config, cost)
    if isinstance(config, ViTConfig):
        _print_sweep(config, sweep)


def _overrides(options: Options) -> dict[str, Any]:
    """The options given on the command line; a size of one number stands for both sides."""
    given = {f.name: getattr(options, f.name) for f in fields(options) if f.name not in ("model", "json")}
    given = {name: value for name, value in given.items() if value is not None}
    return {k: v[0] if isinstance(v, tuple) and len(v) == 1 else v for k, v in given.items()}


def patch_sweep(config: ViTConfig) -> dict[int, Cost]:
    """Costs for the usual square patch sizes that divide the image into at most 64 rows, and for the config's own."""
    height, width = config.image
    sizes = {p for p in (2, 4, 7, 8, 14, 16, 28, 32, 56) if height % p == 0 == width % p and height // p <= 64}
    if config.patch[0] == config.patch[1]:
        sizes.add(config.patch[0])
    if config.stem in ("conv", "conv_deep"):
        sizes = {p for p in sizes if p & (p - 1) == 0}
    elif config.stem == "resnet":
        sizes = {p for p in sizes if p % config.stem_stride == 0}
    return {p: model_cost(replace(config, patch_size=p)) for p in sorted(sizes)}


_ENTRIES = {False: "per head: tokens squared", True: "per head: tokens times those of a window, in the first stage"}


def _shape(c: ViTConfig | SwinConfig) -> str:
    """The options that make its size, in the letters of the paper."""
    patch = f"patch {c.patch[0]}x{c.patch[1]}"
    if isinstance(c, SwinConfig):
        depths, heads, windows = (", ".join(map(str, each)) for each in (c.depths, c.num_heads, sorted({*c.windows})))
        return f"{patch}, C {c.embed_dim}, blocks {depths}, h {heads}, windows of {windows}"
    return f"{patch}, D {c.embed_dim}, L {c.depth}, h {c.num_heads}"


def _tokens_row(c: ViTConfig | SwinConfig, cost: Cost) -> list[str]:
    if isinstance(c, SwinConfig):
        by_stage = [rows * columns for rows, columns in cost.maps]
        return ["tokens", " > ".join(f"{tokens:,}" for tokens in by_stage), "stage by stage"]
    return ["tokens", f"{cost.tokens:,}", f"with {c.prefix_tokens} before the patches"]


def _print_cost(name: str, c: ViTConfig | SwinConfig, cost: Cost) -> None:
    windows = isinstance(c, SwinConfig)
    print_table(
        f"{name}: image {c.image[0]}x{c.image[1]}x{c.in_chans}, {_shape(c)}",
        ["one image", "", ""],
        [
            ["patches", f"{cost.patches:,}", f"{cost.grid[0]} x {cost.grid[1]}"],
            _tokens_row(c, cost),
            ["parameters", f"{cost.params:,}", human(4 * cost.params, "B") + " in fp32"],
            ["multiply-adds", f"{cost.macs:,}", f"{cost.macs / 1e9:.3f} G"],
            ["attention entries", f"{cost.attention_entries:,}", _ENTRIES[windows]],
            ["attention memory", human(cost.attention_bytes, "B"), "per block, if it were written out"],
            ["activations kept", human(cost.activation_bytes, "B"), "for training, fp32, fused attention"],
        ],
    )
    order = ["patch embedding", "prefix tokens", "positions", "query, key, value", "attention"]
    parts = list(dict.fromkeys([*order, *cost.macs_by_part, *cost.params_by_part]))
    _print_parts(cost, [part for part in parts if part in cost.params_by_part or part in cost.macs_by_part])


def _print_parts(cost: Cost, parts: list[str]) -> None:
    print_table(
        "where it goes",
        ["part", "parameters", "", "MACs", ""],
        [
            [
                part,
                *_share(cost.params_by_part.get(part), cost.params),
                *_share(cost.macs_by_part.get(part), cost.macs),
            ]
            for part in parts
        ],
    )


def _print_cnn(name: str, c: ResNetConfig, cost: Cost) -> None:
    """A CNN: no tokens, but maps that shrink and fields that grow from stage to stage."""
    print_table(
        f"{name}: image {c.image[0]}x{c.image[1]}x{c.in_chans}",
        ["one image", "", ""],
        [
            ["parameters", f"{cost.params:,}", human(4 * cost.params, "B") + " in fp32"],
            ["multiply-adds", f"{cost.macs:,}", f"{cost.macs / 1e9:.3f} G"],
            ["activations kept", human(cost.activation_bytes, "B"), "for training, fp32"],
        ],
    )
    _print_parts(cost, list(cost.params_by_part))
    maps = dict(zip((f"layer{i + 1}" for i in range(len(cost.maps))), cost.maps, strict=True))
    print_table(
        "what a cell sees",
        ["stage", "map", "stride", "receptive field"],
        [
            [f.stage, f"{maps[f.stage][0]} x {maps[f.stage][1]}", f"{f.stride}", f"{f.size} x {f.size} pixels"]
            for f in receptive_fields(c)
            if f.stage in maps
        ],
        note="in theory; beyond the image where it is larger",
    )


def _share(count: int | None, total: int) -> tuple[str, str]:
    return ("", "") if count is None else (f"{count:,}", f"{100 * count / total:.1f} %")


def _print_sweep(c: ViTConfig, sweep: dict[int, Cost]) -> None:
    if not sweep:
        return
    rows = [
        [
            f"{p}{' *' if (p, p) == c.patch else ''}",
            f"{cost.tokens:,}",
            human(cost.macs),
            f"{100 * cost.macs_by_part['attention'] / cost.macs:.1f} %",
            f"{cost.attention_entries:,}",
            human(cost.attention_bytes, "B"),
        ]
        for p, cost in sweep.items()
    ]
    own = " (* this model)" if c.patch[0] == c.patch[1] else ""
    print_table(
        "the same model with other patch sizes",
        ["patch", "tokens", "MACs", "of it attention", "entries per head", "attention memory per block"],
        rows,
        note=f"half the patch side: 4 times the tokens, 16 times the attention entries{own}",
    )
