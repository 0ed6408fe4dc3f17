import math

import numpy as np
import pytest
import torch
from PIL import ImageEnhance, ImageOps

from torchvision_free import from_pil, to_pil
from vitral.config import Augmentation, Preprocess
from vitral.data import augment as module
from vitral.data.augment import OPERATIONS, affine_maps, augment, boxes, erase, mix, neighbours, recolor, warp
from vitral.data.noise import Noise

P = Preprocess(img_size=(12, 20), mean=(0.5,) * 3, std=(0.5,) * 3)


def batch(n=6, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (n, 3, 12, 20), generator=generator, dtype=torch.uint8)


def noise(n=6, seed=0):
    return Noise(seed, torch.arange(n))


def test_everything_off_only_normalises():
    mixed = augment(batch(), noise(), Augmentation(), P)
    torch.testing.assert_close(mixed.inputs, (batch().float() / 255 - 0.5) / 0.5)
    assert torch.equal(mixed.own, torch.ones(6))


EVERYTHING = Augmentation(
    flip=0.5,
    shift=0.1,
    rotate=10,
    zoom=0.1,
    shear=0.1,
    policy="rand",
    color_jitter=0.3,
    erasing=0.5,
    mixup=0.8,
    cutmix=1.0,
)


@pytest.mark.parametrize("policy", ["none", "rand", "trivial"])
def test_a_sample_is_augmented_the_same_alone_and_in_a_batch(policy):
    """But for its partner: mixing pairs neighbours, so pairs are kept together."""
    from dataclasses import replace

    a = replace(EVERYTHING, policy=policy)
    whole = augment(batch(8), noise(8), a, P)
    for i in range(0, 8, 2):
        pair = augment(batch(8)[i : i + 2], Noise(0, torch.arange(i, i + 2)), a, P)
        torch.testing.assert_close(pair.inputs, whole.inputs[i : i + 2])
        torch.testing.assert_close(pair.own, whole.own[i : i + 2])


def test_values_stay_finite_and_the_seed_decides():
    a = augment(batch(), noise(), EVERYTHING, P).inputs
    assert a.isfinite().all()
    assert torch.equal(a, augment(batch(), noise(), EVERYTHING, P).inputs)
    assert not torch.equal(a, augment(batch(), noise(seed=1), EVERYTHING, P).inputs)


class TestGeometry:
    x = batch().float() / 255

    def test_flip_at_1_is_the_mirror_image_and_at_0_nothing(self):
        torch.testing.assert_close(warp(self.x, affine_maps(noise(), Augmentation(flip=1.0), (12, 20))), self.x.flip(3))
        assert affine_maps(noise(), Augmentation(flip=0.0), (12, 20)) is None

    def test_a_quarter_turn_of_a_square_is_a_quarter_turn(self, monkeypatch):
        x = torch.rand(2, 3, 9, 9, generator=torch.Generator().manual_seed(0))
        monkeypatch.setattr(
            Noise,
            "between",
            lambda self, stream, low, high: torch.full((2,), high, dtype=torch.float64) * (stream == "rotate"),
        )
        turned = warp(x, affine_maps(noise(2), Augmentation(rotate=90), (9, 9)))
        quarter = [torch.rot90(x, k, (2, 3)) for k in (1, -1)]
        assert min((turned - q).abs().max().item() for q in quarter) < 1e-5

    def test_a_turn_stays_a_turn_in_an_oblong_image(self):
        """The map is a rotation in pixels: lengths are kept."""
        maps = affine_maps(noise(50), Augmentation(rotate=30), (12, 20)).double()
        scale = torch.tensor([20.0, 12.0], dtype=torch.float64)
        linear = maps[:, :, :2] * scale[None, :, None] / scale[None, None, :]
        identity = torch.eye(2, dtype=torch.float64).expand(50, 2, 2)
        torch.testing.assert_close(linear @ linear.mT, identity, atol=1e-5, rtol=0)
        angles = torch.atan2(linear[:, 1, 0], linear[:, 0, 0]) * 180 / math.pi
        assert angles.abs().max() <= 30
        assert angles.max() > 20
        assert angles.min() < -20

    def test_shift_moves_by_its_share_of_the_side(self):
        maps = affine_maps(noise(500), Augmentation(shift=0.1), (12, 20))
        moved = maps[:, :, 2] / 2
        assert moved.abs().max() <= 0.1
        assert moved.abs().max() > 0.09

    def test_zoom_is_as_often_in_as_out(self):
        maps = affine_maps(noise(2000), Augmentation(zoom=0.25), (12, 20))
        factors = 1 / maps[:, 0, 0]
        assert factors.max() <= 1.2501
        assert factors.min() >= 1 / 1.2501
        assert (factors > 1).double().mean().item() == pytest.approx(0.5, abs=0.05)


