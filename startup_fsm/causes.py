"""
Why a state failed: the first violated invariant behind an exception, from what was recorded. Pure.

A capture that dies is often the fault of sizing two states before; then the finding names that state, and the failed
state stays what it was.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import attrs

from startup_fsm.checks.readings import graphs_reserved, sequence_numbers
from startup_fsm.events import BudgetComputed, OomObserved
from startup_fsm.findings import Finding
from startup_fsm.fold import RunState, Visit
from startup_fsm.memory import MIB, Snapshot, format_bytes
from startup_fsm.states import FAILED

#: A neighbour that moved less than this is not what a start died of.
_NEIGHBOUR: Final = 16 * MIB


def causes(visit: Visit, run: RunState) -> list[Finding]:
    """What a failed visit died of, most likely first; empty where a check said it already."""
    failed = visit.failed
    if failed is None or visit.ended_seq is None:
        return []
    if failed.category in _JUDGED:
        return _JUDGED[failed.category](visit, run)
    if failed.category == "check" or (failed.category == "peer" and run.peer_failures):
        # A check, or the event that names the other rank, has said it.
        return []
    code, what = _SAID.get(failed.category, ("state.raised", "the engine raised"))
    return [_raised(code, visit, what)]


def was_answered(visit: Visit, run: RunState) -> bool:
    """Whether the start went on from this visit's failure; a recovery that failed itself is no answer."""
    following = next((each for each in run.visits if each.entered_seq > visit.entered_seq), None)
    if following is None:
        # Whatever ended the start after that came in between.
        return any(
            seq > visit.entered_seq and chosen.state == visit.state and chosen.target != FAILED
            for seq, chosen in run.recoveries
        )
    failed = following.failed
    # A signal that arrives while we repair is an end of its own.
    return following.state != "recover_allocator" or failed is None or failed.category == "signal"


def last_oom(visit: Visit, run: RunState) -> OomObserved | None:
    """What the out-of-memory error of this visit said; None where there is none."""
    seqs = range(visit.entered_seq, (visit.ended_seq or visit.entered_seq) + 1)
    return next((event for seq, event in reversed(run.ooms) if seq in seqs), None)


def budget_before(visit: Visit, run: RunState) -> tuple[int, BudgetComputed] | None:
    """The budget that was in force in a visit, with its seq."""
    end = visit.ended_seq if visit.ended_seq is not None else run.last_seq
    return next(((seq, computed) for seq, computed in reversed(run.budgets) if seq <= end), None)


def graphs_needed(visit: Visit, run: RunState) -> int:
    """Bytes that the graphs need at least: as measured, or as far as the capture came and what it asked for next."""
    oom, before, after = last_oom(visit, run), visit.before, visit.after
    seen = 0 if before is None or after is None else after.own_bytes - before.own_bytes
    tried = 0 if oom is None else oom.tried_bytes or 0
    end = visit.ended_seq if visit.ended_seq is not None else run.last_seq
    measured = next((made.recurring_bytes for seq, made in reversed(run.estimates) if seq <= end), 0)
    return max(measured, seen + tried)


def _out_of_memory(visit: Visit, run: RunState) -> list[Finding]:
    if visit.state in _AFTER_SIZING and (neighbour := _neighbour_since_sizing(visit, run)) is not None:
        return [neighbour]
    if visit.state in _BY_STATE:
        return [_BY_STATE[visit.state](visit, run)]
    code, what = _PLAIN.get(visit.state, ("device.out_of_memory", visit.state))
    return [_ran_out(code, visit, run, what)]


def _ran_out(code: str, visit: Visit, run: RunState, what: str) -> Finding:
    oom = last_oom(visit, run)
    tried = 0 if oom is None else oom.tried_bytes or 0
    free = None if oom is None else oom.free_bytes
    text = f"memory ran out in {visit.state}: {what} does not fit"
    if oom is not None and oom.tried_bytes is not None:
        text += f"; {format_bytes(tried)} were asked for, {format_bytes(free or 0)} were free"
    return Finding(
        code=code,
        severity="error",
        state=visit.state,
        part=visit.part,
        message=text,
        observed=tried or None,
        expected=free,
        scope="process",
        bytes=max(0, tried - (free or 0)),
        evidence=_evidence(visit, run),
    )


