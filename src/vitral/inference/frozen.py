"""A linear head on frozen features, fitted in seconds: the first answer on new data, and the start of fine-tuning.

n images, D features, K outputs. The loss and the metrics are the task's own, so that every task whose head is one
linear layer on the pooled features can begin like this. Fine-tuning from a fitted head distorts the features less than
from a random one (Kumar et al., 2022).
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from vitral.data.inputs import ImageInputs
from vitral.data.sources.base import Data, fold_numbers
from vitral.data.targets import Values
from vitral.errors import ConfigError, DataError
from vitral.inference.cache import digest, digest_config
from vitral.inference.features import Extractor, extract
from vitral.inference.probe import knn_probe
from vitral.models.backbone import Backbone
from vitral.tasks.base import Found, Task

DECAYS = (1e-3, 1e-2, 1e-1, 1.0)
"""Weight decays that are tried; cross-validation chooses."""
FOLDS = 5
ITERATIONS = 60
"""Steps of L-BFGS: the problem is convex, and a head need not be exact."""
RESAMPLES = 200
"""Bootstrap samples for a standard error."""


@dataclass(frozen=True)
class Head:
    """A linear layer: weight (K, D) and bias (K)."""

    weight: Tensor
    bias: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        """(n, D) -> (n, K)."""
        return x @ self.weight.mT + self.bias


class FrozenStart:
    """Fits the head of a new model before it is trained, and judges afterwards whether training was worth it."""

    def __init__(self, cache: bool = True) -> None:
        self.cache = cache
        self.result: dict[str, Any] = {}
        """What goes into the run's document."""

    def prepare(self, model: Backbone, task: Task, data: Data, say: Callable[[str], None]) -> None:
        """Compute the features of the training and validation images, fit the head, and report how good it is."""
        head = model.head
        if not isinstance(head, nn.Linear):
            raise ConfigError(
                f"a probe needs a linear head on the pooled features, and this model has a {type(head).__name__}; "
                f"set --probe none."
            )
        began = time.monotonic()
        self.task = task
        parts = {part: data.splits[part] for part in ("train", "val") if part in data.splits}
        inputs = ImageInputs(model.preprocess)
        look = _look(model.eval())
        extractor = Extractor(inputs.preprocess, look, _identity(model))
        found = extract(replace(data, splits=parts), extractor, self.cache)
        self.x, self.indices = found.of(torch.cat(list(parts.values())).sort().values)
        if not len(self.x):
            raise DataError(f"{data.name} has no training image that can be read.")
        targets = task.targets(data)
        assert isinstance(targets, Values)  # a linear head has nothing else to learn
        self.y = targets.tensor[self.indices]
        decay, outputs = cross_validate(task, self.x, self.y, data.targets[self.indices])
        self.outputs = outputs
        found_cv = task.found(outputs, self.y)
        score, error = task.metrics(found_cv)[task.better], standard_error(task, found_cv)
        train = torch.isin(self.indices, data.splits["train"])
        self.head = fit_head(task, self.x[train], self.y[train], decay)  # validation images judge it later
        set_head(model, self.head)
        self.result = {
            "images": len(self.x), "folds": FOLDS, "decay": decay, task.better: score, "standard_error": error,
            "seconds": time.monotonic() - began,
        }  # fmt: skip
        words = task.better.replace("_", " ")
        say(
            f"linear probe of the frozen features: {words} {score:.3f} ± {error:.3f} by cross-validation on "
            f"{len(self.x):,} images, after {self.result['seconds']:.0f} s"
        )
        if data.kind == "label":
            train_x, val_x = _halves(self.x, self.y)
            near = knn_probe(train_x, val_x, k=10)["accuracy"]
            self.result["knn_accuracy"] = near
            say(f"k-NN on the same features: accuracy {near:.3f}")

    def prefers_training(self, found: Found, say: Callable[[str], None]) -> bool:
        """Whether the trained model is better than the probe, by one standard error, on the validation images."""
        rows = {int(index): row for row, index in enumerate(self.indices.tolist())}
        known = [i for i, index in enumerate(found["indices"].tolist()) if index in rows]
        if not known:
            return True
        here = torch.tensor([rows[int(found["indices"][i])] for i in known])
        probe = self.task.found(self.outputs[here], self.y[here])
        tuned = {name: values[torch.tensor(known)] for name, values in found.items() if name != "indices"}
        before, after = (self.task.metrics(each)[self.task.better] for each in (probe, tuned))
        error = standard_error(self.task, tuned, probe)
        kept = after - before > error
        self.result |= {"val_probe": before, "val_trained": after, "difference_error": error, "kept": not kept}
        words = self.task.better.replace("_", " ")
        which = "the fine-tuned model is kept" if kept else "the probe is kept: fine-tuning is not better by one error"
        say(
            f"validation {words}: {after:.3f} fine-tuned, {before:.3f} by the probe, a difference of "
            f"{after - before:+.3f} ± {error:.3f}; {which}"
        )
        return kept

    def restore(self, model: Backbone) -> None:
        """Give a model, with its weights as they were before training, the fitted head."""
        set_head(model, self.head)


