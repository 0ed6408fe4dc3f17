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
# # The encoder-decoder Transformer, word by word
#
# A small model learns a few English sentences in Italian, here in the notebook. It learns all words at once, and writes
# one word at a time: "I love you very much" becomes "Ti amo molto" in four steps. Every step calls the same code that
# the models run. The model is that of Vaswani et al., 2017 (arXiv:1706.03762).
#
# B sentences, M words of the source, T words of the target, D width, V vocabulary.
#
# Run it as a script, as a notebook (`make notebooks`), or cell by cell in an editor.

# %%
import copy
import math
import time
from itertools import pairwise
from pathlib import Path

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F

from vitral.config import Seq2SeqConfig, TextConfig
from vitral.data.tokenizer import EOS, PAD, SOS, SPECIAL, pad
from vitral.models.generate import generate
from vitral.models.seq2seq import Cache, Seq2Seq
from vitral.nn.attention import causal_mask, softmax_rows

OUT = Path("pictures")
OUT.mkdir(exist_ok=True)
torch.manual_seed(0)
plt.rcParams.update({"figure.dpi": 130, "axes.titlesize": 10, "font.size": 9, "image.cmap": "cividis"})


def show(name: str) -> None:
    """Save the current figure, and show it where there is a screen."""
    path = OUT / f"{name}.png"
    plt.savefig(path, bbox_inches="tight")
    print(f"  picture: {path}")
    plt.show() if plt.get_backend().lower() != "agg" else plt.close()


def heading(text: str) -> None:
    print(f"\n{text}\n{'-' * len(text)}")


def draw_matrix(ax, matrix, rows, columns, title, number="{:z.2f}", **colours) -> None:
    """A matrix with its numbers, a word beside each row and a word under each column."""
    drawn = ax.imshow(matrix, **colours)
    ax.set(title=title, xticks=range(len(columns)), yticks=range(len(rows)))
    ax.set_xticklabels(columns, rotation=60)
    ax.set_yticklabels(rows)
    for i, row in enumerate(matrix.tolist()):
        for j, value in enumerate(row):
            is_light = sum(drawn.to_rgba(value)[:3]) > 1.5
            ax.text(
                j, i, number.format(value), ha="center", va="center", size=7, color="black" if is_light else "white"
            )


def draw_bars(ax, words, p, chosen, title) -> None:
    """Probabilities of words, the largest on top, the chosen word in another colour."""
    bars = ax.barh(words, p, color=["C1" if word == chosen else "C0" for word in words])
    ax.bar_label(bars, fmt="%.3f", padding=2, size=8)
    ax.set(title=title, xlim=(0, 1.3), xticks=[0, 0.5, 1])
    ax.invert_yaxis()
    ax.spines[["top", "right"]].set_visible(False)


# %% [markdown]
# ## 1. Sentences as numbers
#
# A word is a token, and each language has a table of its own. Four numbers stand for no word: padding, the start of a
# sentence, its end, and the unknown. One English sentence has several Italian ones; section 7 is about it.

# %%
heading("1. Sentences as numbers")
PAIRS = [
    ("I love you", "Ti amo"),
    ("I love you very much", "Ti amo molto"),
    ("I see you", "Ti vedo"),
    ("I hear you", "Ti sento"),
    ("I hear you very well", "Ti sento molto bene"),
    ("We love you", "Ti amiamo"),
    ("We love you very much", "Ti amiamo molto"),
    ("We see you", "Ti vediamo"),
    ("We see you very well", "Ti vediamo molto bene"),
    ("She loves you", "Ti ama"),
    ("She sees you", "Ti vede"),
    ("She loves me very much", "Mi ama molto"),
    ("She sees me", "Mi vede"),
    ("I love the sea", "Amo il mare"),
    ("I love the sea very much", "Amo molto il mare"),
    ("We love the sea", "Amiamo il mare"),
    ("We see the sea", "Vediamo il mare"),
    ("She sees the sea", "Vede il mare"),
    ("She loves the sea", "Ama il mare"),
    ("Thank you very much", "Grazie mille"),
    ("Thank you very much", "Grazie tante"),
    ("Thank you very much", "Grazie infinite"),
    ("Thank you very much", "Molte grazie"),
    ("Thank you very much", "Molte grazie"),
]


