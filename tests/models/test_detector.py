"""What a detector promises, whatever its backbone and its queries."""

import math
from dataclasses import replace

import pytest
import torch

from helpers import difference, images, redraw
from vitral.config import DetectorConfig, ResNetConfig, ViTConfig
from vitral.errors import ConfigError, InputError
from vitral.models.detector import Detector, anchor_grid, denoising_mask, inverse_sigmoid, sine_positions
from vitral.models.init import blank

B, K, Q, D = 2, 5, 7, 20
VIT = ViTConfig(img_size=(48, 32), patch_size=8, embed_dim=24, depth=2, num_heads=3, num_classes=0, reg_tokens=1)
CNN = ResNetConfig(kind="resnet18", num_classes=0, frozen_norm=True, dilation=True)


def config(kind="vit", **options):
    parts = {"backbone": {"vit": VIT, "cnn": CNN}[kind], "encoder_layers": 0 if kind == "vit" else 2}
    small = {"num_classes": K, "embed_dim": D, "num_heads": 5, "mlp_width": 37, "decoder_layers": 3, "num_queries": Q}
    return DetectorConfig(**{**parts, **small, **options})


def detector(kind="vit", **options):
    """A small detector with every weight redrawn."""
    return redraw(Detector(config(kind, **options)))


CASES = [(backbone, queries) for backbone in ("vit", "cnn") for queries in ("learned", "anchors")]


@pytest.mark.parametrize("size", [(48, 32), (71, 103)])
@pytest.mark.parametrize(("backbone", "queries"), CASES)
@torch.no_grad()
def test_shapes(backbone, queries, size):
    out = detector(backbone, queries=queries)(images(B, 3, *size))
    columns = K + 1 if queries == "learned" else K
    assert len(out.aux) == 2
    assert out.denoise == []
    for logits, boxes in [(out.logits, out.boxes), *out.aux]:
        assert logits.shape == (B, Q, columns)
        assert boxes.shape == (B, Q, 4)
        assert boxes.min() >= 0
        assert boxes.max() <= 1
    assert difference(out.boxes, out.aux[0][1]) > 1e-3


def padded(seed):
    """Two images of 40 x 64 and 64 x 24 in frames of 64 x 64, with noise around them."""
    mask = torch.zeros(B, 64, 64, dtype=torch.bool)
    mask[0, :40, :], mask[1, :, :24] = True, True
    return images(B, 3, 64, 64).where(mask[:, None], 9 * images(B, 3, 64, 64, seed=seed)), mask


@pytest.mark.parametrize("block", ["pre", "post"])
@pytest.mark.parametrize(("backbone", "queries"), CASES)
@torch.no_grad()
def test_what_is_in_the_padding_does_not_matter(backbone, queries, block):
    model = detector(backbone, queries=queries, block=block)
    x, mask = padded(seed=5)
    out, zeros = model(x, mask), model(x.masked_fill(~mask[:, None], 0), mask)
    assert difference(out.logits, zeros.logits) < 1e-4
    assert difference(out.boxes, zeros.boxes) < 1e-4
    assert difference(model(x).logits, zeros.logits) > 1e-3  # without the mask it does


@pytest.mark.parametrize("queries", ["learned", "anchors"])
@torch.no_grad()
def test_with_a_vit_a_padded_image_is_the_image_alone(queries):
    """Fixed positions of the ViT: its learned table would be resized to the larger frame."""
    vit = replace(VIT, positions="none")
    model = detector(backbone=vit, queries=queries)
    x, mask = padded(seed=5)
    out = model(x, mask)
    alone = [model(x[:1, :, :40]), model(x[1:, :, :, :24])]
    assert difference(out.logits, torch.cat([each.logits for each in alone])) < 1e-4
    assert difference(out.boxes, torch.cat([each.boxes for each in alone])) < 1e-4


@pytest.mark.parametrize("queries", ["learned", "anchors"])
@torch.no_grad()
def test_one_image_gives_what_it_gives_in_a_batch(queries):
    model, x = detector("cnn", queries=queries), images(3, 3, 64, 96)
    out = model(x)
    for i in range(3):
        assert difference(model(x[i : i + 1]).boxes, out.boxes[i : i + 1]) < 1e-4


