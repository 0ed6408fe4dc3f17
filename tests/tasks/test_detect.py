import contextlib
import io
from itertools import permutations

import pytest
import torch
import torch.nn.functional as F

from helpers import images, redraw
from vitral.config import DetectOptions, TrainConfig
from vitral.data.noise import Noise
from vitral.data.sources.scenes_digits import make_digit_scenes
from vitral.data.targets import View, box_cxcywh_to_xyxy, box_iou, generalized_iou
from vitral.models.detector import DetectorOutput
from vitral.models.zoo import create_model
from vitral.tasks.base import Frame
from vitral.tasks.detect import Detect, focal_loss, match, spoil
from vitral.tasks.detection_metrics import coco_documents, detection_metrics, flagged, hits
from vitral.tasks.metrics import best_threshold
from vitral.tasks.open import make_task

LABELS = ["a", "b", "c"]


def boxes(*shape, seed=0):
    """Random boxes cx, cy, w, h that lie in the image."""
    u = images(*shape, 4, seed=seed).sigmoid()
    return torch.cat([0.2 + 0.6 * u[..., :2], 0.05 + 0.3 * u[..., 2:]], -1)


def objects(counts, most=6, seed=1):
    """Targets of images with so many objects each."""
    rows = torch.cat(
        [(images(len(counts), most, 1, seed=seed).abs() * 10).floor() % 3, boxes(len(counts), most, seed=seed)], -1
    )
    for row, n in zip(rows, counts, strict=True):
        row[n:] = torch.tensor([-1.0, 0, 0, 0, 0])
    return rows


def task(queries="anchors", **options):
    return Detect(LABELS, DetectOptions(queries=queries, width=16, heads=2, decoder_layers=2, **options), 8)


def detector(queries="anchors", **options):
    t = task(queries, **options)
    return t, redraw(t.build(create_model("vit_nano_patch2_8", num_classes=0, in_chans=1, seed=0)))


@pytest.mark.parametrize("n", range(7))
def test_matching_is_the_cheapest_of_all_permutations(n):
    cost = images(1, 7, 6, seed=n)
    there = torch.arange(6)[None] < n
    ((queries, taken),) = match(cost, there)
    assert sorted(taken.tolist()) == list(range(n))
    ours = sum(float(cost[0, q, o]) for q, o in zip(queries.tolist(), taken.tolist(), strict=True))
    best = min((sum(float(cost[0, p[o], o]) for o in range(n)) for p in permutations(range(7), n)), default=0.0)
    assert ours == pytest.approx(best, abs=1e-6)


def test_matching_survives_costs_that_are_not_numbers():
    cost = torch.full((1, 4, 2), float("nan"))
    ((queries, taken),) = match(cost, torch.ones(1, 2, dtype=torch.bool))
    assert len(set(queries.tolist())) == 2
    assert sorted(taken.tolist()) == [0, 1]


def literal_cost(t, logits, box, target):
    """What a query costs as the answer to an object, by the words of the paper."""
    k = int(target[0])
    if t.options.queries == "learned":
        told = -float(logits.softmax(0)[k])
    else:
        p = float(logits[k].sigmoid())
        told = float(0.25 * (1 - p) ** 2 * -torch.tensor(p).log() - 0.75 * p**2 * -torch.tensor(1 - p).log())
    corners = box_cxcywh_to_xyxy(torch.stack([box, target[1:]]))
    giou = float(generalized_iou(corners[0], corners[1]))
    return 2 * told + 5 * float((box - target[1:]).abs().sum()) - 2 * giou


