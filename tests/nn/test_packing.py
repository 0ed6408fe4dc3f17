import torch
from hypothesis import given
from hypothesis import strategies as st

from helpers import images
from vitral.nn.packing import pack, plan_rows, unpack


@given(st.lists(st.integers(1, 40), min_size=1, max_size=30))
def test_every_sequence_has_a_place_of_its_own(lengths):
    places = plan_rows(lengths)
    taken = set()
    for length, place in zip(lengths, places, strict=True):
        assert place.stop - place.start == length
        assert place.stop <= max(lengths)
        cells = {(place.row, i) for i in range(place.start, place.stop)}
        assert not cells & taken
        taken |= cells
    rows = {place.row for place in places}
    assert rows == set(range(len(rows)))
    assert len(rows) <= 2 * -(-sum(lengths) // max(lengths))  # first fit leaves at most one row half empty


def test_packing_keeps_sequences_apart_and_gives_them_back():
    sequences = [images(1, n, 3, seed=n) for n in (5, 11, 2, 3)]
    packed, mask, places = pack(sequences)
    assert packed.shape == (2, 11, 3)
    for sequence, back in zip(sequences, unpack(packed, places), strict=True):
        assert torch.equal(sequence, back)
    for place in places:
        inside = torch.zeros(11, dtype=torch.bool)
        inside[place.start : place.stop] = True
        for i in range(place.start, place.stop):
            assert torch.equal(mask[place.row, 0, i], inside)
    assert mask.any(-1).all()  # an empty cell sees the empty cells, so that no softmax is over nothing
