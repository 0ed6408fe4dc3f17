"""DINO as an objective: student and teacher, what they are shown, and what follows a step.

The formulas are in `vitral.models.dino`. B images, G large crops of each, L small ones, V = G + L, K prototypes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from vitral.config import DINOOptions, PretrainConfig
from vitral.data.crops import CropInputs, Crops
from vitral.data.noise import Noise
from vitral.models import dino
from vitral.models.mae import over_pixels, random_masking
from vitral.models.vit import VisionTransformer
from vitral.tasks.method import Kept, Method, counted, drop_gradients
from vitral.tasks.objective import place_noise


class Branch(nn.Module):
    """A ViT with its head, which answers for an image and, where patches are hidden, for each of those."""

    def __init__(self, backbone: VisionTransformer, o: DINOOptions) -> None:
        super().__init__()
        D = backbone.config.embed_dim
        self.backbone = backbone
        self.head = dino.DINOHead(backbone.config.pooled_dim, o.hidden, o.bottleneck, o.prototypes)
        self.patch_head = dino.DINOHead(D, o.hidden, o.bottleneck, o.prototypes) if o.ibot else None
        self.mask_token = nn.Parameter(torch.zeros(1, 1, D)) if o.ibot else None

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(n, C, H, W) -> features (n, D), logits (n, K)."""
        y = self.backbone.embed(x)
        return y, self.head(y)

    def with_patches(self, x: Tensor, masked: Tensor, hide: bool) -> tuple[Tensor, Tensor, Tensor]:
        """(n, C, H, W) -> features (n, D), logits (n, K), and logits (M, K) of the patches that `masked` (n, N) marks.

        With `hide` they are not seen: their pixels are zero, and a learned vector stands in for them.
        """
        assert self.patch_head is not None
        assert self.mask_token is not None
        vit, R = self.backbone, self.backbone.prefix_tokens
        seen = over_pixels(~masked, vit.grid_of(x), vit.config.patch) if hide else None
        z, _ = vit.embed_tokens(x if seen is None else x * seen[:, None])
        if hide:
            hidden = torch.cat([masked.new_zeros(len(masked), R), masked], dim=1)
            z = z + hidden[..., None] * self.mask_token
        for block in vit.blocks:
            z = block(z)
        z = vit.norm(z)
        y = vit.fc_norm(vit.attn_pool(z, None))
        return y, self.head(y), self.patch_head(z[:, R:][masked])


@dataclass(frozen=True)
class Distilled:
    """What student and teacher say of the crops of B images."""

    student: Tensor
    """Logits (V, B, K), the large crops first."""
    teacher: Tensor
    """Logits (G, B, K)."""
    features: Tensor
    """Of the student, for large crops (G, B, D)."""
    hidden_student: Tensor | None = None
    """Logits of the hidden patches (M, K)."""
    hidden_teacher: Tensor | None = None


class SelfDistillation(nn.Module):
    """The student, the teacher that follows it, and the centres of the teacher's answers."""

    centre: Tensor
    patch_centre: Tensor

    def __init__(self, backbone: VisionTransformer, o: DINOOptions) -> None:
        super().__init__()
        self.student = Branch(backbone, o)
        self.teacher = dino.make_teacher(self.student)
        self.register_buffer("centre", torch.zeros(o.prototypes))
        self.register_buffer("patch_centre", torch.zeros(o.prototypes))

    def train(self, mode: bool = True) -> "SelfDistillation":
        """The teacher is never in training mode: nothing in it is left to chance."""
        super().train(mode)
        self.teacher.eval()
        return self

    def forward(self, crops: Crops, noise: tuple[Noise, Noise], masked: Tensor | None) -> Distilled:
        """Crops of one size in one pass; `masked` (B G, N) are the patches of large crops hidden from the student."""
        B, (large, small) = len(crops.large), (crops.large.flatten(0, 1), crops.small.flatten(0, 1))
        with torch.no_grad():
            hidden_t = None
            if masked is None:
                _, teacher = self.teacher(large)
            else:
                _, teacher, hidden_t = self.teacher.with_patches(large, masked, hide=False)
        place_noise(self.student, noise[0], large.device)
        hidden_s = None
        if masked is None:
            y, student = self.student(large)
        else:
            y, student, hidden_s = self.student.with_patches(large, masked, hide=True)
        logits = [_by_crop(student, B)]
        if len(small):
            place_noise(self.student, noise[1], large.device)
            logits.append(_by_crop(self.student(small)[1], B))
        return Distilled(torch.cat(logits), _by_crop(teacher, B), _by_crop(y, B), hidden_s, hidden_t)


def _by_crop(x: Tensor, B: int) -> Tensor:
    """(B n, ...) -> (n, B, ...)."""
    return x.unflatten(0, (B, -1)).transpose(0, 1)


