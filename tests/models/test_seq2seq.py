"""What the encoder-decoder and its halves promise."""

import json
import math

import pytest
import torch

from helpers import difference, images, redraw
from vitral.config import Seq2SeqConfig, TextConfig, ViTConfig
from vitral.errors import ConfigError, InputError
from vitral.models.init import blank
from vitral.models.seq2seq import Cache, Seq2Seq, TextDecoder, TextEncoder
from vitral.nn.attention import causal_mask

B, T, M, V, W, D, h = 3, 7, 11, 23, 29, 20, 5
VIT = ViTConfig(img_size=(24, 16), patch_size=8, embed_dim=12, depth=2, num_heads=3, num_classes=0, reg_tokens=1)
SMALL = {"embed_dim": D, "num_heads": h, "mlp_width": 37, "depth": 2, "max_length": 13}
TEXT = {
    "pre": {"block": "pre", "act": "gelu"},
    "post": {"block": "post", "positions": "learned", "norm_embedding": True, "output_bias": True},
    "separate": {"tied_output": False, "scale_embedding": False, "positions": "learned"},
}


def text(kind="pre", vocab_size=V, **options):
    return TextConfig(**{"vocab_size": vocab_size, **SMALL, **TEXT[kind], **options})


def seq2seq(source="text", kind="pre"):
    """A small model with every weight redrawn; the encoder of text is narrower than the decoder."""
    if source == "image":
        return redraw(Seq2Seq(Seq2SeqConfig(vit=VIT, decoder=text(kind))))
    return redraw(Seq2Seq(Seq2SeqConfig(encoder=text(kind, W, embed_dim=10), decoder=text(kind))))


def tokens(*shape, seed=0, vocabulary=V):
    return torch.randint(vocabulary, shape, generator=torch.Generator().manual_seed(seed))


def a_source(source, seed=0):
    """A ragged batch: a source of full length, and shorter ones with noise behind them."""
    if source == "image":
        mask = torch.zeros(B, 24, 16, dtype=torch.bool)
        mask[0], mask[1, :16, :8], mask[2, :9] = True, True, True
        return images(B, 3, 24, 16, seed=seed), mask
    lengths = torch.tensor([M, 4, 1])
    return tokens(B, M, seed=seed, vocabulary=W), torch.arange(M) < lengths[:, None]


CASES = [(source, kind) for source in ("text", "image") for kind in TEXT]


@pytest.mark.parametrize(("source", "kind"), CASES)
@torch.no_grad()
def test_the_output_at_t_does_not_know_later_tokens(source, kind):
    model, (x, mask) = seq2seq(source, kind), a_source(source)
    y = tokens(B, T)
    logits = model(x, y, mask)
    assert logits.shape == (B, T, V)
    for t in range(1, T):
        other = y.clone()
        other[:, t:] = (y[:, t:] + 5) % V
        changed = model(x, other, mask)
        assert difference(changed[:, :t], logits[:, :t]) < 1e-5
        assert difference(changed[:, t:], logits[:, t:]) > 1e-3


@pytest.mark.parametrize(("source", "kind"), CASES)
@torch.no_grad()
def test_cached_equals_uncached_at_every_step(source, kind):
    model, (x, mask) = seq2seq(source, kind), a_source(source)
    memory, y = model.encode(x, mask), tokens(B, T)
    want = model.decode(y, memory)
    cache = Cache(depth=2)
    for t in range(T):
        got = model.decode(y[:, t : t + 1], memory, cache=cache)
        assert cache.length == t + 1
        assert difference(got[:, 0], want[:, t]) < 1e-5
    cache = Cache(depth=2)
    parts = [model.decode(y[:, a:b], memory, cache=cache) for a, b in ((0, 2), (2, 3), (3, T))]
    assert difference(torch.cat(parts, dim=1), want) < 1e-5


