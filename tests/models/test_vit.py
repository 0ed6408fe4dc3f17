import copy
import math

import pytest
import torch

from helpers import difference, images, redraw
from vitral.config import PositionResize, ViTConfig
from vitral.errors import ConfigError, InputError
from vitral.models.vit import VisionTransformer
from vitral.nn.patches import patchify
from vitral.nn.positions import resize_positions, sincos_2d

SMALL = {
    "img_size": (6, 10),
    "patch_size": (2, 5),
    "in_chans": 3,
    "num_classes": 7,
    "embed_dim": 20,
    "depth": 3,
    "num_heads": 5,
    "mlp_ratio": 1.5,
}

# Every choice at least once, each in a model that otherwise differs as well.
VARIANTS = {
    "plain": {},
    "registers, LayerScale": {"reg_tokens": 4, "pos_prefix": False, "init_values": 1e-5},
    "registers, a row for [CLS]": {"reg_tokens": 2},
    "mean, norm after": {"global_pool": "mean", "norm_after_pool": True, "head": "mlp"},
    "no [CLS], max": {"class_token": False, "global_pool": "max", "act": "relu"},
    "post-norm, sincos1d": {"block": "post", "positions": "sincos1d", "head": "mlp_tanh"},
    "sincos2d": {"positions": "sincos2d", "qkv_bias": False, "act": "gelu_tanh"},
    "no positions": {"positions": "none", "act": "swiglu", "mlp_ratio": 2},
    "CLIP": {"pre_norm": True, "patch_bias": False, "act": "quick_gelu", "norm_eps": 1e-5},
    "SigLIP": {"class_token": False, "global_pool": "map", "act": "gelu_tanh"},
    "DINOv2 classifier": {"global_pool": "cls_mean", "init_values": 1.0},
    "[CLS] of two blocks": {"pool_layers": 2},
    "[CLS] and mean of two blocks": {"pool_layers": 2, "global_pool": "cls_mean"},
    "conv stem": {"stem": "conv", "img_size": (8, 12), "patch_size": (2, 4)},
}


def small(seed=0, **options):
    return redraw(VisionTransformer(ViTConfig(**(SMALL | options))), seed)


def pixels(model, B=2, **kwargs):
    return images(B, model.config.in_chans, *model.config.image, **kwargs)


@pytest.fixture(params=VARIANTS)
def model(request):
    return small(**VARIANTS[request.param])


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


@pytest.mark.parametrize("pool", ["cls", "mean", "max", "cls_mean"])
def test_several_blocks_are_pooled_side_by_side(pool):
    """Each block is pooled as if it were the last of a shallower model, then all are in order."""
    model = small(pool_layers=2, global_pool=pool, depth=3)
    x = pixels(model)
    shallow = [small(depth=depth, global_pool=pool, num_classes=0) for depth in (2, 3)]
    for each in shallow:
        each.load_state_dict({k: model.state_dict()[k] for k in each.state_dict()})
    pooled = torch.cat([each.embed(x).unflatten(1, (-1, model.config.embed_dim)) for each in shallow], dim=2)
    assert difference(model.embed(x), pooled.flatten(1)) < 1e-6
    assert difference(model(x), pooled.flatten(1) @ model.head.weight.mT + model.head.bias) < 1e-5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pool_layers": 3}, "pool_layers must be at most the depth"),
        ({"pool_layers": 0}, "pool_layers must be"),
        ({"pool_layers": 2, "global_pool": "map"}, "goes with neither"),
        ({"pool_layers": 2, "global_pool": "mean", "norm_after_pool": True}, "goes with neither"),
    ],
)
def test_blocks_that_cannot_be_pooled_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        ViTConfig(**(SMALL | {"depth": 2} | options))


def test_shapes_of_vit_base():
    base = VisionTransformer(ViTConfig(depth=1))
    x = images(1, 3, 224, 224)
    assert patchify(x, 16).shape == (1, 196, 768)
    assert base.embed_tokens(x)[0].shape == (1, 197, 768)
    assert base(x).shape == (1, 1000)
    assert VisionTransformer(ViTConfig(depth=1, patch_size=8)).embed_tokens(x)[0].shape == (1, 785, 768)