def _loading(visit: Visit, run: RunState) -> Finding:
    expected, before = visit.notes.get("checkpoint_bytes"), visit.before
    if not isinstance(expected, int) or before is None:
        return _ran_out("device.out_of_memory", visit, run, "the weights")
    missing = before.own_bytes + expected - before.total_bytes
    if missing > 0:
        return Finding(
            code="weights.exceed_device",
            severity="error",
            state=visit.state,
            message=f"the weights have {format_bytes(expected)}, the device {format_bytes(before.total_bytes)} of which"
            f" {format_bytes(before.own_bytes)} were ours already: {format_bytes(missing)} are missing",
            observed=expected,
            expected=before.total_bytes - before.own_bytes,
            bytes=missing,
            evidence=_evidence(visit, run),
        )
    if expected > before.free_bytes:
        short = expected - before.free_bytes
        return Finding(
            code="device.not_enough_free",
            severity="error",
            state=visit.state,
            message=f"the weights have {format_bytes(expected)}, {format_bytes(before.free_bytes)} were free",
            observed=before.free_bytes,
            expected=expected,
            scope="device",
            bytes=short,
            evidence=_evidence(visit, run),
        )
    return _ran_out("device.out_of_memory", visit, run, "more than the checkpoint")


def _neighbour_since_sizing(visit: Visit, run: RunState) -> Finding | None:
    """Another process took memory between the budget and this failure, and more than the failure lacked."""
    sized = _sizing_snapshot(visit, run)
    after = visit.after
    if sized is None or after is None:
        return None
    seq, was = sized
    grown = after.other_bytes - was.other_bytes
    oom = last_oom(visit, run)
    short = 0 if oom is None else (oom.tried_bytes or 0) - (oom.free_bytes or 0)
    if grown < max(_NEIGHBOUR, short):
        return None
    names = {tenant.label: tenant.bytes or 0 for tenant in was.tenants}
    who = max(after.tenants, key=lambda tenant: (tenant.bytes or 0) - names.get(tenant.label, 0)).label
    return Finding(
        code="device.neighbour_grew",
        severity="error",
        state=visit.state,
        message=f"{who} took {format_bytes(grown)} after the KV cache was sized; {format_bytes(short)} were missing",
        observed=after.other_bytes,
        expected=was.other_bytes,
        scope="device",
        bytes=grown,
        evidence=(seq, *_evidence(visit, run)),
    )


def _sizing_snapshot(visit: Visit, run: RunState) -> tuple[int, Snapshot] | None:
    for earlier in reversed(run.visits):
        if earlier.state == "size_kv" and earlier.entered_seq < visit.entered_seq and "sizing" in earlier.snapshots:
            return earlier.snapshots["sizing"]
    return None


def _capturing(visit: Visit, run: RunState) -> Finding:
    sized = graphs_reserved(visit, run)
    if sized is None:
        return _ran_out("capture.out_of_memory", visit, run, "a graph")
    seq, reserved = sized
    needed = graphs_needed(visit, run)
    if needed <= reserved:
        return _ran_out("capture.out_of_memory", visit, run, "a graph")
    done = len(visit.captures)
    promised = "nothing was" if reserved == 0 else f"{format_bytes(reserved)} were"
    return Finding(
        code="graphs.not_reserved" if reserved == 0 else "graphs.estimate_short",
        severity="error",
        state="size_kv",
        message=f"{promised} reserved for the graphs, they need at least {format_bytes(needed)};"
        f" memory ran out in {visit.state} after {done} of them",
        observed=needed,
        expected=reserved,
        bytes=needed - reserved,
        evidence=(seq, *_evidence(visit, run)),
    )


def _verifying(visit: Visit, run: RunState) -> Finding:
    profiled = {part for each in run.visits_of("profile_activations") for _, part in each.parts}
    covers = {"sampler_warmup": "sampler", "sampler": "sampler", "encoder": "encoder", "draft": "draft"}
    wanted = covers.get(visit.part or "")
    if wanted is None or wanted in profiled:
        return _ran_out("verify.out_of_memory", visit, run, "the first real step")
    profile = run.last("profile_activations")
    found = _ran_out("profile.incomplete", visit, run, f"the {wanted}, which was not profiled,")
    seen = () if profile is None else sequence_numbers(profile, "peak", "leave")
    state = visit.state if profile is None else profile.state
    return attrs.evolve(found, state=state, part=wanted, evidence=(*seen, *found.evidence))