class TestColour:
    """Against Pillow, operation by operation."""

    x = batch(4).float() / 255

    def apply(self, name, amount):
        return module._colour(name, self.x, torch.full((4,), amount))

    @pytest.mark.parametrize(
        ("name", "enhance"),
        [
            ("brightness", ImageEnhance.Brightness),
            ("contrast", ImageEnhance.Contrast),
            ("saturation", ImageEnhance.Color),
        ],
    )
    @pytest.mark.parametrize("amount", [-0.6, 0.0, 0.5])
    def test_enhancements(self, name, enhance, amount):
        ours = self.apply(name, amount)
        reference = torch.stack([from_pil(enhance(to_pil(image)).enhance(1 + amount)) for image in self.x])
        assert (ours - reference).abs().max() < 2.5 / 255

    def test_solarize(self):
        reference = torch.stack([from_pil(ImageOps.solarize(to_pil(image), 128)) for image in self.x])
        assert (self.apply("solarize", 127.5 / 255) - reference).abs().max() < 2 / 255

    def test_autocontrast(self):
        dull = self.x * 0.5 + 0.2
        ours = module._colour("autocontrast", dull, torch.zeros(4))
        reference = torch.stack([from_pil(ImageOps.autocontrast(to_pil(image))) for image in dull])
        assert (ours - reference).abs().max() < 3 / 255

    def test_equalize_spreads_evenly_and_keeps_the_order(self):
        skewed = torch.rand(4, 3, 64, 64, generator=torch.Generator().manual_seed(0)) ** 3
        ours = module._colour("equalize", skewed, torch.zeros(4))
        reference = torch.stack([from_pil(ImageOps.equalize(to_pil(image))) for image in skewed])
        assert (ours - reference).abs().mean() < 0.02
        assert ours.mean().item() == pytest.approx(0.5, abs=0.03)

    def test_posterize_leaves_few_levels(self):
        assert len(self.apply("posterize", 0.9).unique()) <= 8
        assert torch.equal(self.apply("posterize", 0.0), self.x)

    def test_sharpness_softens_and_sharpens(self):
        rough = self.x.std()
        assert self.apply("sharpness", -1.0).std() < 0.6 * rough
        torch.testing.assert_close(self.apply("sharpness", 0.0), self.x)
        assert self.apply("sharpness", 0.9).std() > rough

    def test_an_even_image_stays_as_it_is(self):
        flat = torch.full((1, 3, 8, 8), 0.4)
        for name in ("autocontrast", "equalize"):
            torch.testing.assert_close(module._colour(name, flat, torch.zeros(1)), flat)

    def test_jitter_at_0_never_acts(self):
        assert torch.equal(recolor(self.x, noise(4), Augmentation()), self.x)
        assert not torch.equal(recolor(self.x, noise(4), Augmentation(color_jitter=0.5)), self.x)


def test_policies_reach_every_operation():
    for policy in ("rand", "trivial"):
        chosen, strength = module._random_operations(noise(3000), Augmentation(policy=policy))
        assert set(chosen.unique().tolist()) == set(range(len(OPERATIONS)))
        assert strength.abs().max() <= 1
    assert chosen.shape == (3000, 1)


class TestErasing:
    def test_at_0_never_and_at_1_always(self):
        x = torch.ones(200, 1, 16, 24)
        assert torch.equal(erase(x, noise(200), 0.0), x)
        erased = (erase(x, noise(200), 1.0) == 0).double().mean((1, 2, 3))
        assert (erased > 0).double().mean() > 0.98
        assert erased.max() <= 0.42

    def test_boxes_cover_what_they_say(self):
        share = torch.full((9000,), 0.2, dtype=torch.float64)
        box, covered = boxes(noise(9000), "x", share, torch.ones(9000), (40, 60))
        assert box.shape == (9000, 1, 40, 60)
        assert covered.mean().item() == pytest.approx(0.2, abs=0.01)
        assert box.any(0)[0].all()  # every place is reached