@pytest.mark.parametrize("queries", ["anchors", "learned"])
def test_the_loss_is_that_of_the_best_permutation(queries):
    t, n = task(queries), 3
    K = len(LABELS) + (queries == "learned")
    logits, told, targets = images(1, 5, K), boxes(1, 5, seed=3), objects([n])
    cost = {(q, o): literal_cost(t, logits[0, q], told[0, q], targets[0, o]) for q in range(5) for o in range(n)}
    best = min(permutations(range(5), n), key=lambda p: sum(cost[p[o], o] for o in range(n)))
    truth = torch.full((5,), -1)
    for o, q in enumerate(best):
        truth[q] = int(targets[0, o, 0])
    if queries == "learned":
        weights = torch.tensor([1.0, 1, 1, 0.1])
        classes = F.cross_entropy(logits[0], torch.where(truth >= 0, truth, 3), weight=weights)
    else:
        hot = torch.zeros(5, 3)
        for q, k in enumerate(truth.tolist()):
            if k >= 0:
                hot[q, k] = 1
        p = logits[0].sigmoid()
        p_t = p * hot + (1 - p) * (1 - hot)
        alpha = 0.25 * hot + 0.75 * (1 - hot)
        classes = (-alpha * (1 - p_t) ** 2 * p_t.log()).sum() / n
    pairs = [(told[0, q], targets[0, o, 1:]) for o, q in enumerate(best)]
    distance = sum(float((a - b).abs().sum()) for a, b in pairs) / n
    giou = (
        sum(1 - float(generalized_iou(box_cxcywh_to_xyxy(a[None]), box_cxcywh_to_xyxy(b[None]))) for a, b in pairs) / n
    )
    ours = t.loss(DetectorOutput(logits, told, [], []), targets, targets, torch.ones(1))
    assert float(ours) == pytest.approx(2 * float(classes) + 5 * distance + 2 * giou, rel=1e-4)


def test_the_loss_is_the_mean_over_the_layers_and_does_not_mix_images():
    t, targets = task(), objects([3, 0, 5])
    layers = [(images(3, 8, 3, seed=s), boxes(3, 8, seed=s)) for s in (1, 2)]
    both = t.loss(DetectorOutput(*layers[0], [layers[1]], []), targets, targets, torch.ones(3))
    each = [t.loss(DetectorOutput(*layer, [], []), targets, targets, torch.ones(3)) for layer in layers]
    torch.testing.assert_close(both, sum(each) / 2)
    order = [2, 0, 1]
    turned = DetectorOutput(layers[0][0][order], layers[0][1][order], [], [])
    torch.testing.assert_close(t.loss(turned, targets[order], targets, torch.ones(3)), each[0])


def test_focal_loss_without_focus_is_a_weighted_entropy(monkeypatch):
    from vitral.tasks import detect

    monkeypatch.setattr(detect, "GAMMA", 0.0)
    logits, truth = images(5, 3), (images(5, 3, seed=1) > 0).float()
    entropy = F.binary_cross_entropy_with_logits(logits, truth, reduction="none")
    torch.testing.assert_close(focal_loss(logits, truth), (0.25 * truth + 0.75 * (1 - truth)) * entropy)


@pytest.mark.parametrize("queries", ["anchors", "learned"])
def test_images_with_and_without_objects_train_and_predict(queries):
    t, model = detector(queries)
    model.train()
    x = images(3, 1, 8, 8)
    for counts in ([2, 0, 6], [0, 0, 0]):
        targets = objects(counts)
        outputs = t.forward(model, x, targets, Noise(0, torch.arange(3)))
        loss = t.loss(outputs, targets, targets, torch.ones(3))
        assert torch.isfinite(loss)
        loss.backward()
    model.eval()
    found = t.found(model(x), objects([0, 0, 0]))
    metrics = t.metrics(found)
    assert metrics["ap"] == 0
    assert metrics["objects"] == 0
    t.calibrate(found)
    assert t.threshold == 0.5


