"""DINO (Caron et al., 2021, arXiv:2104.14294): a student learns to say of a crop what its own average says of another.

B images, V crops of each that the student sees, the first G of which the teacher sees too, K prototypes, D width. The
terms that DINOv2 adds (Oquab et al., 2023, arXiv:2304.07193) are functions of their own. Knows nothing of the loop that
makes the crops, or of how often what is called.
"""

import copy
import math
from typing import Literal, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitral.errors import InputError
from vitral.models.init import init_weights

M = TypeVar("M", bound=nn.Module)


class DINOHead(nn.Module):
    """g(x)_k = <w_k / |w_k|, h / |h|>, h = MLP(x) of three layers with GELU: (..., D) -> logits (..., K).

    The last layer is weight-normalised with its norm fixed at 1, so that only the direction of each prototype w_k is
    learned; both sides being unit vectors, the logits are cosines.
    """

    def __init__(self, dim: int, hidden: int, bottleneck: int, prototypes: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(
            nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, hidden), nn.GELU(), nn.Linear(hidden, bottleneck)
        )
        self.last_layer = nn.Linear(bottleneck, prototypes, bias=False)
        init_weights(self)

    def forward(self, x: Tensor) -> Tensor:
        """(..., D) -> (..., K)."""
        h = F.normalize(self.mlp(x), dim=-1)  # (..., bottleneck)
        return F.linear(h, F.normalize(self.last_layer.weight, dim=-1))


# ---- the teacher ----


def make_teacher(student: M) -> M:
    """A copy of the student that no gradient reaches; `update_teacher` is the only way it learns."""
    return copy.deepcopy(student).requires_grad_(False).eval()


@torch.no_grad()
def update_teacher(teacher: nn.Module, student: nn.Module, momentum: float) -> None:
    """theta_t <- m theta_t + (1 - m) theta_s, in place."""
    for theta_t, theta_s in zip(teacher.parameters(), student.parameters(), strict=True):
        theta_t.lerp_(theta_s, 1 - momentum)


@torch.no_grad()
def teacher_probabilities(logits: Tensor, centre: Tensor, temperature: float) -> Tensor:
    """P_t = softmax((g_t - c) / tau_t): centred, and sharpened by a low temperature. (..., K), (K) -> (..., K)."""
    return ((logits - centre) / temperature).softmax(dim=-1)


@torch.no_grad()
def update_centre(centre: Tensor, logits: Tensor, momentum: float) -> Tensor:
    """c <- m c + (1 - m) mean(g_t), over all rows of the teacher's logits (..., K): (K) -> (K).

    Several processes average their logits' means first, and then agree.
    """
    return momentum * centre + (1 - momentum) * logits.flatten(0, -2).mean(dim=0)


# ---- the losses ----


