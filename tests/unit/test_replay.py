"""A journal against its own plan, and against today's checks."""

from __future__ import annotations

import attrs
import pytest

from startup_fsm.events import CheckJudged, Event, PoolReleased, Record, RunStarted, StateEntered
from startup_fsm.findings import Finding
from startup_fsm.replay import replay
from startup_fsm.testing import counting_start


@pytest.fixture(scope="module")
def records() -> list[Record]:
    """Every event of a start that is ready."""
    kept: list[Record] = []
    boot, engine = counting_start()
    boot.recorder.listeners.append(kept.append)
    boot.run(engine)
    return kept


def changed(records: list[Record], kind: type[Event], **changes: object) -> list[Record]:
    """The same with other fields in all events of one kind."""
    return [
        attrs.evolve(each, event=attrs.evolve(each.event, **changes)) if isinstance(each.event, kind) else each
        for each in records
    ]


def test_a_sound_start(records: list[Record]):
    """Nothing diverges, every edge is judged again, and every judgement is the same."""
    found = replay(records)

    assert found.divergence() is None
    assert found.edges == len(found.history.visits)
    assert found.differences == ()
    assert not found.is_worse


def test_an_edge_that_is_not_there(records: list[Record]):
    """The first violation is the divergence: place, what was allowed, what was found."""
    cut = [
        each
        for each in records
        if getattr(each.event, "state", None) != "teardown" or isinstance(each.event, RunStarted)
    ]
    divergence = replay(cut).divergence()
    entered = next(
        each.seq for each in records if isinstance(each.event, StateEntered) and each.event.state == "size_kv"
    )

    assert divergence is not None
    assert (divergence.seq, divergence.found, divergence.expected) == (entered, "size_kv", ("teardown",))
    assert divergence.hint


def test_no_plan_to_hold_against(records: list[Record]):
    """A plan that is none is a divergence: nothing could be checked."""
    divergence = replay(changed(records, RunStarted, plan={"name": "x"})).divergence()

    assert divergence is not None
    assert "plan" in divergence.message


def test_facts_that_were_judged_otherwise(records: list[Record]):
    """A check that finds an error today in the facts of then is a difference, and makes it worse."""
    found = replay(changed(records, PoolReleased, left_bytes=4096))
    (difference,) = found.differences

    assert (difference.check, difference.state) == ("pools_gone", "teardown")
    assert difference.was == ()
    assert {each.code for each in difference.now or ()} <= {"teardown.kv_alive", "teardown.pool_held"}
    assert found.is_worse


def test_findings_of_then_that_are_none_today(records: list[Record]):
    """What is not found any more is a difference, and nothing worse."""
    finding = Finding(code="weights.second_copy", severity="error", message="twice")
    found = replay(
        [
            attrs.evolve(each, event=attrs.evolve(each.event, findings=(finding,)))
            if isinstance(each.event, CheckJudged) and each.event.check == "weights_once"
            else each
            for each in records
        ]
    )
    (difference,) = found.differences

    assert (difference.was, difference.now) == ((finding,), ())
    assert not found.is_worse


def test_checks_that_did_not_exist(records: list[Record]):
    """A check that was not asked then and holds today is no difference."""
    assert replay([each for each in records if not isinstance(each.event, CheckJudged)]).differences == ()


def test_skipped_probes_are_named(records: list[Record]):
    """What no probe looked at is said with its reason."""
    assert "replay" in replay(records).skipped
