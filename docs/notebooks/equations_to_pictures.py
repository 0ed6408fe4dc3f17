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
# # From equations to pictures
#
# A toy image of 8 x 8 pixels with four patches, its position codes and its token matrix, as numbers and as pictures;
# then the same quantities in a model that has learned something: a small ViT trained on real digits.
#
# Run it as a script, as a notebook (`make notebooks`), or cell by cell in an editor.

# %%
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch

import vitral
from vitral.data.sources.digits import load_digits
from vitral.explanation.attention import entropy, mean_distance
from vitral.nn.patches import patchify
from vitral.nn.positions import sincos_2d

OUT = Path("pictures")
OUT.mkdir(exist_ok=True)
plt.rcParams.update({"figure.dpi": 130, "axes.titlesize": 10, "font.size": 9, "image.cmap": "cividis"})


def show(name: str) -> None:
    """Save the current figure, and show it where there is a screen."""
    path = OUT / f"{name}.png"
    plt.savefig(path, bbox_inches="tight")
    print(f"  picture: {path}")
    plt.show() if plt.get_backend().lower() != "agg" else plt.close()


# %% [markdown]
# ## The toy: an image, four patches, a similarity table, a token matrix

# %%
image = torch.zeros(1, 1, 8, 8)
for value, (row, column) in zip((0.1, 0.4, 0.6, 0.9), ((0, 0), (0, 4), (4, 0), (4, 4)), strict=True):
    image[0, 0, row : row + 4, column : column + 4] = value
x_p = patchify(image, 4)  # (1, 4, 16)
E_pos = sincos_2d((2, 2), 8).float()  # (4, 8)
similarity = E_pos @ E_pos.T
print("x_p has shape", tuple(x_p.shape), "and the dot products of the positions are")
print(np.array2string(similarity.numpy(), precision=2, floatmode="fixed"))

# %% [markdown]
# A token is its projected patch plus its position: z_0 = x_p E + E_pos. With an E that spreads the mean of a patch
# over all eight dimensions, the token matrix is grey level plus position code.

# %%
E = torch.full((16, 8), 1 / 16)
tokens = x_p[0] @ E + E_pos
figure, axes = plt.subplots(1, 4, figsize=(10, 2.4), layout="constrained")
panels = (("image, four patches", image[0, 0]), ("dot products of positions", similarity), ("x_p E", x_p[0] @ E))
for ax, (title, values) in zip(axes, (*panels, ("z_0 = x_p E + E_pos", tokens)), strict=True):
    ax.imshow(values)
    ax.set_title(title)
for (i, j), value in np.ndenumerate(similarity.numpy()):
    axes[1].text(j, i, f"{value:.2f}", ha="center", va="center", color="black" if value > 3.4 else "white")
for ax in axes[1:]:
    ax.set(yticks=range(4), yticklabels=["p00", "p01", "p10", "p11"])
show("1_toy")

# %% [markdown]
# ## A model that has learned: digits of 8 x 8 pixels, 16 patches of 2 x 2
#
# A few epochs are enough for a look.

# %%
run = vitral.train("digits", out=OUT / "run", epochs=8, quiet=True)
predictor = vitral.Predictor(run.path)
model, data = predictor.model, load_digits()
test = data.splits["test"]
print(f"test accuracy after 8 epochs: {100 * run.metrics['test']['accuracy']:.1f} %")

# %% [markdown]
# What [CLS] attends to in each block, for a test image: rows of softmax(Q K^T / sqrt(d)), mean of heads.

# %%
chosen = [int(test[i]) for i in range(4)]
figure, axes = plt.subplots(4, 5, figsize=(7, 5.8), layout="constrained")
for row, index in zip(axes, chosen, strict=True):
    pixels = data.images.pixels[index]
    row[0].imshow(pixels[0], cmap="gray")
    row[0].set_title(f"a {data.classes[int(data.targets[index])]}")
    for layer in range(4):
        made = vitral.explain(predictor, pixels, layer=layer)
        row[1 + layer].imshow(made.maps[0])
        row[1 + layer].set_title(f"block {layer}")
for ax in axes.flat:
    ax.set_axis_off()
show("2_digits_attention")

# %% [markdown]
# How widely the heads look (entropy, in nats; looking everywhere alike is log 17 = 2.83) and how far (mean distance).

# %%
x = (torch.stack([data.images.pixels[int(i)] for i in test[:64]]).float() / 255 - 0.5) / 0.5
with torch.no_grad():
    rows = model.attention(x, "all", "all")
wide = torch.stack([entropy(r).mean((0, 2)) for r in rows])  # (L, h)
far = torch.stack([mean_distance(model, r, model.grid_of(x)).mean(0) for r in rows])
figure, axes = plt.subplots(1, 2, figsize=(7, 2.6), layout="constrained")
for ax, values, name in ((axes[0], wide, "entropy of a row, nats"), (axes[1], far, "mean distance, pixels")):
    for head in range(values.shape[1]):
        ax.plot(range(4), values[:, head], "o", color="C0", alpha=0.6)
    ax.plot(range(4), values.mean(1), color="C1")
    ax.set(title=name, xlabel="block", xticks=range(4))
show("3_digits_heads")

# %% [markdown]
# Which patches speak for the answer (gradient times attention), beside what the positions have learned.

# %%
figure, axes = plt.subplots(2, 4, figsize=(7, 3.6), layout="constrained")
for column, index in enumerate(chosen):
    pixels = data.images.pixels[index]
    made = vitral.explain(predictor, pixels, "relevance")
    axes[0, column].imshow(pixels[0], cmap="gray")
    axes[0, column].set_title(made.about)
    axes[1, column].imshow(made.maps[0])
for ax in axes.flat:
    ax.set_axis_off()
show("4_digits_relevance")
