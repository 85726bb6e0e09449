"""Journals grouped to starts: a start is one attempt of one run with all its processes. No torch, no structlog."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

import attrs

from startup_fsm.fold import RunState, fold
from startup_fsm.journal import Journal, Problem
from startup_fsm.sources import Source, meetings_of

#: What starts that come out of a text log are grouped as; each then has the importer that read it.
TEXT_LOG: Final = "log"


@attrs.frozen(kw_only=True)
class Process:
    """
    What is known of one process of a start.

    Attributes:
        journal: Its records and what is wrong with them.
        history: The fold of the records.
        is_alive: Whether a writer still holds the journal.
        stacks: What faulthandler left beside it, outermost line first.
    """

    journal: Journal
    history: RunState
    is_alive: bool = False
    stacks: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """``rank 3``, or the name of a process that is no rank."""
        return self.as_source().label

    def as_source(self) -> Source:
        """As the diagnosis takes it."""
        problems = tuple((each.kind, each.message, each.seq) for each in self.journal.problems)
        origins = {each.seq: each.origin for each in self.journal.records if each.origin is not None}
        return Source(
            run=self.history,
            problems=problems,
            is_alive=self.is_alive,
            stacks=self.stacks,
            origins=origins,
            meetings=meetings_of(self.journal.records),
        )


@attrs.frozen(kw_only=True)
class Start:
    """
    One attempt of one run.

    Attributes:
        run, attempt: Which.
        source: ``journal``, ``mirror``, or the importer that read a text log.
        origin: What was read: a run directory, a file, or ``-``; lines of a text log after a colon.
        is_whole: Whether all that the origin has of this attempt was read; False for one file of a run directory.
        processes: At least one, in the order of their names.
    """

    run: str | None
    attempt: int
    source: str
    origin: str
    is_whole: bool
    processes: tuple[Process, ...]

    @property
    def sources(self) -> tuple[Source, ...]:
        """As the diagnosis takes them."""
        return tuple(process.as_source() for process in self.processes)

    @property
    def unseen(self) -> tuple[str, ...]:
        """What the source cannot tell, whatever is asked of it."""
        found: list[str] = []
        if self.source == "journal" and not self.is_whole:
            found.append("other processes of this run: one journal was read")
        for process in self.processes:
            history, label = process.history, process.label
            found += [f"{label}: {problem.message}" for problem in process.journal.problems]
            if history.finished is None and process.as_source().is_imported:
                found.append(f"{label}: what comes after its last line: the log holds no more of it")
            elif history.finished is None:
                why = "it is still being written" if process.is_alive else "the journal has no end"
                found.append(f"{label}: what comes after seq {history.last_seq}: {why}")
            for kind, count in history.unknown.items():
                found.append(f"{label}: what {count} of an unknown kind mean: {kind}")
        return tuple(found)


@attrs.frozen(kw_only=True)
class Found:
    """A journal and what belongs to it besides its lines."""

    journal: Journal
    is_alive: bool = False
    stacks: tuple[str, ...] = ()


def grouped(found: Iterable[Found], *, source: str, origin: str, is_whole: bool) -> Iterator[Start]:
    """Starts in the order of their run ids and attempts; ``source`` may be :data:`TEXT_LOG`."""
    groups: dict[tuple[str | None, int, int], list[Process]] = {}
    seen: dict[tuple[str | None, int, str | None], int] = {}
    for each in found:
        process = Process(
            journal=each.journal, history=_history(each.journal), is_alive=each.is_alive, stacks=each.stacks
        )
        history = process.history
        # A container that restarts without its journal mirrors the same names again: that is another start.
        key = (history.run, history.attempt, history.process)
        seen[key] = seen.get(key, -1) + 1
        groups.setdefault((history.run, history.attempt, seen[key]), []).append(process)
    for run, attempt, again in sorted(groups, key=lambda key: (key[0] or "", *key[1:])):
        processes = tuple(groups[run, attempt, again])
        start = Start(run=run, attempt=attempt, source=source, origin=origin, is_whole=is_whole, processes=processes)
        yield _of_log(start) if source == TEXT_LOG else start


def _of_log(start: Start) -> Start:
    """A start with the importer that read it, and the lines that it had."""
    started = start.processes[0].history.started
    origins = [each.origin for process in start.processes for each in process.journal.records]
    lines = [each.line for each in origins if each is not None and each.line is not None]
    where = f"{start.origin}:{min(lines)}-{max(lines)}" if lines else start.origin
    return attrs.evolve(start, source="unknown" if started is None else started.source, origin=where)


def _history(journal: Journal) -> RunState:
    history = fold(journal.records)
    if history.started is None and journal.records:
        # The beginning is lost; every line says whose it is.
        first = journal.records[0]
        history.run, history.process, history.rank = first.run, first.process, first.rank
        history.attempt = first.attempt
    return history


def with_problem(start: Start, problem: Problem) -> Start:
    """The same start, with something wrong in its first journal."""
    first, *others = start.processes
    journal = attrs.evolve(first.journal, problems=(*first.journal.problems, problem))
    return attrs.evolve(start, processes=(attrs.evolve(first, journal=journal), *others))
