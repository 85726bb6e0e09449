"""What the doctor says of a text log, for the tests in this folder: in process, as one document, and piece by piece."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import jsonschema

from startup_fsm.memory import GIB, MIB
from startup_fsm.reading import read_starts
from startup_fsm.verdict import report
from startup_fsm.verdicts import judge

HERE: Final = Path(__file__).parent
FAULTS: Final = HERE / "faults"
STARTED: Final = HERE / "started"

_SCHEMA: Final = jsonschema.Draft202012Validator(json.loads((HERE.parent / "doctor.schema.json").read_bytes()))
_UNITS: Final = {"GiB": GIB, "MiB": MIB}
_LINES: Final = re.compile(r":\d+-\d+\Z")

Object = dict[str, Any]


def document(path: Path) -> Object:
    """What ``doctor --json`` prints of a log; by the schema, or the test fails."""
    starts = read_starts(path)
    verdicts = [judge(start.sources, source=start.source, origin=start.origin) for start in starts]
    told = json.loads(json.dumps(report(verdicts)))
    _SCHEMA.validate(told)
    return told


@functools.cache
def document_once(path: Path) -> Object:
    """The same, read once for all tests of a log; nobody changes it."""
    return document(path)


def main_of(told: Object) -> Object:
    """The verdict that matters."""
    return told["runs"][told["main"]]


def first_code(verdict: Object) -> str | None:
    """The code of the first finding that is more than a note."""
    return next((each["code"] for each in verdict["findings"] if each["severity"] != "note"), None)


def codes(verdict: Object) -> list[str]:
    """Codes of all findings."""
    return [each["code"] for each in verdict["findings"]]


def changes(verdict: Object, *, first: int | None = None) -> list[Object]:
    """Changes of the advice, of the ``first`` items or of all."""
    return [change for item in verdict["advice"][:first] for change in item["changes"]]


def moves(verdict: Object, *, first: int | None = None) -> list[str]:
    """The same as words: ``gpu_memory_utilization lower``."""
    return [f"{change['setting']} {change['direction']}" for change in changes(verdict, first=first)]


def advised(verdict: Object, setting: str) -> float | None:
    """The value that the advice gives a setting; None where it gives none."""
    return next((each["to"] for each in changes(verdict) if each["setting"] == setting and "to" in each), None)


def amount(printed: str | float) -> float:
    """A figure as a log prints it, in bytes, or a count."""
    if not isinstance(printed, str):
        return printed
    number, unit = printed.split()
    return round(float(number) * _UNITS[unit])


def without_place(told: Object) -> Object:
    """A document without what depends on where its lines stand: origin, run, line numbers, seq, and times."""

    def stripped(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: stripped(each) for key, each in value.items() if key not in ("origin", "run", "durations_ns")}
        return [stripped(each) for each in value] if isinstance(value, list) else value

    told = stripped(told)
    for verdict in told["runs"]:
        for finding in verdict["findings"]:
            finding["evidence"] = [each.get("text") for each in finding["evidence"]]
    return told


def lines_of(path: Path) -> list[str]:
    """The lines of a log as a reader counts them."""
    return path.read_bytes().decode("utf-8").split("\n")


def span_of(verdict: Object) -> tuple[int, int]:
    """First and last line of a start, as its origin says."""
    found = _LINES.search(verdict["origin"])
    assert found is not None, verdict["origin"]
    first, last = found[0][1:].split("-")
    return int(first), int(last)
