"""
Why device memory ran out: the first violated invariant behind an out-of-memory, by the state that it happened in.

A capture or a first step that dies is often the fault of sizing; then the finding names that state, and the failed
state stays what it was.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from startup_fsm.events import OomObserved
from startup_fsm.logged.facts import Seen
from startup_fsm.logged.graphs import graphs_finding
from startup_fsm.logged.outcome import Failure
from startup_fsm.logged.sizing import foreign_bytes, is_pinned, pinned_bytes
from startup_fsm.logged.start import Found, Start
from startup_fsm.memory import MIB, format_bytes

#: Others that hold less than this are a desktop or a driver.
_PRESENT: Final = 256 * MIB

_SENTENCE: Final = ("oom_tried_bytes", "oom_free_bytes", "process_bytes", "total_bytes")


def out_of_memory(start: Start, failure: Failure) -> list[Found]:
    """Findings of an out-of-memory, the cause first."""
    state = start.ending.state
    found = [grown] if (grown := _neighbour_grew(start, failure)) is not None else []
    # Of what fails in a request a neighbour that came meanwhile is the nearer cause.
    is_late = state in _AFTER_SIZING or (state == "serving" and grown is None)
    pinned = _pinned_too_large(start, failure) if is_late else None
    if pinned is not None:
        found.append(pinned)
    if state in _BY_STATE:
        found += _BY_STATE[state](start, failure)
    else:
        code, what = _PLAIN.get(state or "", ("device.out_of_memory", ""))
        found.append(ran_out(start, failure, code, what))
    present = _neighbour_present(start, failure)
    is_said = grown is not None or any(each.finding.code == "device.neighbour_present" for each in found)
    return found if present is None or is_said else [*found, present]


def short_bytes(failure: Failure) -> int:
    """What the allocation that failed lacked; 0 where it does not say, or where free memory was in pieces."""
    oom = failure.oom
    return 0 if oom is None else max(0, (oom.tried_bytes or 0) - (oom.free_bytes or 0))


def ran_out(start: Start, failure: Failure, code: str, what: str) -> Found:
    """Memory ran out, and its own figures say how."""
    state, oom = start.ending.state, failure.oom
    text = f"memory ran out in {state}" if state else "memory ran out, and the log does not show in which state"
    text += f": no room for {what}" if what else ""
    if oom is not None and oom.tried_bytes is not None:
        text += f"; {format_bytes(oom.tried_bytes)} were asked for"
        text += "" if oom.free_bytes is None else f", {format_bytes(oom.free_bytes)} were free"
    text += _whose(start, oom)
    return start.found(
        code,
        text,
        state=state,
        part=start.ending.part,
        figures=_SENTENCE,
        observed=None if oom is None else oom.tried_bytes,
        expected=None if oom is None else oom.free_bytes,
        bytes=short_bytes(failure),
        is_cause=True,
    )


def _whose(start: Start, oom: OomObserved | None) -> str:
    """Who holds the device, by the sentence."""
    if oom is None:
        return ""
    own, total = start.size("process_bytes"), start.size("total_bytes")
    text = "" if own is None or total is None else f"; this process holds {format_bytes(own)} of {format_bytes(total)}"
    idle = oom.reserved_unallocated_bytes
    if idle and oom.tried_bytes and idle >= oom.tried_bytes:
        text += f"; torch holds {format_bytes(idle)} in pieces that are too small"
        text += " (expandable_segments:True in PYTORCH_CUDA_ALLOC_CONF may join them)"
    return text


def _loading(start: Start, failure: Failure) -> list[Found]:
    foreign, total = foreign_bytes(start.facts), start.size("total_bytes")
    if foreign is not None and total is not None and foreign * 4 >= total:
        return [_crowded_out(start, foreign, total)]
    held = start.size("torch_allocated_bytes")
    text = "the weights"
    if held is not None and total is not None:
        text += f", of which {format_bytes(held)} were loaded when the {format_bytes(total)} of the device were full"
    return [ran_out(start, failure, "weights.exceed_device", text)]


def _crowded_out(start: Start, foreign: int, total: int) -> Found:
    tenants = {sign.inputs.get("pid"): sign for sign in start.facts.signs("tenant")}
    named = ", ".join(str(pid) for pid in list(tenants)[:8] if pid is not None)
    who = f"process{'es' if len(tenants) > 1 else ''} {named}" if named else "others"
    verb = "holds" if named and len(tenants) == 1 else "hold"
    text = f"{who} {verb} {format_bytes(foreign)} of {format_bytes(total)}, and the weights do not fit beside that"
    return start.found(
        "device.neighbour_present",
        text,
        state="load_weights",
        figures=_SENTENCE,
        observed=foreign,
        expected=0,
        scope="device",
        bytes=foreign,
        is_cause=True,
    )


def _capturing(start: Start, failure: Failure) -> list[Found]:
    if is_pinned(start.facts):
        return [ran_out(start, failure, "capture.out_of_memory", "a graph")]
    cause = graphs_finding(start)
    return [ran_out(start, failure, "capture.out_of_memory", "a graph")] if cause is None else [cause]


def _verifying(start: Start, failure: Failure) -> list[Found]:
    rows = start.size("sampler_dummy_requests")
    what = "the first real step"
    if start.ending.part == "sampler_warmup":
        what = "the sampler's warm-up" + ("" if rows is None else f" with {rows} requests")
    found = [ran_out(start, failure, "verify.out_of_memory", what)]
    cause = None if is_pinned(start.facts) else graphs_finding(start)
    return found if cause is None else [cause, *found]


def _pinned_too_large(start: Start, failure: Failure) -> Found | None:
    """Explicit KV bytes, or explicit blocks, that leave no room for the rest."""
    facts = start.facts
    override = facts.sign("blocks_overridden")
    if override is not None:
        was, to = override.inputs.get("from"), override.inputs.get("to")
        if isinstance(was, int) and isinstance(to, int) and to > was > 0:
            text = f"{was} blocks were sized and {to} were given instead: what was measured protects nothing"
            seen = (override.seen,)
            return start.found(
                "budget.pinned_too_large", text, state="size_kv", seen=seen, observed=to, expected=was, is_cause=True
            )
    if not is_pinned(facts):
        return None
    pinned = pinned_bytes(facts)
    sign = facts.sign("kv_pinned")
    size = "the KV bytes" if pinned is None else f"{format_bytes(pinned)} of KV cache"
    short = short_bytes(failure)
    return start.found(
        "budget.pinned_too_large",
        f"{size} were given explicitly, which skips the measurement, and leave no room for {start.ending.state}"
        + (f": at least {format_bytes(short)} are missing" if short else ""),
        state="size_kv",
        figures=("kv_cache_bytes", "oom_tried_bytes", "oom_free_bytes"),
        seen=() if sign is None else (sign.seen,),
        observed=pinned,
        bytes=short,
        is_cause=True,
    )


def _neighbour_grew(start: Start, failure: Failure) -> Found | None:
    """Somebody else took memory since the engine looked first, and more than the failure lacked."""
    total, free, foreign = start.size("total_bytes"), start.size("free_at_start_bytes"), foreign_bytes(start.facts)
    if free is None and start.ending.state in _AFTER_SIZING and start.facts.dialect.engine == "vllm":
        # Its check lets nobody start with less than it requests.
        free = start.size("requested_bytes")
    if total is None or free is None or foreign is None:
        return None
    grown = foreign - (total - free)
    if grown < max(_PRESENT, short_bytes(failure)):
        return None
    text = f"others hold {format_bytes(foreign)}, {format_bytes(grown)} more than could be held when the engine looked"
    return start.found(
        "device.neighbour_grew",
        f"{text} first; {format_bytes(short_bytes(failure))} were missing",
        state="size_kv" if start.ending.state in _AFTER_SIZING else start.ending.state,
        figures=(*_SENTENCE, "free_at_start_bytes"),
        observed=foreign,
        expected=total - free,
        scope="device",
        bytes=grown,
        is_cause=True,
    )


def _neighbour_present(start: Start, failure: Failure) -> Found | None:
    """Somebody else holds memory: named by the sentence, or what it leaves over."""
    tenants = {sign.inputs.get("pid"): sign for sign in start.facts.signs("tenant")}
    foreign, total = foreign_bytes(start.facts), start.size("total_bytes") or 0
    named = sum(held for sign in tenants.values() if isinstance(held := sign.inputs.get("bytes"), int))
    held = max(foreign or 0, named)
    if held < max(_PRESENT, total // 50):
        return None
    who = ", ".join(f"process {pid}" for pid in tenants if pid is not None)
    text = f"{who or 'something that is not this process'} holds {format_bytes(held)} of the device"
    # A neighbour fails nothing by itself; here this start would have gone on without it.
    matters = held > short_bytes(failure) and held * 10 >= total and start.ending.state not in _AFTER_SIZING
    return start.found(
        "device.neighbour_present",
        text,
        severity="warning" if matters else "note",
        state=start.ending.state,
        figures=_SENTENCE,
        seen=tuple(sign.seen for sign in tenants.values()),
        observed=held,
        scope="device",
        bytes=held,
    )


def failed_elsewhere(start: Start) -> list[Found]:
    """Failures that a ready start came over, as warnings."""
    found: list[Found] = []
    for failure in start.ending.others if start.is_ready else ():
        if failure.is_echo:
            continue
        code = "device.out_of_memory" if failure.is_oom else "state.raised"
        common: dict[str, Any] = {"severity": "warning", "state": failure.state, "process": failure.process}
        seen = (Seen(failure.process, failure.seq),)
        found.append(start.found(code, f"the start came over a failure: {failure.first_line}", seen=seen, **common))
    return found


_AFTER_SIZING: Final = frozenset({"allocate_kv", "commit_kv", "reserve_kv", "warmup", "capture_graphs", "verify"})

Judge = Callable[[Start, Failure], list[Found]]

#: States where it has a cause to look for.
_BY_STATE: Final[dict[str | None, Judge]] = {
    "load_weights": _loading,
    "capture_graphs": _capturing,
    "verify": _verifying,
}

#: States where it speaks for itself: code, and what did not fit.
_PLAIN: Final = {
    "init_device": ("device.out_of_memory", "a context or a communicator"),
    "profile_activations": ("profile.out_of_memory", "the largest step"),
    "bootstrap_kv": ("kv.out_of_memory", "the profiling KV cache"),
    "capture_throwaway": ("capture.out_of_memory", "a throwaway graph"),
    "allocate_kv": ("kv.out_of_memory", "the KV cache"),
    "reserve_kv": ("kv.out_of_memory", "the KV cache"),
    "commit_kv": ("kv.out_of_memory", "the KV cache"),
    "warmup": ("device.out_of_memory", "a kernel's warm-up"),
    "serving": ("device.out_of_memory", "a request"),
}