class Words:
    """A token for each word of the texts, after the special ones."""

    def __init__(self, texts):
        self.table = [f"<{name}>" for name in SPECIAL] + sorted({word for text in texts for word in text.split()})

    def encode(self, text):
        return [self.table.index(word) for word in text.split()]

    def decode(self, tokens):
        return [self.table[token] for token in tokens]


english, italian = (Words(texts) for texts in zip(*PAIRS, strict=True))
V = len(italian.table)
print(f"{len(PAIRS)} pairs; {len(english.table)} English tokens, V = {V} Italian ones")
print("I love you very much ->", [SOS, *english.encode("I love you very much"), EOS])

# %% [markdown]
# ## 2. No word sees a later one
#
# The decoder must say each word from those before it. So the scores of all later words become -infinity before the
# softmax, and their weights 0:
#
#     A_ij = exp(s_ij) / sum_{k <= i} exp(s_ik)   for j <= i, else 0       s = Q K^T / sqrt(d)

# %%
heading("2. The causal mask")
words = ["<SOS>", "Ti", "sento", "molto", "bene"]
q, k = torch.randn(2, 1, 1, len(words), 8)  # (B, h, T, d) each
mask = causal_mask(len(words), 0, None)
A = softmax_rows(q, k, mask)[0, 0]
print(f"weights right of the diagonal: at most {A.triu(1).max():.1f}")
print(f"rows sum to {A.sum(1).min():.4f} .. {A.sum(1).max():.4f}")
cut = softmax_rows(q, k, None)[0, 0].tril()
cut = cut / cut.sum(1, keepdim=True)
print(f"largest difference to rows without a mask, cut and scaled to 1: {(A - cut).abs().max():.1e}")

scores = (q @ k.mT)[0, 0] / 8**0.5
most = scores.abs().max()
figure, axes = plt.subplots(1, 3, figsize=(9.6, 3.4), layout="constrained")
draw_matrix(axes[0], scores, words, words, "scores s = Q K^T / sqrt(d)", cmap="coolwarm", vmin=-most, vmax=most)
draw_matrix(axes[1], mask[0, 0].float(), words, words, "the mask: 1 where a word may look", "{:.0f}")
draw_matrix(axes[2], A, words, words, "softmax: rows sum to 1", vmin=0, vmax=1)
axes[0].set_ylabel("the word that looks")
show("1_causal_mask")

# %% [markdown]
# ## 3. Training reads the target, shifted right
#
# While it learns, the decoder is not given its own words but the true ones (teacher forcing; Williams & Zipser, 1989).
# It reads `<SOS>` and the target, and in each place it must say the next word, up to `<EOS>`. Thanks to the mask, all
# places of all sentences are one pass. Shorter sentences are filled with `<PAD>`, which no loss counts.

# %%
heading("3. The target, shifted right")
source, source_mask = pad([[SOS, *english.encode(e), EOS] for e, _ in PAIRS])  # (B, M)
given, counts = pad([[SOS, *italian.encode(i)] for _, i in PAIRS])  # (B, T)
label, _ = pad([[*italian.encode(i), EOS] for _, i in PAIRS])  # (B, T)


def row(name, cells):
    print(f"{name:<16}" + " ".join(f"{cell:<6}" for cell in cells))


for i in (1, 4):
    row("encoder reads", english.decode(source[i]))
    row("decoder reads", italian.decode(given[i]))
    row("must say", italian.decode(label[i]))
    row("counts", counts[i].int().tolist())
    print()

# %% [markdown]
# The model: two blocks each, with the norm after each residual sum as in the first Transformer.
#
#     memory = encoder(source)                        (B, M, D)
#     logits = decoder(given, memory) E^T             (B, T, V)

# %%
D = 32


def half(words):
    return TextConfig(
        vocab_size=len(words.table),
        max_length=12,
        embed_dim=D,
        depth=2,
        num_heads=4,
        mlp_width=4 * D,
        block="post",
        drop_rate=0.1,
    )


model = Seq2Seq(Seq2SeqConfig(encoder=half(english), decoder=half(italian)))
with torch.no_grad():
    memory = model.eval().encode(source, source_mask)
    logits = model.decode(given, memory)
    changed = given.clone()
    changed[:, -1] = italian.encode("mare")[0]
    difference = (model.decode(changed, memory) - logits).abs().amax((0, 2))
print(f"source {tuple(source.shape)} -> memory {tuple(memory.tokens.shape)}")
print(f"given  {tuple(given.shape)} -> logits {tuple(logits.shape)}")
print("another last word changes the logits of each place by", " ".join(f"{d:.1e}" for d in difference))