def test_sine_positions_are_those_of_the_paper():
    visible = torch.zeros(1, 3, 5, dtype=torch.bool)
    visible[0, :2, :4] = True
    p = sine_positions(visible, 8, 10000.0, 0.0, torch.float64).view(3, 5, 8)
    for row in range(2):
        for column in range(4):
            y, x = 2 * math.pi * (row + 1) / (2 + 1e-6), 2 * math.pi * (column + 1) / (4 + 1e-6)
            want = [f(v / 10000 ** (2 * i / 4)) for v in (y, x) for i in (0, 1) for f in (math.sin, math.cos)]
            torch.testing.assert_close(p[row, column], torch.tensor(want, dtype=torch.float64))


@pytest.mark.parametrize("Q", [1, 2, 7, 12, 100])
def test_anchors_start_spread_over_the_image(Q):
    boxes = anchor_grid(Q).sigmoid()
    assert boxes.shape == (Q, 4)
    torch.testing.assert_close(boxes[:, 1].mean(), torch.tensor(0.5), atol=0.1, rtol=0)
    torch.testing.assert_close(boxes[:, 0].mean(), torch.tensor(0.5))
    assert len({tuple(box) for box in boxes.tolist()}) == Q
    assert difference(inverse_sigmoid(boxes).sigmoid(), boxes) < 1e-6


@torch.no_grad()
def test_fresh_anchors_answer_with_themselves_and_small_probabilities():
    model = Detector(config(queries="anchors")).eval()
    out = model(images(B, 3, 48, 32))
    for _, boxes in [*out.aux, (out.logits, out.boxes)]:
        assert difference(boxes, anchor_grid(Q).sigmoid().expand(B, -1, -1)) < 1e-5
    assert 0.001 < out.logits.sigmoid().mean() < 0.1


@torch.no_grad()
def test_every_block_moves_the_boxes_of_the_block_before():
    model = detector(queries="anchors")
    for parameter in model.box_head[-1].parameters():
        parameter.zero_()
    model.box_head[-1].bias.copy_(torch.tensor([0.3, -0.2, 0.1, 0.5]))
    out = model(images(B, 3, 48, 32))
    u = model.queries.anchors.expand(B, -1, -1)
    for _, boxes in [*out.aux, (out.logits, out.boxes)]:
        u = u + model.box_head[-1].bias
        assert difference(boxes, u.sigmoid()) < 1e-5


def test_no_gradient_passes_from_one_block_to_the_boxes_before():
    model = detector(queries="anchors")
    steps = []
    model.box_head.register_forward_hook(lambda module, args, delta: steps.append(delta))
    out = model(images(B, 3, 48, 32))
    grads = torch.autograd.grad(out.boxes.sum(), steps, allow_unused=True)
    assert [grad is not None for grad in grads] == [False, False, True]


@torch.no_grad()
def test_the_position_of_a_query_follows_its_box():
    model = detector(queries="anchors")
    seen = []
    for block in model.decoder:
        block.register_forward_pre_hook(lambda module, args: seen.append(args[4]))
    out = model(images(B, 3, 48, 32))
    for p, (_, boxes) in zip(seen[1:], out.aux, strict=True):
        assert difference(p, model.queries.positions(boxes.logit())) < 1e-4
    assert difference(seen[1], seen[2]) > 1e-3


def extra(G, seed=2):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, K, (B, G), generator=generator)
    labels[0, -1] = -1
    return 0.1 + 0.8 * torch.rand(B, G, 4, generator=generator), labels


@torch.no_grad()
def test_extra_queries_change_nothing_for_the_others():
    model, x = detector("cnn", queries="anchors", denoise_groups=3), images(B, 3, 64, 64)
    plain, out = model(x), model(x, extra=extra(6))
    for (logits, boxes), (logits2, boxes2) in zip(
        [*plain.aux, (plain.logits, plain.boxes)], [*out.aux, (out.logits, out.boxes)], strict=True
    ):
        assert difference(logits2, logits) < 1e-5
        assert difference(boxes2, boxes) < 1e-5
    assert [(logits.shape, boxes.shape) for logits, boxes in out.denoise] == [((B, 6, K), (B, 6, 4))] * 3