def test_equations_1_to_4_written_out():
    model = small()
    x = pixels(model)

    def LN(norm, t):
        return (t - t.mean(-1, keepdim=True)) / (
            t.var(-1, keepdim=True, unbiased=False) + 1e-6
        ).sqrt() * norm.weight + (norm.bias)

    def MSA(attn, t):
        Q, K, V = (t @ attn.qkv.weight.T + attn.qkv.bias).split(20, dim=-1)
        heads = []
        for i in range(5):
            at = slice(4 * i, 4 * i + 4)
            A = torch.softmax(Q[..., at] @ K[..., at].mT / math.sqrt(4), dim=-1)
            heads.append(A @ V[..., at])
        return torch.cat(heads, -1) @ attn.proj.weight.T + attn.proj.bias

    def MLP(mlp, t):
        t = t @ mlp.fc1.weight.T + mlp.fc1.bias
        return 0.5 * t * (1 + torch.erf(t / math.sqrt(2))) @ mlp.fc2.weight.T + mlp.fc2.bias

    x_p = patchify(x, (2, 5)) @ model.patch_embed.E + model.patch_embed.proj.bias
    z = torch.cat([model.cls_token.expand(2, -1, -1), x_p], 1) + model.pos_embed  # (1)
    for block in model.blocks:
        z = MSA(block.attn, LN(block.norm1, z)) + z  # (2)
        z = MLP(block.mlp, LN(block.norm2, z)) + z  # (3)
    y = LN(model.norm, z[:, 0])  # (4)
    logits = y @ model.head.weight.T + model.head.bias
    assert difference(model.embed(x), y) < 1e-5
    assert difference(model(x), logits) < 1e-5


def test_forward_is_features_then_head(model):
    x = pixels(model)
    z = model.forward_features(x)
    assert z.shape == (2, model.prefix_tokens + math.prod(model.config.grid), 20 * model.config.pool_layers)
    assert difference(model(x), model.forward_head(z)) < 1e-5
    assert model(x).shape == (2, 7)
    assert model.embed(x).shape == (2, model.config.pooled_dim)
    assert difference(model.head(model.embed(x)), model(x)) < 1e-6


def test_an_image_gives_the_same_alone_and_in_a_batch(model):
    x = pixels(model, B=3)
    alone = torch.cat([model(x[i : i + 1]) for i in range(3)])
    assert difference(model(x), alone) < 1e-5
    assert difference(model(x)[:1], model(x)[1:2]) > 1e-3  # the images do differ


def test_every_part_reaches_the_output(model):
    """A parameter that could be changed without effect would be a part that is not wired in."""
    x = pixels(model)
    before = model(x)
    for name, parameter in model.named_parameters():
        kept = parameter.clone()
        parameter.add_(0.5 * images(*parameter.shape, seed=3))
        changed = difference(model(x), before)
        parameter.copy_(kept)
        assert changed > 1e-6, f"{name} does nothing"


def test_without_positions_patches_are_a_set_and_with_them_they_are_not():
    x = images(1, 3, 6, 10)
    shuffled = x.view(1, 3, 3, 2, 2, 5)[:, :, [2, 0, 1]].reshape(1, 3, 6, 10)
    unplaced = small(positions="none")
    assert difference(unplaced(shuffled), unplaced(x)) < 1e-5
    placed = small()
    assert difference(placed(shuffled), placed(x)) > 1e-3
    placed.pos_embed.zero_()
    assert difference(placed(shuffled), placed(x)) < 1e-5


def test_the_class_token_without_a_row_gets_no_position():
    model = small(pos_prefix=False, positions="sincos2d")
    z, _ = model.embed_tokens(pixels(model))
    assert torch.equal(z[:, 0], model.cls_token[0].expand(2, -1))
    x_pE = model.patch_embed(pixels(model))
    torch.testing.assert_close(z[:, 1:], x_pE + sincos_2d((3, 2), 20).float())


