"""The masked autoencoder as an objective. The model and its formulas are in `vitral.models.mae`."""

from collections.abc import Sequence

import torch
from PIL import Image
from torch import Tensor, nn

from vitral.config import MAEConfig, PretrainConfig
from vitral.data.inputs import ImageInputs
from vitral.data.noise import Noise
from vitral.data.transforms import denormalize
from vitral.models.mae import MaskedAutoencoder, mae_loss, mae_targets
from vitral.models.vit import VisionTransformer
from vitral.tasks.method import Kept, Method, counted

Filled = tuple[Tensor, Tensor, Tensor]
"""Predicted patches (B, N, P P C), what they should be, and a 1 for those that were hidden (B, N)."""


class MAE(Method):
    """A ViT sees a few patches, and a light decoder fills in the others."""

    name = "mae"
    what = "fill in hidden patches of an image"

    def __init__(self, backbone: VisionTransformer, config: PretrainConfig, heads_warm_up: bool) -> None:
        super().__init__(backbone, config, heads_warm_up)
        options = {**config.mae.to_dict(), "backbone": backbone.config}
        self.model = MaskedAutoencoder(MAEConfig(**options), backbone)
        assert backbone.preprocess is not None
        self.inputs = ImageInputs(backbone.preprocess)

    @property
    def backbone(self) -> VisionTransformer:
        """The encoder."""
        return self.model.backbone

    @property
    def learner(self) -> VisionTransformer:
        """The encoder."""
        return self.model.backbone

    def forward(self, model: nn.Module, inputs: Tensor, targets: Tensor, noise: Noise) -> Filled:
        """What it makes of the images."""
        return self._fill(model, inputs, noise)

    def _fill(self, model: nn.Module, x: Tensor, noise: Noise) -> Filled:
        c = self.model.config
        out = model(x, self._numbers(x, noise))
        return out.predicted, mae_targets(x, c.backbone.patch, c.norm_pixels), out.masked.to(out.predicted)

    def _numbers(self, x: Tensor, noise: Noise) -> Tensor:
        """What decides which patches are hidden (B, N)."""
        G_h, G_w = self.backbone.grid_of(x)
        return noise.uniform("hide", G_h * G_w).float().to(x.device)

    def loss(self, outputs: Filled, targets: Tensor, partners: Tensor, own: Tensor) -> Tensor:
        """The squared error on hidden patches."""
        return mae_loss(*outputs)

    def sums(self, outputs: Filled, targets: Tensor) -> dict[str, float]:
        """Nothing besides the loss."""
        return counted(targets)

    def watch(self, x: Tensor, samples: Tensor) -> Kept:
        """Features of whole images, and how well each is filled in; always with the same patches hidden."""
        predicted, wanted, masked = self._fill(self.model, x, Noise(0, samples))
        error = (predicted - wanted).square().mean(dim=2)  # (B, N)
        return {"features": self.backbone.embed(x), "errors": (error * masked).sum(dim=1) / masked.sum(dim=1)}

    def signals(self, kept: Kept) -> dict[str, float]:
        """The loss on images that are not trained on."""
        return {"loss": kept["errors"].mean().item()}

    def pictures(self, x: Tensor) -> Sequence[Image.Image]:
        """Each image, what was seen of it, and what was made of that, side by side."""
        shown = self.model.reconstruct(x, self._numbers(x, Noise(0, torch.arange(len(x)))))
        rows = torch.cat([x, shown.seen, shown.filled], dim=3)
        pixels = denormalize(rows, self.inputs.preprocess).expand(-1, 3, -1, -1).permute(0, 2, 3, 1)
        return [Image.fromarray(picture) for picture in pixels.cpu().numpy()]
