"""
How a logged start ended, over all its processes, by what its text proves.

Of several failures the cause is the earliest that reports no other one; an out-of-memory that says its figures comes
before what follows from it, and a time-out or a signal after what may have led to it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import attrs

from startup_fsm.events import OomObserved, RunFinished, StateFailed
from startup_fsm.fold import RunState, Visit
from startup_fsm.sources import Source
from startup_fsm.verdict import Outcome

#: The decision that holds a failure of which nothing tells the state: ``category``, ``type`` and ``said`` (one word).
STATELESS: Final = "failed_without_state"

_OOM: Final = frozenset({"oom", "host_oom"})
#: Words of an end that has no category: a shell that says what the kernel did.
_KILLED: Final = ("killed", "out of memory: kill", "137", "bus error")
_MEMORY: Final = "out of memory"
#: The reason of an echo that quotes nothing.
_PEER: Final = "peer"
#: Categories of what an echo quotes, by its reason; all others are ``raised``.
_CATEGORIES: Final = {
    "oom": ("out_of_memory", "driver_out_of_memory", "sampler_out_of_memory"),
    "host_oom": ("host_out_of_memory",),
    "budget": ("not_enough_free", "external_weights", "no_blocks", "request_does_not_fit", "sequences_do_not_fit"),
    "capture": ("not_capturable", "workspace_locked", "ipc_handle", "graph_pool_id"),
    "pool": ("pool_use_count",),
    "signal": ("signal",),
}


@attrs.frozen(kw_only=True)
class Failure:
    """
    One process's failure.

    Attributes:
        process, seq, line: Which event it is; the line orders failures over all processes.
        state, part: Where it happened; None where no text proves it.
        category, reason: As in ``state_failed``.
        error_type, message, where: As printed.
        oom: The figures of the out-of-memory sentence; None where there was none.
    """

    process: int
    seq: int
    line: int
    state: str | None = None
    part: str | None = None
    category: str = "raised"
    reason: str = ""
    error_type: str = ""
    message: str = ""
    where: tuple[str, ...] = ()
    oom: OomObserved | None = None

    @property
    def is_echo(self) -> bool:
        """Whether it only reports what somebody else failed of."""
        return self.category == "peer"

    @property
    def quotes(self) -> bool:
        """Whether it is such a report and holds what the other one said: its reason is the other one's."""
        return self.is_echo and self.reason != _PEER

    @property
    def is_oom(self) -> bool:
        """Whether device memory ran out."""
        return self.category == "oom"

    @property
    def first_line(self) -> str:
        """Its type and the first line of its message, at most 200 characters."""
        line = next((line.strip() for line in self.message.splitlines() if line.strip()), "")
        kind = self.error_type.rpartition(".")[2]
        said = f"{kind}: {line}" if kind and line and not line.startswith(kind) else line or kind
        return said[:200] or "nothing that says more"

    @property
    def said(self) -> str:
        """All its words in lower case: type, message and frames."""
        return "\n".join((self.error_type, self.message, self.part or "", *self.where)).lower()


@attrs.frozen(kw_only=True)
class Ending:
    """
    How a start ended.

    Attributes:
        outcome: In the words of a verdict.
        failure: What it ended of; None where nothing failed.
        others: Failures of other processes, and those that it came over.
        process: Index of the process that the end is about; None where none is.
        state, part: Where it ended; None at ready, and where no text proves it.
    """

    outcome: Outcome
    failure: Failure | None = None
    others: tuple[Failure, ...] = ()
    process: int | None = None
    state: str | None = None
    part: str | None = None


def ending(processes: Sequence[Source]) -> Ending:
    """How a start ended."""
    failures = sorted(_failures(processes), key=_first)
    ready = [line for at, each in enumerate(processes) if (line := _ready(at, each)) is not None]
    ended = [each for each in failures if not ready or each.line > min(ready) or each.state == "serving"]
    if ended:
        chosen = ended[0]
        others = tuple(each for each in failures if each is not chosen)
        return _failed(chosen, others, processes)
    if ready:
        return Ending(outcome="ready", others=tuple(failures))
    last = _latest(processes)
    waiting = _waiting(processes)
    if waiting is not None:
        at, visit = waiting
        return Ending(outcome="hang", process=at, state=visit.state, part=visit.part)
    signalled = [at for at, each in enumerate(processes) if each.run.signals]
    outcome: Outcome = "interrupted" if signalled else "incomplete"
    if last is None:
        return Ending(outcome=outcome, process=signalled[0] if signalled else None)
    at, visit = last
    return Ending(outcome=outcome, process=at, state=visit.state, part=visit.part if visit.is_open else None)