def dino_loss(student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """-P_t(x_i) . log P_s(x_j), averaged over images and over all pairs of different crops i <= G, j <= V.

    `student` are logits (V, B, K), `teacher` probabilities (G, B, K) of the student's first G crops.
    """
    (V, B, _), G = student.shape, len(teacher)
    if V < 2 or not 1 <= G <= V:
        raise InputError(f"DINO compares different crops: it needs 2 or more, the teacher's first, got {V} and {G}.")
    log_P_s = (student / temperature).log_softmax(dim=-1)
    H = torch.stack([-(P_t * log_P_s).sum(dim=(1, 2)) for P_t in teacher]) / B  # of each pair (G, V)
    return (H.sum() - H.trace()) / (G * V - G)


def ibot_loss(student: Tensor, teacher: Tensor, masked: Tensor, temperature: float) -> Tensor:
    """-P_t . log P_s of the hidden patches: their mean in each image, then the mean over images (Zhou et al., 2022).

    `student` are logits and `teacher` probabilities (M, K) of the M patches that `masked` (B, N) marks, in that order;
    so the head need not be applied to any other. An image with no hidden patch counts as zero.
    """
    H = -(teacher * (student / temperature).log_softmax(dim=-1)).sum(dim=-1)  # (M)
    hidden = masked.sum(dim=1)  # (B)
    return (H / hidden.repeat_interleave(hidden)).sum() / len(masked)


def koleo_loss(x: Tensor) -> Tensor:
    """-1/n sum_i log min_j |x_i - x_j|, on unit vectors: (n, D) -> scalar. It spreads features evenly.

    (Kozachenko and Leonenko's estimate of entropy; Sablayrolles et al., 2019, arXiv:1806.03198.)
    """
    if len(x) < 2:
        raise InputError(f"the KoLeo term needs at least 2 features, got {len(x)}.")
    x = F.normalize(x, dim=-1)
    with torch.no_grad():
        nearest = (x @ x.mT).fill_diagonal_(-2).argmax(dim=1)  # no cosine is below -1
    distance = (x - x[nearest]).norm(dim=1)
    return -(distance + 1e-8).log().mean()


# ---- the schedules, at `progress` 0..1 of the run ----


def cosine_between(progress: float, start: float, end: float) -> float:
    """From start to end along half a cosine."""
    return end + (start - end) * 0.5 * (1 + math.cos(math.pi * progress))


def teacher_momentum(progress: float, start: float) -> float:
    """The momentum of `update_teacher`: it rises to 1, where the teacher stands still."""
    return cosine_between(progress, start, 1.0)


def weight_decay(progress: float, start: float, end: float) -> float:
    """The decay of weights, which grows (0.04 to 0.4 in the paper)."""
    return cosine_between(progress, start, end)


def teacher_temperature(progress: float, warmup: float, start: float, end: float) -> float:
    """tau_t: it rises linearly during `warmup`, a share of the run, for a sharp teacher steadies the first epochs."""
    return start + (end - start) * min(progress / warmup, 1.0) if warmup else end


# ---- is it going well ----


def entropy(p: Tensor) -> Tensor:
    """-sum_k p_k log p_k, in nats: (..., K) -> (...)."""
    return torch.special.entr(p).sum(dim=-1)


def teacher_entropy(probabilities: Tensor) -> float:
    """The mean entropy of the teacher's answers (n, K): 0 if each is one prototype, log K if all are even."""
    return entropy(probabilities.float()).mean().item()


def teacher_information(probabilities: Tensor) -> float:
    """H(mean answer) - mean H(answer), for answers (n, K): what the teacher's answer tells about the image, in nats.

    It is 0 if every image gets the same answer, whatever that is, and at most log min(n, K). Each image is to come with
    one crop only: several would add what tells crops apart.
    """
    p = probabilities.float()
    return (entropy(p.mean(dim=0)) - entropy(p).mean()).item()


def feature_rank(x: Tensor) -> float:
    """exp(H(sigma / sum sigma)), sigma the singular values of features (n, D): from 1, all parallel, to min(n, D).

    (Effective rank: Roy and Vetterli, 2007; as a sign of good features: Garrido et al., 2023, arXiv:2210.02885.)
    """
    sigma = torch.linalg.svdvals(x.float())
    return entropy(sigma / sigma.sum().clamp(min=1e-12)).exp().item()


def feature_std(x: Tensor) -> float:
    """sqrt(D) times the mean deviation of a channel, of unit vectors (n, D): 0 if all are equal, 1 if spread evenly.

    (Chen and He, 2021, arXiv:2011.10566.)
    """
    x = F.normalize(x.float(), dim=-1)
    return (x.std(dim=0, correction=0).mean() * math.sqrt(x.shape[1])).item()


class Collapse(NamedTuple):
    """The way in which a teacher has stopped telling images apart, and what to do about it."""

    kind: Literal["uniform", "one-point"]
    advice: str


UNIFORM = Collapse(
    "uniform",
    "the teacher gives every image the same even answer: sharpen it (a lower --dino.teacher-temperature-end, a longer "
    "--dino.temperature-warmup), or let the centre follow more slowly (--dino.centre-momentum 0.99).",
)
ONE_POINT = Collapse(
    "one-point",
    "the teacher gives every image the same few prototypes: let the centre follow faster (--dino.centre-momentum 0.8), "
    "raise --dino.teacher-temperature, lower the learning rate, or raise --dino.freeze-last-epochs.",
)
LEAST_INFORMATION = 0.01
"""Of the most that n answers could tell; a teacher that tells less has collapsed."""


def collapse(probabilities: Tensor) -> Collapse | None:
    """Whether the teacher's answers (n, K), one for each image, have collapsed: evenly, to one point, or not (None)."""
    n, K = probabilities.shape
    if n < 2 or K < 2:
        raise InputError(f"collapse shows in 2 or more answers over 2 or more prototypes, got {n} over {K}.")
    if teacher_information(probabilities) > LEAST_INFORMATION * math.log(min(n, K)):
        return None
    return UNIFORM if teacher_entropy(probabilities) > 0.5 * math.log(K) else ONE_POINT