class DINO(Method):
    """A student learns to say of a crop what its own average, the teacher, says of another crop of the same image."""

    name = "dino"
    what = "say the same of different crops of an image"

    def __init__(
        self, backbone: VisionTransformer, config: PretrainConfig, heads_warm_up: bool,
        mean: Callable[[Tensor], Tensor] = lambda x: x,
    ) -> None:  # fmt: skip
        super().__init__(backbone, config, heads_warm_up)
        self.options, self.mean = config.dino, mean  # the mean of a tensor over processes
        self.model = SelfDistillation(backbone, config.dino)
        assert backbone.preprocess is not None
        self.inputs = CropInputs(backbone.preprocess, config.dino, backbone.config.patch)
        self.momentum, self.temperature = config.dino.momentum, config.dino.teacher_temperature
        self.masked: Tensor | None = None
        self.sums_of: dict[str, list[Tensor]] = {}
        """What the teacher said in this step, added up for each centre."""

    @property
    def backbone(self) -> VisionTransformer:
        """The teacher's."""
        return self.model.teacher.backbone

    @property
    def learner(self) -> VisionTransformer:
        """The student's."""
        return self.model.student.backbone

    def before_step(self, progress: float, epoch: float, optimizers: Sequence[Optimizer]) -> None:
        """Momentum and temperature of the teacher follow their schedules."""
        super().before_step(progress, epoch, optimizers)
        o = self.options
        self.momentum = dino.teacher_momentum(progress, o.momentum)
        self.temperature = dino.teacher_temperature(
            progress, o.temperature_warmup, o.teacher_temperature, o.teacher_temperature_end
        )
        self.sums_of = {"centre": [], "patch_centre": []}

    def forward(self, model: nn.Module, inputs: Crops, targets: Tensor, noise: Noise) -> Distilled:
        """What both say."""
        of_crops = self.inputs.noise(noise)
        self.masked = self._masked(inputs.large, of_crops[0]) if self.options.ibot else None
        out = model(inputs, of_crops, self.masked)
        for name, logits in (("centre", out.teacher), ("patch_centre", out.hidden_teacher)):
            if logits is not None:
                self.sums_of[name].append(_sum_and_count(logits))
        return out

    def _masked(self, large: Tensor, noise: Noise) -> Tensor:
        """Patches (B G, N) to hide: a share of them in half of the crops."""
        G_h, G_w = self.learner.grid_of(large)
        numbers = noise.uniform("hide", G_h * G_w)
        masked = random_masking(numbers, self.options.ibot_hidden).masked
        return (masked & noise.chance("hide ?", 0.5)[:, None]).to(large.device)

    def loss(self, outputs: Distilled, targets: Tensor, partners: Tensor, own: Tensor) -> Tensor:
        """DINO's, and with their weights iBOT's and KoLeo's."""
        o = self.options
        answers = dino.teacher_probabilities(outputs.teacher, self.model.centre, self.temperature)
        loss = dino.dino_loss(outputs.student, answers, o.student_temperature)
        if outputs.hidden_student is not None:
            assert outputs.hidden_teacher is not None
            assert self.masked is not None
            hidden = dino.teacher_probabilities(outputs.hidden_teacher, self.model.patch_centre, self.temperature)
            loss = loss + o.ibot * dino.ibot_loss(outputs.hidden_student, hidden, self.masked, o.student_temperature)
        if o.koleo and outputs.features.shape[1] > 1:
            spread = torch.stack([dino.koleo_loss(y) for y in outputs.features]).mean()
            loss = loss + o.koleo * spread
        return loss

    def sums(self, outputs: Distilled, targets: Tensor) -> dict[str, float]:
        """How sure the teacher is of the crops of this batch."""
        answers = dino.teacher_probabilities(outputs.teacher, self.model.centre, self.temperature)
        return counted(targets, teacher_entropy=dino.teacher_entropy(answers.flatten(0, 1)))

    def before_update(self, epoch: float) -> None:
        """The last layer rests in the first epochs."""
        super().before_update(epoch)
        if self.rests(epoch, self.options.freeze_last_epochs):
            heads = [self.model.student.head, self.model.student.patch_head]
            for head in filter(None, heads):
                drop_gradients(head.last_layer)

    def after_update(self) -> None:
        """Teacher and centres follow."""
        dino.update_teacher(self.model.teacher, self.model.student, self.momentum)
        for name, sums in self.sums_of.items():
            if sums:
                total = self.mean(torch.stack(sums).sum(dim=0))
                mean = total[None, :-1] / total[-1].clamp(min=1)
                setattr(
                    self.model, name, dino.update_centre(getattr(self.model, name), mean, self.options.centre_momentum)
                )

    def watch(self, x: Tensor, samples: Tensor) -> Kept:
        """The teacher's features of whole images, and its answers."""
        y, logits = self.model.teacher(x)
        return {"features": y, "answers": dino.teacher_probabilities(logits, self.model.centre, self.temperature)}

    def signals(self, kept: Kept) -> dict[str, float]:
        """How sure the teacher is, and how much its answers tell about the images."""
        return {
            "teacher_entropy": dino.teacher_entropy(kept["answers"]),
            "teacher_information": dino.teacher_information(kept["answers"]),
        }

    def trouble(self, kept: Kept) -> str:
        """Collapse."""
        found = dino.collapse(kept["answers"])
        return f"{found.kind} collapse: {found.advice}" if found else super().trouble(kept)


def _sum_and_count(logits: Tensor) -> Tensor:
    """(..., K) -> (K + 1): their sum, and how many there are."""
    rows = logits.flatten(0, -2)
    rows = rows.to(torch.promote_types(rows.dtype, torch.float32))
    return torch.cat([rows.sum(dim=0), rows.new_tensor([len(rows)])])
