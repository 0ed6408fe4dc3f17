"""What writing token by token promises, whatever the method."""

import itertools

import pytest
import torch

from helpers import difference, images, redraw
from vitral.config import Seq2SeqConfig, TextConfig, ViTConfig
from vitral.errors import InputError
from vitral.models.generate import _sampler, generate
from vitral.models.seq2seq import Cache, Seq2Seq, TextDecoder

B, M, V, W, D = 5, 11, 23, 29, 20
BOS, EOS, PAD = 1, 2, 0
SMALL = {"embed_dim": D, "num_heads": 5, "mlp_width": 37, "depth": 2, "max_length": 31}
TOKENS = {"bos": BOS, "eos": EOS, "pad": PAD}
METHODS = {
    "greedy": {"method": "greedy"},
    "beam": {"method": "beam", "beam": 3, "n_best": 3},
    "beam, full": {"method": "beam", "beam": 3, "n_best": 2, "early_stopping": True, "length_penalty": 0.7},
    "beam, never": {"method": "beam", "beam": 4, "n_best": 4, "early_stopping": "never", "length_penalty": 2.0},
    "sample": {"method": "sample", "n_best": 3, "temperature": 1.3, "top_p": 0.9, "seed": 3},
}


def seq2seq(vocab_size=V, eos_bias=0.0, **options):
    """Redrawn weights, with logits far enough apart that sequences end at many lengths."""
    decoder = TextConfig(vocab_size=vocab_size, output_bias=True, tied_output=False, **{**SMALL, **options})
    model = redraw(Seq2Seq(Seq2SeqConfig(encoder=TextConfig(vocab_size=W, **SMALL), decoder=decoder)))
    with torch.no_grad():
        model.decoder.output.weight *= 1.5
        model.decoder.output.bias[EOS] += eos_bias
    return model


def sources(seed=0):
    lengths = torch.tensor([M, 3, 7, 1, 5])
    x = torch.randint(W, (B, M), generator=torch.Generator().manual_seed(seed))
    return x, torch.arange(M) < lengths[:, None]


def same(a, b, tolerance=1e-5):
    assert len(a) == len(b)
    for one, other in zip(a, b, strict=True):
        assert [g.tokens for g in one] == [g.tokens for g in other]
        assert [g.ended for g in one] == [g.ended for g in other]
        for g, w in zip(one, other, strict=True):
            assert abs(g.score - w.score) < tolerance


def log_p_of(model, x, written, ended):
    """Teacher forced: the sum of log p of what was written, and of EOS if it came."""
    target = [*written, EOS] if ended else written
    logits = model(x, torch.tensor([[BOS, *target[:-1]]]))[0]
    return sum(logits.log_softmax(-1)[t, token].item() for t, token in enumerate(target)), len(target)


@pytest.mark.parametrize("options", METHODS.values(), ids=METHODS)
@torch.no_grad()
def test_cached_equals_uncached(options):
    model, (x, mask) = seq2seq(), sources()
    with_cache = generate(model, x, mask=mask, max_length=13, **TOKENS, **options)
    same(with_cache, generate(model, x, mask=mask, max_length=13, **TOKENS, **options, cache=False))
    lengths = {len(g.tokens) for each in with_cache for g in each}
    assert len(lengths) > 2, lengths


@pytest.mark.parametrize("options", METHODS.values(), ids=METHODS)
@torch.no_grad()
def test_neither_the_batch_nor_padding_matters(options):
    model, (x, mask) = seq2seq(), sources()
    together = generate(model, x, mask=mask, max_length=13, **TOKENS, **options)
    alone = [
        generate(model, x[i : i + 1, : int(mask[i].sum())], max_length=13, **TOKENS, **options)[0] for i in range(B)
    ]
    same(together, alone)
    order = [3, 1, 4, 0]
    same(generate(model, x[order], mask=mask[order], max_length=13, **TOKENS, **options), [together[i] for i in order])