# %% [markdown]
# ## 4. One step of training
#
# The loss is the cross entropy to labels that are smoothed (Szegedy et al., 2016, arXiv:1512.00567): the true word y
# has 1 - eps, and eps is shared by all V words. It is a mean over the places that count.
#
#     loss = mean of  -(1 - eps) log p_y - (eps / V) sum_v log p_v

# %%
heading("4. One step")
EPS = 0.1


def smoothed_loss(logits, label):
    """(B, T, V), (B, T) -> the mean over places that are no padding."""
    log_p = logits.log_softmax(-1)
    right = log_p.gather(-1, label[..., None])[..., 0]  # log p_y (B, T)
    loss = -(1 - EPS) * right - EPS * log_p.mean(-1)
    return loss[label != PAD].mean()


def train_step():
    loss = smoothed_loss(model.train()(source, given, source_mask), label)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


@torch.no_grad()
def loss_now():
    return smoothed_loss(model.eval()(source, given, source_mask), label).item()


of_torch = F.cross_entropy(logits.flatten(0, 1), label.flatten(), ignore_index=PAD, label_smoothing=EPS)
print(f"the equation gives {smoothed_loss(logits, label):.4f}, torch {of_torch:.4f}")
wider = smoothed_loss(F.pad(logits, (0, 0, 0, 3), value=9.0), F.pad(label, (0, 3), value=PAD))
print(f"with three more places of padding it is {wider:.4f}")

optimizer = torch.optim.Adam(model.parameters(), lr=2e-3, betas=(0.9, 0.98))
before = loss_now()
train_step()
print(f"one step, {int(counts.sum())} words at once: loss {before:.3f} -> {loss_now():.3f}")

# %% [markdown]
# More of the same. How low can it get? The best that any model can say in a place is the mean q of the smoothed labels
# of all sentences that are the same up to there.

# %%
start = time.perf_counter()
losses = [train_step() for _ in range(40)]
young = copy.deepcopy(model).eval()  # for section 7
losses += [train_step() for _ in range(260)]
print(f"{len(losses)} steps, {time.perf_counter() - start:.0f} s: loss {loss_now():.3f}", end="; ")

smoothed = (1 - EPS) * F.one_hot(label, V) + EPS / V  # (B, T, V)
alike = (source[:, None] == source).all(-1)[..., None] & (given[:, None] == given).cumprod(-1).bool()  # (B, B, T)
q = torch.einsum("bct,ctv->btv", alike.float(), smoothed) / alike.sum(1)[..., None]
least = smoothed_loss(q.log(), label).item()
print(f"no model gets below {least:.3f}")

figure, ax = plt.subplots(figsize=(5, 2.6), layout="constrained")
ax.plot(losses)
ax.axhline(least, color="C1", ls="--", label="the least there can be")
ax.set(xlabel="step", ylabel="loss", title="loss of training, with dropout", ylim=0)
ax.legend(frameon=False)
ax.spines[["top", "right"]].set_visible(False)
show("2_loss")

# %% [markdown]
# Sentences it has never read, of words that it knows. Not all need come out right: so few pairs are no grammar.

# %%
UNSEEN = [
    ("She loves you very much", "Ti ama molto"),
    ("I see you very well", "Ti vedo molto bene"),
    ("She loves me", "Mi ama"),
    ("We love the sea very much", "Amiamo molto il mare"),
]
LIMITS = {"max_length": 8, "bos": SOS, "eos": EOS}


def encode_source(text):
    return torch.tensor([[SOS, *english.encode(text), EOS]])  # (1, M)


def text_of(written):
    return " ".join(italian.decode(written.tokens))


model.eval()
for text, truth in UNSEEN:
    ((written,),) = generate(model, encode_source(text), **LIMITS)
    print(f"{text} -> {text_of(written)}" + ("" if text_of(written) == truth else f"   (right: {truth})"))

# %% [markdown]
# ## 5. Four steps of writing
#
# The encoder reads the sentence once. The decoder begins with `<SOS>`. In step t it reads t words, and the last row of
#
#     p = softmax(logits)                             (t, V)
#
# is about the next word. The likeliest is chosen and joins the words that are read. `<EOS>` ends it.

