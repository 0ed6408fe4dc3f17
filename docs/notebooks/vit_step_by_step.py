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
# # A Vision Transformer, step by step
#
# First an image of 8 x 8 pixels, small enough to print; then ViT-Base on a 224 x 224 image. Every step calls the same
# code that the models run. Symbols are those of Dosovitskiy et al., 2021 (arXiv:2010.11929); `docs/equations.md` says
# which line of code each one is.
#
# Run it as a script (`make demo`), as a notebook (`make notebooks`), or cell by cell in an editor.

# %%
from dataclasses import replace
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.patheffects import withStroke

from vitral import create_model
from vitral.config import ViTConfig
from vitral.models.cost import model_cost
from vitral.models.vit import VisionTransformer
from vitral.nn.patches import patchify, unpatchify
from vitral.nn.positions import sincos_1d, sincos_2d

OUT = Path("demo")
OUT.mkdir(exist_ok=True)
torch.manual_seed(42)
plt.rcParams.update({"figure.dpi": 130, "axes.titlesize": 10, "font.size": 9, "image.cmap": "cividis"})


def show(name: str) -> None:
    """Save the current figure, and show it where there is a screen."""
    path = OUT / f"{name}.png"
    plt.savefig(path, bbox_inches="tight")
    print(f"  picture: {path}")
    plt.show() if plt.get_backend().lower() != "agg" else plt.close()


def heading(text: str) -> None:
    print(f"\n{text}\n{'-' * len(text)}")


# %% [markdown]
# ## 1. From pixels to tokens
#
# The image has one channel and four even quarters. Patches of 4 x 4 pixels make a grid of 2 x 2: N = HW / P^2 = 4.

# %%
heading("1. From pixels to tokens: an 8 x 8 image")
P, D = 4, 8
quarters = torch.tensor([[0.9, 0.4], [0.6, 0.1]])
x = quarters.repeat_interleave(4, 0).repeat_interleave(4, 1)[None, None]  # (B, C, H, W)
x_p = patchify(x, P)
print(f"image x       {tuple(x.shape)}   B, C, H, W")
print(
    f"patches x_p   {tuple(x_p.shape)}      B, N, P*P*C   with N = {x.shape[2] * x.shape[3]} / {P * P} = {x_p.shape[1]}"
)
print(f"each patch has one value: {[f'{patch.unique().item():.1f}' for patch in x_p[0]]}")
assert torch.equal(unpatchify(x_p, P, (2, 2)), x), "nothing is lost"

figure, (left, right) = plt.subplots(1, 2, figsize=(7, 3.2), width_ratios=[1, 1.25], layout="constrained")
left.imshow(x[0, 0], cmap="gray", vmin=0, vmax=1)
left.set(title="8 x 8 image, four 4 x 4 patches", xticks=range(8), yticks=range(8))
left.axhline(3.5, color="tab:red", lw=2)
left.axvline(3.5, color="tab:red", lw=2)
outline = [withStroke(linewidth=3, foreground="white")]
for i in range(4):
    row, column = divmod(i, 2)
    left.text(
        4 * column + 1.5,
        4 * row + 1.5,
        f"p{row}{column}",
        color="tab:red",
        ha="center",
        va="center",
        size=14,
        path_effects=outline,
    )
right.imshow(x_p[0], cmap="gray", vmin=0, vmax=1)
right.set(title="the same as a sequence: 4 vectors of 16 pixels", yticks=range(4), xlabel="pixel within the patch")
right.set_yticklabels(["p00", "p01", "p10", "p11"])
show("1_patches")

# %% [markdown]
# A learned matrix E turns each patch vector into a token of D numbers. As a convolution whose stride is its kernel size
# it is the same matrix: the model stores it that way because published files do.

