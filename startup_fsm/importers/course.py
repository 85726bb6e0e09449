"""
The course of one process of a logged start: facts in, events out.

A log says what is done and rarely what is over: a state lasts until a line of another one comes, and such a border is
marked as inferred. Nothing goes back but a line that says that a state begins.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import attrs

from startup_fsm.events import (
    DecisionMade,
    Event,
    FigureRead,
    NoteAdded,
    OomObserved,
    Origin,
    PartEntered,
    RunFinished,
    StateEntered,
    StateFailed,
    StateLeft,
    StateStalled,
)
from startup_fsm.importers.facts import Death, Figure, Raised, Said, Sign, Step
from startup_fsm.importers.torch_oom import Sentence, parse_prints, parse_sentence
from startup_fsm.logged.outcome import STATELESS

#: Where a state usually stands in a start as engines print it.
ORDER: Final = {
    name: at
    for at, name in enumerate(
        (
            "init_device",
            "load_weights",
            "profile_activations",
            "bootstrap_kv",
            "capture_throwaway",
            "recover_allocator",
            "teardown",
            "size_kv",
            "reserve_kv",
            "allocate_kv",
            "warmup",
            "capture_graphs",
            "commit_kv",
            "verify",
            "serving",
        )
    )
}

#: Longest text of a message that is kept.
TEXT: Final = 300
#: Most events of one process, and of all processes of a start: what a log repeats for ever is not kept for ever.
EVENTS: Final = 4_000
ALL_EVENTS: Final = 40_000
#: Longest wait that is believed, in seconds.
_LONGEST_WAIT: Final = 1e9
#: What each process may have when the start has too many.
_FEW: Final = 24
#: How many more of them may be of its course, which ends with what it failed of.
_COURSE: Final = 100

_SENTENCE: Final = {
    "oom_tried_bytes": "tried_bytes",
    "oom_free_bytes": "free_bytes",
    "total_bytes": "total_bytes",
    "process_bytes": "process_bytes",
    "torch_allocated_bytes": "allocated_bytes",
    "torch_reserved_unallocated_bytes": "reserved_unallocated_bytes",
    "torch_reserved_bytes": "reserved_bytes",
    "graph_private_pool_bytes": "private_pool_bytes",
}


@attrs.frozen(slots=True)
class Happened:
    """An event with its place and its clock in seconds."""

    event: Event
    origin: Origin
    t: float | None


@attrs.frozen(slots=True)
class Failure:
    """
    How a process may have failed: it did, unless it goes on.

    Attributes:
        death: What it means.
        said: Where it is printed.
        type, message, where: Of the exception; empty where it was none.
        lines: Where the exceptions are printed that it was raised from.
    """

    death: Death
    said: Said
    type: str = ""
    message: str = ""
    where: tuple[str, ...] = ()
    lines: tuple[int, ...] = ()

    @property
    def is_echo(self) -> bool:
        """Whether it only reports what somebody else failed of."""
        return self.death.is_echo


@attrs.define(slots=True)
class Shared:
    """
    What the processes of one start have together.

    Attributes:
        failing: Those that have failed and not gone on, by their identity.
        events: How many are kept of all of them.
    """

    failing: dict[int, Course] = attrs.field(factory=dict)
    events: int = 0


@attrs.define(slots=True)
class Course:
    """
    One process.

    Attributes:
        label, rank: As the log calls it; None for a process that is no rank.
        name: Of the process, for its journal.
        shared: With the others of its start.
        pids: Under which it spoke.
        state: The last state that it was in; None before the first.
        failure: What it failed of, as far as is known.
        was_ready: Whether it is part of a start that came to ready.
    """

    name: str
    source: str
    label: str | None = None
    rank: int | None = None
    shared: Shared = attrs.field(factory=Shared)
    pids: set[int] = attrs.field(factory=set)
    state: str | None = None
    failure: Failure | None = None
    was_ready: bool = False
    happened: list[Happened] = attrs.field(factory=list)
    last_line: int = 0
    entered_line: int = 0
    unlisted: int = 0
    _part: str | None = None
    _is_open: bool = False
    _rows: set[str] = attrs.field(factory=set)
    _visits: dict[str, int] = attrs.field(factory=dict)
    _figures: dict[str, int | float] = attrs.field(factory=dict)
    _signs: dict[str, tuple[int, dict[str, Any], Said]] = attrs.field(factory=dict)

    def has(self, row: str) -> bool:
        """Whether it said a line of the row ``row``."""
        return row in self._rows

    def heard(self, row: str) -> None:
        """It said such a line."""
        self._rows.add(row)

    @property
    def position(self) -> int:
        """How far it came."""
        return -1 if self.state is None else ORDER.get(self.state, len(ORDER))

    def step(self, step: Step, said: Said) -> bool:
        """Go where the line says that the process is; True where that is another state than before."""
        before = self.state, self._is_open
        begins = step.moment == "begins"
        if step.state == self.state:
            if begins and not self._is_open:
                self._enter(step.state, said, is_inferred=False)
        elif begins or ORDER.get(step.state, len(ORDER)) > self.position or self._is_throwaway(step.state):
            self.leave(said, is_inferred=True)
            self._enter(step.state, said, is_inferred=not begins)
        else:
            return False
        if self._is_open and step.part is not None and step.part != self._part:
            self._part = step.part
            self._add(PartEntered(state=step.state, part=step.part, visit=self._visits[step.state]), said)
        if step.moment == "ends" and self._is_open:
            self.leave(said, is_inferred=False)
        return (self.state, self._is_open) != before

    def _is_throwaway(self, state: str) -> bool:
        # The three states of a throwaway capture are printed in any order.
        states = ("bootstrap_kv", "capture_throwaway", "teardown")
        return state in states and self.state in states

    def _enter(self, state: str, said: Said, *, is_inferred: bool) -> None:
        visit = self._visits[state] = self._visits.get(state, 0) + 1
        source = self.state
        self.state, self._part, self._is_open, self.entered_line = state, None, True, said.line
        self._add(StateEntered(state=state, visit=visit, source=source), said, is_inferred=is_inferred)

    def leave(self, said: Said, *, is_inferred: bool) -> None:
        """The open state is over."""
        if self._is_open and self.state is not None:
            self._is_open = False
            self._add(StateLeft(state=self.state, visit=self._visits[self.state]), said, is_inferred=is_inferred)

    def figure(self, figure: Figure, said: Said) -> None:
        """A figure; the same value again is no news."""
        if self._figures.get(figure.name) == figure.value:
            return
        self._figures[figure.name] = figure.value
        event = FigureRead(figure=figure.name, value=figure.value, state=self.state, unit=figure.unit)
        self._add(event, said, resolution=figure.resolution)

    def sign(self, sign: Sign, said: Said) -> None:
        """Something that was chosen or noticed; told once, with how often it was."""
        count, inputs, first = self._signs.get(sign.name, (0, {}, said))
        # A number beyond 64 bits cannot be journaled, and nobody means it.
        new = {name: value for name, value in sign.inputs.items() if type(value) is not int or abs(value) < 1 << 62}
        self._signs[sign.name] = (count + said.repeated, inputs | new, first)

    def fails(self, failure: Failure) -> None:
        """It seems to fail: of the first thing, unless that was only an echo, or this is raised from it."""
        self.shared.failing[id(self)] = self
        first = self.failure
        if first is None or (first.is_echo and not failure.is_echo) or first.said.line in failure.lines:
            self.failure = failure
        elif first.death.category == failure.death.category and failure.type and not first.type:
            # A sentence alone, and then the exception that it is of.
            self.failure = failure

    def survives(self, said: Said) -> None:
        """It goes on: what was raised before was dealt with."""
        if self.failure is None or self.failure.death.is_final:
            return
        raised, self.failure = self.failure, None
        self.shared.failing.pop(id(self), None)
        note = {"survived": f"{raised.type}: {raised.message}"[:TEXT]}
        visit = self._visits.get(self.state or "", 1)
        self._add(NoteAdded(state=self.state, visit=visit, note=note), raised.said)

    def ended(self, *, is_ready: bool, closing: Said | None) -> Iterator[Happened]:
        """All its events, the end included."""
        for name, (count, inputs, said) in self._signs.items():
            told = inputs if count == 1 else inputs | {"count": count}
            self._add(DecisionMade(decision=name, reason=said.text[:TEXT], state=None, inputs=told), said)
        if self.failure is not None:
            self._end_by(self.failure)
        elif is_ready and closing is not None:
            self.leave(closing, is_inferred=True)
            self._add(RunFinished(end="ready", state=self.state), closing, is_inferred=closing.speaker.label is None)
        return iter(self.happened)

    def stalled(self, said: Said, seconds: float | None) -> None:
        """It waits, and nothing comes after that."""
        if self.state is not None and self._is_open:
            waited = round(max(0, min(seconds or 0, _LONGEST_WAIT)) * 1e9)
            self._add(StateStalled(state=self.state, visit=self._visits[self.state], deadline_ns=waited), said)

    def _end_by(self, failure: Failure) -> None:
        death, said = failure.death, failure.said
        state = self._failed_state(death)
        if state is None:
            # No state is proven: the run is over, and nothing says where.
            self._told(failure, None, 1)
            what = {"category": death.category, "type": failure.type, "said": death.reason}
            self._add(DecisionMade(decision=STATELESS, reason=failure.message[:TEXT], inputs=what), said)
            self._add(RunFinished(end="failed", state=None, reason=failure.message[:TEXT]), said)
            return
        if state != self.state or not self._is_open:
            self.leave(said, is_inferred=True)
            self._enter(state, said, is_inferred=True)
        visit, part = self._visits[state], death.part or self._part
        if part is not None and part != self._part:
            self._part = part
            self._add(PartEntered(state=state, part=part, visit=visit), said, is_inferred=True)
        self._told(failure, state, visit)
        self._add(
            StateFailed(
                state=state,
                visit=visit,
                part=part,
                error_type=failure.type,
                category=death.category,
                reason=death.reason,
                message=failure.message,
                where=failure.where,
            ),
            said,
        )
        self._is_open = False
        self._add(RunFinished(end="failed", state=state, reason=failure.message[:TEXT]), said)

    def _failed_state(self, death: Death) -> str | None:
        if self.was_ready and (death.state is None or ORDER.get(death.state, 0) >= ORDER["verify"]):
            return "serving"
        return death.state or self.state

    def _told(self, failure: Failure, state: str | None, visit: int) -> None:
        """The figures of torch's sentence, which is the best snapshot that most logs have."""
        sentence = parse_sentence(failure.message)
        if sentence is None:
            return
        prints = parse_prints(failure.message)
        for name, attribute in _SENTENCE.items():
            value = getattr(sentence, attribute)
            if value is not None:
                self.figure(Figure(name, value, *prints[attribute]), failure.said)
        self._add(_observed(sentence, failure, state, visit), failure.said)
        for pid, size in sentence.tenants:
            inputs = {"pid": pid} if size is None else {"pid": pid, "bytes": size}
            reason = "another process on the device"
            self._add(DecisionMade(decision="tenant", reason=reason, state=state, inputs=inputs), failure.said)

    def _add(self, event: Event, said: Said, *, is_inferred: bool = False, resolution: int | None = None) -> None:
        self.last_line = max(self.last_line, said.line)
        is_course = not isinstance(event, FigureRead | NoteAdded)
        most, more = (EVENTS, _COURSE) if self.shared.events < ALL_EVENTS else (_FEW, _FEW)
        if len(self.happened) >= (most + more if is_course else most):
            self.unlisted += 1
            return
        self.shared.events += 1
        text = said.text.strip()[:TEXT]
        origin = Origin(source=self.source, line=said.line, resolution=resolution, inferred=is_inferred, text=text)
        self.happened.append(Happened(event, origin, said.t))


def _observed(sentence: Sentence, failure: Failure, state: str | None, visit: int) -> OomObserved:
    return OomObserved(
        state=state,
        visit=visit,
        part=failure.death.part,
        tried_bytes=sentence.tried_bytes,
        free_bytes=sentence.free_bytes,
        allocated_bytes=sentence.allocated_bytes,
        reserved_unallocated_bytes=sentence.reserved_unallocated_bytes,
        private_pool_bytes=sentence.private_pool_bytes,
        message=failure.message[:TEXT],
    )


def failure_of(raised: Raised, death: Death, said: Said) -> Failure:
    """A printed exception as a failure, in the words of what it was raised from first."""
    where = tuple(f"{frame.file} {frame.function}"[:TEXT] for frame in raised.frames[-12:])
    lines: list[int] = []
    root = raised
    while root.cause is not None and len(lines) < 16:
        root = root.cause
        lines.append(root.line)
    return Failure(death, said, root.type, root.message, where, tuple(lines))
