"""Whole starts on a card, with an engine of a few matrices: what was predicted is what was taken."""

from __future__ import annotations

import pytest

from startup_fsm.errors import CheckFailed
from startup_fsm.memory import GIB, MIB
from startup_fsm.plan import single_capture, throwaway
from tests.gpu.little_engine import SIZES, LittleEngine, OwnCaptures

pytestmark = pytest.mark.gpu


def used_peak(visit):
    """Most that the process had during a visit: outside torch, arena, and the peak of what torch reserved."""
    return visit.after.outside_bytes + visit.after.arena_mapped_bytes + visit.after.reserved_peak_bytes


def findings(boot):
    """Codes of findings that are more than notes."""
    return [each.code for _, judged in boot.history.checks for each in judged.findings if each.severity != "note"]


def test_throwaway(start):
    """What the throwaway graphs gave back is what the real ones take, and the request is filled to the margin."""
    engine, boot, budget = start(throwaway())
    history = boot.history
    capture = history.last("capture_graphs")
    taken = capture.after.own_bytes - capture.before.own_bytes
    predicted = history.estimates[-1][1].recurring_bytes
    print(f"predicted {predicted / MIB:.1f} MiB, taken {taken / MIB:.1f} MiB, blocks {budget.blocks}")
    assert history.finished[1].end == "ready"
    assert findings(boot) == []
    assert abs(taken - predicted) <= 4 * MIB
    peak, margin = used_peak(history.last("verify")), 151 * MIB
    print(f"peak {peak / MIB:.1f} of {8 * GIB / MIB:.0f} MiB requested")
    assert 0 <= 8 * GIB - peak <= margin + engine.kv_block_bytes() + 2 * MIB
    assert [each.instantiate_bytes is None for _, each in capture.captures] == [False] * len(SIZES)


def test_single_capture(start):
    """One capture; the last block was mapped after it, and replay into it equals eager."""
    engine, boot, budget = start(single_capture())
    history = boot.history
    mapped = history.last("verify").after
    print(f"blocks {budget.blocks}, mapped {mapped.arena_mapped_bytes / MIB:.1f} MiB")
    assert history.finished[1].end == "ready"
    assert findings(boot) == []
    assert len(history.visits_of("capture_graphs")) == 1
    assert engine.usable == budget.blocks > engine.profiling_blocks()
    assert used_peak(history.last("verify")) <= 8 * GIB
    assert mapped.arena_mapped_bytes <= mapped.arena_reserved_bytes


def test_capture_fails(start):
    """A throwaway capture that fails is repaired, proven, and the start goes on without graphs where that is allowed."""
    _, boot, _ = start(throwaway(allow_eager=True), LittleEngine(breaks=True), allow_eager=True)
    history = boot.history
    repair = history.last("recover_allocator").probes["repair"][1]
    print(dict(repair.result))
    assert repair.result["proven"]
    assert history.last("capture_throwaway").failed.category == "capture"
    assert history.finished[1].end == "ready"
    assert history.last("capture_graphs") is None


def test_captures_of_the_engines_own(start):
    """Graphs of plain torch, in a pool that nobody was told of: estimated, compared, and proven gone like ours."""
    engine, boot, _ = start(throwaway(), OwnCaptures())
    history = boot.history
    capture, trial = history.last("capture_graphs"), history.last("capture_throwaway")
    taken = capture.after.own_bytes - capture.before.own_bytes
    predicted = history.estimates[-1][1].recurring_bytes
    peak = used_peak(history.last("verify"))
    print(f"predicted {predicted / MIB:.1f} MiB, taken {taken / MIB:.1f} MiB, peak {peak / MIB:.1f} MiB")
    assert history.finished[1].end == "ready"
    assert findings(boot) == []
    assert trial.captures == []
    assert trial.after.foreign_pools - trial.before.foreign_pools
    assert predicted > 16 * MIB
    assert abs(taken - predicted) <= 4 * MIB
    # The workspace of the stream that it warms up on is taken off with the graphs and with the headroom.
    assert 0 <= 8 * GIB - peak <= (151 + 32) * MIB + engine.kv_block_bytes() + 2 * MIB


def test_a_graph_of_the_engines_own_that_stays(start):
    """It could be replayed, and its pool still holds memory: the start ends after teardown, and says who holds it."""
    with pytest.raises(CheckFailed) as caught:
        start(throwaway(), OwnCaptures(keeps="graph"))

    (found,) = caught.value.findings
    print(found.message)
    assert (found.code, found.state) == ("teardown.graphs_alive", "teardown")
    assert "OwnCaptures.kept" in found.message


def test_an_output_of_the_engines_own_that_stays(start):
    """Its graph is gone, so it does no harm but to memory: a warning with its holder."""
    _, boot, _ = start(throwaway(), OwnCaptures(keeps="output"))

    (found,) = [each for _, judged in boot.history.checks for each in judged.findings if each.severity == "warning"]
    print(found.message)
    assert (found.code, found.state) == ("teardown.pool_held", "teardown")
    assert "OwnCaptures.kept" in found.message
