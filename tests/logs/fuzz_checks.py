"""What holds for every log, however hostile: one error at most, an end in time, and a verdict that can be shown."""

from __future__ import annotations

import functools
import json
import math
import re
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, Final, get_args

import attrs
import jsonschema
import orjson

from startup_fsm.codec import CODEC
from startup_fsm.errors import JournalError
from startup_fsm.findings import CODES, SETTINGS
from startup_fsm.fold import fold
from startup_fsm.journal import file_name
from startup_fsm.reading import read_starts
from startup_fsm.reports.markdown import markdown_pages
from startup_fsm.reports.terminal import page
from startup_fsm.reports.text import verdict_view
from startup_fsm.reports.views import blame_view, times_view
from startup_fsm.sources import Source
from startup_fsm.starts import Start
from startup_fsm.verbs.importing import _safe, _write
from startup_fsm.verdict import Outcome, Verdict, report
from startup_fsm.verdicts import judge, sizing

_SCHEMA: Final = Path(__file__).parents[1] / "doctor.schema.json"
_OUTCOMES: Final = frozenset(get_args(Outcome))

#: Starts of one log, the last ones, whose pages are made: a crash loop has hundreds that are alike.
_SHOWN: Final = 4
#: Seconds of processor time: for any log, and for each of its bytes.
BASE_S: Final = 0.5
BYTE_S: Final = 1.5 / 200_000


class TooSlow(BaseException):
    """The time of a log is over; no ``except Exception`` may take it."""


@attrs.frozen
class Checked:
    """What came of a log: seconds of reading, and outcomes; none where it says nothing."""

    seconds: float
    outcomes: tuple[str, ...]


def check(path: Path, *, is_thorough: bool = False) -> Checked:
    """
    Read a log and hold everything that must hold against what comes of it.

    Args:
        path: The log.
        is_thorough: Also against the schema, and by way of the files that an import writes.

    Raises:
        AssertionError: Something does not hold.
        TooSlow: It takes too long; the traceback shows in what.
    """
    with _limited(BASE_S + BYTE_S * path.stat().st_size):
        began = time.process_time()
        try:
            starts = read_starts(path)
        except JournalError:
            return Checked(time.process_time() - began, ())
        verdicts = [judge(start.sources, source=start.source, origin=start.origin) for start in starts]
        seconds = time.process_time() - began
    assert starts, "no start and no error"
    logged = [start.run for start in starts if start.source not in ("journal", "mirror")]
    assert len(set(logged)) == len(logged), f"processes of one start stand in two: {logged}"
    for start, verdict in zip(starts, verdicts, strict=True):
        if start.source not in ("journal", "mirror"):
            _hold_for_records(start)
            _hold_for_a_round_trip(start, verdict)
    answer = report(verdicts)
    _hold_for_json(answer)
    _hold_for_views(verdicts)
    if is_thorough:
        _validator().validate(orjson.loads(orjson.dumps(answer)))
        _hold_for_other_views(starts)
        _hold_for_an_import(starts, path)
    return Checked(seconds, tuple(verdict.outcome for verdict in verdicts))


@contextmanager
def _limited(seconds: float) -> Iterator[None]:
    def over(number: int, frame: FrameType | None) -> None:
        raise TooSlow(f"more than {seconds:.1f} s of processor time")

    before = signal.signal(signal.SIGPROF, over)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def _hold_for_records(start: Start) -> None:
    for process in start.processes:
        records = process.journal.records
        assert [each.seq for each in records] == list(range(len(records))), "seqs have gaps"
        clock = [each.t for each in records if each.t is not None]
        assert clock == sorted(clock), "t falls"
        assert not process.history.violations, process.history.violations[:3]
        assert process.history.plan_trouble is None, process.history.plan_trouble
        assert all(each.rank is None or each.rank >= 0 for each in records)
        assert all(each.origin is not None for each in records)


