"""A history of torch's allocator, recorded on a card, against the model of it: the same segments in the same order."""

from __future__ import annotations

import json
from pathlib import Path

import attrs
import pytest

from startup_fsm.pages import MIB, TraceEntry
from startup_fsm.trace import ACTIONS, Call, History, Segment, compare

RECORDED = Path(__file__).parents[1] / "data" / "h200_trace.json"


@pytest.fixture(scope="module")
def history():
    return History.from_data(json.loads(RECORDED.read_text(encoding="utf-8")))


def entries(*rows):
    return tuple(TraceEntry(action, addr, size, 0, (0, 0)) for action, addr, size in rows)


def small(*rows, calls=()):
    """A history made by hand."""
    return History(torch="-", device="-", total_bytes=1 << 30, entries=entries(*rows), calls=tuple(calls))


class TestRecorded:
    def test_of_a_card(self, history):
        """It was recorded on an H200, and is small enough to keep."""
        assert history.device == "NVIDIA H200"
        assert history.torch.startswith("2.11")
        assert RECORDED.stat().st_size < 300_000

    def test_covers(self, history):
        """It has a load, an eager step, pool scopes, captures into a pool, a teardown, and the same once more."""
        calls = [call.call for call in history.calls]
        assert calls.count("open_pool") == 4
        assert sum(call.stream is not None for call in history.calls) == 8
        assert {entry.action for entry in history.entries} == set(ACTIONS[:5])
        assert len({segment.size for segment in history.segments}) >= 5

    def test_same_segments(self, history):
        """The model asks the driver for the same segments, and gives them back, in the same order."""
        compared = compare(history)
        assert compared.first_difference is None
        assert compared.is_equal
        assert len(compared.recorded) == 56

    def test_same_blocks(self, history):
        """Every block lies where torch placed it."""
        compared = compare(history)
        assert (compared.moved, compared.unknown) == (0, 0)

    @pytest.mark.parametrize("call", ["begin", "release", "empty_cache"])
    def test_notices(self, history, call):
        """Left out one kind of call, the two part: the comparison is not true of anything."""
        left = tuple(each for each in history.calls if each.call != call)
        if call == "begin":
            left = tuple(each for each in left if each.call not in ("end", "release"))
        compared = compare(attrs.evolve(history, calls=left))
        assert not compared.is_equal
        assert compared.first_difference is not None


class TestByHand:
    def test_difference(self):
        """The first place where they part is told, with both sides."""
        one = small(("segment_alloc", 1 << 40, 32 * MIB), ("alloc", 1 << 40, 3 * MIB))
        compared = compare(one)
        place, recorded, modelled = compared.first_difference
        assert (place, recorded) == (0, Segment("segment_alloc", 1 << 40, 32 * MIB, 0))
        assert (modelled.action, modelled.size) == ("segment_alloc", 20 * MIB)

    def test_missing_at_the_end(self):
        """A segment that only torch gave back is a difference at the end."""
        base = 1 << 40
        one = small(
            ("segment_alloc", base, 20 * MIB),
            ("alloc", base, 3 * MIB),
            ("free_requested", base, 3 * MIB),
            ("free_completed", base, 3 * MIB),
            ("segment_free", base, 20 * MIB),
        )
        assert compare(one).first_difference == (1, Segment("segment_free", base, 20 * MIB, 0), None)
        assert compare(attrs.evolve(one, calls=(Call(at=4, call="empty_cache"),))).is_equal

    def test_more_than_recorded(self):
        """A model that asks for more goes on at addresses of its own."""
        base = 1 << 40
        one = small(("segment_alloc", base, 20 * MIB), ("alloc", base, 12 * MIB), ("alloc", base + 12 * MIB, 12 * MIB))
        compared = compare(one)
        assert [segment.size for segment in compared.modelled] == [12 * MIB, 12 * MIB]
        assert len({segment.addr for segment in compared.modelled}) == compared.moved == 2

    def test_freed_later(self):
        """A block whose free is not completed at once was used by another stream, and stays until the next look."""
        base = 1 << 40
        one = small(
            ("segment_alloc", base, 20 * MIB),
            ("alloc", base, 12 * MIB),
            ("free_requested", base, 12 * MIB),
            ("alloc", base + 12 * MIB, 2 * MIB),
            ("free_completed", base, 12 * MIB),
        )
        assert compare(one).unknown == 0

    def test_unknown(self):
        """A free of what was allocated before the history began is counted."""
        assert compare(small(("free_requested", 1 << 40, MIB))).unknown == 1

    def test_shape(self):
        """Data of another shape is refused."""
        with pytest.raises(KeyError):
            History.from_data({"torch": "2.11"})