# %%
toy = VisionTransformer(
    ViTConfig(
        img_size=8,
        patch_size=P,
        in_chans=1,
        embed_dim=D,
        depth=2,
        num_heads=2,
        num_classes=3,
        positions="sincos2d",
        pos_prefix=False,
    )
).eval()
E, b = toy.patch_embed.E, toy.patch_embed.proj.bias
tokens = x_p @ E + b
print(f"E             {tuple(E.shape)}         P*P*C, D")
print(f"x_p E + b     {tuple(tokens.shape)}       B, N, D")
difference = (tokens - toy.patch_embed(x)).abs().max().item()
print(f"largest difference to the strided convolution: {difference:.1e}")

# %% [markdown]
# ## 2. Where a patch is
#
# Attention does not care about order, so position is added to each token. The sinusoid of a place (r, c) has the row in
# its first half and the column in its second.

# %%
heading("2. Positions")
print("1D sinusoid, D = 4, p = 1:", [f"{v:.6g}" for v in sincos_1d(torch.tensor([1]), 4)[0].tolist()])
E_pos = sincos_2d((2, 2), D)
similarity = E_pos @ E_pos.T
print("dot products of the four 2D positions:")
print(np.array2string(similarity.numpy(), precision=2, floatmode="fixed"))
print("itself 4.00; same row or column 3.54; across 3.08: near places have near codes")

figure, (left, right) = plt.subplots(1, 2, figsize=(7.6, 2.8), width_ratios=[1.5, 1], layout="constrained")
drawn = left.imshow(E_pos, vmin=-1, vmax=1)
left.axvline(3.5, color="white", ls="--")
left.set(title="2D sinusoid: row half | column half", xlabel="dimension", yticks=range(4), xticks=range(8))
left.set_yticklabels(["p00", "p01", "p10", "p11"])
figure.colorbar(drawn, ax=left, shrink=0.8)
right.imshow(similarity)
for i in range(4):
    for j in range(4):
        shade = "black" if similarity[i, j] > 3.4 else "white"
        right.text(j, i, f"{similarity[i, j]:.2f}", ha="center", va="center", color=shade)
right.set(title="dot products", xticks=range(4), yticks=range(4))
right.set_xticklabels(["p00", "p01", "p10", "p11"])
right.set_yticklabels(["p00", "p01", "p10", "p11"])
show("2_positions_toy")

# %% [markdown]
# Without positions a ViT sees a set of patches; with them, a picture.

# %%
shuffled = unpatchify(x_p[:, [3, 1, 0, 2]], P, (2, 2))
unplaced = VisionTransformer(replace(toy.config, positions="none"))
unplaced.load_state_dict(toy.state_dict())
with torch.no_grad():
    for name, model in (("without positions", unplaced.eval()), ("with positions   ", toy)):
        change = (model.embed(shuffled) - model.embed(x)).abs().max().item()
        print(f"{name}: shuffling the patches changes the embedding by {change:.1e}")

# %% [markdown]
# ## 3. Equations 1 to 4
#
# Eq. 1 prepends the class token and adds the positions (in this toy [CLS] has none). Eqs. 2 and 3 are one block,
# applied L times; Eq. 4 normalises the last state of [CLS], and a linear head reads it.

# %%
heading("3. Equations 1-4 on the toy")
with torch.no_grad():
    z, _ = toy.embed_tokens(x)
    print(f"Eq. 1    z_0 = [x_class; x_p E] + E_pos       {tuple(z.shape)}   B, 1 + N, D")
    for layer, block in enumerate(toy.blocks, start=1):
        z = block.attn(block.norm1(z)) + z
        print(f"Eq. 2    z'_{layer} = MSA(LN(z_{layer - 1})) + z_{layer - 1}            {tuple(z.shape)}")
        z = block.mlp(block.norm2(z)) + z
        print(f"Eq. 3    z_{layer} = MLP(LN(z'_{layer})) + z'_{layer}           {tuple(z.shape)}")
    y = toy.norm(z)[:, 0]
    logits = toy.head(y)
    print(f"Eq. 4    y = LN(z_L^0)                        {tuple(y.shape)}")
    print(f"         logits = W_head y + b_head           {tuple(logits.shape)}")
    difference = (logits - toy(x)).abs().max().item()
    print(f"largest difference to toy(x): {difference:.1e}")
    rows = toy.attention(x, "all", "all")
    print(
        f"attention of a block: {tuple(rows[0].shape)} B, h, queries, keys; a row sums to {rows[0][0, 0, 0].sum():.4f}"
    )

