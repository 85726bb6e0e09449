"""Figures of the shared list out of one process's journal: each with one definition, whatever the source. Pure."""

from __future__ import annotations

import math

from startup_fsm import budget
from startup_fsm.causes import request_that_fits
from startup_fsm.checks.readings import graphs_actual, used_peak
from startup_fsm.fold import RunState
from startup_fsm.memory import Snapshot


def figures_of(run: RunState) -> dict[str, int | float]:
    """Figures of the shared list, by name; what nothing measured is absent."""
    figures: dict[str, int | float | None] = {name: event.value for name, (_, event) in run.figures.items()}
    first, last = (first_snapshot(run), last_snapshot(run))
    if first is not None and last is not None:
        figures["total_bytes"] = first.total_bytes
        figures["free_at_start_bytes"] = first.free_bytes
        figures["outside_torch_bytes"] = last.outside_bytes
        figures["unexplained_bytes"] = last.unexplained_bytes
        figures["process_bytes"] = last.process_bytes
    for knob in ("gpu_memory_utilization", "max_model_len", "max_num_seqs"):
        value = run.knob(knob)
        if knob == "gpu_memory_utilization" and run.knob("requested_bytes") is not None:
            # Nobody has gone by it.
            continue
        if type(value) in (int, float) and math.isfinite(value):
            figures[knob] = value
    loaded = run.last("load_weights")
    if loaded is not None and loaded.left is not None and loaded.before is not None and loaded.after is not None:
        figures["weights_bytes"] = loaded.after.allocated_bytes - loaded.before.allocated_bytes
    if run.estimates:
        figures["graph_recurring_bytes"] = run.estimates[-1][1].recurring_bytes
        figures["graph_one_time_bytes"] = run.estimates[-1][1].one_time_bytes
    _sized_figures(run, figures)
    for visit in run.visits:
        if visit.state == "capture_graphs" and visit.left is not None:
            figures["graph_actual_bytes"] = graphs_actual(visit)
        if visit.state == "verify" and visit.left is not None:
            figures["used_peak_bytes"] = used_peak(visit)
    if run.ooms:
        figures["oom_tried_bytes"] = run.ooms[-1][1].tried_bytes
        figures["oom_free_bytes"] = run.ooms[-1][1].free_bytes
        figures["torch_allocated_bytes"] = run.ooms[-1][1].allocated_bytes
        figures["torch_reserved_unallocated_bytes"] = run.ooms[-1][1].reserved_unallocated_bytes
        figures["graph_private_pool_bytes"] = run.ooms[-1][1].private_pool_bytes
    return {name: value for name, value in figures.items() if value is not None}


def _sized_figures(run: RunState, figures: dict[str, int | float | None]) -> None:
    if not run.budgets:
        return
    computed = run.budgets[-1][1]
    figures["requested_bytes"] = computed.requested_bytes
    figures["kv_available_bytes"] = computed.available_bytes
    figures["kv_needed_bytes"] = computed.needed_bytes
    figures["graph_estimate_bytes"] = -budget.term(computed, "graphs")
    figures["activation_reserved_peak_bytes"] = -budget.term(computed, "headroom")
    if not computed.missing_bytes:
        figures["kv_cache_bytes"] = computed.kv_bytes
        figures["gpu_blocks"] = computed.blocks
    sizing = run.last("size_kv")
    if sizing is not None and (fits := request_that_fits(sizing, computed)):
        figures["estimated_max_model_len" if computed.missing_bytes else "kv_tokens"] = fits


def first_snapshot(run: RunState) -> Snapshot | None:
    """The first reading of memory; None where none was taken."""
    return next((shot for visit in run.visits for _, shot in visit.snapshots.values()), None)


def last_snapshot(run: RunState) -> Snapshot | None:
    """The last reading of memory; None where none was taken."""
    shots = [pair for visit in run.visits for pair in visit.snapshots.values()]
    return max(shots, key=lambda pair: pair[0])[1] if shots else None
