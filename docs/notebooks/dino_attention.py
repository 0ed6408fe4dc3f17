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
# # Where a model looks that no one has told what to look for
#
# A tiny ViT learns from 3,000 images by DINO (Caron et al., 2021, arXiv:2104.14294), here in the notebook, in one or
# two minutes. No label and no box takes part. Then its attention is laid beside that of a fresh model, and boxes that
# only we know measure it. The formulas are in `vitral/models/dino.py` and in docs/pretrain.md.
#
# Run it as a script, as a notebook (`make notebooks`), or cell by cell in an editor.

# %%
import json
import math
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from matplotlib.patches import Rectangle

import vitral
from vitral.config import Augmentation, DINOOptions
from vitral.data.crops import CropInputs
from vitral.data.noise import Noise
from vitral.data.sources.base import Data, ImageArray
from vitral.data.sources.digits import load_digits
from vitral.data.targets import Values
from vitral.data.transforms import denormalize, normalize
from vitral.explanation.attention import to_maps
from vitral.explanation.figures import as_picture, overlay

OUT = Path("pictures")
OUT.mkdir(exist_ok=True)
plt.rcParams.update({"figure.dpi": 130, "axes.titlesize": 9, "font.size": 9, "image.cmap": "gray"})


def show(name: str) -> None:
    """Save the current figure, and show it where there is a screen."""
    path = OUT / f"{name}.png"
    plt.savefig(path, bbox_inches="tight")
    print(f"  picture: {path}")
    plt.show() if plt.get_backend().lower() != "agg" else plt.close()


def heading(text: str) -> None:
    print(f"\n{text}\n{'-' * len(text)}")


# %% [markdown]
# ## 1. Images with something to find
#
# One of the embedded digits, 14 to 22 pixels wide, lies somewhere on 32 x 32 pixels of noise. Each pixel of the noise
# is drawn by itself: two crops of one image have nothing in common but the digit. So DINO has a reason to find it.

# %%
heading("1. Images with something to find")
SIDE, TRAIN, TEST = 32, 3000, 500
generator = torch.Generator().manual_seed(0)
digits = load_digits()


def below(limit: int) -> int:
    return int(torch.randint(limit, (1,), generator=generator))


pixels, labels, boxes = [], [], []
for part, count in (("train", TRAIN), ("test", TEST)):
    for _ in range(count):
        index = int(digits.splits[part][below(len(digits.splits[part]))])
        side = 14 + below(9)
        left, top = below(SIDE - side + 1), below(SIDE - side + 1)
        small = digits.images.read(index, "grey")[None].float()
        digit = F.interpolate(small, size=(side, side), mode="bicubic", antialias=True)[0, 0].clamp(0, 255)
        canvas = 40 * torch.rand(SIDE, SIDE, generator=generator)
        place = canvas[top : top + side, left : left + side]
        place.copy_(torch.maximum(place, digit))
        pixels.append(canvas.round().to(torch.uint8))
        labels.append(int(digits.targets[index]))
        boxes.append((left, top, side, side))
data = Data(
    name="lost digits",
    inputs=ImageArray(torch.stack(pixels)[:, None]),
    targets=torch.tensor(labels),
    classes=digits.classes,
    splits={"train": torch.arange(TRAIN), "test": torch.arange(TRAIN, TRAIN + TEST)},
    mode="grey",
    licence=digits.licence,
)
print(data.describe())
figure, axes = plt.subplots(2, 10, figsize=(10, 2.2), layout="constrained")
for ax, image in zip(axes.flat, pixels, strict=False):
    ax.imshow(image, vmin=0, vmax=255)
    ax.set_axis_off()
show("1_images")

# %% [markdown]
# ## 2. What it is shown
#
# The student sees two large and two small crops of each image, the teacher the large ones; each is made brighter or
# darker by itself. The student is to say of each crop what the teacher says of *another* one. The digit may be cut,
# moved and enlarged, and it should not matter.