@pytest.mark.parametrize(("source", "kind"), CASES)
@torch.no_grad()
def test_a_ragged_batch_equals_one_by_one(source, kind):
    model, (x, mask), y = seq2seq(source, kind), a_source(source), tokens(B, T)
    together = model(x, y, mask)
    for i in range(B):
        alone = x[i : i + 1, : int(mask[i].sum())] if source == "text" else x[i : i + 1]
        shown = None if source == "text" else mask[i : i + 1]
        assert difference(together[i : i + 1], model(alone, y[i : i + 1], shown)) < 1e-5
    noise = a_source(source, seed=1)[0]
    where = mask if source == "text" else mask[:, None]
    assert difference(model(x.where(where, noise), y, mask), together) < 1e-6


@torch.no_grad()
def test_the_source_matters_and_so_does_its_order():
    model, (x, _), y = seq2seq(), a_source("text"), tokens(B, T)
    assert difference(model((x + 1) % W, y), model(x, y)) > 1e-3
    assert difference(model(x.flip(1), y), model(x, y)) > 1e-3


@torch.no_grad()
def test_padding_of_the_target_may_be_at_either_side():
    model, (x, mask), y = seq2seq("text", "post"), a_source("text"), tokens(B, T)
    memory, want = model.encode(x, mask), model(x, y, mask)
    left = torch.cat([tokens(B, 3, seed=5), y], dim=1)
    shown = torch.arange(T + 3).expand(B, -1) >= 3
    assert difference(model.decode(left, memory, shown)[:, 3:], want) < 1e-5
    right = torch.cat([y, tokens(B, 3, seed=5)], dim=1)
    assert difference(model.decode(right, memory, shown.flip(1))[:, :T], want) < 1e-5
    assert difference(model.decode(right, memory)[:, :T], want) < 1e-5
    cache = Cache(depth=2)
    parts = [model.decode(left[:, a:b], memory, shown[:, :b], cache) for a, b in ((0, 5), (5, 6), (6, T + 3))]
    assert difference(torch.cat(parts, dim=1)[:, 3:], want) < 1e-5


@pytest.mark.parametrize(("source", "kind"), CASES)
@torch.no_grad()
def test_attention_rows_sum_to_one_and_are_zero_right_of_the_diagonal(source, kind):
    model, (x, mask), y = seq2seq(source, kind), a_source(source), tokens(B, T)
    memory = model.encode(x, mask)
    shown = torch.arange(T) < torch.tensor([7, 5, 2])[:, None]
    rows = model.attention(y, memory, shown)
    assert len(rows) == 2
    for own, other in rows:
        assert own.shape == (B, h, T, T)
        assert other.shape == (B, h, T, memory.tokens.shape[1])
        for each in (own, other):
            assert (each.sum(-1) - 1).abs().max() < 1e-5
        assert own.triu(1).abs().max() == 0
        assert own[1, :, :5, 5:].abs().max() == 0
        assert other.masked_select(~memory.visible[:, None, None]).abs().max() == 0
    # They are the rows of forward: the last block's, put in its equation, give what it gives.
    z = model.decoder.token_embed(y, shown)
    first = model.decoder.blocks[0]
    causal = causal_mask(T, 0, shown)
    attended = first.attn.rows(first.norm1(z) if kind != "post" else z, first.norm1(z) if kind != "post" else z, causal)
    assert torch.equal(attended, rows[0][0])


def test_the_causal_mask():
    assert causal_mask(1, 5, None) is None
    assert causal_mask(3, 0, None).tolist() == [[[[True, False, False], [True, True, False], [True, True, True]]]]
    assert causal_mask(2, 1, None).tolist() == [[[[True, True, False], [True, True, True]]]]
    visible = torch.tensor([[False, True, True], [True, True, False]])
    assert causal_mask(2, 1, visible).tolist() == [
        [[[False, True, False], [False, True, True]]],
        [[[True, True, False], [True, True, True]]],  # a token of padding still sees itself
    ]
    assert causal_mask(1, 2, visible).tolist() == [[[[False, True, True]]], [[[True, True, True]]]]


