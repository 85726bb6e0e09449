"""
What is new of a start that is followed, line by line: of each process what has come since it was asked last.

Texts are as the journal has them: whoever shows a line cleans it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import attrs

from startup_fsm.events import Record
from startup_fsm.reports.happenings import Happening, happenings
from startup_fsm.reports.progress import amount, done_of
from startup_fsm.starts import Process
from startup_fsm.tail import Sight

#: Lines of one process that are remembered, so that a log that is read anew says nothing twice.
_SAID: Final = 20_000
_TENTHS: Final = 10


@attrs.frozen(kw_only=True)
class News:
    """A line of one process; ``at_s`` is since the first process began, None where the source has no time."""

    at_s: float | None
    label: str
    severity: str
    text: str


class Newsreader:
    """What is new since it was asked last, process by process."""

    def __init__(self) -> None:
        self._last: dict[tuple[str | None, str, int], tuple[int, Record]] = {}
        self._said: dict[tuple[str | None, str, int], set[tuple[str, str]]] = {}
        self._tenths: dict[tuple[str, str, int], int] = {}

    def read(self, sight: Sight) -> list[News]:
        """The lines that have come, in the order of their time."""
        began = _clocks(sight.start.processes)
        found: list[News] = []
        for process, offset in zip(sight.start.processes, began, strict=True):
            found += [_news(process, each, offset) for each in self._happened(process)]
            found += self._further(process, offset, sight)
        return sorted(found, key=lambda each: each.at_s or 0)

    def _happened(self, process: Process) -> Iterator[Happening]:
        records, history = process.journal.records, process.history
        key = (history.run, history.process or "", history.attempt)
        count, last = self._last.get(key, (0, None))
        if last is not None and (count > len(records) or records[count - 1] != last):
            # Another journal under the same name, or a log that is understood otherwise by now.
            count = 0
        if records:
            self._last[key] = len(records), records[-1]
        said = self._said.setdefault(key, set())
        for record in records[count:]:
            for each in happenings(record):
                if (each.severity, each.text) in said and process.as_source().is_imported:
                    continue
                if len(said) < _SAID:
                    said.add((each.severity, each.text))
                yield each

    def _further(self, process: Process, offset: int, sight: Sight) -> Iterator[News]:
        """A line for each further tenth of shards or captures."""
        visit, done = process.history.current, done_of(process.history, sight.bar)
        if visit is None or done is None or not done.total:
            return
        key, tenth = (process.label, visit.state, visit.visit), done.done * _TENTHS // done.total
        if tenth > self._tenths.get(key, 0):
            self._tenths[key] = tenth
            text = f"{visit.state}: {amount(done)}"
            yield _news(process, Happening(t=process.history.last_t, text=text), offset)


def _clocks(processes: Sequence[Process]) -> list[int]:
    """How much later than the first each process began, ns; 0 where its source has no wall clock."""
    walls = [None if each.history.started is None else each.history.started.wall_ns for each in processes]
    first = min((wall for wall in walls if wall is not None), default=0)
    return [0 if wall is None else wall - first for wall in walls]


def _news(process: Process, happening: Happening, offset: int) -> News:
    at_s = None if happening.t is None else (happening.t + offset) / 1e9
    return News(at_s=at_s, label=process.label, severity=happening.severity, text=happening.text)