def _budget(visit: Visit, run: RunState) -> list[Finding]:
    sized = budget_before(visit, run)
    if sized is None:
        return [_raised("budget.negative", visit, "nothing is left for the KV cache")]
    seq, computed = sized
    missing = computed.missing_bytes
    if computed.blocks >= 1 and computed.needed_bytes is not None:
        code = "budget.request_does_not_fit"
        fits = request_that_fits(visit, computed)
        text = f"one longest request needs {format_bytes(computed.needed_bytes)} of KV cache, there are"
        text += f" {format_bytes(computed.kv_bytes)}: {format_bytes(missing)} are missing"
        text += f"; {fits} tokens would fit" if fits else ""
    else:
        code = _negative_code(computed, run)
        text = f"{format_bytes(computed.requested_bytes)} were requested and nothing of it is left for the KV cache:"
        text += f" {format_bytes(missing)} are missing"
    common: dict[str, Any] = {"severity": "error", "state": visit.state, "bytes": missing, "evidence": (seq,)}
    part = "request_fits" if code == "budget.request_does_not_fit" else None
    return [
        Finding(
            code=code,
            part=part,
            message=text,
            observed=computed.available_bytes,
            expected=computed.needed_bytes,
            **common,
        )
    ]


def _negative_code(computed: BudgetComputed, run: RunState) -> str:
    loaded = run.last("load_weights")
    if loaded is None or loaded.before is None or loaded.after is None:
        return "budget.negative"
    weights = loaded.after.allocated_bytes - loaded.before.allocated_bytes
    return "weights.exceed_request" if weights > computed.requested_bytes else "budget.negative"


def request_that_fits(visit: Visit, computed: BudgetComputed) -> int:
    """Tokens of the longest request that the sized KV cache could hold; 0 where nobody said how blocks count."""
    tokens = visit.notes.get("block_tokens")
    return computed.blocks * tokens if isinstance(tokens, int) else 0


def _pool(visit: Visit, run: RunState) -> list[Finding]:
    found = _raised("capture.pool_reused", visit, "a pool was opened again after its graphs died")
    earlier = [
        life.opened_seq for life in run.pools if life.opened_seq < visit.entered_seq and life.released is not None
    ]
    return [found] if not earlier else [attrs.evolve(found, evidence=(earlier[-1], *found.evidence))]


def _raised(code: str, visit: Visit, what: str) -> Finding:
    failed = visit.failed
    kind = "" if failed is None else failed.error_type.rpartition(".")[2]
    first = "" if failed is None or not failed.message else failed.message.splitlines()[0]
    return Finding(
        code=code,
        severity="error",
        state=visit.state,
        part=visit.part,
        message=f"{what} in {visit.state}: {kind}: {first}" if first else f"{what} in {visit.state}: {kind}",
        reason=kind,
        evidence=() if visit.ended_seq is None else (visit.ended_seq,),
    )


def _evidence(visit: Visit, run: RunState) -> tuple[int, ...]:
    oom = [seq for seq, _ in run.ooms if visit.entered_seq <= seq <= (visit.ended_seq or seq)]
    ended = () if visit.ended_seq is None else (visit.ended_seq,)
    return (*oom[-1:], *ended)


_AFTER_SIZING: Final = frozenset({"allocate_kv", "commit_kv", "capture_graphs", "verify"})

#: States where running out of memory has a cause to look for.
_BY_STATE: Final[dict[str, Callable[[Visit, RunState], Finding]]] = {
    "load_weights": _loading,
    "capture_graphs": _capturing,
    "verify": _verifying,
}

#: States where it speaks for itself: code, and what did not fit.
_PLAIN: Final = {
    "profile_activations": ("profile.out_of_memory", "the largest step"),
    "bootstrap_kv": ("kv.out_of_memory", "the profiling KV cache"),
    "capture_throwaway": ("capture.out_of_memory", "a throwaway graph"),
    "allocate_kv": ("kv.out_of_memory", "the KV cache"),
    "commit_kv": ("kv.out_of_memory", "the KV cache"),
}

_JUDGED: Final[dict[str, Callable[[Visit, RunState], list[Finding]]]] = {
    "oom": _out_of_memory,
    "budget": _budget,
    "pool": _pool,
}

#: Categories that speak for themselves: code, and what happened.
_SAID: Final = {
    "capture": ("capture.failed", "an operation may not be captured"),
    "hook": ("state.raised", "a hook refused"),
    "host_oom": ("host.out_of_memory", "host memory ran out"),
    "peer": ("ranks.peer_failed", "another rank failed"),
    "signal": ("run.ended_by_signal", "a signal ended the start"),
    "unsupported": ("state.raised", "virtual memory is not supported"),
    "restart": ("teardown.pool_held", "the allocator could not be repaired"),
}
