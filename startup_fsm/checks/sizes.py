"""Checks of sizes: the budget and its terms, the arena, graphs against their estimate, the peak."""

from __future__ import annotations

from typing import Any, Final, Literal

from startup_fsm import budget, ranks
from startup_fsm.checks.readings import graphs_actual, graphs_reserved, sequence_numbers, used_peak
from startup_fsm.events import BudgetComputed
from startup_fsm.findings import Finding
from startup_fsm.fold import RunState, Visit
from startup_fsm.memory import MIB, Snapshot, format_bytes

PAGE: Final = 2 * MIB
#: Graphs may differ from their estimate by this much before it is worth a warning.
GRAPH_TOLERANCE: Final = 64 * MIB


def terms_once(visit: Visit, before: Snapshot | None, after: Snapshot | None, run: RunState) -> list[Finding]:
    """Each term of the budget is counted once, and they add up."""
    found: list[Finding] = []
    for seq, computed in run.budgets:
        if seq < visit.entered_seq:
            continue
        left_over = budget.adds_up(computed)
        names = [term.term for term in computed.terms]
        if left_over or len(set(names)) != len(names):
            found.append(
                Finding(
                    code="budget.counted_twice",
                    severity="error",
                    state=visit.state,
                    message=f"the terms of the budget leave {format_bytes(left_over)} over",
                    observed=left_over,
                    expected=0,
                    bytes=abs(left_over),
                    evidence=(seq,),
                )
            )
        if computed.kv_bytes > max(0, computed.available_bytes):
            found.append(
                Finding(
                    code="budget.pinned_too_large",
                    severity="warning",
                    state=visit.state,
                    message=f"{format_bytes(computed.kv_bytes)} of KV cache were asked for,"
                    f" {format_bytes(computed.available_bytes)} are left for it",
                    observed=computed.kv_bytes,
                    expected=computed.available_bytes,
                    bytes=computed.kv_bytes - computed.available_bytes,
                    evidence=(seq,),
                )
            )
    return found


def mapped_within_reserved(
    visit: Visit, before: Snapshot | None, after: Snapshot | None, run: RunState
) -> list[Finding]:
    """An arena maps no more than it reserved."""
    if run.arena is None:
        return []
    seq, arena = run.arena
    if arena.mapped_bytes <= arena.reserved_bytes:
        return []
    return [
        Finding(
            code="kv.unmapped_touch",
            severity="error",
            state=visit.state,
            message=f"{format_bytes(arena.mapped_bytes)} are mapped of {format_bytes(arena.reserved_bytes)} reserved",
            observed=arena.mapped_bytes,
            expected=arena.reserved_bytes,
            evidence=(seq,),
        )
    ]


def estimate_positive(visit: Visit, before: Snapshot | None, after: Snapshot | None, run: RunState) -> list[Finding]:
    """What came back when graphs died is not negative: then something else moved while we measured."""
    return [
        Finding(
            code="graphs.estimate_negative",
            severity="warning",
            state=visit.state,
            message=f"the throwaway graphs seem to take {format_bytes(made.recurring_bytes)}: nothing is reserved",
            observed=made.recurring_bytes,
            expected=0,
            bytes=-made.recurring_bytes,
            evidence=(seq,),
        )
        for seq, made in run.estimates
        if seq > visit.entered_seq and made.recurring_bytes < -PAGE
    ]


