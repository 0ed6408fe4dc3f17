import numpy as np
import pytest
import torch
from PIL import Image

from vitral.config import Preprocess
from vitral.data.noise import Noise
from vitral.data.transforms import (
    decode_size,
    denormalize,
    eval_transform,
    normalize,
    random_resized_crop,
    random_view,
    random_views,
    resized_size,
)


def picture(height, width):
    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    return torch.stack([rows * 255 // height, columns * 255 // width, (rows * columns) % 256]).to(torch.uint8)


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("mode", ["center", "squash"])
def test_eval_transform_is_pillows(mode, interpolation):
    p = Preprocess(img_size=(32, 48), crop_mode=mode, crop_pct=0.8, interpolation=interpolation)
    x = picture(130, 110)
    ours = eval_transform(x, p)
    height, width = resized_size((130, 110), p)
    filter_ = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}[interpolation]
    reference = Image.fromarray(x.permute(1, 2, 0).numpy()).resize((width, height), filter_)
    top, left = (height - 32) // 2, (width - 48) // 2
    reference = np.asarray(reference)[top : top + 32, left : left + 48].transpose(2, 0, 1)
    assert ours.shape == (3, 32, 48)
    assert np.abs(ours.numpy().astype(float) - reference).mean() < 0.5


def test_center_keeps_the_aspect_and_squash_does_not():
    center = Preprocess(img_size=32, crop_mode="center", crop_pct=0.875)
    assert resized_size((100, 200), center) == (36, 72)
    assert resized_size((100, 200), Preprocess(img_size=32, crop_mode="squash")) == (32, 32)


def test_normalize():
    p = Preprocess(img_size=2, mean=(0.5, 0.25, 0.0), std=(0.5, 0.25, 2.0))
    x = torch.tensor([255, 0, 255], dtype=torch.uint8)[None, :, None, None].expand(1, 3, 2, 2)
    assert normalize(x, p)[0, :, 0, 0].tolist() == pytest.approx([1, -1, 0.5])
    assert torch.equal(normalize(x.float() / 255, p), normalize(x, p))


def test_random_crops_are_of_the_asked_share_and_inside():
    p = Preprocess(img_size=16, interpolation="bilinear")
    x = picture(64, 96)
    shares = []
    for i in range(300):
        crop = random_resized_crop(x, p, Noise(0, torch.tensor([i])), (0.25, 0.5), (3 / 4, 4 / 3)).float()
        assert crop.shape == (3, 16, 16)
        rows, columns = crop[0].mean(1), crop[1].mean(0)
        shares.append(float((rows[-1] - rows[0]) * (columns[-1] - columns[0])) / 255**2 * (16 / 15) ** 2)
    assert min(shares) > 0.2
    assert max(shares) < 0.57
    assert np.mean(shares) == pytest.approx(0.375, abs=0.03)


def test_a_crop_that_fits_nowhere_is_the_largest_in_the_middle():
    strip = picture(8, 800)
    crop = random_resized_crop(strip, Preprocess(img_size=16), Noise(0, torch.tensor([1])), (1.0, 1.0), (3 / 4, 4 / 3))
    assert crop.shape == (3, 16, 16)
    assert abs(float(crop[1].float().mean()) - 127) < 2


def test_decode_size_is_enough_for_the_smallest_crop():
    assert decode_size(Preprocess(img_size=224, crop_pct=0.875)) == (512, 512, True)
    assert decode_size(Preprocess(img_size=100, crop_mode="squash"), 0.25) == (200, 200, False)


def test_views_of_many_images_are_those_of_each_by_itself():
    sizes = [(20, 30), (64, 64), (7, 100), (50, 9)]
    together = random_views(sizes, Noise(3, torch.arange(4)), (0.05, 0.4), (3 / 4, 4 / 3))
    for i, size in enumerate(sizes):
        alone = random_view(size, Noise(3, torch.tensor([i])), (0.05, 0.4), (3 / 4, 4 / 3))
        assert together[i] == alone


def test_denormalize_undoes_normalize():
    x = torch.randint(0, 256, (2, 3, 4, 5), dtype=torch.uint8)
    assert torch.equal(denormalize(normalize(x, Preprocess()), Preprocess()), x)


def test_padding_has_the_mean_colour_within_what_pixels_can_have():
    x = torch.full((3, 4, 8), 7, dtype=torch.uint8)
    p = Preprocess(img_size=8, crop_mode="pad", mean=(0.5, 500.0, -1.0), std=(1, 1, 1))
    assert eval_transform(x, p)[:, -1, 0].tolist() == [128, 255, 0]
