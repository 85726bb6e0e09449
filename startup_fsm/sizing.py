"""From what was measured to the size of the KV cache: the inputs of the budget, each with its source."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from startup_fsm import budget
from startup_fsm.events import BudgetComputed, DecisionMade
from startup_fsm.measurement import CAPTURED_ALREADY, Measurement
from startup_fsm.memory import Snapshot


@attrs.frozen(kw_only=True)
class Wanted:
    """
    What the KV cache is for.

    Attributes:
        block_bytes: Bytes of one KV block over all layers, with whatever grows beside it.
        needed_blocks: Blocks of one longest request; None where nobody said.
        graphs: Whether graphs are still to be captured.
        reserve: What the engine will take after this by itself, in bytes by name.
    """

    block_bytes: int
    needed_blocks: int | None
    graphs: bool
    reserve: Mapping[str, int]


def size_kv(measurement: Measurement, knobs: budget.Knobs, wanted: Wanted, state: str, visit: int) -> BudgetComputed:
    """Read memory once more, and compute the budget; every choice on the way is a decision in the journal."""
    now = measurement.snapshot(state, visit, "sizing")
    graphs = _for_graphs(measurement, knobs, state) if wanted.graphs else (0, budget.NOT_APART)
    if measurement.profile_peak is None:
        reason = "no activations were profiled: nothing is kept free for the largest step"
        measurement.recorder.record(DecisionMade(decision="no_headroom", reason=reason, state=state))
    inputs = _inputs(measurement, knobs, wanted, now, graphs)
    computed = budget.compute(inputs)
    if measurement.arena is None:
        return computed
    # Blocks are those whose mapping fits, granules included.
    within = measurement.arena.blocks_within(max(0, computed.available_bytes))
    return budget.compute(attrs.evolve(inputs, most_blocks=within))


def _for_graphs(measurement: Measurement, knobs: budget.Knobs, state: str) -> tuple[int, str]:
    """Bytes to take off for graphs that are still to come, and where that number is from; a decision says why."""
    if measurement.has_real_graphs:
        return 0, CAPTURED_ALREADY
    measured = measurement.recurring
    chosen, source = 0, "nothing measured"
    if isinstance(knobs.graph_estimate, int):
        chosen, source = knobs.graph_estimate, "knob"
    elif knobs.graph_estimate == "none":
        source = "knob: none"
    elif measured is not None:
        source = "measured by release" if measurement.method == "all" else f"from a few sizes by {measurement.method}"
        # A negative delta is a fault of the measure, never a bonus; a check says so.
        chosen = max(0, int(measured * knobs.graph_share))
    learned = measurement.learned_graphs
    if learned > chosen:
        chosen, source = learned, "a failed try"
    measurement.recorder.record(
        DecisionMade(
            decision="reserve_for_graphs",
            reason=source,
            state=state,
            inputs={
                "reserved_bytes": chosen,
                "measured_bytes": measured,
                "graph_estimate": knobs.graph_estimate,
                "graph_share": knobs.graph_share,
                "learned_bytes": learned,
            },
        )
    )
    return chosen, source


def _inputs(
    measurement: Measurement, knobs: budget.Knobs, wanted: Wanted, now: Snapshot, graphs: tuple[int, str]
) -> budget.Inputs:
    readings, peak = measurement.readings, measurement.profile_peak
    settled = readings.get("F2") or readings.get("F0") or now
    baseline = readings.get("F0")
    drift = 0 if baseline is None else now.unexplained_bytes - baseline.unexplained_bytes
    return budget.Inputs(
        total=now.total_bytes,
        requested=knobs.requested(now.total_bytes),
        used_by_us=now.own_bytes,
        free_settled=settled.free_bytes if not measurement.has_real_graphs else now.free_bytes,
        free_now=now.free_bytes,
        graphs=graphs[0],
        # Against what torch held just after profiling, settled: what came since is in ``used_by_us`` already.
        headroom=0 if baseline is None else budget.headroom_bytes(peak or 0, baseline.reserved_bytes),
        margin=budget.margin_bytes(now.total_bytes, drift=max(0, drift), late_return=measurement.late_return),
        shortfall=measurement.shortfall,
        reserve=wanted.reserve,
        block_bytes=wanted.block_bytes,
        needed_blocks=wanted.needed_blocks,
        pinned=knobs.kv_cache_memory_bytes,
        mapped=now.arena_mapped_bytes,
        sources={
            "requested": "requested_bytes" if knobs.requested_bytes is not None else "gpu_memory_utilization",
            "used_by_us": now.sources.get("process", "inferred"),
            "free": now.sources.get("device", "device"),
            "graphs": graphs[1],
            "headroom": "profile_activations" if peak is not None else "not profiled",
        },
    )