def graphs_as_estimated(visit: Visit, before: Snapshot | None, after: Snapshot | None, run: RunState) -> list[Finding]:
    """The graphs took what was reserved for them."""
    actual, reserved = graphs_actual(visit), graphs_reserved(visit, run)
    if actual is None or reserved is None:
        return []
    seq, promised = reserved
    estimate = next((made for _, made in reversed(run.estimates)), None)
    tolerance = GRAPH_TOLERANCE + (estimate.error_bytes if estimate else 0)
    off = actual - promised
    if abs(off) <= tolerance:
        return []
    if off < 0 and estimate is not None and abs(estimate.recurring_bytes - actual) <= tolerance:
        # More was kept back on purpose, by a knob or after a failed try.
        severity: Literal["warning", "note"] = "note"
    else:
        severity = "warning"
    code = ("graphs.not_reserved" if promised == 0 else "graphs.estimate_short") if off > 0 else "graphs.estimate_long"
    return [
        Finding(
            code=code,
            severity=severity,
            state=visit.state,
            message=f"graphs took {format_bytes(actual)}, {format_bytes(promised)} were reserved for them",
            observed=actual,
            expected=promised,
            tolerance=tolerance,
            bytes=abs(off),
            evidence=(seq, *sequence_numbers(visit, "enter", "F3", "leave")),
        )
    ]


def within_request(visit: Visit, before: Snapshot | None, after: Snapshot | None, run: RunState) -> list[Finding]:
    """The peak over ``verify`` stays within the request, and not far below it."""
    peak = used_peak(visit)
    if peak is None or after is None or not run.budgets:
        return []
    seq, computed = run.budgets[-1]
    over = peak - computed.requested_bytes
    granule = max(computed.block_bytes, run.arena[1].granule_bytes if run.arena else 0, PAGE)
    margin = -budget.term(computed, "margin") - budget.term(computed, "shortfall")
    evidence = (seq, *sequence_numbers(visit, "leave"))
    requested = computed.requested_bytes
    common: dict[str, Any] = {
        "state": visit.state,
        "observed": peak,
        "expected": requested,
        "evidence": evidence,
    }
    if over > 0:
        return [
            Finding(
                code="budget.overrun",
                severity="warning",
                message=f"the start peaked {format_bytes(over)} above its request of {format_bytes(requested)}"
                + _what_took_more(visit, run, computed),
                tolerance=0,
                bytes=over,
                **common,
            )
        ]
    limited = budget.term(computed, "not_free") < 0 or computed.kv_bytes + granule < computed.available_bytes
    if limited or -over <= margin + granule:
        return []
    wasteful = -over > margin + granule + max(256 * MIB, computed.requested_bytes // 20)
    return [
        Finding(
            code="budget.unused",
            severity="warning" if wasteful else "note",
            message=f"{format_bytes(-over)} of the request stay unused; the margin is {format_bytes(margin)}",
            tolerance=margin + granule,
            bytes=-over,
            **common,
        )
    ]


def _what_took_more(verify: Visit, run: RunState, computed: BudgetComputed) -> str:
    """Where an overrun came from: what each state after sizing took beyond what the budget had for it."""
    # What the engine takes by a name of its own may come in any of them.
    kept = -sum(term.bytes for term in computed.terms if term.source == budget.OF_ENGINE)
    meant = {"allocate_kv": (computed.kv_bytes, "more than its blocks")}
    if budget.source_of(computed, "graphs") != budget.NOT_APART:
        meant["capture_graphs"] = (-budget.term(computed, "graphs"), "more than was reserved")
    said: list[str] = []
    for state, (size, words) in meant.items() if run.last("commit_kv") is None else ():
        last = run.last(state)
        if last is None or last.before is None or last.after is None:
            continue
        settled = last.snapshots["F3"][1] if "F3" in last.snapshots else last.after
        more = settled.own_bytes - last.before.own_bytes - size - kept
        if more > 2 * PAGE:
            said.append(f"{state} took {format_bytes(more)} {words}")
    peak = used_peak(verify)
    if peak is not None and verify.before is not None:
        more = peak - verify.before.own_bytes + budget.term(computed, "headroom") - kept
        if more > 2 * PAGE:
            said.append(f"verify {format_bytes(more)} more than the headroom")
    return f": {', '.join(said)}" if said else ""


def ranks_even(visit: Visit, before: Snapshot | None, after: Snapshot | None, run: RunState) -> list[Finding]:
    """The smallest rank does not leave too much of the others unused."""
    return ranks.judged_even(run, visit.entered_seq)
