import numpy as np
import pytest
import torch
import torch.nn.functional as F

from helpers import images, redraw
from vitral.config import SegmentOptions, TrainConfig
from vitral.data.sources.coco import rle_to_mask
from vitral.data.targets import IGNORE, View
from vitral.errors import ConfigError, InputError
from vitral.inference.predictor import Predictor
from vitral.models.zoo import create_model
from vitral.tasks.open import make_task
from vitral.tasks.segment import Segment, confusion, dice_loss, slide, to_image

K = 4
LABELS = ["ground", "a", "b", "c"]


def truth(seed=0, ignored=True):
    y = (images(3, 6, 5, seed=seed) * 7).long() % K
    if ignored:
        y[images(3, 6, 5, seed=seed + 50) > 1] = IGNORE
    return y.to(torch.uint8)


def segmenter(head="conv", **options):
    task = Segment(LABELS, SegmentOptions(head=head, width=16))
    model = task.build(create_model("vit_nano_patch2_8", num_classes=0, in_chans=1, seed=0, **options))
    return task, redraw(model).eval()


def test_mean_iou_against_a_literal_loop():
    told, true = (images(3, 6, 5, seed=9) * 7).long() % K, truth()
    task = Segment(LABELS, SegmentOptions())
    logits = F.one_hot(told, K).permute(0, 3, 1, 2).float()
    found = task.metrics(task.found(logits, true))
    ious = []
    for k in range(K):
        both = union = 0
        for i, y, x in np.ndindex(3, 6, 5):
            if int(true[i, y, x]) != IGNORE:
                a, b = int(told[i, y, x]) == k, int(true[i, y, x]) == k
                both, union = both + (a and b), union + (a or b)
        ious.append(both / union)
        assert found["by_class"][LABELS[k]]["iou"] == pytest.approx(both / union)
    assert found["miou"] == pytest.approx(sum(ious) / K)


def test_a_class_that_is_nowhere_does_not_count():
    task, y = Segment(LABELS, SegmentOptions()), torch.zeros(1, 4, 4, dtype=torch.uint8)
    logits = F.one_hot(y.long(), K).permute(0, 3, 1, 2).float()
    found = task.metrics(task.found(logits, y))
    assert found["miou"] == 1
    assert list(found["by_class"]) == ["ground"]


def test_confusion_counts_each_image_apart():
    told, true = (images(3, 6, 5, seed=9) * 7).long() % K, truth()
    table = confusion(told, true, K)
    assert int(table.sum()) == int((true != IGNORE).sum())
    for i in range(3):
        for a, b in np.ndindex(K, K):
            assert int(table[i, a, b]) == int(((true[i] == a) & (told[i] == b)).sum())


def test_dice_against_a_literal_sum():
    logits, y = images(3, K, 6, 5), truth()
    p = logits.softmax(1)
    each = []
    for k in range(K):
        both = sizes = 0.0
        for i, r, c in np.ndindex(3, 6, 5):
            if int(y[i, r, c]) != IGNORE:
                q, t = float(p[i, k, r, c]), float(int(y[i, r, c]) == k)
                both, sizes = both + q * t, sizes + q + t
        each.append(1 - (2 * both + 1) / (sizes + 1))
    assert float(dice_loss(logits, y.long())) == pytest.approx(sum(each) / K, rel=1e-5)


def test_ignored_pixels_change_nothing():
    task, logits, y = Segment(LABELS, SegmentOptions()), images(3, K, 6, 5), truth()
    other = torch.where((y == IGNORE)[:, None], 9 * images(3, K, 6, 5, seed=4), logits)
    ones = torch.ones(3)
    torch.testing.assert_close(task.loss(logits, y, y, ones), task.loss(other, y, y, ones))
    nothing = torch.full_like(y, IGNORE)
    assert float(task.loss(logits, nothing, nothing, ones)) == 0


def test_class_weights_weigh_the_entropy():
    task = Segment(LABELS, SegmentOptions(dice=0), weights=torch.tensor([1.0, 2.0, 3.0, 4.0]))
    logits, y = images(3, K, 6, 5), truth()
    literal = F.cross_entropy(logits, y.long(), weight=torch.tensor([1.0, 2, 3, 4]), ignore_index=IGNORE)
    torch.testing.assert_close(task.loss(logits, y, y, torch.ones(3)), literal)