# %% [markdown]
# What each token looks at: one softmax row per token, for each head of each block. `model.attention` computes exactly
# the rows that are asked for. A fresh model looks at everything alike; larger weights give the heads opinions.

# %%
with torch.no_grad():
    for block in toy.blocks:
        block.attn.qkv.weight.normal_(0, 0.7)
    rows = toy.attention(x, "all", "all")
names = ["CLS", "p00", "p01", "p10", "p11"]
figure, axes = plt.subplots(1, 4, figsize=(9, 2.7), layout="constrained")
for i, axis in enumerate(axes):
    block, head = divmod(i, 2)
    drawn = axis.imshow(rows[block][0, head], vmin=0, vmax=max(float(r.max()) for r in rows))
    axis.set(title=f"block {block + 1}, head {head + 1}", xticks=range(5), yticks=range(5), xlabel="key")
    axis.set_xticklabels(names, rotation=45)
    axis.set_yticklabels(names)
axes[0].set_ylabel("query")
figure.colorbar(drawn, ax=axes, label="attention")
show("3_attention_toy")

# %% [markdown]
# ## 4. ViT-Base
#
# The same walk at full size, on a picture drawn from a formula: a ball over a chequered floor. The weights are random,
# so only shapes and costs mean anything here, not the answer.

# %%
heading("4. ViT-Base, 224 x 224 x 3")
v, u = torch.meshgrid(torch.linspace(-1, 1, 224), torch.linspace(-1, 1, 224), indexing="ij")
ground = (v > 0.25).float()
distance = 1 / (v + 0.2).clamp(min=0.05)
chequer = ((torch.floor(4 * u * distance) + torch.floor(2 * distance)) % 2) * 0.5 + 0.3
sky = torch.stack([0.45 + 0.2 * v, 0.6 + 0.2 * v, 0.85 + 0.05 * v])
picture = sky * (1 - ground) + chequer * ground
ball = (u**2 + (v - 0.05) ** 2 < 0.3).float()
shade = (0.55 + 0.55 * (-(u + v) * 0.8 + 0.3).clamp(-0.7, 1)).clamp(0, 1)
picture = picture * (1 - ball) + torch.stack([shade, 0.35 * shade, 0.25 * shade]) * ball
picture = picture.clamp(0, 1)

base = create_model("vit_base_patch16_224", seed=0).eval()
mean, std = (torch.tensor(values)[:, None, None] for values in (base.preprocess.mean, base.preprocess.std))
image = ((picture - mean) / std)[None]
with torch.no_grad():
    x_p = patchify(image, 16)
    z, _ = base.embed_tokens(image)
    states = list(base.states(z))
    logits = base(image)
print(f"image                       {tuple(image.shape)}")
print(f"patches                     {tuple(x_p.shape)}   14 x 14 patches of 16 * 16 * 3 = 768 numbers")
print(f"tokens, Eq. 1               {tuple(z.shape)}   one more for [CLS]")
print(f"after each of {len(states) - 1} blocks     {tuple(states[-1].shape)}   the shape never changes")
print(f"logits                      {tuple(logits.shape)}")
cost = model_cost(base.config)
print(f"parameters {cost.params:,}; multiply-adds {cost.macs / 1e9:.3f} x 10^9")

