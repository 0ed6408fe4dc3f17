"""Whether learning without labels goes well, seen on images that are not trained on: the same ones each time."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

import torch
from torch import Tensor

from vitral.config import PretrainConfig
from vitral.data.inputs import ImageInputs
from vitral.data.loader import eval_batches
from vitral.data.sources.base import Data
from vitral.data.targets import Values
from vitral.errors import DataError, ImageError
from vitral.inference.probe import Labelled, knn_probe
from vitral.models.dino import feature_rank, feature_std
from vitral.tasks.method import Kept, Method

QUERIES = 0.5
"""Share of labelled images, given for the k-NN signal alone, whose neighbours are looked for among the others."""
LEAST = 32
"""Images that show how it goes; where fewer are kept apart, some that are trained on are looked at too."""


class Health:
    """Looks at a method on a sample of the images kept apart, and on labelled ones where there are any.

    `labelled` are other data than those learned from; without them the labels of the data serve, if they have any. The
    labels never reach the training.
    """

    def __init__(self, data: Data, labelled: Data | None, config: PretrainConfig) -> None:
        self.data, self.config = data, config
        self.watched = _some(_kept_apart(data), config.health_images)
        if len(self.watched) < LEAST:
            self.watched = _some(torch.cat([self.watched, data.splits["train"]]), config.health_images)
        if labelled is not None and labelled.kind != "label":
            raise DataError(f"{labelled.name} has no class labels for the k-NN signal; give data that have, or none.")
        self.labelled = labelled or (data if data.kind == "label" else None)

    @torch.no_grad()
    def look(self, method: Method) -> tuple[dict[str, float], str]:
        """Signals in numbers, and what is wrong, if anything."""
        kept = self._watch(method)
        signals = method.signals(kept)
        signals |= {"feature_rank": feature_rank(kept["features"]), "feature_std": feature_std(kept["features"])}
        if self.labelled is not None and len(_kept_apart(self.labelled)):
            signals["knn"] = self._nearest(method, self.labelled)
        return signals, method.trouble(kept)

    def examples(self, count: int) -> list[Tensor]:
        """Some of the images that can be read, as uint8 (C, H, W)."""
        found: list[Tensor] = []
        for index in self.watched.tolist():
            with suppress(ImageError):
                found.append(self.data.images.read(index, self.data.mode))
            if len(found) == count:
                break
        return found

    def _watch(self, method: Method) -> Kept:
        parts: dict[str, list[Tensor]] = {}
        for x, samples, _ in self._batches(method, self.data, self.watched):
            for name, tensor in method.watch(x, samples).items():
                parts.setdefault(name, []).append(tensor.float().cpu())
        return {name: torch.cat(tensors) for name, tensors in parts.items()}

    def _nearest(self, method: Method, labelled: Data) -> float:
        keys = self._embed(method, labelled, _some(labelled.splits["train"], self.config.neighbours))
        queries = self._embed(method, labelled, _some(_kept_apart(labelled), self.config.health_images))
        return knn_probe(keys, queries)["accuracy"]

    def _embed(self, method: Method, data: Data, indices: Tensor) -> Labelled:
        parts = [(method.backbone.embed(x).float().cpu(), y) for x, _, y in self._batches(method, data, indices)]
        return torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])

    def _batches(self, method: Method, data: Data, indices: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Images as the model takes them, their numbers and their targets."""
        device = next(method.model.parameters()).device
        assert method.backbone.preprocess is not None
        inputs = ImageInputs(method.backbone.preprocess)
        data = replace(data, mode=inputs.mode)  # labelled images may have other channels
        targets = Values(data.targets if data.kind == "label" else torch.zeros(len(data.inputs), 0))
        for batch in eval_batches(data, indices, inputs, self.config.batch_size, False, 0, targets):
            yield inputs.normal(batch.inputs.to(device)), batch.samples, batch.targets


def _kept_apart(data: Data) -> Tensor:
    """Images that are not trained on, if there are any."""
    return data.splits.get("val", torch.empty(0, dtype=torch.long))


def _some(indices: Tensor, count: int) -> Tensor:
    """So many of them, by chance, always the same."""
    order = torch.randperm(len(indices), generator=torch.Generator().manual_seed(0))
    return indices[order[:count]].sort().values