# %%
heading("2. Crops")
MODEL = {"model": "vit_nano_conv_patch2_8", "img_size": SIDE, "patch_size": 4}
CROPS = {"global_scale": 0.6, "local_scale": 0.35, "global_size": 24, "local_size": 16, "local_crops": 2}
AUGMENT = {"flip": 0.0, "color_jitter": 0.4, "grey": 0.0, "blur": 0.0, "solarize": 0.0}  # mirrored digits are none
name, *sizes = MODEL.values()
fresh = vitral.create_model(name, seed=0, num_classes=0, img_size=sizes[0], patch_size=sizes[1]).eval()
inputs = CropInputs(fresh.preprocess, DINOOptions(**CROPS), fresh.config.patch)
some = torch.arange(1, 5)
feed = inputs.feed(data, Values(torch.zeros(len(pixels), 0)), crop_scale=1.0, seed=0, strict=True)
crops = inputs.augment(feed[some, some].inputs, Noise(0, some), Augmentation(**AUGMENT), mirror=False).inputs
print(f"large crops {tuple(crops.large.shape)}, small crops {tuple(crops.small.shape)}")

titles = ["image", "large 1", "large 2", "small 1", "small 2"]
figure = plt.figure(figsize=(10, 3.6), layout="constrained")
for i, group in enumerate(figure.subfigures(2, 2, wspace=0.06).flat):
    axes = group.subplots(1, 5, width_ratios=[32, 24, 24, 16, 16])
    shown = [data.images.read(int(some[i]), "grey")]
    shown += [denormalize(crop[None], fresh.preprocess)[0] for crop in (*crops.large[i], *crops.small[i])]
    for ax, picture, title in zip(axes, shown, titles, strict=True):
        ax.imshow(picture[0], vmin=0, vmax=255)
        ax.set_title(title, fontsize=8)
        ax.set_axis_off()
show("2_crops")

# %% [markdown]
# ## 3. Learning
#
# `vitral.pretrain` is what `vitral pretrain` calls. The labels serve for one signal only, the accuracy of nearest
# neighbours. K = 256 prototypes are few, for a small run; a sharp teacher and a little KoLeo, which pushes the features
# of a batch apart, keep so short a run from collapse. Several other settings that were tried here did collapse.

# %%
heading("3. Learning")
K = 256
folder = TemporaryDirectory()
began = time.perf_counter()
run = vitral.pretrain(
    data, out=Path(folder.name) / "run", quiet=True, **MODEL, epochs=5, batch_size=32, augment=AUGMENT,
    optimizer="muon", muon_lr=0.02, lr=2e-3, weight_decay=0.05, weight_decay_end=None, warmup_epochs=0.3,
    neighbours=1000, health_images=300, val_fraction=0.1, log_steps=5, picture_every=100,
    dino={**CROPS, "prototypes": K, "hidden": 256, "bottleneck": 64, "momentum": 0.985, "koleo": 0.1,
          "teacher_temperature": 0.025, "teacher_temperature_end": 0.03, "freeze_last_epochs": 0.5},
)  # fmt: skip
print(f"{time.perf_counter() - began:.0f} s")
lines = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
steps, looks = ([line for line in lines if line["split"] == part] for part in ("train", "val"))
for look in looks:
    told = ("teacher_entropy", "teacher_information", "feature_rank", "feature_std", "knn")
    print(f"epoch {look['epoch']:g}: " + ", ".join(f"{key.replace('_', ' ')} {look[key]:.3g}" for key in told))

figure, axes = plt.subplots(1, 5, figsize=(12.5, 2.3), layout="constrained")
axes[0].plot([s["epoch"] for s in steps], [s["loss"] for s in steps], color="C0", lw=1)
axes[1].plot([s["epoch"] for s in steps], [s["teacher_entropy"] for s in steps], color="C0", lw=1)
axes[1].axhline(math.log(K), color="grey", ls=":", lw=1)
axes[1].set_ylim(0, 1.2 * math.log(K))
axes[1].text(0.1, math.log(K) + 0.1, "log K: a little of everything", fontsize=7, color="grey")
for ax, key in zip(axes[2:], ("teacher_information", "feature_rank", "knn"), strict=True):
    ax.plot([look["epoch"] for look in looks], [look[key] for look in looks], "o-", color="C1")
    ax.set_ylim(0, None)
