"""The same logits, greedy output and beams as transformers: BART and Marian for text, a ViT with TrOCR for images.

Every tensor is redrawn.
"""

import re

import pytest
import torch

from helpers import difference, images, redraw
from peers import import_transformers
from vitral.config import Seq2SeqConfig, TextConfig, ViTConfig
from vitral.models.generate import generate
from vitral.models.seq2seq import Seq2Seq
from vitral.weights.seq2seq import from_hugging_face

transformers = import_transformers()

PAD, BOS, EOS, START = 1, 0, 2, 3
B, M, T, V, D = 5, 11, 7, 53, 24
LENGTH = 12
SPECIAL = {"pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS, "decoder_start_token_id": START}
TEXT = {
    "vocab_size": V, "embed_dim": D, "num_heads": 4, "mlp_width": 41, "depth": 2, "max_length": 32, "block": "post",
    "positions": "learned", "act": "gelu",
}  # fmt: skip
THEIRS = {
    "vocab_size": V, "d_model": D, "decoder_attention_heads": 4, "decoder_ffn_dim": 41, "decoder_layers": 2,
    "max_position_embeddings": 32, "activation_function": "gelu", "dropout": 0.0, **SPECIAL,
}  # fmt: skip
ENCODER = {"encoder_attention_heads": 4, "encoder_ffn_dim": 41, "encoder_layers": 2}

LOUDER = {r"bias$": 0.1, r"[qk]_proj\.weight$": 2.5, r"(out_proj|fc2)\.weight$": 2.0, r"embed_positions\.weight$": 4.0}


def sharpen(theirs, table):
    """Redraw so that rounding cannot decide between two tokens, and what is written depends on all that came before.

    Logits are far apart; attention is sharp, positions are loud, and no bias outweighs what a layer reads.
    """
    redraw(theirs, seed=3)  # under which sequences end at several lengths
    with torch.no_grad():
        table(theirs).mul_(2.0)
        for name, p in theirs.named_parameters():
            for pattern, factor in LOUDER.items():
                if re.search(pattern, name):
                    p.mul_(factor)
    return theirs


def bart():
    config = transformers.BartConfig(**THEIRS, **ENCODER, scale_embedding=True, forced_eos_token_id=None)
    theirs = sharpen(transformers.BartForConditionalGeneration(config), lambda m: m.model.shared.weight)
    theirs.final_logits_bias.copy_(0.1 * images(1, V))
    part = TextConfig(**TEXT, norm_embedding=True, output_bias=True)
    return theirs, Seq2SeqConfig(encoder=part, decoder=part)


def marian():
    options = THEIRS | {"activation_function": "relu"}
    config = transformers.MarianConfig(**options, **ENCODER, scale_embedding=False, forced_eos_token_id=None)
    theirs = sharpen(transformers.MarianMTModel(config), lambda m: m.model.shared.weight)
    theirs.final_logits_bias.copy_(0.1 * images(1, V))
    theirs.final_logits_bias[0, EOS] = 4.0
    part = TextConfig(**TEXT | {"act": "relu"}, scale_embedding=False, output_bias=True)
    return theirs, Seq2SeqConfig(encoder=part, decoder=part)


def trocr():
    vit = transformers.ViTConfig(
        hidden_size=28, num_hidden_layers=2, num_attention_heads=4, intermediate_size=43, image_size=32, patch_size=8,
    )  # fmt: skip
    decoder = transformers.TrOCRConfig(**THEIRS, tie_word_embeddings=False)
    config = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(vit, decoder)
    theirs = transformers.VisionEncoderDecoderModel(config)
    # A ViT's own pooler takes no part.
    theirs.encoder.pooler = None
    sharpen(theirs, lambda m: m.decoder.output_projection.weight)
    for name, value in SPECIAL.items():
        setattr(theirs.generation_config, name, value)
    vit = ViTConfig(
        img_size=32, patch_size=8, embed_dim=28, depth=2, num_heads=4, mlp_ratio=43 / 28, num_classes=0, norm_eps=1e-12
    )
    part = TextConfig(**TEXT, norm_embedding=True, scale_embedding=False, tied_output=False)
    return theirs, Seq2SeqConfig(vit=vit, decoder=part)


MODELS = {"bart": bart, "marian": marian, "trocr": trocr}


@pytest.fixture(scope="module", params=MODELS)
def both(request):
    """Their model, ours with the same numbers, and a batch of sources: ragged text, or images."""
    theirs, config = MODELS[request.param]()
    ours = Seq2Seq(config).eval()
    ours.load_state_dict(from_hugging_face(theirs.state_dict(), config))
    if request.param == "trocr":
        return theirs, ours, {"pixel_values": images(B, 3, 32, 32)}, (images(B, 3, 32, 32), None)
    x = torch.randint(4, V, (B, M), generator=torch.Generator().manual_seed(0))
    mask = torch.arange(M) < torch.tensor([M, 3, 7, 1, 5])[:, None]
    x = x.where(mask, PAD)
    return theirs, ours, {"input_ids": x, "attention_mask": mask.long()}, (x, mask)


@torch.no_grad()
def test_the_same_logits(both):
    theirs, ours, inputs, (x, mask) = both
    y = torch.randint(V, (B, T), generator=torch.Generator().manual_seed(1))
    want = theirs(**inputs, decoder_input_ids=y).logits
    assert want.std() > 1
    assert difference(ours(x, y, mask), want) < 1e-4


def written(sequence):
    """Their tokens as ours: without the start, EOS and padding; and whether EOS came."""
    tokens = sequence.tolist()[1:]
    return (tokens[: tokens.index(EOS)], True) if EOS in tokens else (tokens, False)


def test_the_same_greedy_output(both):
    theirs, ours, inputs, (x, mask) = both
    want = theirs.generate(
        **inputs, max_new_tokens=LENGTH, do_sample=False, num_beams=1, return_dict_in_generate=True, output_logits=True
    )
    gaps = torch.stack(want.logits).topk(2).values.diff().abs()
    got = generate(ours, x, mask=mask, max_length=LENGTH, bos=START, eos=EOS, pad=PAD)
    assert gaps.min() > 1e-3, gaps.min()
    assert [(g.tokens, g.ended) for (g,) in got] == [written(sequence) for sequence in want.sequences]
    assert len({len(g.tokens) for (g,) in got}) > 2
    assert len({token for (g,) in got for token in g.tokens}) > 3
    for i, (g,) in enumerate(got):
        log_p = torch.stack(want.logits, dim=1)[i].log_softmax(-1)
        target = [*g.tokens, EOS] if g.ended else g.tokens
        total = sum(log_p[t, token].item() for t, token in enumerate(target))
        assert abs(g.score - total / len(target)) < 1e-3


@pytest.mark.parametrize("early_stopping", [False, True, "never"])
@pytest.mark.parametrize("penalty", [1.0, 0.0, 2.0, -0.5])
def test_the_same_beams_with_their_scores(both, penalty, early_stopping):
    theirs, ours, inputs, (x, mask) = both
    for beam, n_best in ((2, 1), (4, 4)):
        want = theirs.generate(
            **inputs, max_new_tokens=LENGTH, do_sample=False, num_beams=beam, num_return_sequences=n_best,
            length_penalty=penalty, early_stopping=early_stopping, return_dict_in_generate=True, output_scores=True,
        )  # fmt: skip
        got = generate(
            ours, x, mask=mask, max_length=LENGTH, bos=START, eos=EOS, pad=PAD, method="beam", beam=beam,
            n_best=n_best, length_penalty=penalty, early_stopping=early_stopping,
        )  # fmt: skip
        flat = [g for each in got for g in each]
        assert [(g.tokens, g.ended) for g in flat] == [written(sequence) for sequence in want.sequences]
        scores = torch.tensor([g.score for g in flat])
        assert (scores - want.sequences_scores).abs().max() < 1e-3