def test_registers_stand_between_class_token_and_patches_without_a_position():
    model = small(reg_tokens=2)
    z, _ = model.embed_tokens(pixels(model))
    torch.testing.assert_close(z[0, 0], model.cls_token[0, 0] + model.pos_embed[0, 0])
    assert torch.equal(z[0, 1:3], model.reg_token[0])
    torch.testing.assert_close(z[:, 3:], model.patch_embed(pixels(model)) + model.pos_embed[:, 1:])


class TestAnySize:
    def test_every_size_that_the_patch_divides_is_taken(self, model):
        P_h, P_w = model.config.patch
        x = images(2, 3, 5 * P_h, 3 * P_w)
        assert model(x).shape == (2, 7)
        assert model.forward_features(x).shape == (2, model.prefix_tokens + 15, 20 * model.config.pool_layers)

    def test_a_learned_table_is_resized_to_the_grid(self):
        model = small(pos_resize=PositionResize(mode="bilinear", antialias=False))
        x = images(1, 3, 8, 25)
        z, _ = model.embed_tokens(x)
        table = resize_positions(model.pos_embed, (3, 2), (4, 5), model.config.pos_resize)
        torch.testing.assert_close(z[:, 1:], model.patch_embed(x) + table[:, 1:])

    def test_gradients_reach_the_table_through_the_resize(self):
        model = small()
        with torch.enable_grad():
            model(images(1, 3, 8, 25)).square().sum().backward()
        assert model.pos_embed.grad.abs().min() > 0

    @pytest.mark.parametrize(
        ("size", "message"), [((7, 10), "got 7; the nearest are 6 and 8"), ((6, 4), "got 4; the nearest is 5")]
    )
    def test_a_side_that_does_not_fit_is_an_error_that_names_the_nearest(self, size, message):
        with pytest.raises(InputError, match=message):
            small()(images(1, 3, *size))


class TestPadAndMask:
    def test_pad_fills_up_with_zeros_at_the_bottom_and_right(self, model):
        P_h, P_w = model.config.patch
        x = images(2, 3, 3 * P_h - 1, 3 * P_w - 1)
        padded = torch.zeros(2, 3, 3 * P_h, 3 * P_w)
        padded[:, :, :-1, :-1] = x
        assert torch.equal(model(x, pad=True), model(padded))
        assert torch.equal(model(padded, pad=True), model(padded))

    def test_masked_pixels_do_not_count(self, model):
        P_h, P_w = model.config.patch
        x = images(2, 3, 4 * P_h, 3 * P_w)
        mask = torch.ones(2, 4 * P_h, 3 * P_w, dtype=torch.bool)
        mask[0, 2 * P_h :] = False
        other = x.clone()
        other[0, :, 2 * P_h :] += 1
        assert torch.equal(model(x, mask=mask), model(other, mask=mask))
        assert difference(model(x, mask=mask)[1:], model(x)[1:]) < 1e-5
        assert difference(model(x, mask=mask)[:1], model(x)[:1]) > 1e-4

    def test_hidden_patches_might_as_well_not_be_there(self):
        """With no positions, a canvas whose lower half is masked gives what the upper half gives alone."""
        for options in ({}, {"global_pool": "mean"}, {"class_token": False, "global_pool": "map"}):
            model = small(positions="none", **options)
            x = images(2, 3, 8, 15)
            mask = torch.ones(2, 8, 15, dtype=torch.bool)
            mask[:, 4:] = False
            assert difference(model(x, mask=mask), model(x[:, :, :4])) < 1e-5

    def test_attention_rows_know_the_mask(self):
        model = small()
        x = images(2, 3, 7, 12)
        mask = torch.ones(2, 7, 12, dtype=torch.bool)
        mask[1, 2:] = False
        rows = model.attention(x, "all", "all", pad=True, mask=mask)
        assert len(rows) == 3
        assert rows[0].shape == (2, 5, 13, 13)
        assert not rows[2][1, :, :, 1 + 3 :].any()
        torch.testing.assert_close(rows[2].sum(-1), torch.ones(2, 5, 13))

    def test_what_is_masked_may_be_anything(self):
        model, x = small(), images(2, 3, 6, 10)
        mask = torch.ones(2, 6, 10, dtype=torch.bool)
        mask[0, 4:] = False
        broken = x.masked_fill(~mask[:, None], math.nan)
        assert torch.equal(model(broken, mask=mask), model(x, mask=mask))

    def test_a_mask_that_is_no_tensor_is_an_error(self):
        with pytest.raises(InputError, match=r"mask must be a boolean tensor .*, got str"):
            small()(images(2, 3, 6, 10), mask="left")

    @pytest.mark.parametrize("mask", [torch.ones(2, 6, 9, dtype=torch.bool), torch.ones(2, 6, 10)])
    def test_a_mask_of_another_shape_or_kind_is_an_error(self, mask):
        with pytest.raises(
            InputError, match=r"mask must be boolean \(B, H, W\) = \(2, 6, 10\), got torch\.\w+ \(2, 6, \d+\)"
        ):
            small()(images(2, 3, 6, 10), mask=mask)

    def test_a_mask_that_hides_an_image_is_an_error(self):
        with pytest.raises(InputError, match="mask hides a whole image"):
            small()(images(2, 3, 6, 10), mask=torch.zeros(2, 6, 10, dtype=torch.bool))