figure, (left, right) = plt.subplots(1, 2, figsize=(9.5, 3.6), width_ratios=[1, 1.7], layout="constrained")
left.imshow(picture.permute(1, 2, 0))
for at in range(16, 224, 16):
    left.axhline(at - 0.5, color="white", lw=0.6)
    left.axvline(at - 0.5, color="white", lw=0.6)
left.set(title="224 x 224 in patches of 16 x 16: N = 196", xticks=[0, 112, 223], yticks=[0, 112, 223])
line = torch.ones(7 * 20, 28 * 18, 3)  # the sequence, written like text: seven lines of 28 patches
for i, patch in enumerate(unpatchify(x_p[0][:, None], 16, (1, 1))):
    row, column = divmod(i, 28)
    line[20 * row + 2 : 20 * row + 18, 18 * column + 1 : 18 * column + 17] = (patch * std + mean).permute(1, 2, 0)
right.imshow(line.clamp(0, 1))
right.set(title="the sequence the model reads, in lines of 28", xticks=[], yticks=[10 + 20 * r for r in range(7)])
right.set_yticklabels([str(28 * r + 1) for r in range(7)])
right.spines[:].set_visible(False)
show("4_patches_base")

# %% [markdown]
# The similarity of one position to all others, for the 2D sinusoid on the 14 x 14 grid: each small map belongs to one
# patch, and is brightest where that patch is. Learned tables come to look like this by training.

# %%
E_pos = sincos_2d((14, 14), 768)
E_pos = E_pos / E_pos.norm(dim=1, keepdim=True)
similarity = (E_pos @ E_pos.T).view(14, 14, 14, 14)
figure, axes = plt.subplots(7, 7, figsize=(7.4, 6.6), layout="constrained")
for row in range(7):
    for column in range(7):
        axes[row, column].imshow(similarity[2 * row, 2 * column], vmin=float(similarity.min()), vmax=1)
        axes[row, column].set(xticks=[], yticks=[])
        if row == 6:
            axes[row, column].set_xlabel(2 * column)
        if column == 0:
            axes[row, column].set_ylabel(2 * row)
drawn = axes[0, 0].images[0]
figure.colorbar(drawn, ax=axes, shrink=0.5, label="cosine similarity")
figure.suptitle("similarity of a position to all others, every second patch", fontsize=10)
figure.supxlabel("column of the patch", fontsize=9)
figure.supylabel("row of the patch", fontsize=9)
show("5_position_similarity")

# %% [markdown]
# ## 5. What a smaller patch costs
#
# Half the patch side makes four times the tokens and sixteen times the attention matrix.

# %%
heading("5. The cost of small patches: ViT-Base at 224")
print(f"{'P':>4} {'tokens':>8} {'entries per head':>18} {'10^9 MACs':>11} {'attention':>10}")
patch_sizes = [32, 16, 8, 4]
costs = [model_cost(ViTConfig(patch_size=p)) for p in patch_sizes]
for p, cost in zip(patch_sizes, costs, strict=True):
    share = cost.macs_by_part["attention"] / cost.macs
    print(f"{p:>4} {cost.tokens:>8,} {cost.attention_entries:>18,} {cost.macs / 1e9:>11.1f} {share:>9.1%}")

figure, axis = plt.subplots(figsize=(5.2, 3.2), layout="constrained")
linear = [(cost.macs - cost.macs_by_part["attention"]) / 1e9 for cost in costs]
square = [cost.macs_by_part["attention"] / 1e9 for cost in costs]
names = [f"P = {p}\n{cost.tokens:,} tokens" for p, cost in zip(patch_sizes, costs, strict=True)]
axis.bar(names, linear, label="linear in the tokens")
axis.bar(names, square, bottom=linear, label="quadratic: softmax(Q K^T) V")
axis.set(ylabel="10^9 multiply-adds", title="ViT-Base on one 224 x 224 image")
axis.legend(frameon=False)
axis.spines[["top", "right"]].set_visible(False)
show("6_cost_of_patches")