@torch.no_grad()
def test_beams_share_the_memory_of_their_source():
    model, (x, mask) = seq2seq(), a_source("text")
    memory, y = model.encode(x, mask), tokens(2 * B, T)
    copied = memory.select(torch.arange(B).repeat_interleave(2))
    want = model.decode(y, copied)
    assert difference(model.decode(y, memory), want) < 1e-5
    cache = Cache(depth=2)
    model.decode(y[:, :3], memory, cache=cache)
    swap = torch.tensor([1, 0, 3, 2, 5, 4])
    cache.select(swap)
    assert difference(model.decode(y[swap, 3:], memory, cache=cache), want[swap, 3:]) < 1e-5
    cache = Cache(depth=2)
    model.decode(y[:, :3], memory, cache=cache)
    rows, sources = torch.tensor([4, 5, 0, 1]), torch.tensor([2, 0])
    cache.select(rows, sources)
    assert difference(model.decode(y[rows, 3:], memory.select(sources), cache=cache), want[rows, 3:]) < 1e-5


@torch.no_grad()
def test_the_cache_outgrows_its_buffer():
    model = redraw(TextDecoder(text(max_length=150)))
    y, cache = tokens(2, 150), Cache(depth=2)
    want = model(y)
    got = [model.decode(y[:, t : t + 1], cache=cache) for t in range(150)]
    assert difference(torch.cat(got, dim=1), want) < 1e-5


# ---- the halves ----


@pytest.mark.parametrize("kind", TEXT)
@torch.no_grad()
def test_a_language_model_alone(kind):
    model, y = redraw(TextDecoder(text(kind))), tokens(B, T)
    logits, cache = model(y), Cache(depth=2)
    assert logits.shape == (B, T, V)
    for t in range(T):
        other = y.clone()
        other[:, t + 1 :] = 0
        assert difference(model(other)[:, : t + 1], logits[:, : t + 1]) < 1e-5
        assert difference(model.decode(y[:, t : t + 1], cache=cache)[:, 0], logits[:, t]) < 1e-5
    assert not any("cross" in name for name, _ in model.named_parameters())


@pytest.mark.parametrize("pool", ["cls", "mean", "tokens"])
@pytest.mark.parametrize("kind", TEXT)
@torch.no_grad()
def test_an_encoder_alone(kind, pool):
    model, (x, mask) = redraw(TextEncoder(text(kind, W, pool=pool, num_classes=17))), a_source("text")
    logits, z = model(x, mask), model.forward_features(x, mask)
    assert logits.shape == ((B, M, 17) if pool == "tokens" else (B, 17))
    pooled = {"cls": z[:, 0], "mean": torch.stack([z[i, : mask[i].sum()].mean(0) for i in range(B)]), "tokens": z}[pool]
    assert difference(model.embed(x, mask), pooled) < 1e-5
    assert difference(logits, model.head(pooled)) < 1e-5
    for i in range(B):
        n = int(mask[i].sum())
        alone = model(x[i : i + 1, :n])[0]
        assert difference(logits[i, :n] if pool == "tokens" else logits[i], alone) < 1e-5