@pytest.mark.parametrize("penalty", [0.0, 1.0, -0.5])
@pytest.mark.parametrize("options", METHODS.values(), ids=METHODS)
@torch.no_grad()
def test_scores_are_what_teacher_forcing_gives(options, penalty):
    model, (x, mask) = seq2seq(), sources()
    options = {**options, "length_penalty": penalty}
    for i, found in enumerate(generate(model, x, mask=mask, max_length=9, **TOKENS, **options)):
        assert len(found) == options.get("n_best", 1)
        for g in found:
            total, length = log_p_of(model, x[i : i + 1, : int(mask[i].sum())], g.tokens, g.ended)
            assert abs(g.score - total / length**penalty) < 1e-4
            assert EOS not in g.tokens
            assert g.ended or len(g.tokens) == 9
        if options["method"] == "beam":
            assert [g.score for g in found] == sorted((g.score for g in found), reverse=True)
            assert len({(*g.tokens, g.ended) for g in found}) == len(found)


@torch.no_grad()
def test_greedy_takes_the_likeliest_each_time():
    model, (x, mask) = seq2seq(), sources()
    for i, (found,) in enumerate(generate(model, x, mask=mask, max_length=13, **TOKENS)):
        written = [BOS]
        while len(written) < 14 and written[-1] != EOS:
            logits = model(x[i : i + 1, : int(mask[i].sum())], torch.tensor([written]))
            written.append(int(logits[0, -1].argmax()))
        assert found.tokens == [token for token in written[1:] if token != EOS]
        assert found.ended == (written[-1] == EOS)


@torch.no_grad()
def test_a_beam_of_one_is_greedy():
    model, (x, mask) = seq2seq(), sources()
    for stop in (True, False, "never"):
        one = generate(model, x, mask=mask, max_length=13, **TOKENS, method="beam", beam=1, early_stopping=stop)
        same(one, generate(model, x, mask=mask, max_length=13, **TOKENS))


@torch.no_grad()
def test_sampling_one_token_of_many_is_greedy():
    model, (x, mask) = seq2seq(), sources()
    greedy = generate(model, x, mask=mask, max_length=13, **TOKENS)
    for options in ({"top_k": 1}, {"top_p": 1e-6}, {"temperature": 1e-4}):
        same(generate(model, x, mask=mask, max_length=13, **TOKENS, method="sample", **options), greedy)


@pytest.mark.parametrize("penalty", [0.0, 1.0, 2.0, -1.0])
@torch.no_grad()
def test_a_beam_as_wide_as_everything_finds_the_best_of_all(penalty):
    small, length = 4, 3
    model, (x, mask) = seq2seq(vocab_size=small), sources()
    every = [
        (list(written), True)
        for n in range(length)
        for written in itertools.product([t for t in range(small) if t != EOS], repeat=n)
    ]
    every += [(list(w), False) for w in itertools.product([t for t in range(small) if t != EOS], repeat=length)]
    options = {"method": "beam", "beam": small**length, "n_best": small**length, "early_stopping": "never"}
    got = generate(model, x, mask=mask, max_length=length, length_penalty=penalty, **TOKENS, **options)
    for i in range(B):
        source = x[i : i + 1, : int(mask[i].sum())]
        scores = {}
        for written, ended in every:
            total, n = log_p_of(model, source, written, ended)
            scores[(*written, ended)] = total / n**penalty
        best = sorted(scores, key=scores.__getitem__, reverse=True)
        assert len(got[i]) == len(best)  # fewer than the beam is wide: there are no more
        assert [(*g.tokens, g.ended) for g in got[i]] == best
        assert max(abs(g.score - scores[name]) for g, name in zip(got[i], best, strict=True)) < 1e-4


@torch.no_grad()
def test_a_beam_never_finds_less_than_the_greedy_score_when_nothing_stops_it():
    model, (x, mask) = seq2seq(vocab_size=7), sources()
    options = {"max_length": 6, "length_penalty": 0.0, **TOKENS}
    greedy = generate(model, x, mask=mask, **options)
    beam = generate(model, x, mask=mask, method="beam", beam=50, early_stopping="never", **options)
    assert all(b[0].score >= g[0].score - 1e-6 for b, g in zip(beam, greedy, strict=True))
    assert any(b[0].score > g[0].score + 1e-3 for b, g in zip(beam, greedy, strict=True))