class TestMixing:
    def test_neighbours(self):
        assert neighbours(5).tolist() == [1, 0, 3, 2, 4]

    def test_mixup_is_a_weighted_sum(self):
        x = torch.randn(6, 1, 4, 4, generator=torch.Generator().manual_seed(0))
        mixed = mix(x, noise(), mixup=0.8, cutmix=0.0)
        own = mixed.own[:, None, None, None]
        torch.testing.assert_close(mixed.inputs, own * x + (1 - own) * x[neighbours(6)])
        assert ((mixed.own >= 0.5) & (mixed.own <= 1)).all()
        assert (mixed.own < 1).any()

    def test_cutmix_pastes_a_box_of_the_neighbour(self):
        x = torch.arange(6.0)[:, None, None, None].expand(6, 1, 8, 8).contiguous()
        mixed = mix(x, noise(), mixup=0.0, cutmix=1.0)
        for i in range(6):
            values = set(mixed.inputs[i].unique().tolist())
            assert values <= {float(i), float(i ^ 1)}
            share = (mixed.inputs[i] == i).double().mean().item()
            assert mixed.own[i].item() == pytest.approx(share)

    def test_both_share_the_samples(self):
        x = torch.arange(2000.0)[:, None, None, None].expand(2000, 1, 8, 8).contiguous()
        mixed = mix(x, noise(2000), mixup=0.8, cutmix=1.0)
        partner = x[neighbours(2000)]
        cut = ((mixed.inputs == x) | (mixed.inputs == partner)).all(3).all(2).all(1)
        assert 0.45 < cut.double().mean() < 0.65

    def test_neither_leaves_everything(self):
        x = torch.randn(3, 1, 4, 4)
        assert torch.equal(mix(x, noise(3), 0.0, 0.0).inputs, x)


def test_repeatable_statistics_do_not_drift():
    """The mean image under flips alone is symmetric."""
    x = batch(1).expand(4000, 3, 12, 20)
    mean = augment(x, noise(4000), Augmentation(flip=0.5), P).inputs.mean(0)
    assert np.abs((mean - mean.flip(2)).numpy()).max() < 0.1


def test_grey_solarize_and_blur_hit_as_often_as_asked():
    x = torch.rand(400, 3, 4, 300, generator=torch.Generator().manual_seed(5))  # so long that every blur shows
    for name, probability in (("grey", 0.3), ("solarize", 0.6), ("blur", 0.5)):
        y = recolor(x, noise(400), Augmentation(**{name: probability}))
        changed = (y != x).flatten(1).any(1).float().mean().item()
        assert abs(changed - probability) < 0.08


def test_grey_has_no_colour_and_solarize_turns_the_bright_half():
    x = torch.rand(5, 3, 12, 20, generator=torch.Generator().manual_seed(5))
    grey = recolor(x, noise(5), Augmentation(grey=1.0))
    torch.testing.assert_close(grey[:, 0], grey[:, 2])
    luma = 0.299 * x[:, 0] + 0.587 * x[:, 1] + 0.114 * x[:, 2]
    torch.testing.assert_close(grey[:, 1], luma)
    turned = recolor(x, noise(5), Augmentation(solarize=1.0))
    torch.testing.assert_close(turned, torch.minimum(x, 1 - x))


def test_blur_is_its_formula():
    """One image, by the width that its numbers give, as a Gaussian written out."""
    x = torch.rand(3, 3, 40, 60, generator=torch.Generator().manual_seed(5))
    y = module.blur(x, noise(3), 1.0)
    for i, sigma in enumerate((noise(3).between("blur", 0.0005, 0.01) * 60).tolist()):
        k = np.arange(-2, 3)
        kernel = np.exp(-0.5 * (k / sigma) ** 2)
        kernel /= kernel.sum()
        padded = np.pad(x[i].numpy(), ((0, 0), (2, 2), (2, 2)), mode="reflect")
        rows = sum(w * padded[:, :, 2 + d : 62 + d] for w, d in zip(kernel, k, strict=True))
        both = sum(w * rows[:, 2 + d : 42 + d] for w, d in zip(kernel, k, strict=True))
        np.testing.assert_allclose(y[i].numpy(), both, atol=1e-5)