def _identity(model: Backbone) -> str:
    """What features depend on: the model without its head."""
    body = (value for name, value in model.state_dict().items() if not name.startswith("head."))
    return f"{digest_config(model)} {digest(body)} embed"


def _look(model: Backbone) -> Callable[[Tensor], Tensor]:
    device = next(model.parameters()).device
    return lambda x: model.embed(x.to(device)).float().cpu()


def _halves(x: Tensor, y: Tensor) -> Any:
    part = fold_numbers(y, 2, seed=0).bool()
    return (x[~part], y[~part]), (x[part], y[part])


# ---- fitting ----


def fit_head(task: Task, x: Tensor, y: Tensor, decay: float) -> Head:
    """Minimise the task's loss of x W^T + b, plus decay / 2 |W|^2 for standardised x, by L-BFGS."""
    mean, std = x.mean(0), x.std(0, correction=0)
    std = std.where(std > 1e-6, 1.0)
    z = (x - mean) / std
    W = torch.zeros(task.outputs, x.shape[1], requires_grad=True)
    b = torch.zeros(task.outputs, requires_grad=True)
    own = torch.ones(len(x))
    optimizer = torch.optim.LBFGS([W, b], max_iter=ITERATIONS, line_search_fn="strong_wolfe")

    def closure() -> float:
        optimizer.zero_grad()
        loss = task.loss(z @ W.mT + b, y, y, own) + decay / 2 * W.square().sum()
        loss.backward()
        return cast(float, loss)

    with torch.enable_grad():
        optimizer.step(closure)
    weight = W.detach() / std
    return Head(weight, b.detach() - weight @ mean)


def cross_validate(task: Task, x: Tensor, y: Tensor, strata: Tensor) -> tuple[float, Tensor]:
    """The decay with the best metric, and the outputs (n, K) that heads gave for images they were not fitted on."""
    part = fold_numbers(strata, min(FOLDS, len(x)), seed=0)
    tried = []
    for decay in DECAYS:
        outputs = torch.zeros(len(x), task.outputs)
        for fold in part.unique().tolist():
            away = part == fold
            outputs[away] = fit_head(task, x[~away], y[~away], decay)(x[away])
        tried.append((task.metrics(task.found(outputs, y))[task.better], decay, outputs))
    _, decay, outputs = max(tried, key=lambda each: each[0])
    return decay, outputs


def set_head(model: Backbone, head: Head) -> None:
    """Copy a head into a model."""
    own = cast(nn.Linear, model.head)
    with torch.no_grad():
        own.weight.copy_(head.weight)
        own.bias.copy_(head.bias)


# ---- judging ----


def standard_error(task: Task, found: Found, other: Found | None = None) -> float:
    """Standard error of the task's metric by the bootstrap, or of its difference on the same images."""
    n = len(next(iter(found.values())))
    generator = torch.Generator().manual_seed(0)
    values = []
    for _ in range(RESAMPLES):
        rows = torch.randint(n, (n,), generator=generator)
        a, b = ({k: v[rows] for k, v in each.items()} if each is not None else None for each in (found, other))
        score = task.metrics(a)[task.better]  # type: ignore[arg-type]
        values.append(score - task.metrics(b)[task.better] if b is not None else score)
    return float(torch.tensor(values).std())
