"""Logged starts by hand: what an importer would write of a log, without any log."""

from __future__ import annotations

from typing import Any

import attrs

from startup_fsm.events import (
    DecisionMade,
    Event,
    FigureRead,
    OomObserved,
    Origin,
    PartEntered,
    Record,
    RunFinished,
    RunStarted,
    SignalReceived,
    StateEntered,
    StateFailed,
    StateLeft,
    StateStalled,
)
from startup_fsm.fold import fold
from startup_fsm.logged.verdict import logged_verdict
from startup_fsm.memory import GIB, MIB
from startup_fsm.plan import observed
from startup_fsm.sources import Source
from startup_fsm.verdict import Verdict

#: Half a unit of the last digit of two decimals of GiB.
HALF = GIB // 200


def gib(value: float) -> int:
    """Bytes of a printed figure in GiB."""
    return round(value * GIB)


def mib(value: float) -> int:
    """Bytes of a printed figure in MiB."""
    return round(value * MIB)


@attrs.define
class Process:
    """One process; every event is a line of the log."""

    log: Log
    name: str
    label: str | None = None
    rank: int | None = None
    events: list[tuple[Event, Origin]] = attrs.field(factory=list)
    open: str | None = None

    def _add(self, event: Event, text: str = "", resolution: int | None = None) -> Process:
        self.log.line += 1
        origin = Origin(source=self.log.source, line=self.log.line, resolution=resolution, text=text or event.kind)
        self.events.append((event, origin))
        return self

    def state(self, name: str, part: str | None = None, text: str = "") -> Process:
        """A state begins; the one before is over."""
        if self.open is not None:
            self._add(StateLeft(state=self.open))
        self._add(StateEntered(state=name, source=self.open), text)
        self.open = name
        return self if part is None else self._add(PartEntered(state=name, part=part))

    def figures(self, text: str = "", **figures: float) -> Process:
        """Figures of one line; bytes with the resolution of two decimals of GiB."""
        for name, value in figures.items():
            event = FigureRead(figure=name, value=value, state=self.open)
            self._add(event, text, HALF if name.endswith("_bytes") else 0)
        return self

    def sign(self, name: str, /, text: str = "", **inputs: Any) -> Process:
        """Something that was chosen or noticed."""
        return self._add(DecisionMade(decision=name, reason=text or name, inputs=inputs), text)

    def fails(
        self,
        category: str,
        reason: str = "",
        *,
        part: str | None = None,
        error: str = "RuntimeError",
        message: str = "",
        where: tuple[str, ...] = (),
        **sentence: int,
    ) -> Process:
        """The open state fails; the figures of an out-of-memory sentence by their shared names."""
        names = {"oom_tried_bytes": "tried_bytes", "oom_free_bytes": "free_bytes"}
        if sentence:
            self.figures(message, **sentence)
        if category == "oom" and sentence:
            told = {names[name]: value for name, value in sentence.items() if name in names}
            self._add(OomObserved(state=self.open, message=message, **told))
        if self.open is None:
            return self._add(RunFinished(end="failed", reason=message), message)
        if part is not None:
            self._add(PartEntered(state=self.open, part=part))
        self._add(
            StateFailed(
                state=self.open,
                part=part,
                error_type=error,
                category=category,
                reason=reason,
                message=message,
                where=where,
            ),
            message,
        )
        return self._add(RunFinished(end="failed", state=self.open, reason=message), message)

    def ready(self, text: str = "Application startup complete.") -> Process:
        """The closing line."""
        if self.open is not None:
            self._add(StateLeft(state=self.open))
        return self._add(RunFinished(end="ready", state=self.open), text)

    def stalls(self) -> Process:
        """A notice of waiting."""
        return self._add(StateStalled(state=self.open or "", deadline_ns=60 * 10**9, stack=()))

    def signal(self) -> Process:
        """A signal arrives."""
        return self._add(SignalReceived(signal="SIGTERM", state=self.open))

    def source(self) -> Source:
        """As a judgement takes it."""
        started = RunStarted(
            engine=self.log.engine,
            engine_version=self.log.version,
            plan=observed().as_data(),
            knobs=self.log.knobs,
            source=self.log.source,
            label=self.label,
        )
        said = [(started, Origin(source=self.log.source, line=1, inferred=True)), *self.events]
        records = [
            Record(run="log-1", process=self.name, rank=self.rank, seq=seq, t=None, kind=event.kind, event=event)
            for seq, (event, _) in enumerate(said)
        ]
        return Source(run=fold(records), origins={seq: origin for seq, (_, origin) in enumerate(said)})


class Log:
    """One start of a log."""

    def __init__(self, source: str = "vllm", version: str | None = None, **knobs: Any) -> None:
        """Begin with what the banner says."""
        self.source, self.version, self.knobs = source, version, knobs
        self.engine: str | None = source if source != "torch" else None
        self.line = 1
        self.processes: list[Process] = []

    def process(self, label: str | None = None, rank: int | None = None) -> Process:
        """One more process; None is the engine's."""
        process = Process(self, (label or f"engine-{len(self.processes)}").replace(" ", "-"), label, rank)
        self.processes.append(process)
        return process

    def sources(self) -> list[Source]:
        """All processes."""
        return [process.source() for process in self.processes]

    def verdict(self) -> Verdict:
        """What is said of it."""
        return logged_verdict(self.sources(), origin="a.log:1-99")


def codes(verdict: Verdict) -> list[str]:
    """Codes above a note, in their order."""
    return [each.finding.code for each in verdict.findings if each.finding.severity != "note"]


def changes(verdict: Verdict) -> list[tuple[str, str]]:
    """Settings and directions, best first."""
    return [(change.setting, change.direction) for advice in verdict.advice for change in advice.changes]


def value(verdict: Verdict, setting: str) -> Any:
    """What is advised for a setting."""
    return next(change.to for advice in verdict.advice for change in advice.changes if change.setting == setting)


def flag(verdict: Verdict, setting: str) -> str | None:
    """The same as it is pasted."""
    return next(change.flag for advice in verdict.advice for change in advice.changes if change.setting == setting)