# %%
heading("5. I love you very much")
sentence = encode_source("I love you very much")
tokens, steps = [SOS], []
with torch.no_grad():
    memory = model.encode(sentence)
    while tokens[-1] != EOS:
        p = model.decode(torch.tensor([tokens]), memory)[0].softmax(-1)  # (t, V)
        tokens.append(int(p[-1].argmax()))
        steps.append(p)

figure, axes = plt.subplots(1, len(steps), figsize=(10.5, 2.6), layout="constrained")
for t, (ax, p) in enumerate(zip(axes, steps, strict=True), start=1):
    read, chosen = " ".join(italian.decode(tokens[:t])), italian.table[tokens[t]]
    print(f"step {t}: reads {read:<20} p {tuple(p.shape)}, row {t} -> {chosen}")
    top = p[-1].topk(5)
    draw_bars(ax, italian.decode(top.indices), top.values, chosen, f"step {t}:  {read}")
figure.supxlabel("probability of the next word", size=9)
show("3_four_steps")
print("written:", " ".join(italian.decode(tokens[1:])))
print(f"the labels asked for {1 - EPS + EPS / V:.3f} for the right word and {EPS / V:.3f} for each other")
((written,),) = generate(model, sentence, **LIMITS)
assert [*written.tokens, EOS] == tokens[1:], "`generate` does the same"

# %% [markdown]
# ## 6. Where each word looks
#
# Cross-attention: the queries come from the decoder, the keys and values from the memory (after Bahdanau et al., 2015,
# arXiv:1409.0473). A row belongs to the word that is read, and is named by the word that is written from it. English
# says "I love", Italian says who loves by the ending of "amo"; and "Ti" stands first where "you" stands third. With
# other starting weights the rows differ: they show where the model looks, not why it says what it says (Jain & Wallace,
# 2019, arXiv:1902.10186).

# %%
heading("6. Cross-attention")
read = torch.tensor([tokens[:-1]])
with torch.no_grad():
    blocks = model.attention(read, memory)
asked, said = english.decode(sentence[0]), [f"-> {word}" for word in italian.decode(tokens[1:])]
print(f"rows of a block: to the words read {tuple(blocks[0][0].shape)}, to the source {tuple(blocks[0][1].shape)}")
for i, word in enumerate(italian.decode(tokens[1:])):
    rows = blocks[-1][1][0, :, i].mean(0)
    print(f"{word:<6} looks most at {asked[rows.argmax()]:<6} ({rows.max():.2f}, mean of heads, last block)")

own = blocks[-1][0][0].mean(0)
most = max(rows[0].mean(0).max() for _, rows in blocks)
figure, axes = plt.subplots(1, 3, figsize=(11, 3), width_ratios=[4, 7, 7], layout="constrained")
names = italian.decode(read[0])
draw_matrix(axes[0], own, names, names, "block 2: to the words read", vmin=0, vmax=1)
for ax, (block, (_, rows)) in zip(axes[1:], enumerate(blocks, start=1), strict=True):
    draw_matrix(ax, rows[0].mean(0), said, asked, f"block {block}: to the source", vmin=0, vmax=most)
show("4_cross_attention")

# %% [markdown]
# ## 7. Greedy, and a beam
#
# Taking the likeliest word each time is greedy, and the sentence need not be the likeliest. A beam of width K keeps the
# K best beginnings instead (Sutskever et al., 2014, arXiv:1409.3215). The score is
#
#     log p(y | x) = sum_t log p(y_t | y_1 .. y_{t-1}, x)
#
# The pairs were made to show the difference: three of the five thanks begin with "Grazie", and each goes on in its own
# way; two are "Molte grazie". So greedy has to begin with "Grazie", about 3 in 5, and then finds 1 in 3.

# %%
heading("7. Thank you very much")
thanks = encode_source("Thank you very much")
for width in (1, 2, 4):
    (best,) = generate(model, thanks, method="beam", beam=width, n_best=width, length_penalty=0.0, **LIMITS)
    print(f"beam of {width}" + (", which is greedy" if width == 1 else ""))
    for found in best:
        print(f"    {text_of(found):<16} log p = {found.score:.3f}   p = {math.exp(found.score):.3f}")

# %% [markdown]
# The same sums by one pass of teacher forcing.

# %%
with torch.no_grad():
    memory = model.encode(thanks)
    for found in best[:2]:
        log_p = model.decode(torch.tensor([[SOS, *found.tokens]]), memory)[0].log_softmax(-1)  # (T, V)
        total = log_p.gather(1, torch.tensor([*found.tokens, EOS])[:, None]).sum()
        print(f"{text_of(found):<16} log p = {total:.3f}, of the beam {found.score:.3f}")