def test_spoilt_boxes_stay_near_and_some_labels_change():
    targets = objects([6] * 200)
    told, labels = spoil(targets, Noise(0, torch.arange(200)), 2, 3)
    assert told.shape == (200, 12, 4)
    again = targets.repeat(1, 2, 1)
    shift = (told[:, :, :2] - again[:, :, 1:3]).abs() / again[:, :, 3:]
    assert 0.15 < float(shift.max()) <= 0.2 + 1e-5
    size = told[:, :, 2:] / again[:, :, 3:]
    assert 0.6 - 1e-5 <= float(size.min()) < 0.65
    assert 1.35 < float(size.max()) <= 1.4 + 1e-5
    changed = (labels != again[:, :, 0]).double().mean()
    assert float(changed) == pytest.approx(0.2 * 2 / 3, abs=0.03)
    assert not torch.equal(told[:, :6], told[:, 6:])
    _, padded = spoil(objects([2] * 3), Noise(0, torch.arange(3)), 2, 3)
    assert (padded.view(3, 2, 6)[:, :, 2:] == -1).all()


def test_denoising_is_learned_from_but_changes_no_answer():
    t, model = detector(denoise_groups=2)
    x, targets = images(2, 1, 8, 8), objects([3, 1])
    plain, helped = model(x), t.forward(model, x, targets, Noise(0, torch.arange(2)))
    torch.testing.assert_close(plain.boxes, helped.boxes)
    torch.testing.assert_close(plain.logits, helped.logits)
    losses = [t.loss(o, targets, targets, torch.ones(2)) for o in (plain, helped)]
    assert bool(losses[1] > losses[0])


def test_what_denoising_adds_does_not_depend_on_the_number_of_layers():
    t, targets = task(denoise_groups=1), objects([3, 1])
    layer = (images(2, 8, 3), boxes(2, 8))
    spoilt = (images(2, 6, 3, seed=4), boxes(2, 6, seed=4))
    added = []
    for n in (1, 2, 4):
        outputs = [DetectorOutput(*layer, [layer] * (n - 1), extra) for extra in ([], [spoilt] * n)]
        plain, helped = (float(t.loss(o, targets, targets, torch.ones(2))) for o in outputs)
        added.append(helped - plain)
    assert added == [pytest.approx(added[0], rel=1e-4)] * 3
    assert added[0] > 0


def test_anchors_and_tokens_of_queries_are_not_decayed():
    from vitral.training.optim import make_optimizers

    _, model = detector()
    names = {id(p): name for name, p in model.named_parameters()}
    groups = [g for o in make_optimizers(model, TrainConfig()) for g in o.param_groups]
    decayed = {names[id(p)] for g in groups if g["weight_decay"] for p in g["params"]}
    assert "queries.anchors" not in decayed
    assert "queries.content.weight" not in decayed
    assert "decoder.0.attn.q.weight" in decayed


# ---- metrics ----


def answers(n=30, seed=0):
    """Objects, and boxes of which some are good, some poor, some of the wrong class."""
    targets = objects([i % 7 for i in range(n)], seed=seed)
    near = targets[:, :, 1:] + 0.03 * images(n, 6, 4, seed=seed + 1) * targets[:, :, 3:].repeat(1, 1, 2)
    told = torch.cat([near, boxes(n, 4, seed=seed + 2)], 1).clamp(1e-3, 1)
    labels = torch.cat([targets[:, :, 0].clamp(min=0), torch.ones(n, 4)], 1).long()
    labels = torch.where(images(n, 10, seed=seed + 3) > 1, (labels + 1) % 3, labels)
    return {"scores": images(n, 10, seed=seed + 4).sigmoid(), "labels": labels, "boxes": told, "targets": targets}


def test_average_precision_equals_pycocotools_on_the_same_json():
    pycocotools = pytest.importorskip("pycocotools.coco")
    from pycocotools.cocoeval import COCOeval

    found = answers()
    ours = detection_metrics(found, LABELS, 0.5)
    truth, told = coco_documents(found, 3)
    with contextlib.redirect_stdout(io.StringIO()):
        ground = pycocotools.COCO()
        ground.dataset = truth
        ground.createIndex()
        judge = COCOeval(ground, ground.loadRes(told), "bbox")
        judge.evaluate()
        judge.accumulate()
        judge.summarize()
    assert 0.05 < ours["ap"] < 0.95
    assert [ours[k] for k in ("ap", "ap50", "ap75")] == pytest.approx(judge.stats[:3].tolist(), abs=1e-6)