for ax, title in zip(
    axes,
    ("loss of a step", "teacher's entropy, nats", "teacher's information, nats", "rank of features", "k-NN accuracy"),
    strict=True,
):
    ax.set(title=title, xlabel="epoch", xlim=(0, None))
axes[4].axhline(0.1, color="grey", ls=":", lw=1)
axes[4].text(0.1, 0.11, "chance", fontsize=7, color="grey")
show("3_signals")

# %% [markdown]
# The loss says little, for what it is measured against moves too: here it *rises* while the model learns. At first the
# teacher gives every image the same few prototypes (entropy near 0), then the centre drives it to the other side, a
# little of everything (near log K). To stay at one or the other, with an information of 0, would be collapse. It does
# neither: the entropy falls again, slowly, while the answers tell more and more about the image. The rank of the
# features and the accuracy of neighbours, which training knows nothing of, rise with it.

# %% [markdown]
# ## 4. Where [CLS] looks
#
# The four heads of the first and of the last block, on test images: digits that training never showed. The frame is
# ours. In a map zero is dark and its largest value bright: that of a fresh model is bright all over, for it looks
# everywhere alike.

# %%
heading("4. Where [CLS] looks")
trained = vitral.Predictor(run.path)
models = {"fresh": fresh, "trained": trained.vit}
test = data.splits["test"]
x = normalize(torch.stack([data.images.read(int(i), "grey") for i in test]), trained.preprocess)
maps = {}  # of each model (L, B, h, G, G)
for name, vit in models.items():
    with torch.no_grad():
        rows = torch.stack(vit.attention(x, list(range(vit.config.depth))))
    maps[name] = to_maps(vit, rows, vit.grid_of(x)).reshape(len(rows), len(x), -1, *vit.grid_of(x))
    print(f"{name}: maps {tuple(maps[name].shape)}, rows sum to {rows.sum(-1).min():.4f} .. {rows.sum(-1).max():.4f}")


def draw_heads(block: int, count: int, title: str) -> None:
    """Images, and the maps of a block's heads of both models beside each other."""
    figure, axes = plt.subplots(count, 9, figsize=(10, 1.18 * count + 0.3), layout="constrained")
    for i, row in enumerate(axes):
        picture = data.images.read(int(test[i]), "grey")
        shown = [None, *maps["fresh"][block, i], *maps["trained"][block, i]]
        for k, (ax, map_) in enumerate(zip(row, shown, strict=True)):
            ax.imshow(as_picture(picture))
            if map_ is not None:
                overlay(ax, map_, (SIDE, SIDE))
            left, top, side, _ = boxes[int(test[i])]
            frame = Rectangle((left - 0.5, top - 0.5), side, side, fill=False, ec="white", lw=0.8, ls="--")
            ax.add_patch(frame)
            ax.set_axis_off()
            if i == 0:
                ax.set_title("image" if k == 0 else f"{'fresh' if k < 5 else 'trained'}, head {(k - 1) % 4}")
    figure.suptitle(title, fontsize=10)


draw_heads(0, 5, "first block")
show("4_first_block")
draw_heads(-1, 5, "last block")
show("5_last_block")

# %% [markdown]
# ## 5. How much of it lies in the box
#
# The share of a head's attention that falls into the digit's frame, over the frame's share of the area: 1 is chance,
# and the most there can be is one over that share.

# %%
heading("5. How much of it lies in the box")


def in_box(maps, which):
    """(L, B, h, G, G) -> (L, h), the mean over images."""
    dense = maps.repeat_interleave(4, -2).repeat_interleave(4, -1)
    ratios = []
    for i, index in enumerate(which.tolist()):
        left, top, side, _ = boxes[index]
        inside = dense[:, i, :, top : top + side, left : left + side].sum((-2, -1)) / dense[:, i].sum((-2, -1))
        ratios.append(inside / (side * side / SIDE**2))
    return torch.stack(ratios).mean(0)


