"""
What a log went through changes nothing of its verdict but where its lines stand.

Every fault goes through every second way, each way through every second fault; the long logs through every fourth.
``STARTUP_FSM_ALL_DIRT=1`` in the environment takes all of both.
"""

from __future__ import annotations

import os

import pytest

from tests.logs.soil import WAYS, soiled
from tests.logs.verdicts_of import FAULTS, STARTED, document, document_once, without_place

LOGS = {path.stem: path for path in (*sorted(FAULTS.glob("*.log")), *sorted(STARTED.glob("*.log")))}

#: What is not read through some dirt yet.
WRONG: dict[tuple[str, str], str] = {}


def cases():
    """Pairs of a way and a log, with their mark where the doctor is wrong."""
    for number, way in enumerate(WAYS):
        for at, name in enumerate(LOGS):
            step = 2 if LOGS[name].parent == FAULTS else 4
            if (number + at) % step and "STARTUP_FSM_ALL_DIRT" not in os.environ:
                continue
            reason = WRONG.get((way, name))
            marks = () if reason is None else pytest.mark.xfail(strict=True, reason=reason)
            yield pytest.param(way, name, marks=marks, id=f"{way}-{name}")


@pytest.mark.parametrize(("way", "name"), list(cases()))
def test_dirt_changes_nothing(way, name, tmp_path):
    """The verdict of a soiled log is that of the clean one, but for its origin and the numbers of its lines."""
    path = tmp_path / "soiled.log"
    path.write_bytes(soiled(LOGS[name].read_bytes(), way, name))
    assert without_place(document(path)) == without_place(document_once(LOGS[name]))


@pytest.mark.parametrize("way", WAYS)
def test_dirt_is_dirt(way):
    """A way of soiling changes the bytes, loses no line, and does the same each time."""
    log = LOGS["F01"].read_bytes()
    got = soiled(log, way, "F01")
    assert got != log
    assert got == soiled(log, way, "F01")
    assert got.count(b"\n") >= log.count(b"\n") - 1
