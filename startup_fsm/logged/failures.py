"""What a logged start died of: one finding or two for each category and reason of a failure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from startup_fsm.logged import budget_failures as budget
from startup_fsm.logged.memory_failures import out_of_memory
from startup_fsm.logged.outcome import Failure
from startup_fsm.logged.start import Found, Start
from startup_fsm.memory import format_bytes

_CAPTURES: Final = ("capture_throwaway", "capture_graphs")


def died_of(start: Start) -> list[Found]:
    """Findings of the failure that ended a start; none where nothing failed."""
    failure = start.failure
    if failure is None:
        return []
    if failure.category == "oom":
        return out_of_memory(start, failure)
    judge = _BY_REASON.get(failure.reason) or _BY_CATEGORY.get(failure.category, _raised)
    return judge(start, failure)


def _ranks_differ(start: Start, failure: Failure) -> list[Found]:
    text = f"ranks do not agree: {failure.first_line}"
    return [start.found("ranks.disagree", text, state=start.ending.state, is_cause=True)]


def _unbalanced(start: Start, failure: Failure) -> list[Found]:
    least, own = start.size("min_per_gpu_bytes"), start.size("local_free_bytes")
    text = "ranks have unlike amounts of free memory"
    if least is not None and own is not None:
        text = f"one rank has {format_bytes(least)} free and this one {format_bytes(own)};"
        text += f" {format_bytes(round(own * 0.9))} are asked for"
    if start.ending.part == "draft_worker_init":
        text += "; the draft model is checked after the model itself was loaded, so its own ranks may hold the rest"
    return [
        start.found(
            "ranks.uneven",
            text,
            state=start.ending.state,
            part=start.ending.part,
            figures=("min_per_gpu_bytes", "local_free_bytes"),
            observed=least,
            expected=None if own is None else round(own * 0.9),
            scope="device",
            bytes=0 if least is None or own is None else max(0, own - least),
            is_cause=True,
        )
    ]


def _capture(start: Start, failure: Failure) -> list[Found]:
    state = start.ending.state
    if failure.reason in ("no_kernel_image", "illegal_access") and state not in _CAPTURES:
        return _raised(start, failure)
    text = f"{_CAPTURED.get(failure.reason, 'the capture failed')}: {failure.first_line}; it is no fault of memory"
    return [start.found("capture.failed", text, state=state, part=start.ending.part, is_cause=True)]


def _pool(start: Start, failure: Failure) -> list[Found]:
    text = f"a pool of graphs was opened again after all its graphs were gone: {failure.first_line}"
    return [start.found("capture.pool_reused", text, state=start.ending.state, is_cause=True)]


def _workspace(start: Start, failure: Failure) -> list[Found]:
    text = f"a workspace is locked once graphs hold its address, and had to grow: {failure.first_line}"
    return [start.found("workspace.grew", text, state=start.ending.state, is_cause=True)]


def _host(start: Start, failure: Failure) -> list[Found]:
    text = f"the process was ended as memory of the host ran out, as far as its log tells: {failure.first_line}"
    state = start.ending.state
    if start.facts.sign("unified_memory") is not None:
        text += "; host and device share one memory"
    return [start.found("host.out_of_memory", text, state=state, part=start.ending.part, scope="host", is_cause=True)]


def _timeout(start: Start, failure: Failure) -> list[Found]:
    state = start.ending.state
    code = "capture.stalled" if state in _CAPTURES else "state.stalled"
    text = f"something waited too long: {failure.first_line}"
    return [start.found(code, text, state=state, part=start.ending.part, is_cause=True)]


def _signal(start: Start, failure: Failure) -> list[Found]:
    text = f"a signal ended the start: {failure.first_line}"
    return [start.found("run.ended_by_signal", text, state=start.ending.state, is_cause=True)]


def _peer(start: Start, failure: Failure) -> list[Found]:
    died = start.facts.sign("worker_died")
    if died is not None:
        name, code = died.inputs.get("name", "a worker"), died.inputs.get("code")
        text = f"{name} ended without a word of why" + ("" if code is None else f" (exit code {code})")
        state = start.ending.state
        return [start.found("run.ended_without_trace", text, state=state, seen=(died.seen,), is_cause=True)]
    text = f"the log only repeats that another process failed, and does not hold why: {failure.first_line}"
    if start.ending.state is not None:
        state, part = start.ending.state, start.ending.part
        text = f"a process died in {state} without a word of why: all that follows is {failure.first_line}"
        return [start.found("run.ended_without_trace", text, state=state, part=part, reason="peer", is_cause=True)]
    return [start.found("state.raised", text, state=start.ending.state, reason="peer", is_cause=True)]


def _raised(start: Start, failure: Failure) -> list[Found]:
    text = f"the engine raised {failure.first_line}"
    state, part = start.ending.state, start.ending.part
    return [start.found("state.raised", text, state=state, part=part, reason=failure.error_type, is_cause=True)]


_CAPTURED: Final = {
    "not_capturable": "an operation that may not be captured",
    "no_kernel_image": "a kernel was not built for this device",
    "illegal_access": "an illegal access inside the capture",
    "ipc_handle": "memory could not be shared between ranks for the capture",
    "graph_pool_id": "the capture did not say which pool it uses",
}

Judge = Callable[[Start, Failure], list[Found]]

_BY_REASON: Final[dict[str, Judge]] = {
    "not_enough_free": budget.not_enough_free,
    "external_weights": budget.external_weights,
    "free_grew": budget.free_moved,
    "free_fell": budget.free_moved,
    "no_blocks": budget.no_blocks,
    "request_does_not_fit": budget.request,
    "sequences_do_not_fit": budget.sequences,
    "ranks_differ": _ranks_differ,
    "unbalanced": _unbalanced,
    "host_out_of_memory": _host,
    "not_capturable": _capture,
    "no_kernel_image": _capture,
    "illegal_access": _capture,
    "ipc_handle": _capture,
    "graph_pool_id": _capture,
    "pool_use_count": _pool,
    "workspace_locked": _workspace,
    "timeout": _timeout,
    "signal": _signal,
    "peer": _peer,
}

_BY_CATEGORY: Final[dict[str, Judge]] = {
    "budget": budget.no_blocks,
    "host_oom": _host,
    "capture": _capture,
    "pool": _pool,
    "signal": _signal,
    "peer": _peer,
}