# %%
(greedy,) = generate(model, thanks, **LIMITS)[0]
figure, axes = plt.subplots(1, 4, figsize=(11, 2.6), width_ratios=[1, 1, 1, 1.2], layout="constrained")
for ax, read in zip(axes[:3], ([], greedy.tokens[:1], best[0].tokens[:1]), strict=True):
    with torch.no_grad():
        top = model.decode(torch.tensor([[SOS, *read]]), memory)[0, -1].softmax(-1).topk(4)
    taken = italian.table[greedy.tokens[len(read)]] if read == greedy.tokens[: len(read)] else None
    draw_bars(ax, italian.decode(top.indices), top.values, taken, " ".join(italian.decode([SOS, *read])) + " -> ?")
p = [math.exp(found.score) for found in best]
draw_bars(axes[3], [text_of(found) for found in best], p, text_of(greedy), "the whole sentence")
figure.supxlabel("probability; orange is what greedy takes", size=9)
show("5_beam")

# %% [markdown]
# And where nothing was arranged? The same search with every sentence, for the model after 40 steps and as it is now. A
# higher score is the model's opinion, and no better translation if the model knows little. A sum of logs also favours
# short sentences, for which `length_penalty` divides it by a power of the length. Nor is a beam a proof: the best
# sentence is lost if its beginning falls out of the beam.

# %%
texts = sorted({e for e, _ in PAIRS + UNSEEN})
batch, batch_mask = pad([[SOS, *english.encode(text), EOS] for text in texts])
for name, writer in (("after 40 steps", young), ("now", model)):
    greedy = generate(writer, batch, mask=batch_mask, length_penalty=0.0, **LIMITS)
    beam = generate(writer, batch, mask=batch_mask, method="beam", beam=4, length_penalty=0.0, **LIMITS)
    found = [(text, g, b) for text, (g,), (b,) in zip(texts, greedy, beam, strict=True)]
    higher = [(text, g, b) for text, g, b in found if b.score > g.score + 1e-4]
    lower = sum(b.score < g.score - 1e-4 for _, g, b in found)
    print(f"{name}: of {len(texts)} sentences a beam of 4 scores higher in {len(higher)}, lower in {lower}")
    for text, g, b in higher:
        print(f"    {text}: {text_of(g)} ({g.score:.2f}) < {text_of(b)} ({b.score:.2f})")

# %% [markdown]
# ## 8. Each word is computed once
#
# No word sees a later one, so the rows of earlier words are the same in every step. Their keys and values can be kept:
# then a step reads the new word alone, and T steps read T words instead of T (T + 1) / 2.

# %%
heading("8. The cache")
changes = [(p[: len(before)] - before).abs().max().item() for before, p in pairwise(steps)]
print(f"rows of earlier words change by at most {max(changes):.1e} from step to step")
cache, difference = Cache(model.decoder.depth), 0.0
with torch.no_grad():
    memory = model.encode(sentence)
    for token, p in zip(tokens[:-1], steps, strict=True):
        new = model.decode(torch.tensor([[token]]), memory, cache=cache)[0, -1].softmax(-1)  # (V)
        difference = max(difference, (new - p[-1]).abs().max().item())
        print(f"reads {italian.table[token]:<6} -> {italian.table[new.argmax()]:<6} {cache.length} in the cache")
print(f"largest difference to the probabilities of section 5: {difference:.1e}")

# %% [markdown]
# What `generate` reads, counted.

# %%
for keep in (False, True):
    read = {"encoder": [], "decoder": []}
    hooks = [
        part.token_embed.register_forward_pre_hook(lambda _, inputs, to=read[name]: to.append(inputs[0].shape[1]))
        for name, part in (("encoder", model.encoder), ("decoder", model.decoder))
    ]
    generate(model, sentence, cache=keep, **LIMITS)
    for hook in hooks:
        hook.remove()
    print(f"cache={keep}: the encoder reads {read['encoder']} words, the decoder {read['decoder']}")

for method in ("greedy", "beam"):
    kept, anew = (
        [text_of(best) for (best,) in generate(model, batch, mask=batch_mask, method=method, cache=keep, **LIMITS)]
        for keep in (True, False)
    )
    assert kept == anew
    print(f"{method}: the same {len(texts)} sentences with the cache and without")
