"""Progress of a state: on a terminal always, in the journal at most once a second."""

from __future__ import annotations

import pytest

from startup_fsm import step
from startup_fsm.testing import counting_start


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The clock of the steps, to be set by a test."""
    clock = [100.0]
    monkeypatch.setattr(step.time, "monotonic", lambda: clock[0])
    return clock


def test_notes_of_a_slow_state(now: list[float]):
    """One note for each second in which there was progress, with what is done, of how much, in which unit."""
    boot, _ = counting_start(progress=False)
    seen: list[object] = []
    boot.recorder.listeners.append(lambda record: seen.append(record.event) if record.kind == "note_added" else None)
    with boot.state("init_device") as open_step:
        for tick in range(35):
            now[0] = 100 + tick / 10
            open_step.progress(tick, 35, "shards")

    assert [event.note["progress"] for event in seen] == [
        {"done": done, "total": 35, "unit": "shards"} for done in (10, 20, 30)
    ]
    assert boot.history.visits[0].notes["progress"]["done"] == 30


def test_a_quick_state_leaves_none(now: list[float]):
    """A state that is over within a second leaves no note of its progress."""
    boot, engine = counting_start(progress=False)
    boot.run(engine)

    assert all("progress" not in visit.notes for visit in boot.history.visits)