@torch.no_grad()
def test_the_encoder_runs_once():
    model, (x, mask) = seq2seq(eos_bias=-50.0), sources()
    calls = []
    model.encoder.blocks[0].register_forward_hook(lambda *_: calls.append("encoder"))
    for block in model.decoder.blocks:
        block.cross_attn.k.register_forward_hook(lambda *_: calls.append("keys"))
    for options in METHODS.values():
        calls.clear()
        generate(model, x, mask=mask, max_length=7, **TOKENS, **options)
        assert calls == ["encoder", "keys", "keys"]


@torch.no_grad()
def test_it_says_what_stopped_it():
    (x, mask), endless, mute = sources(), seq2seq(eos_bias=-50.0), seq2seq(eos_bias=50.0)
    for options in METHODS.values():
        for found in generate(endless, x, mask=mask, max_length=7, **TOKENS, **options):
            assert all(not g.ended and len(g.tokens) == 7 for g in found)
        for found in generate(mute, x, mask=mask, max_length=7, **TOKENS, **options):
            assert found[0].ended
            assert found[0].tokens == []
            assert abs(found[0].score) < 1e-3


# ---- sampling ----


@torch.no_grad()
def test_samples_follow_the_probabilities():
    log_p = torch.tensor([[0.1, 0.4, 0.05, 0.3, 0.15]]).log()
    n = 20_000
    uniforms = torch.rand(1, n, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def shares(**options):
        choose = _sampler(uniforms, **{"temperature": 1.0, "top_k": None, "top_p": 1.0, **options})
        rows = torch.tensor([0])
        return torch.bincount(torch.cat([choose(log_p, t, rows) for t in range(n)]), minlength=5) / n

    def near(got, want):
        want = torch.tensor(want)
        return (got - want / want.sum()).abs().max() < 0.015

    assert near(shares(), [0.1, 0.4, 0.05, 0.3, 0.15])
    assert near(shares(temperature=0.5), [0.01, 0.16, 0.0025, 0.09, 0.0225])
    assert near(shares(top_k=2), [0, 0.4, 0, 0.3, 0])
    assert near(shares(top_p=0.75), [0, 0.4, 0, 0.3, 0.15])
    assert near(shares(top_p=0.7), [0, 0.4, 0, 0.3, 0]) or near(shares(top_p=0.7), [0, 0.4, 0, 0.3, 0.15])
    assert near(shares(top_k=4, top_p=0.5), [0, 0.4, 0, 0.3, 0])


@torch.no_grad()
def test_seeds():
    model, (x, mask) = seq2seq(), sources()
    options = {"mask": mask, "max_length": 13, **TOKENS, "method": "sample", "n_best": 2}
    first = generate(model, x, seed=[3, 4, 5, 6, 7], **options)
    same(generate(model, x, seed=[3, 4, 5, 6, 7], **options), first, tolerance=1e-9)
    other = generate(model, x, seed=[3, 4, 5, 6, 8], **options)
    same(other[:4], first[:4])
    assert other[4] != first[4]
    assert any(a.tokens != b.tokens for a, b in first)
    with pytest.raises(InputError, match="seed must be one number, or one for each of the 5 sources, got 2"):
        generate(model, x, seed=[1, 2], **options)


# ---- other models ----


@pytest.mark.parametrize("options", METHODS.values(), ids=METHODS)
@torch.no_grad()
def test_images(options):
    vit = ViTConfig(
        img_size=(24, 16), patch_size=8, embed_dim=12, depth=1, num_heads=3, num_classes=0, positions="sincos2d"
    )
    model = redraw(Seq2Seq(Seq2SeqConfig(vit=vit, decoder=TextConfig(vocab_size=V, **SMALL))))
    x = images(3, 3, 24, 16)
    mask = torch.ones(3, 24, 16, dtype=torch.bool)
    mask[1, 16:] = False
    together = generate(model, x, mask=mask, max_length=6, **TOKENS, **options)
    same(together, generate(model, x, mask=mask, max_length=6, **TOKENS, **options, cache=False))
    same(together[1:2], generate(model, x[1:2, :, :16], max_length=6, **TOKENS, **options))


@pytest.mark.parametrize("positions", ["learned", "sincos1d"])
@pytest.mark.parametrize("options", METHODS.values(), ids=METHODS)
@torch.no_grad()
def test_a_language_model_continues_prompts_of_any_length(options, positions):
    model = redraw(TextDecoder(TextConfig(vocab_size=V, output_bias=True, **SMALL, positions=positions)))
    model.decoder.output.bias[EOS] += 1.0
    x, mask = sources()
    x = x % V
    together = generate(model, x, mask=mask, max_length=9, eos=EOS, pad=PAD, **options)
    same(together, generate(model, x, mask=mask, max_length=9, eos=EOS, pad=PAD, **options, cache=False))
    for i in range(B):
        prompt = x[i : i + 1, : int(mask[i].sum())]
        same(together[i : i + 1], generate(model, prompt, max_length=9, eos=EOS, pad=PAD, **options))
    # The padding may be at the left as well.
    behind = mask.flip(1)
    left = torch.zeros_like(x).masked_scatter(behind, x[mask])
    same(together, generate(model, left, mask=behind, max_length=9, eos=EOS, pad=PAD, **options))
    if options["method"] == "greedy":
        written = x[:1].clone()
        for token in together[0][0].tokens:
            assert int(model(written)[0, -1].argmax()) == token
            written = torch.cat([written, torch.tensor([[token]])], dim=1)


@torch.no_grad()
def test_a_cached_step_is_the_teachers_at_every_length():
    model, (x, mask) = seq2seq(eos_bias=-50.0), sources()
    found = generate(model, x, mask=mask, max_length=31, **TOKENS)
    y = torch.tensor([[BOS, *each[0].tokens] for each in found])[:, :31]
    memory, cache = model.encode(x, mask), Cache(depth=2)
    want = model.decode(y, memory)
    for t in range(31):
        assert difference(model.decode(y[:, t : t + 1], memory, cache=cache)[:, 0], want[:, t]) < 1e-5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "best"}, "method must be one of greedy, beam, sample, got 'best'"),
        ({"max_length": 0}, "max_length must be a whole number of at least 1, got 0"),
        ({"max_length": 32}, "max_length must be at most 31 here, as the decoder reads 31 tokens, got 32"),
        ({"n_best": 2}, "n_best must be at most 1 with method greedy, got 2"),
        ({"method": "beam", "beam": 3, "n_best": 4}, "n_best must be at most 3 with method beam, got 4"),
        ({"method": "beam", "beam": 0}, "beam must be a whole number of at least 1, got 0"),
        ({"temperature": 0}, "temperature must be above 0, got 0"),
        ({"top_p": 1.5}, "top_p must be above 0 and at most 1, got 1.5"),
        ({"top_k": 0}, "top_k must be a whole number of at least 1, got 0"),
        ({"eos": V}, f"eos must be a token from 0 to {V - 1}, got {V}"),
        ({"bos": -1}, f"bos must be a token from 0 to {V - 1}, got -1"),
        ({"bos": None}, "writing needs a token to begin after; give bos="),
    ],
)
def test_what_cannot_be_asked(options, message):
    model, (x, mask) = seq2seq(), sources()
    with pytest.raises(InputError, match=message):
        generate(model, x, mask=mask, **{"max_length": 5, **TOKENS, **options})


def test_only_a_decoder_writes():
    with pytest.raises(InputError, match="only a Seq2Seq or a TextDecoder can write, got Linear"):
        generate(torch.nn.Linear(2, 3), torch.zeros(1, 2), max_length=3, eos=EOS)