class TestPacked:
    def test_each_image_gets_the_result_it_has_alone(self, model):
        P_h, P_w = model.config.patch
        grids = [(3, 2), (1, 1), (5, 4), (2, 7), (1, 3)]
        batch = [images(3, a * P_h, b * P_w, seed=a) for a, b in grids]
        alone = torch.cat([model(image[None]) for image in batch])
        assert difference(model.forward_packed(batch), alone) < 1e-5
        for z, image in zip(model.packed_features(batch), batch, strict=True):
            assert difference(z, model.forward_features(image[None])) < 1e-5

    def test_packed_images_may_be_padded(self):
        model = small()
        batch = [images(3, 5, 9), images(3, 11, 3)]
        alone = torch.cat([model(image[None], pad=True) for image in batch])
        assert difference(model.forward_packed(batch, pad=True), alone) < 1e-5

    def test_an_error_names_the_image(self):
        with pytest.raises(InputError, match="image number 1: image height must be a multiple of patch_size"):
            small().forward_packed([images(3, 6, 10), images(3, 7, 10)])

    def test_bad_lists_are_errors(self):
        with pytest.raises(InputError, match="empty list"):
            small().forward_packed([])
        with pytest.raises(InputError, match=r"list of \(C, H, W\) tensors, got \(1, 3, 6, 10\) as number 0"):
            small().forward_packed([images(1, 3, 6, 10)])


