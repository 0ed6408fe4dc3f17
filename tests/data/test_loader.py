import itertools
import os
import threading

import pytest
import torch
from PIL import Image

from vitral.config import Augmentation, Preprocess
from vitral.data.inputs import ImageInputs
from vitral.data.loader import TrainLoader, eval_batches
from vitral.data.sources.base import Data, ImageArray, ImageFiles
from vitral.errors import DataError, ImageError

P = Preprocess(img_size=(6, 9), crop_mode="squash", mean=(0.5,), std=(0.5,))


def array_data(n=23):
    pixels = torch.arange(n, dtype=torch.uint8)[:, None, None, None].expand(n, 1, 6, 9).contiguous()
    return Data(
        "numbers", ImageArray(pixels), torch.arange(n) % 3, ["a", "b", "c"], {"train": torch.arange(n)}, mode="grey"
    )


@pytest.fixture
def file_data(tmp_path):
    paths = []
    for i in range(11):
        paths.append(tmp_path / f"{i}.png")
        Image.new("L", (40, 30), i).save(paths[-1])
    return Data("files", ImageFiles(paths), torch.arange(11) % 2, ["a", "b"], {"train": torch.arange(11)}, mode="grey")


def loader(data, batch=4, seed=0, workers=0, rank=0, world=1, crop=1.0, strict=False, repeats=1):
    augment = Augmentation(crop_scale=crop, repeats=repeats)
    return TrainLoader(data, ImageInputs(P), augment, batch, seed, strict, workers, rank, world)


def take(batches, count):
    return list(itertools.islice(batches, count))


def test_an_epoch_has_every_image_at_most_once_and_the_next_another_order():
    one = take(loader(array_data()).batches(0), 10)
    assert loader(array_data()).steps_per_epoch == 5
    epochs = [torch.cat([b.inputs[:, 0, 0, 0] for b in one[i : i + 5]]) for i in (0, 5)]
    for epoch in epochs:
        assert len(epoch.unique()) == 20
    assert epochs[0].tolist() != epochs[1].tolist()
    for batch in one:
        assert torch.equal(batch.targets, batch.inputs[:, 0, 0, 0].long() % 3)


def test_no_sample_number_comes_twice_in_a_run():
    samples = torch.cat([b.samples for b in take(loader(array_data()).batches(0), 20)])
    assert len(samples.unique()) == len(samples)


@pytest.mark.parametrize("start", [0, 3, 5, 7, 12])
def test_it_can_be_taken_up_anywhere(start):
    whole = take(loader(array_data()).batches(0), 15)
    for a, b in zip(take(loader(array_data()).batches(start), 15 - start), whole[start:], strict=True):
        assert torch.equal(a.inputs, b.inputs)
        assert torch.equal(a.samples, b.samples)


@pytest.mark.parametrize("world", [2, 4])
def test_processes_share_the_batches_of_one(world):
    whole = take(loader(array_data()).batches(0), 7)
    shares = [take(loader(array_data(), rank=r, world=world).batches(0), 7) for r in range(world)]
    for step in range(7):
        together = torch.cat([share[step].samples for share in shares])
        assert torch.equal(together, whole[step].samples)


def test_the_seed_decides():
    a, b, c = (take(loader(array_data(), seed=s).batches(0), 3) for s in (1, 1, 2))
    assert torch.equal(a[2].inputs, b[2].inputs)
    assert not torch.equal(a[0].inputs, c[0].inputs)


@pytest.mark.parametrize("crop", [1.0, 0.3])
def test_workers_read_the_same(file_data, crop):
    alone = take(loader(file_data, crop=crop).batches(1), 5)
    helped = take(loader(file_data, crop=crop, workers=2).batches(1), 5)
    for a, b in zip(alone, helped, strict=True):
        assert a.inputs.shape == (4, 1, 6, 9)
        assert torch.equal(a.inputs, b.inputs)
        assert torch.equal(a.targets, b.targets)


def test_workers_are_threads_that_end_with_the_reader(file_data, monkeypatch):
    """A fork of a process that has run torch's threads can die without a message."""
    monkeypatch.setattr(os, "fork", lambda: pytest.fail("a process was forked"))
    batches = loader(file_data, workers=2).batches(0)
    next(batches)
    assert [t for t in threading.enumerate() if t.name.startswith("vitral-ahead")]
    batches.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("vitral-ahead")]


def test_repeated_augmentation_gives_views_of_fewer_images():
    batches = take(loader(array_data(), repeats=2).batches(0), 5)
    images = torch.cat([b.inputs[:, 0, 0, 0] for b in batches])
    assert torch.equal(images[0::2], images[1::2])
    assert len(images.unique()) == 10
    assert len(torch.cat([b.samples for b in batches]).unique()) == 20


def test_an_unreadable_file_is_left_out_and_named(file_data):
    file_data.inputs.paths[3].write_bytes(b"broken")
    batches = take(loader(file_data, batch=11).batches(0), 1)
    assert len(batches[0].inputs) == len(batches[0].targets) == len(batches[0].samples) == 10
    assert "3.png is not an image" in batches[0].unreadable[0]
    found = list(eval_batches(file_data, torch.arange(11), ImageInputs(P), 4, False, 0))
    assert sum(len(b.targets) for b in found) == 10
    assert torch.cat([b.samples for b in found]).tolist() == [0, 1, 2, 4, 5, 6, 7, 8, 9, 10]
    with pytest.raises(ImageError, match=r"3\.png is not an image"):
        take(loader(file_data, batch=11, strict=True).batches(0), 1)


def test_a_batch_of_nothing_readable_is_an_error(file_data):
    for path in file_data.inputs.paths:
        path.write_bytes(b"broken")
    with pytest.raises(DataError, match="none of the 4 images of a batch can be read; the first: "):
        take(loader(file_data).batches(0), 1)


def test_a_batch_larger_than_the_data_becomes_the_data():
    assert loader(array_data(5), batch=100).batch_size == 5
    assert loader(array_data(5), batch=100).steps_per_epoch == 1
    with pytest.raises(DataError, match="1 training images are too few for 2 processes"):
        loader(array_data(1), world=2)


def test_a_last_batch_without_a_readable_image_stops_no_evaluation(tmp_path):
    for i in range(4):
        Image.new("RGB", (8, 8), (50 * i, 0, 0)).save(tmp_path / f"{i}.png")
    (tmp_path / "4.png").write_bytes(b"no image")
    files = ImageFiles(sorted(tmp_path.iterdir()))
    data = Data("some", files, torch.arange(5), [str(i) for i in range(5)], {"train": torch.arange(5)})
    inputs = ImageInputs(Preprocess(img_size=8))
    batches = list(eval_batches(data, torch.arange(5), inputs, 2, False, 0))
    assert [batch.samples.tolist() for batch in batches] == [[0, 1], [2, 3]]
    with pytest.raises(DataError, match="none of the 1 images can be read; vitral check says why"):
        list(eval_batches(data, torch.tensor([4]), inputs, 2, False, 0))
    with pytest.raises(ImageError):
        list(eval_batches(data, torch.arange(5), inputs, 2, True, 0))