def _failed(failure: Failure, others: tuple[Failure, ...], processes: Sequence[Source]) -> Ending:
    state, part = failure.state, failure.part
    # Who reports another one's failure was mostly elsewhere itself; who only plans runs out of nothing.
    is_anothers = failure.is_echo or (failure.is_oom and state == "size_kv" and not failure.where)
    before = _latest(processes, failure.line) if state is None or is_anothers else None
    if before is not None and before[1].state != state:
        at, visit = before
        there = _open_part(processes[at], visit, failure.line)
        state, part = visit.state, there if is_anothers else part or there
    if failure.quotes:
        failure = _quoted(failure, processes)
    outcome: Outcome = "error"
    if failure.category in _OOM:
        outcome = "oom"
    elif failure.reason == "timeout":
        outcome = "hang"
    elif failure.category == "signal":
        outcome = "interrupted"
    return Ending(outcome=outcome, failure=failure, others=others, process=failure.process, state=state, part=part)


def _quoted(echo: Failure, processes: Sequence[Source]) -> Failure:
    """The failure that an echo quotes, where nothing else is left of it."""
    category = next((category for category, reasons in _CATEGORIES.items() if echo.reason in reasons), "raised")
    ooms = processes[echo.process].run.ooms if category == "oom" else []
    oom = next((event for seq, event in reversed(ooms) if seq <= echo.seq), None)
    return attrs.evolve(echo, category=category, oom=oom)


def _open_part(process: Source, visit: Visit, line: int) -> str | None:
    """The part that a visit was in at a line; None where it was over by then."""
    if visit.ended_seq is not None and line_of(process, visit.ended_seq) <= line:
        return None
    return next((part for seq, part in reversed(visit.parts) if line_of(process, seq) <= line), None)


def _first(failure: Failure) -> tuple[bool, bool, bool, bool, int]:
    """Smaller is nearer to the cause."""
    has_figures = failure.is_oom and failure.oom is not None and failure.oom.tried_bytes is not None
    follows = failure.reason == "timeout" or failure.category == "signal"
    return failure.is_echo, not failure.quotes, follows, not has_figures, failure.line


def _failures(processes: Sequence[Source]) -> Iterator[Failure]:
    for at, process in enumerate(processes):
        run = process.run
        failed = [(visit, visit.failed) for visit in run.visits if visit.failed is not None]
        for visit, event in failed:
            yield _of_visit(at, visit, event, process)
        if not failed and run.finished is not None and run.finished[1].end == "failed":
            yield _of_end(at, *run.finished, process)


def _of_visit(at: int, visit: Visit, failed: StateFailed, process: Source) -> Failure:
    seq = visit.entered_seq if visit.ended_seq is None else visit.ended_seq
    oom = next((event for number, event in reversed(process.run.ooms) if number <= seq), None)
    return Failure(
        process=at,
        seq=seq,
        line=line_of(process, seq),
        state=failed.state or None,
        part=failed.part or visit.part,
        category=failed.category,
        reason=failed.reason,
        error_type=failed.error_type,
        message=failed.message,
        where=failed.where,
        oom=oom if failed.category == "oom" else None,
    )


def _of_end(at: int, seq: int, finished: RunFinished, process: Source) -> Failure:
    """A process that ended without a state: its words say what it was."""
    oom = process.run.ooms[-1][1] if process.run.ooms else None
    words = finished.reason.lower()
    told = next((event for _, event in process.run.decisions if event.decision == STATELESS), None)
    category, reason, error_type = "raised", "", ""
    if told is not None:
        inputs = {name: str(told.inputs.get(name, "")) for name in ("category", "type", "said")}
        category, error_type, reason = inputs["category"] or "raised", inputs["type"], inputs["said"]
    elif oom is not None or (_MEMORY in words and "kill" not in words):
        category, reason = "oom", "out_of_memory"
    elif any(word in words for word in _KILLED):
        category, reason = "host_oom", "host_out_of_memory"
    elif process.run.signals or "sigterm" in words or words == "terminated":
        category, reason = "signal", "signal"
    return Failure(
        process=at,
        seq=seq,
        line=line_of(process, seq),
        state=finished.state,
        category=category,
        reason=reason,
        error_type=error_type,
        message=finished.reason,
        oom=oom,
    )


def line_of(process: Source, seq: int) -> int:
    """Line of an event; its seq where nothing says it."""
    origin = process.origins.get(seq)
    return seq if origin is None or origin.line is None else origin.line


def _ready(at: int, process: Source) -> int | None:
    finished = process.run.finished
    return line_of(process, finished[0]) if finished is not None and finished[1].end == "ready" else None


def _latest(processes: Sequence[Source], until: int | None = None) -> tuple[int, Visit] | None:
    """The state that was entered last by any process, before a line."""
    entered = [
        (line_of(process, visit.entered_seq), at, visit)
        for at, process in enumerate(processes)
        for visit in process.run.visits
    ]
    fitting = [each for each in entered if until is None or each[0] <= until]
    if not fitting:
        return None
    _, at, visit = max(fitting, key=lambda each: (each[0], each[2].entered_seq))
    return at, visit


def _waiting(processes: Sequence[Source]) -> tuple[int, Visit] | None:
    """Where the stall notices come up to the end; None where something went on after them."""
    for at, process in enumerate(processes):
        run: RunState = process.run
        visit = run.current
        if run.stalls and visit is not None and visit.entered_seq < run.stalls[-1][0]:
            return at, visit
    return None