class TestLookingInside:
    def test_attention_is_the_softmax_of_each_block_on_its_input(self, model):
        x = pixels(model)
        z, _ = model.embed_tokens(x)
        expected = []
        for block in model.blocks:
            seen = block.norm1(z) if model.config.block == "pre" else z
            q, k, _ = block.attn.qkv(seen).view(2, -1, 3, 5, 4).permute(2, 0, 3, 1, 4)
            expected.append(torch.softmax(q @ k.mT / 2, -1))
            z = block(z)
        for ours, reference in zip(model.attention(x, "all", "all"), expected, strict=True):
            assert difference(ours, reference) < 1e-5

    def test_chosen_layers_and_queries(self):
        model = small(reg_tokens=2)
        x = pixels(model)
        whole = model.attention(x, "all", "all")
        last, first = model.attention(x, [-1, 0], "cls")
        torch.testing.assert_close(last, whole[2][:, :, :1])
        torch.testing.assert_close(first, whole[0][:, :, :1])
        (some,) = model.attention(x, [1], [4, -1])
        torch.testing.assert_close(some, whole[1][:, :, [4, 8]])
        (default,) = model.attention(x)
        assert torch.equal(default, last)

    def test_class_rows_of_all_layers_of_s8_are_kilobytes(self):
        from torch.utils._python_dispatch import TorchDispatchMode

        class Shapes(TorchDispatchMode):
            """The shapes of all tensors that come into being."""

            def __init__(self):
                super().__init__()
                self.seen = set()

            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                out = func(*args, **(kwargs or {}))
                for t in out if isinstance(out, tuple) else (out,):
                    if isinstance(t, torch.Tensor):
                        self.seen.add(tuple(t.shape))
                return out

        model = VisionTransformer(ViTConfig(embed_dim=384, num_heads=6, depth=12, patch_size=8)).eval()
        with Shapes() as shapes:
            rows = model.attention(images(1, 3, 224, 224), "all", "cls")
        assert sum(r.numel() * r.element_size() for r in rows) == 12 * 6 * 785 * 4
        assert (1, 6, 1, 785) in shapes.seen
        assert not [shape for shape in shapes.seen if shape[-2:] == (785, 785)]

    def test_rows_do_not_depend_on_the_kernel(self):
        from torch.nn.attention import SDPBackend, sdpa_kernel

        model = small()
        x = pixels(model)
        rows = model.attention(x, "all", "all")
        with sdpa_kernel(SDPBackend.MATH):
            for a, b in zip(rows, model.attention(x, "all", "all"), strict=True):
                assert difference(a, b) < 1e-6

    def test_intermediate_maps_are_the_block_outputs_on_the_grid(self, model):
        P_h, P_w = model.config.patch
        x = images(2, 3, 4 * P_h, 3 * P_w)
        z, _ = model.embed_tokens(x)
        states = [z := block(z) for block in model.blocks]
        last, first = model.intermediate(x, [-1, 0])
        assert last.shape == (2, 20, 4, 3)
        R = model.prefix_tokens
        for row in range(4):
            for column in range(3):
                token = model.norm(states[0])[:, R + 3 * row + column]
                torch.testing.assert_close(first[:, :, row, column], token)
        tokens, raw = model.intermediate(x, "all", as_grid=False)[2], model.intermediate(x, [2], False, norm=False)[0]
        torch.testing.assert_close(tokens, model.forward_features(x)[..., -20:])
        torch.testing.assert_close(raw, states[2])
        torch.testing.assert_close(last.flatten(2).mT, tokens[:, R:])

    def test_intermediate_of_padded_images_has_the_padded_grid(self):
        assert small().intermediate(images(1, 3, 7, 12), [0], pad=True)[0].shape == (1, 20, 4, 3)

    @pytest.mark.parametrize("layers", [[3], [-4], [], "last", 1, None, 2.0, ["0"]])
    def test_a_layer_that_is_not_there_is_an_error(self, layers):
        with pytest.raises(InputError, match="layers must be 'all' or a list of block numbers from -3 to 2, got"):
            small().intermediate(images(1, 3, 6, 10), layers)

    @pytest.mark.parametrize("queries", [[7], [-8], [0.5], [[0]], None])
    def test_a_token_that_is_not_there_is_an_error(self, queries):
        with pytest.raises(InputError, match="queries must be token indices from -7 to 6, got"):
            small().attention(images(1, 3, 6, 10), queries=queries)

    def test_class_rows_without_a_class_token_are_an_error(self):
        with pytest.raises(InputError, match=r'needs a \[CLS\] token, which this model has not; use "all"'):
            small(class_token=False, global_pool="mean").attention(images(1, 3, 6, 10))
        with pytest.raises(InputError, match='queries must be "cls", "all" or token indices, got \'patches\''):
            small().attention(images(1, 3, 6, 10), queries="patches")


class TestBadInput:
    @pytest.mark.parametrize(
        ("x", "message"),
        [
            (images(2, 5, 6, 10), r"must have 3 channels, got 5 in shape \(2, 5, 6, 10\); pass in_chans=5"),
            (images(2, 6, 10, 3), r"must have 3 channels, got 6 in shape \(2, 6, 10, 3\); move the channels first"),
            (images(3, 6, 10), r"must have 4 axes \(B, C, H, W\), got 3 in shape \(3, 6, 10\); add a batch axis"),
            (images(6, 10), r"must have 4 axes \(B, C, H, W\), got 2"),
            (torch.zeros(2, 3, 6, 10, dtype=torch.uint8), r"must be floating point, got torch\.uint8; scale with"),
            (torch.zeros(0, 3, 6, 10), r"must not be empty, got shape \(0, 3, 6, 10\)"),
            (torch.full((1, 3, 6, 10), math.nan), "must be finite, got 180 NaN or infinite values"),
            (torch.full((1, 3, 6, 10), math.inf), "must be finite, got 180 NaN or infinite values"),
            (images(1, 3, 6, 10).double(), r"must be torch\.float32 like the model, got torch\.float64"),
            ([[1.0]], r"must be a torch tensor \(B, C, H, W\), got list"),
        ],
    )
    def test_one_clear_sentence(self, x, message):
        with pytest.raises(InputError, match=message):
            small()(x)

    def test_large_finite_pixels_are_not_mistaken_for_infinite_ones(self):
        assert small()(torch.full((1, 3, 6, 10), 3e38)).shape == (1, 7)