def _hold_for_a_round_trip(start: Start, verdict: Verdict) -> None:
    sources = []
    for process in start.processes:
        was = process.journal.records
        records = [CODEC.decode(CODEC.encode(each)) for each in was]
        # The first one holds settings and a plan, whose tuples become arrays.
        assert [each.event for each in records[1:]] == [each.event for each in was[1:]], "an event is not what it was"
        origins = {each.seq: each.origin for each in records if each.origin is not None}
        problems = process.as_source().problems
        sources.append(Source(run=fold(records), problems=problems, origins=origins))
    again = judge(sources, source=start.source, origin=start.origin)
    before, after = (_plain(each.as_json()) for each in (verdict, again))
    assert after == before, f"the verdict differs after a round trip:\n{before!r}\n{after!r}"


def _plain(value: Any) -> Any:
    """As JSON has it: what journals hold as arrays may have been tuples."""
    return json.loads(json.dumps(value))


def _hold_for_an_import(starts: tuple[Start, ...], path: Path) -> None:
    if any(start.source in ("journal", "mirror") for start in starts):
        return
    for at, start in enumerate(starts):
        # A directory gives its processes by name; where two say something in one line, the first of them counts.
        ordered = sorted(start.processes, key=lambda each: file_name(_safe(each.history.process or ""), 1))
        verdict = judge([each.as_source() for each in ordered], source=start.source, origin=start.origin)
        directory = path.parent / f"{path.name}.{at}"
        files = _write(start, directory)
        assert len(files) == len(start.processes)
        assert all(directory in file.resolve().parents for file in files), f"a file outside: {files}"
        (again,) = read_starts(files[0].parent)
        other = judge(again.sources, source=again.source, origin=start.origin)
        assert (other.outcome, other.failed_state) == (verdict.outcome, verdict.failed_state)
        assert [each.finding.code for each in other.findings] == [each.finding.code for each in verdict.findings]
        shutil.rmtree(directory)


def _hold_for_json(answer: dict[str, Any]) -> None:
    orjson.dumps(answer)
    _hold_for_numbers(answer, "answer")
    for run in answer["runs"]:
        assert run["outcome"] in _OUTCOMES, run["outcome"]
        for finding in run["findings"]:
            assert finding["code"] in CODES, finding["code"]
        for advice in run["advice"]:
            assert advice["changes"], advice
            for change in advice["changes"]:
                assert change["setting"] in SETTINGS, change


def _hold_for_numbers(value: Any, where: str) -> None:
    if isinstance(value, dict):
        for name, each in value.items():
            assert isinstance(name, str), f"{where}: the name {name!r}"
            _hold_for_numbers(each, f"{where}.{name}")
    elif isinstance(value, (list, tuple)):
        for each in value:
            _hold_for_numbers(each, where)
    elif isinstance(value, float):
        assert math.isfinite(value), f"{where}: {value}"
    elif isinstance(value, int):
        assert -(1 << 63) <= value < 1 << 63, f"{where}: {value}"


def _hold_for_views(verdicts: list[Verdict]) -> None:
    text = "\n".join(page(verdict_view(each), width=100) for each in verdicts[-_SHOWN:])
    _hold_for_characters(text, "text")
    markdown = markdown_pages(verdicts)
    _hold_for_characters(markdown, "markdown")
    for line in markdown.split("\n"):
        outside = _outside_code(line)
        assert not re.search(r"[<@]", outside), f"markup in {line!r}"


def _hold_for_other_views(starts: tuple[Start, ...]) -> None:
    for start in starts[-3:]:
        _hold_for_characters(page(times_view(start), width=100), "times")
        _hold_for_characters(page(blame_view(start), width=100), "blame")
        sizing(start.sources)


def _hold_for_characters(text: str, where: str) -> None:
    strange = {each for each in set(text) if not each.isprintable() and each != "\n"}
    assert not strange, f"{where} holds {sorted(strange)!r}"


def _outside_code(line: str) -> str:
    """A line of Markdown without its code spans: those end with as many backticks as they began with."""
    outside, at = "", 0
    while at < len(line):
        if line[at] == "\\":
            at += 2
            continue
        if line[at] != "`":
            outside += line[at]
            at += 1
            continue
        fence = re.match("`+", line[at:])
        assert fence is not None
        end = re.compile(rf"(?<!`){fence[0]}(?!`)").search(line, at + fence.end())
        assert end is not None, f"a code span without an end: {line!r}"
        at = end.end()
    return outside


@functools.cache
def _validator() -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator(json.loads(_SCHEMA.read_bytes()))
