"""One start of a log as it is gathered, and the journals that it becomes: one a process, each with its first event."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from typing import Any, Final

import attrs

from startup_fsm.events import Event, Origin, Record, RunStarted
from startup_fsm.importers.course import TEXT, Course, Happened, Shared
from startup_fsm.importers.facts import Said, Setting
from startup_fsm.plan import observed

#: Settings of one start.
SETTINGS: Final = 200

#: What no start takes, in seconds: half a century lies between clocks with a year and those without.
_LONGEST: Final = 10 * 366 * 86_400

#: Longest name of a process.
_NAME: Final = 120

#: The importer where nothing says which engine it is.
UNKNOWN: Final = "unknown"


@attrs.define(slots=True)
class Gathered:
    """
    What is known of one start so far.

    Attributes:
        first, last: Its first message and its last.
        source: The importer; ``unknown`` until a line of an engine comes.
        is_sure: Whether that line had the engine's own prefix.
        engine, version: As the log tells them.
        settings: Knobs by our names.
        courses: By what the log calls the process.
        banners: Who printed which banner: by its kind, then by name and label, the pids.
        shared: What its courses have together.
        latest: The course that entered a state last.
        closing: The line that says that it is ready.
        stalls: The last ones, as long as nothing comes after them.
        rows: What any of its processes said.
        clock: Seconds, of the first message that has a time: what was typed to start it has none.
    """

    first: Said
    source: str = UNKNOWN
    is_sure: bool = False
    engine: str | None = None
    version: str | None = None
    settings: dict[str, Any] = attrs.field(factory=dict)
    courses: dict[str, Course] = attrs.field(factory=dict)
    banners: dict[str, dict[tuple[str, str | None], set[int | None]]] = attrs.field(factory=dict)
    shared: Shared = attrs.field(factory=Shared)
    latest: Course | None = None
    closing: Said | None = None
    stalls: list[tuple[Said, float | None]] = attrs.field(factory=list)
    last: Said | None = None
    rows: set[str] = attrs.field(factory=set)
    clock: float | None = None

    def hears(self, said: Said) -> None:
        """One more message of it."""
        self.last = said
        if self.clock is None:
            self.clock = said.t

    @property
    def is_over(self) -> bool:
        """Whether it came to ready, or something of it failed."""
        return self.closing is not None or bool(self.shared.failing)

    @property
    def state(self) -> str | None:
        """The state that was entered last, by whomever."""
        return None if self.latest is None else self.latest.state


@attrs.frozen(kw_only=True)
class ImportedProcess:
    """
    One process of a start as its journal has it.

    Attributes:
        name: Of its journal file.
        records: From ``run_started`` on.
        unlisted: Events that were left out since there were too many.
    """

    name: str
    records: tuple[Record, ...]
    unlisted: int = 0


@attrs.frozen(kw_only=True)
class ImportedStart:
    """One start: its run id, its lines, its processes."""

    run: str
    source: str
    first_line: int
    last_line: int
    processes: tuple[ImportedProcess, ...]


def set_knob(start: Gathered, fact: Setting) -> None:
    """A knob of the start, as given; what cannot be written down is left out."""
    value = fact.value
    if isinstance(value, str):
        value = value[:TEXT]
    elif isinstance(value, int | float) and not isinstance(value, bool) and not abs(value) < 1 << 62:
        return
    if len(start.settings) < SETTINGS or fact.name in start.settings:
        start.settings[fact.name] = value


def imported(start: Gathered, run: str) -> ImportedStart:
    """The journals of a start that is over; without processes where it said nothing."""
    if start.engine == "vllm-ascend":
        # A plugin of vLLM: its lines are vLLM's, and only some say whose they are.
        start.source = start.engine
    processes: list[ImportedProcess] = []
    last = start.first.line
    for course in start.courses.values():
        happened = list(course.ended(is_ready=start.closing is not None, closing=start.closing))
        if not happened and len(start.courses) > 1:
            # It said nothing of the start.
            continue
        last = max(last, course.last_line)
        name = _unique(course.name, {each.name for each in processes})
        records = tuple(_records(start, course, happened, run, name))
        processes.append(ImportedProcess(name=name, records=records, unlisted=course.unlisted))
    is_empty = all(len(process.records) < 2 for process in processes) and not start.settings
    return ImportedStart(
        run=run,
        source=start.source,
        first_line=start.first.line,
        last_line=last,
        processes=() if is_empty else tuple(processes),
    )


def _unique(text: str, taken: set[str]) -> str:
    """A name that is one step of a path, as what a log calls a process need not be, and nobody else's."""
    name = re.sub(r"[^\w.-]", "_", text.replace(" ", "-"))[:_NAME]
    number, unique = 1, name
    while unique in taken:
        number += 1
        unique = f"{name}-{number}"
    return unique


def _records(start: Gathered, course: Course, happened: list[Happened], run: str, name: str) -> Iterator[Record]:
    origin = Origin(source=start.source, line=start.first.line, inferred=True)
    started = RunStarted(
        engine=start.engine or (start.source if start.source not in (UNKNOWN, "torch") else None),
        engine_version=start.version,
        plan=observed().as_data(),
        knobs=start.settings,
        source=start.source,
        label=course.label,
    )
    base = start.clock
    events: list[tuple[Event, Origin, float | None]] = [(started, origin, base)]
    events += [(each.event, _sourced(each.origin, start.source), each.t) for each in happened]
    latest = 0
    for seq, (event, where, t) in enumerate(events):
        if t is not None and base is not None and t - base < _LONGEST:
            # Clocks of one second, without a year, that may go back at its end; those with one are another kind.
            latest = max(latest, round((t - base) * 1e9))
        yield Record(
            run=run,
            process=name,
            rank=course.rank,
            seq=seq,
            t=None if base is None else latest,
            kind=event.kind,
            origin=where,
            event=event,
        )


def _sourced(origin: Origin, source: str) -> Origin:
    return origin if origin.source == source else attrs.evolve(origin, source=source)


def run_name(head: bytes) -> str:
    """What the run ids of a log begin with: the same log gives the same ids."""
    return f"log-{hashlib.sha256(head).hexdigest()[:12]}"