@pytest.mark.parametrize("head", ["linear", "conv", "mask"])
def test_every_head_gives_every_pixel_a_class_at_any_size(head):
    task, model = segmenter(head)
    for size in ((8, 8), (12, 6)):
        x = images(2, 1, *size)
        logits = model(x)
        assert logits.shape == (2, K, *size)
        assert torch.allclose(logits[1:], model(x[1:]), atol=1e-5)
    task.loss(model(x), torch.zeros(2, 12, 6), torch.zeros(2), torch.ones(2)).backward()
    unused = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum()]
    allowed = ("fc_norm", "attn.qkv.bias")
    assert not [name for name in unused if not any(part in name for part in allowed)]


def test_the_conv_head_reads_several_layers():
    _, model = segmenter("conv")
    assert model.head.layers == [0, 2, 3]
    x = images(1, 1, 8, 8)
    before = model(x)
    with torch.no_grad():
        model.head.gather[0].weight.mul_(2)
    assert not torch.allclose(model(x), before)


def test_logits_come_back_to_the_size_of_the_image():
    logits = images(K, 8, 8)
    assert torch.equal(to_image(logits, View(0, 0, 2.0, 1.0), (4, 8)), logits[:, :4])
    ramp = torch.arange(8.0).expand(K, 8, 8)
    wide = to_image(ramp, View.whole(), (8, 16))
    torch.testing.assert_close(wide[0, 0, 1:-1], (torch.arange(16.0)[1:-1] - 0.5) / 2)


def test_sliding_over_an_image_of_the_window_is_the_model_itself():
    _, model = segmenter()
    x = images(1, 8, 8)
    torch.testing.assert_close(slide(model, x, (8, 8), K), model(x[None])[0].detach())


def test_sliding_covers_any_size_and_is_exact_where_the_model_sees_only_pixels():
    class Pixels(torch.nn.Module):
        def forward(self, x):
            return torch.cat([k * x for k in range(1, K + 1)], 1)

    for size in ((8, 8), (19, 8), (5, 23), (31, 30), (3, 3)):
        x = images(1, *size)
        torch.testing.assert_close(slide(Pixels(), x, (8, 8), K), Pixels()(x[None])[0])


def test_answers_are_masks_of_the_image_with_run_lengths():
    task, model = segmenter()
    model.preprocess, model.labels = task.preprocess(model.backbone.preprocess), LABELS
    predictor = Predictor(model)
    picture = (images(1, 20, 11).abs() * 100).clamp(max=255).to(torch.uint8)
    (answer,) = predictor.predict(picture)
    assert answer.mask.shape == (20, 11)
    plain = answer.to_dict()
    assert plain["size"] == [20, 11]
    assert sum(row["pixels"] for row in plain["classes"]) == 220
    for row in plain["classes"]:
        number = LABELS.index(row["label"])
        assert np.array_equal(rle_to_mask(row["rle"]).numpy().astype(bool), answer.mask == number)
    (slid,) = Predictor(model, slide=True).predict(picture)
    assert slid.mask.shape == (20, 11)
    with pytest.raises(InputError, match="slide is for segmentation"):
        Predictor(create_model("vit_nano_patch2_8", in_chans=1), slide=True)


def test_images_cannot_be_mixed_and_must_have_masks(tmp_path):
    from vitral.data.sources.scenes_digits import make_digit_scenes

    data = make_digit_scenes(train=4, test=2)
    with pytest.raises(ConfigError, match="mixup and cutmix do not go"):
        make_task("segment", data, TrainConfig.from_dict({"augment": {"mixup": 0.2}}))
    with pytest.raises(ConfigError, match="boxes and masks"):
        make_task(None, data, TrainConfig())
    task = make_task("segment", data, TrainConfig.from_dict({"segment": {"class_weights": "balanced"}}))
    assert task.weights[0] == task.weights.min()  # the ground is everywhere
    assert float(task.weights.mean()) == pytest.approx(1)


def test_frames_without_an_answer_say_why():
    answer = Segment.answer("x.png", "it is broken")
    assert answer.to_dict() == {"image": "x.png", "error": "it is broken"}