def grads(model, scalar):
    return torch.autograd.grad(scalar, list(model.parameters()))


def test_gradients_are_the_same_by_every_way(model):
    """Through the short cut of the last block, through all tokens, and packed."""
    x = pixels(model)
    with torch.enable_grad():
        direct = grads(model, model(x).square().sum())
        by_features = grads(model, model.forward_head(model.forward_features(x)).square().sum())
        packed = grads(model, model.forward_packed(list(x)).square().sum())
    for (name, _), a, b, c in zip(model.named_parameters(), direct, by_features, packed, strict=True):
        assert difference(a, b) < 1e-4, name
        assert difference(c, b) < 1e-4, name


class Wrapped(torch.nn.Module):
    """What LoRA does to a layer."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, z):
        return 2 * self.inner(z)


@pytest.mark.parametrize("how", ["wrapped", "hooked"])
def test_what_is_put_around_qkv_acts_by_every_way(how):
    model = small()
    x = pixels(model)
    before, rows_before = model(x), model.attention(x)[0]
    attn = model.blocks[-1].attn
    if how == "wrapped":
        attn.qkv = Wrapped(attn.qkv)
    else:
        attn.qkv.register_forward_hook(lambda module, args, output: 2 * output)
    assert difference(model(x), model.forward_head(model.forward_features(x))) < 1e-5
    assert difference(model(x), before) > 1e-3
    assert difference(model.attention(x)[0], rows_before) > 1e-3
    attn.qkv = torch.nn.Linear(20, 60)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_gradients_of_single_samples_by_vmap():
    from torch.func import functional_call, grad, vmap

    model = small()
    x = pixels(model, B=3)
    weights = dict(model.named_parameters())

    def loss(weights, image):
        return functional_call(model, weights, (image[None],)).square().sum()

    each = vmap(grad(loss), in_dims=(None, 0))({k: v.detach() for k, v in weights.items()}, x)
    with torch.enable_grad():
        whole = grads(model, model(x).square().sum())
    for (name, _), expected in zip(model.named_parameters(), whole, strict=True):
        assert difference(each[name].sum(0), expected) < 1e-4, name


def test_weights_survive_a_state_dict(model):
    twin = VisionTransformer(model.config).eval()
    twin.load_state_dict(model.state_dict())
    assert torch.equal(twin(pixels(model)), model(pixels(model)))


def test_stochastic_depth_rises_through_the_blocks():
    model = small(drop_path_rate=0.4)
    for part in ("drop_path1", "drop_path2"):
        assert [getattr(block, part).rate for block in model.blocks] == pytest.approx([0, 0.2, 0.4])


def test_each_dropout_is_where_it_belongs():
    """With everything dropped, what passes a dropout is zero."""
    model = small(drop_rate=0.999999).train()
    z = model.forward_features(pixels(model))
    assert torch.equal(model.forward_head(z), model.head.bias.expand(2, -1))
    assert torch.equal(model(pixels(model)), model.head.bias.expand(2, -1))
    model = small(proj_drop_rate=0.999999).train()
    assert not model.blocks[0].attn(z).any()
    assert not model.blocks[0].mlp(z).any()
    model = small(pos_drop_rate=0.999999).train()
    assert not model.embed_tokens(pixels(model))[0].any()


def test_visible_tokens_let_the_head_know_the_mask():
    for pool in ("mean", "max", "map"):
        model = small(class_token=False, global_pool=pool)
        x = pixels(model)
        mask = torch.ones(2, 6, 10, dtype=torch.bool)
        mask[0, 4:] = False
        z = model.forward_features(x, mask=mask)
        assert difference(model.forward_head(z, model.visible_tokens(x, mask=mask)), model(x, mask=mask)) < 1e-6
        assert difference(model.forward_head(z), model(x, mask=mask)) > 1e-4
    assert model.visible_tokens(x) is None


def test_dropout_and_stochastic_depth_act_in_training_only():
    for name in (field for field in ViTConfig().to_dict() if field.endswith("_rate")):
        model = small(**{name: 0.4})
        x = pixels(model, B=5)
        assert torch.equal(model(x), model(x)), name
        model.train()
        torch.manual_seed(0)
        assert difference(model(x), model(x)) > 1e-3, name


@pytest.mark.parametrize("pool", ["cls", "mean", "map"])
def test_patch_dropout_trains_on_the_patches_that_stay(pool):
    """As many tokens as the rate says; the same answer as if the others had been masked; nothing in evaluation."""
    model, counts = small(patch_drop_rate=0.4, global_pool=pool), []
    x = pixels(model)
    N = math.prod(model.grid_of(x))
    model.blocks[0].attn.qkv.register_forward_hook(lambda module, args, out: counts.append(args[0].shape[1]))
    whole = model(x)
    noise = torch.rand(2, N, generator=torch.Generator().manual_seed(0))
    model.patch_drop.draw = lambda n: noise[:, :n]
    found = model.train()(x)
    stay = N - round(0.4 * N)
    assert counts == [model.prefix_tokens + N, model.prefix_tokens + stay]
    seen = noise <= noise.sort(dim=1).values[:, stay - 1 : stay]
    mask = seen.unflatten(1, model.grid_of(x)).repeat_interleave(2, 1).repeat_interleave(5, 2)
    assert difference(found, model.eval()(x, mask=mask)) < 1e-5
    assert torch.equal(model(x), whole)
    model.train().patch_drop.rate = 0.0
    assert torch.equal(model(x), whole)


def test_a_head_of_no_classes_gives_the_embedding():
    model = small(num_classes=0)
    assert torch.equal(model(pixels(model)), model.embed(pixels(model)))


def test_copies_are_independent_and_double_precision_works(model):
    before = {name: value.clone() for name, value in model.state_dict().items()}
    twin = copy.deepcopy(model).double()
    x = images(1, 3, 2 * model.config.patch[0], 4 * model.config.patch[1])
    assert difference(twin(x.double()).float(), model(x)) < 1e-4
    assert twin(x.double()).dtype == torch.float64
    for parameter in twin.parameters():
        parameter.zero_()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_autocast_runs_and_is_near(model):
    x = images(1, 3, 2 * model.config.patch[0], 4 * model.config.patch[1])
    with torch.autocast("cpu", dtype=torch.float16):
        half = model(x)
    assert half.dtype == torch.float16
    assert 0 < difference(half.float(), model(x)) < 0.02
    with torch.autocast("cpu", dtype=torch.float16):
        assert model.embed_tokens(x)[0].dtype == torch.float32  # the residual stream keeps its digits


@pytest.mark.parametrize("variant", ["plain", "registers, LayerScale", "SigLIP", "sincos2d"])
def test_it_exports_with_any_batch_size(variant):
    model = small(**VARIANTS[variant])
    batch = torch.export.Dim("batch", min=1, max=64)
    exported = torch.export.export(model, (pixels(model, B=2),), dynamic_shapes={"x": {0: batch}})
    x = pixels(model, B=5)
    assert difference(exported.module()(x), model(x)) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["plain", "registers, LayerScale", "SigLIP"])
def test_it_compiles_and_exports_to_the_same_numbers(variant):
    model = small(**VARIANTS[variant])
    for x in (pixels(model), images(2, 3, 8, 15)):
        torch._dynamo.reset()
        assert difference(torch.compile(model)(x), model(x)) < 1e-5
        exported = torch.export.export(model, (x,)).module()
        assert difference(exported(x), model(x)) < 1e-5