most = sum(SIDE**2 / boxes[index][2] ** 2 for index in test.tolist()) / len(test)
figure, ax = plt.subplots(figsize=(5.2, 2.8), layout="constrained")
for name, colour, shift in (("fresh", "C0", -0.08), ("trained", "C1", 0.08)):
    ratio = in_box(maps[name], test)
    print(f"{name}: " + "; ".join(f"block {b} " + " ".join(f"{r:.2f}" for r in row) for b, row in enumerate(ratio)))
    for block, row in enumerate(ratio):
        ax.plot([block + shift] * len(row), row, "o", color=colour, alpha=0.7, label=name if block == 0 else None)
for level, words in ((1, "chance"), (most, "all of it in the box")):
    ax.axhline(level, color="grey", ls=":", lw=1)
    ax.text(len(ratio) - 1.5, level + 0.03, words, fontsize=7, color="grey", va="bottom", ha="center")
ax.set(xticks=range(len(ratio)), xlabel="block", ylim=(0, most + 0.5), title="attention in the box over its area")
ax.legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize=8, frameon=False)
show("6_in_the_box")

# %% [markdown]
# The heads of the first block have found the digit, and nearly all they read is ink, each its own part of it. Nobody
# asked for that: it is what crops of one image have in common. In the later blocks [CLS] knows the digit already, and
# heads look around it and at the margins too; the famous maps of the *last* block come from far larger models, trained
# for far longer, on photographs. And finding is easy here: ink is bright, noise is dark.

# %% [markdown]
# ## 6. Neighbours
#
# The five nearest training images by the cosine of [CLS], for the first test image of each class; those of the same
# class are framed.

# %%
heading("6. Neighbours")
train = data.splits["train"]
every = normalize(torch.stack([data.images.read(int(i), "grey") for i in train]), trained.preprocess)
nearest = {}
for name, vit in models.items():
    with torch.no_grad():
        keys, queries = (F.normalize(vit.embed(images), dim=1) for images in (every, x))
    nearest[name] = (queries @ keys.mT).topk(5).indices
    same = data.targets[train][nearest[name]] == data.targets[test][:, None]
    print(f"{name}: {100 * same.float().mean():.1f} % of the five nearest to {TEST} test images are of their class")

firsts = [(data.targets[test] == label).nonzero()[0].item() for label in range(10)]
figure = plt.figure(figsize=(9.6, 8.0), layout="constrained")
for name, group in zip(models, figure.subfigures(1, 2, wspace=0.06), strict=True):
    axes = group.subplots(10, 6)
    for i, row in zip(firsts, axes, strict=True):
        query = int(test[i])
        for k, (ax, index) in enumerate(zip(row, [query, *nearest[name][i].tolist()], strict=True)):
            ax.imshow(pixels[index], vmin=0, vmax=255)
            ax.set(xticks=[], yticks=[])
            found = k > 0 and labels[index] == labels[query]
            ax.spines[:].set(color="C1" if found else "white", linewidth=2.5)
    axes[0, 0].set_title("test image")
    axes[0, 3].set_title(f"nearest, {name}")
show("7_neighbours")

# %% [markdown]
# How often the 20 nearest name the class (`vitral eval RUN DATA --probe knn`):

# %%
for name, source in (("pixels", "pixels"), ("fresh", fresh), ("trained", trained.vit)):
    found = vitral.probe(source, data, "knn", cache=False)
    low, high = found["accuracy_95"]
    print(f"k-NN by {name}: {100 * found['accuracy']:.1f} % (95 %: {100 * low:.1f} to {100 * high:.1f})")
folder.cleanup()

# %% [markdown]
# The model has learnt something about digits that nobody told it: more of its neighbours are of one class than those of
# a fresh model. Ten rows of pictures hardly show it, 500 images do. And a minute is a minute: the plain pixels,
# compared as they are, still do far better. Whoever gives a k-NN accuracy without that line gives half of it. *Where*
# something is was learnt sooner than *what* it is; for that it takes more images and more time: docs/pretrain.md.
