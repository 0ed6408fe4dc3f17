import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import difference, images
from vitral.config import ViTConfig
from vitral.errors import InputError
from vitral.models.cost import receptive_field
from vitral.nn.patches import ConvStem, PatchEmbed, patchify, unpatchify

sizes = st.integers(1, 5)


def literal_patchify(x, P_h, P_w):
    """Pixel by pixel, as the definition says it."""
    B, C, H, W = x.shape
    x_p = torch.empty(B, (H // P_h) * (W // P_w), P_h * P_w * C)
    for b in range(B):
        for row in range(H // P_h):
            for column in range(W // P_w):
                pixels = [
                    x[b, c, row * P_h + i, column * P_w + j] for i in range(P_h) for j in range(P_w) for c in range(C)
                ]
                x_p[b, row * (W // P_w) + column] = torch.stack(pixels)
    return x_p


@pytest.mark.parametrize(
    ("side", "patch", "count"), [(224, 16, 196), (224, 32, 49), (224, 8, 784), (448, 8, 3136), (48, 16, 9), (8, 4, 4)]
)
def test_number_of_patches(side, patch, count):
    assert patchify(torch.zeros(1, 3, side, side), patch).shape == (1, count, patch * patch * 3)


def test_patchify_is_the_definition():
    x = images(2, 3, 4 * 5, 2 * 7)
    torch.testing.assert_close(patchify(x, (5, 7)), literal_patchify(x, 5, 7), rtol=0, atol=0)


@given(B=sizes, C=sizes, P_h=sizes, P_w=sizes, G_h=sizes, G_w=sizes)
@settings(max_examples=40, deadline=None)
def test_unpatchify_inverts_patchify(B, C, P_h, P_w, G_h, G_w):
    x = images(B, C, G_h * P_h, G_w * P_w)
    assert torch.equal(unpatchify(patchify(x, (P_h, P_w)), (P_h, P_w), (G_h, G_w)), x)


def test_unpatchify_names_the_shape_it_wants():
    with pytest.raises(InputError, match=r"\(2, 7, 12\) do not fill a 2x3 grid of 2x2 patches: expected \(B, 6,"):
        unpatchify(torch.zeros(2, 7, 12), 2, (2, 3))


def test_the_linear_projection_and_the_strided_convolution_are_one():
    embed = PatchEmbed(in_chans=3, embed_dim=11, patch_size=(5, 7), bias=True)
    x = images(2, 3, 4 * 5, 2 * 7)
    assert embed.E.shape == (5 * 7 * 3, 11)
    assert difference(embed(x), patchify(x, (5, 7)) @ embed.E + embed.proj.bias) < 1e-6


def test_learning_E_is_learning_the_convolution():
    embed = PatchEmbed(in_chans=2, embed_dim=3, patch_size=(2, 5), bias=False)
    x = images(1, 2, 4, 15)
    (by_convolution,) = torch.autograd.grad(embed(x).square().sum(), embed.proj.weight)
    (by_E,) = torch.autograd.grad((patchify(x, (2, 5)) @ embed.E).square().sum(), embed.proj.weight)
    assert difference(by_E, by_convolution) < 1e-5


@pytest.mark.parametrize("size", [(21, 14), (20, 15)])
def test_a_side_that_the_patch_does_not_divide_is_an_error_with_the_nearest_sizes(size):
    side, low, high, P = (21, 20, 25, 5) if size[0] == 21 else (15, 14, 21, 7)
    with pytest.raises(
        InputError, match=rf"multiple of patch_size \({P}\), got {side}; the nearest are {low} and {high}"
    ):
        patchify(torch.zeros(1, 3, *size), (5, 7))


def stem(patch, width=16, chans=3, kind="conv"):
    config = ViTConfig(img_size=64, patch_size=patch, embed_dim=width, num_heads=1, in_chans=chans, stem=kind)
    return ConvStem(config.stem_layers, bias=True, eps=1e-6)


@pytest.mark.parametrize("patch", [1, 2, 4, 8, 16, (2, 8), (4, 1)])
@pytest.mark.parametrize("kind", ["conv", "conv_deep"])
def test_the_conv_stem_has_the_shape_of_the_projection(patch, kind):
    P_h, P_w = (patch, patch) if isinstance(patch, int) else patch
    x = images(2, 3, 3 * P_h, 5 * P_w)
    assert stem(patch, kind=kind)(x).shape == PatchEmbed(3, 16, (P_h, P_w), bias=True)(x).shape == (2, 15, 16)


def test_the_conv_stem_is_its_formula():
    part = stem(4)
    x = images(1, 3, 12, 8)
    (first,), (norm,) = part.convs, part.norms
    y = torch.nn.functional.conv2d(x, first.weight, stride=2, padding=1)
    y = (y - y.mean(1, keepdim=True)) / (y.var(1, keepdim=True, unbiased=False) + 1e-6).sqrt()
    y = y * norm.weight[:, None, None] + norm.bias[:, None, None]
    y = y * 0.5 * (1 + torch.erf(y / 2**0.5))
    y = torch.nn.functional.conv2d(y, part.proj.weight, part.proj.bias, stride=2, padding=1)
    assert difference(part(x), y.reshape(1, 16, 6).mT) < 1e-6


def test_a_token_of_the_conv_stem_sees_beyond_its_patch_and_not_far():
    x = images(1, 3, 32, 32).requires_grad_()
    part = stem(4)
    part(x)[0, 8 * 3 + 3].sum().backward()  # row 3, column 3: pixels 12..15
    rows = x.grad[0].abs().sum((0, 2)).nonzero().flatten().tolist()
    assert min(rows) < 12
    assert max(rows) - min(rows) + 1 == receptive_field([(3, 2), (3, 2)]) == 7


def test_the_layers_of_the_stems():
    config = {"img_size": 32, "patch_size": 8, "embed_dim": 128, "num_heads": 1}
    assert ViTConfig(**config, stem="conv").stem_layers == [(3, 32, (2, 2)), (32, 64, (2, 2)), (64, 128, (2, 2))]
    assert ViTConfig(**config, stem="conv_deep").stem_layers == [
        (3, 64, (2, 2)),
        (64, 64, (1, 1)),
        (64, 128, (2, 2)),
        (128, 128, (1, 1)),
        (128, 128, (2, 2)),
    ]
