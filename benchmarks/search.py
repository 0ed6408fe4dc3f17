"""Search: recall and speed of a graph beside the exact search, and the rate of indexing beside that of embedding alone.

`python benchmarks/search.py [--vectors 100000] [--pictures 2000] [--model vit_small_patch16_224]`
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from measure import interleave, ratio, write_json
from vitral import Index, Predictor, create_model
from vitral.retrieval.nearest import Approximate, Exact

ALONE = 20
"""Queries that are asked one by one."""
Search = Callable[[Tensor, int], tuple[Tensor, Tensor]]


def synthetic(n: int, D: int, seed: int, clusters: int = 1000) -> Tensor:
    """Unit vectors around centres, as embeddings of classes lie."""
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(clusters, D, generator=generator)
    own = torch.randint(clusters, (n,), generator=generator)
    return F.normalize(centres[own] + torch.randn(n, D, generator=generator), dim=1)


def recalls(n: int, D: int, queries: int, seconds: float) -> dict[str, dict[str, float]]:
    data = synthetic(n + queries, D, 0)
    vectors, asked = data[:n], data[n:]
    exact = Exact(vectors)
    truth = exact.search(asked, 10)[1].tolist()
    searches, found = {"exact": exact.search}, {}
    for kind in ("hnsw", "ivf"):
        began = time.perf_counter()
        made = Approximate.of(vectors, kind)
        built = time.perf_counter() - began
        rows = made.search(asked, 10)[1].tolist()
        recall = float(np.mean([len(set(a) & set(b)) / 10 for a, b in zip(truth, rows, strict=True)]))
        found[kind] = {"recall_at_10": recall, "build_seconds": built}
        searches[kind] = made.search
    found["exact"] = {}
    for way, groups in {"together": [asked], "one_by_one": asked[:ALONE].split(1)}.items():

        def ask(search: Search, groups: Sequence[Tensor] = groups) -> None:
            for some in groups:
                search(some, 10)

        times = interleave({kind: partial(ask, search) for kind, search in searches.items()}, seconds, warmup=1)
        for kind, told in found.items():
            told[f"queries_per_second_{way}"] = sum(map(len, groups)) / statistics.median(times[kind])
            told[f"speed_of_exact_{way}"] = ratio(times, "exact", kind)[0]
    return found


def indexing(model: str, pictures: int, rounds: int) -> dict[str, float]:
    """Pictures a second into an index, as a share of those that the predictor alone embeds."""
    shares = []
    with tempfile.TemporaryDirectory() as folder:
        photos = Path(folder) / "photos"
        photos.mkdir()
        pixels = np.random.default_rng(0)
        for i in range(pictures):
            small = Image.fromarray(pixels.integers(0, 256, (10, 12, 3), np.uint8))
            small.resize((500, 400), Image.Resampling.BICUBIC).save(photos / f"{i:05d}.jpg", quality=90)
        predictor = Predictor(create_model(model, num_classes=0, seed=0))
        files = sorted(photos.iterdir())
        rates = []
        for number in range(rounds):
            began = time.perf_counter()
            predictor.embed(files)
            bare = len(files) / (time.perf_counter() - began)
            _, change = Index.build(predictor, photos, Path(folder) / f"index-{number}")
            rates.append(change.added / change.seconds)
            shares.append(rates[-1] / bare)
    return {"pictures_per_second": float(np.median(rates)), "share_of_bare": float(np.median(shares))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vectors", type=int, default=100_000)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--queries", type=int, default=200)
    parser.add_argument("--pictures", type=int, default=2000)
    parser.add_argument("--model", default="vit_small_patch16_224")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=10.0)
    o = parser.parse_args()
    found = recalls(o.vectors, o.width, o.queries, o.seconds)
    print(f"{o.vectors:,} vectors of width {o.width}, {o.queries} queries, 10 neighbours each")
    for kind, told in found.items():
        way = f"recall {told['recall_at_10']:.3f}, built in {told['build_seconds']:.0f} s; " if kind != "exact" else ""
        print(
            f"  {kind}: {way}queries a second one by one {told['queries_per_second_one_by_one']:,.0f} "
            f"({told['speed_of_exact_one_by_one']:.1f} times exact), all at once "
            f"{told['queries_per_second_together']:,.0f} ({told['speed_of_exact_together']:.1f} times)"
        )
    rate = indexing(o.model, o.pictures, o.rounds)
    print(
        f"indexing {o.pictures:,} JPEGs with {o.model}: {rate['pictures_per_second']:.1f} a second, "
        f"{rate['share_of_bare']:.2f} of embedding alone"
    )
    print(write_json("search", {"nearest": found, "indexing": rate, "options": vars(o)}))


if __name__ == "__main__":
    main()