def test_perfect_answers_have_ap_1_and_moved_ones_less():
    targets = objects([3, 5, 0, 1])
    found = {
        "scores": (targets[:, :, 0] >= 0).float(),
        "labels": targets[:, :, 0].clamp(min=0).long(),
        "boxes": targets[:, :, 1:],
        "targets": targets,
    }
    assert detection_metrics(found, LABELS, 0.5)["ap"] == pytest.approx(1)
    moved = found | {"boxes": targets[:, :, 1:] + 0.15 * torch.cat([targets[:, :, 3:], 0 * targets[:, :, 3:]], -1)}
    worse = detection_metrics(moved, LABELS, 0.5)
    assert worse["ap"] < 0.3 < worse["ap50"]


def literal_hits(found, threshold):
    """Right ones among the boxes that are shown, the surest choosing first."""
    right = shown = 0
    for i in range(len(found["targets"])):
        free = [row for row in found["targets"][i] if row[0] >= 0]
        for j in found["scores"][i].argsort(descending=True).tolist():
            if found["scores"][i, j] < threshold:
                continue
            shown += 1
            a = box_cxcywh_to_xyxy(found["boxes"][i, j][None])
            mine = [row for row in free if int(row[0]) == int(found["labels"][i, j])]
            ious = [float(box_iou(a, box_cxcywh_to_xyxy(row[1:][None]))) for row in mine]
            if ious and max(ious) >= 0.5:
                right += 1
                taken = mine[ious.index(max(ious))]
                free = [row for row in free if row is not taken]
    return right, shown


def test_precision_recall_and_the_threshold_against_a_literal_loop():
    found = answers()
    there = int((found["targets"][:, :, 0] >= 0).sum())
    for threshold in (0.2, 0.6):
        assert hits(found, threshold) == (*literal_hits(found, threshold), there)

    def f1(threshold):
        right, shown = literal_hits(found, threshold)
        return 2 * right / (shown + there)

    chosen = best_threshold(*flagged(found))
    assert f1(chosen) == pytest.approx(max(f1(t) for t in found["scores"].flatten().tolist()), abs=1e-9)


# ---- answers ----


def test_answers_are_in_pixels_of_the_image_whatever_was_padded():
    t = task()
    t.threshold = 0.5
    logits = torch.full((1, 8, 3), -9.0)
    logits[0, 2, 1] = 3
    told = torch.full((1, 8, 4), 0.9)
    told[0, 2] = torch.tensor([0.25, 0.5, 0.5, 0.2])
    frame = Frame("x", (40, 20), View(0.0, 0.0, 1.0, 2.0))  # a tall image, padded at the right to a square
    (answer,) = t.decode(DetectorOutput(logits, told, [], []), [frame], 1)
    assert answer.labels == ["b"]
    assert answer.boxes == [pytest.approx([0, 16, 20, 24], abs=1e-4)]
    assert answer.to_dict()["size"] == [40, 20]
    t.threshold = 0.99
    (nothing,) = t.decode(DetectorOutput(logits, told, [], []), [frame], 1)
    assert nothing.text() == "no object"


def test_the_number_of_queries_comes_from_the_data_and_is_said():
    data = make_digit_scenes(train=40, test=5)
    t = make_task("detect", data, TrainConfig())
    most = max(len(data.boxes.rows[i]) for i in range(40))
    assert t.num_queries == max(10, 2 * most)
    assert t.notes == [f"at most {most} objects in a training image: {t.num_queries} queries"]
    asked = make_task("detect", data, TrainConfig.from_dict({"detect": {"num_queries": 7}}))
    assert (asked.num_queries, asked.notes) == (7, [])