@torch.no_grad()
def test_embeddings_are_their_equation():
    for kind in TEXT:
        c, y = text(kind), tokens(B, T)
        part = redraw(TextDecoder(c)).decoder.token_embed
        z = part.tokens.weight[y] * (math.sqrt(D) if c.scale_embedding else 1)
        for t in range(T):
            for i in range(D):
                if c.positions == "learned":
                    z[:, t, i] += part.pos_embed[t, i]
                else:
                    angle = t / 10000 ** (i // 2 * 2 / D)
                    z[:, t, i] += math.cos(angle) if i % 2 else math.sin(angle)
        if c.norm_embedding:
            z = torch.nn.functional.layer_norm(z, [D], part.norm.weight, part.norm.bias, c.norm_eps)
        assert difference(part(y, None), z) < 1e-5


@torch.no_grad()
def test_tied_and_separate_outputs():
    tied, separate = redraw(TextDecoder(text())), redraw(TextDecoder(text("separate")))
    assert "decoder.output.weight" not in tied.state_dict()
    z = images(B, D)
    assert difference(tied.decoder.logits(z), z @ tied.decoder.token_embed.tokens.weight.T) < 1e-6
    assert difference(separate.decoder.logits(z), z @ separate.decoder.output.weight.T) < 1e-6


# ---- learning, starting, failing ----


@pytest.mark.parametrize("kind", TEXT)
def test_it_learns_to_turn_a_sequence_around(kind):
    torch.manual_seed(0)
    options = {**SMALL, **TEXT[kind], "depth": 1, "embed_dim": 32, "num_heads": 4, "vocab_size": 7}
    model = Seq2Seq(Seq2SeqConfig(encoder=TextConfig(**options), decoder=TextConfig(**options)))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for step in range(150):
        source = tokens(64, 3, seed=step, vocabulary=5) + 2
        target = source.flip(1)
        shifted = torch.cat([torch.ones(64, 1, dtype=torch.long), target[:, :-1]], dim=1)
        loss = torch.nn.functional.cross_entropy(model(source, shifted).flatten(0, 1), target.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 0.7, loss  # 1.6 is chance
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("kind", TEXT)
def test_starting_logits_are_near_even(kind):
    torch.manual_seed(0)
    model = Seq2Seq(Seq2SeqConfig(vit=VIT, decoder=text(kind))).eval()
    with torch.no_grad():
        assert model(images(B, 3, 24, 16), tokens(B, T)).std() < 2


def test_a_blank_model_can_be_filled():
    model = seq2seq("image", "post")
    other = blank(lambda: Seq2Seq(model.config))
    assert next(other.parameters()).device.type == "meta"
    other.load_state_dict(model.state_dict(), assign=True)
    x, y = images(B, 3, 24, 16), tokens(B, T)
    with torch.no_grad():
        assert torch.equal(other.eval()(x, y), model(x, y))


def test_dropout_acts_in_training_alone():
    options = {**SMALL, "vocab_size": V, "drop_rate": 0.3, "attn_drop_rate": 0.2}
    model = redraw(Seq2Seq(Seq2SeqConfig(encoder=TextConfig(**options), decoder=TextConfig(**options))))
    x, y = tokens(B, M), tokens(B, T)
    assert torch.equal(model(x, y), model(x, y))
    model.train()
    assert not torch.equal(model(x, y), model(x, y))


def test_a_config_survives_json():
    for config in (seq2seq("image").config, seq2seq("text", "post").config):
        assert Seq2SeqConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Seq2SeqConfig(), "needs one encoder, vit or encoder, got neither"),
        (lambda: Seq2SeqConfig(vit=VIT, encoder=TextConfig()), "needs one encoder, vit or encoder, got both"),
        (lambda: Seq2SeqConfig(vit=ViTConfig()), "the vit of a seq2seq model has no head .* got 1000"),
        (lambda: TextConfig(embed_dim=10, num_heads=3), r"num_heads must divide embed_dim \(10\), got 3"),
        (lambda: TextConfig(embed_dim=9, num_heads=3), "need an even embed_dim, got 9"),
        (lambda: TextConfig(act="swiglu"), "act must be one of relu, .*, got 'swiglu'"),
    ],
)
def test_configs_that_cannot_be(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_inputs_that_cannot_be():
    model, y = seq2seq(), tokens(B, T)
    for x, mask, message in (
        (torch.zeros(B, 0, dtype=torch.long), None, r"source must not be empty, got shape \(3, 0\)"),
        (tokens(B, 14), None, r"source must be at most max_length \(13\) long, got 14"),
        (tokens(B, 5) + W, None, rf"source must be from 0 to {W - 1}, got "),
        (images(B, 5), None, r"source must be whole numbers \(B, T\), got torch.float32 \(3, 5\)"),
        ([[1]], None, r"source must be whole numbers \(B, T\), got list"),
        (tokens(B, 5), torch.ones(B, 4) > 0, r"the mask of source must be boolean \(3, 5\), got torch.bool \(3, 4\)"),
        (tokens(B, 5), torch.zeros(B, 5) > 0, "the mask of source hides a whole sequence"),
    ):
        with pytest.raises(InputError, match=message):
            model(x, y, mask)
    with pytest.raises(InputError, match=r"tokens must be at most max_length \(13\) long, got 14"):
        model(tokens(B, 5), tokens(B, 14))
    cache = Cache(depth=2)
    memory = model.encode(tokens(B, 5))
    model.decode(tokens(B, 13), memory, cache=cache)
    with pytest.raises(InputError, match=r"tokens must be at most max_length \(13\) long, got 14"):
        model.decode(tokens(B, 1), memory, cache=cache)