@torch.no_grad()
def test_groups_of_extra_queries_do_not_see_each_other_nor_padding():
    model, x = detector(queries="anchors", denoise_groups=3), images(B, 3, 48, 32)
    boxes, labels = extra(6)
    out = model(x, extra=(boxes, labels)).denoise[-1][0]
    boxes2, labels2 = boxes.clone(), labels.clone()
    boxes2[:, 2:4], labels2[:, 2:4] = 0.77, (labels[:, 2:4] + 1) % K
    changed = model(x, extra=(boxes2, labels2)).denoise[-1][0]
    assert difference(changed[:, [0, 1, 4, 5]], out[:, [0, 1, 4, 5]]) < 1e-5
    assert difference(changed[:, 2:4], out[:, 2:4]) > 1e-3
    boxes2 = boxes.clone()
    boxes2[0, 5] = 0.66  # padding
    assert difference(model(x, extra=(boxes2, labels)).denoise[-1][0][0, :5], out[0, :5]) < 1e-5
    boxes2 = boxes.clone()
    boxes2[1, 5] = 0.66  # in the second image the same query is real, and its neighbour sees it
    assert difference(model(x, extra=(boxes2, labels)).denoise[-1][0][1, 4], out[1, 4]) > 1e-4


def test_the_mask_of_extra_queries_written_out():
    real = torch.tensor([[True, True, True, False]])
    want = ["110000", "110000", "111100", "111100", "110010", "110011"]
    got = denoising_mask(2, real, 2)[0, 0]
    assert ["".join(str(int(v)) for v in row) for row in got] == want


@pytest.mark.parametrize(("backbone", "queries"), CASES)
def test_the_gradient_reaches_every_parameter(backbone, queries):
    model = detector(backbone, queries=queries).train()
    x, mask = padded(seed=5)
    out = model(x, mask, extra(4) if queries == "anchors" else None)
    total = sum((logits.square().sum() + boxes.square().sum()) for logits, boxes in [*out.aux, *out.denoise])
    (total + out.logits.square().sum() + out.boxes.square().sum()).backward()
    without = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum()]
    # A bias on all keys alike shifts every score of a query alike, and softmax does not see it. DETR's tokens start at
    # zero, so its first self-attention has nothing to pass on.
    known = (".k.bias", "decoder.0.attn.v.weight") if queries == "learned" else (".k.bias",)
    assert [name for name in without if not name.endswith(known)] == []


def test_a_config_travels_as_a_dictionary():
    for backbone in ("vit", "cnn"):
        c = config(backbone)
        assert DetectorConfig.from_dict(c.to_dict()) == c
        first = {key: value for key, value in c.to_dict().items() if key != "backbone"}  # as the first runs have it
        both = {"vit": None, "cnn": None} | {backbone: c.to_dict()["backbone"]}
        assert DetectorConfig.from_dict(first | both) == c


def test_a_blank_detector_takes_the_weights_of_another():
    for backbone, queries in CASES:
        model = detector(backbone, queries=queries)
        again = blank(lambda c=model.config: Detector(c))
        again.load_state_dict(model.state_dict(), assign=True)
        x = images(1, 3, 48, 32)
        torch.testing.assert_close(again.eval()(x).boxes, model(x).boxes)


def test_errors():
    with pytest.raises(ConfigError, match="maps must be at most 2, as many as the backbone has, got 3"):
        Detector(config(maps=3))
    with pytest.raises(ConfigError, match="set its num_classes to 0, got 1000"):
        DetectorConfig(backbone=ResNetConfig())
    with pytest.raises(ConfigError, match=r"embed_dim must be a multiple of 4 and of num_heads \(5\), got 24"):
        config(embed_dim=24)
    with pytest.raises(
        ConfigError, match=r"backbone must be a ViTConfig or SwinConfig or ResNetConfig\(...\), got None"
    ):
        DetectorConfig(backbone=None)  # type: ignore[arg-type]
    x = images(B, 3, 64, 64)
    with pytest.raises(InputError, match='make the detector with queries="anchors"'):
        detector()(x, extra=extra(4))
    model = detector("cnn", queries="anchors", denoise_groups=3)
    with pytest.raises(InputError, match=r"G a multiple of denoise_groups \(3\), got \(2, 4, 4\) and \(2, 4\)"):
        model(x, extra=extra(4))
    boxes, labels = extra(3)
    with pytest.raises(InputError, match="extra labels must be from -1 to 4, got -1 to 5"):
        model(x, extra=(boxes, labels.where(labels < 0, K)))
    with pytest.raises(InputError, match=r"mask must be boolean \(B, H, W\) = \(2, 64, 64\), got torch.float32"):
        model(x, torch.ones(B, 64, 64))
    with pytest.raises(InputError, match="mask hides a whole image"):
        model(x, torch.zeros(B, 64, 64, dtype=torch.bool))
