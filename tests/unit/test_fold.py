"""The fold: facts are folded, disorder is recorded, and nothing is ever rejected."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import attrs
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from startup_fsm import events
from startup_fsm.checks import judge
from startup_fsm.diagnose import diagnose
from startup_fsm.events import (
    DecisionMade,
    Event,
    NoteAdded,
    PoolOpened,
    PoolReleased,
    Record,
    RunFinished,
    RunStarted,
    StateEntered,
    StateFailed,
    StateLeft,
    UnknownEvent,
)
from startup_fsm.fold import RunState, allowed_targets, fold
from startup_fsm.memory import GIB, MIB, Snapshot
from startup_fsm.plan import observed, throwaway
from startup_fsm.replay import replay
from startup_fsm.sources import Source
from startup_fsm.testing import counting_start
from startup_fsm.verdict import report


def records(*given_events: Event) -> list[Record]:
    """Events in their envelopes."""
    return [
        Record(run="r", process="p", seq=seq, t=seq * 10, kind=getattr(event, "kind", "later"), event=event)
        for seq, event in enumerate(given_events)
    ]


def entered(state: str, **facts: Any) -> StateEntered:
    return StateEntered(state=state, **facts)


def onward(state: str, source: str, **facts: Any) -> StateEntered:
    return StateEntered(state=state, edge="advance", source=source, **facts)


def failed(state: str, category: str = "oom") -> StateFailed:
    return StateFailed(state=state, error_type="E", category=category, message="m")


START = RunStarted(plan=throwaway(retries=1).as_data())
FIRST = (START, entered("init_device"))
TWO = (*FIRST, StateLeft(state="init_device"), onward("load_weights", "init_device"))


def violations(*given_events: Event) -> list[tuple[int, str]]:
    """Seq and message of every violation."""
    return [(each.seq, each.message) for each in fold(records(*given_events)).violations]


def test_a_start_in_order_has_no_violation() -> None:
    """Entry, end, next entry by its edge."""
    run = fold(records(*TWO))
    assert run.violations == []
    assert (run.state, run.position, run.records, run.last_seq, run.last_t) == ("load_weights", "open", 4, 3, 30)
    assert run.edges_taken == {("init_device", "advance"): 1}
    assert run.visits[0].duration_ns == 10
    assert run.visits[1].duration_ns is None


@pytest.mark.parametrize(
    ("given_events", "seq", "message"),
    [
        ((START, entered("verify")), 1, "the start is init_device, not verify"),
        ((*FIRST, entered("load_weights")), 2, "load_weights entered while init_device is open"),
        ((*FIRST, StateLeft(state="verify")), 2, "state_left verify, which is not open"),
        ((*FIRST, failed("verify")), 2, "state_failed verify, which is not open"),
        ((START, StateLeft(state="init_device")), 1, "state_left init_device, which is not open"),
        ((*TWO[:3], StateLeft(state="init_device")), 3, "state_left init_device, which is not open"),
        ((*TWO[:3], failed("init_device")), 3, "state_failed init_device, which is not open"),
        ((*TWO[:3], onward("verify", "init_device")), 3, "init_device -> verify by 'advance' is not allowed; allowed: load_weights"),
        ((*TWO[:3], entered("load_weights")), 3, "init_device -> load_weights by None is not allowed; allowed: load_weights"),
        ((*TWO[:3], entered("load_weights", edge="leap", source="init_device")), 3, "by 'leap' is not allowed"),
        ((*FIRST, failed("init_device"), onward("load_weights", "init_device")), 3, "by 'advance' is not allowed; allowed: failed"),
        ((*TWO[:3], entered("failed", edge="fail", source="init_device")), 3, "init_device -> failed by 'fail' is not allowed"),
        ((*FIRST, RunFinished(end="ready")), 2, "ready while init_device is open"),
        ((*TWO[:3], RunFinished(end="ready")), 3, "init_device -> ready is not allowed"),
        ((START, RunFinished(end="ready")), 1, "None -> ready is not allowed"),
        ((*FIRST, RunFinished(end="failed"), entered("init_device")), 3, "init_device entered after the end"),
        ((*FIRST, RunFinished(end="failed"), StateLeft(state="init_device")), 3, "state_left init_device after the end"),
        ((*FIRST, RunFinished(end="failed"), failed("init_device")), 3, "state_failed init_device after the end"),
        ((*FIRST, RunFinished(end="failed"), RunFinished(end="ready")), 3, "the run ended twice"),
        ((START, START), 1, "the run began twice in one file"),
        ((*FIRST, PoolReleased(pool="0.1", purpose="kv")), 2, "pool 0.1 released, which is not open"),
    ],
)  # fmt: skip
def test_every_disorder_is_a_violation_with_its_seq(given_events: Sequence[Event], seq: int, message: str) -> None:
    """What does not fit is said once, where it stands, and folded all the same."""
    found = violations(*given_events)
    assert [each[0] for each in found] == [seq]
    assert message in found[0][1]


def test_a_retry_beyond_its_bound_is_a_violation() -> None:
    """The bound of an edge counts within the file."""
    plan = throwaway(retries=1)
    names = [
        "init_device", "load_weights", "profile_activations", "bootstrap_kv", "capture_throwaway", "teardown",
        "size_kv", "allocate_kv",
    ]  # fmt: skip
    sequence: list[Event] = [RunStarted(plan=plan.as_data())]
    source: str | None = None
    for name in names:
        sequence += [
            onward(name, source) if source else entered(name),
            failed(name) if name == "allocate_kv" else StateLeft(state=name),
        ]
        source = name
    again: list[Event] = [
        StateEntered(state="teardown", edge="shrink", source="allocate_kv", visit=2),
        StateLeft(state="teardown", visit=2),
        onward("size_kv", "teardown", visit=2),
        StateLeft(state="size_kv", visit=2),
        onward("allocate_kv", "size_kv", visit=2),
        failed("allocate_kv"),
    ]
    assert fold(records(*sequence, *again)).violations == []
    run = fold(records(*sequence, *again, again[0]))
    assert [each.message for each in run.violations] == [
        "allocate_kv -> teardown by 'shrink' is not allowed; allowed: failed"
    ]
    assert run.violations[0].expected == ("failed",)


def test_a_free_plan_knows_one_order_only() -> None:
    """Any state may follow any, but not while one is open or after the end."""
    free = RunStarted(plan=observed().as_data())
    good = (free, entered("verify"), StateLeft(state="verify"), entered("init_device"), StateLeft(state="init_device"))
    assert violations(*good, RunFinished(end="ready")) == []
    assert len(allowed_targets(fold(records(*good)))) == len(observed().states)
    assert violations(free, entered("verify"), entered("verify"))[0][0] == 2
    assert violations(*good, RunFinished(end="ready"), entered("verify"))[0][0] == 6


@pytest.mark.parametrize("plan", [{"states": 1}, {"name": "x", "states": [], "edges": []}, {"edges": "x"}])
def test_a_plan_that_is_none_is_said_and_survived(plan: dict[str, Any]) -> None:
    """Without a plan nothing is a violation of it; what is wrong with it is kept."""
    run = fold(records(RunStarted(plan=plan), entered("verify"), StateLeft(state="verify"), RunFinished(end="ready")))
    assert run.plan is None
    assert run.plan_trouble
    assert run.violations == []


def test_unknown_kinds_are_counted() -> None:
    """Events of later versions change nothing and are not lost."""
    run = fold(records(START, UnknownEvent(payload={}), UnknownEvent(payload={})))
    assert run.unknown == {"later": 2}


def test_pools_live_more_than_once() -> None:
    """A pool that is opened again has a second life; the last one is released first."""
    sequence = (
        PoolOpened(pool="0.1", purpose="graphs"),
        PoolReleased(pool="0.1", purpose="graphs"),
        PoolOpened(pool="0.1", purpose="graphs"),
        PoolReleased(pool="0.1", purpose="graphs", left_bytes=5),
    )
    lives = fold(records(START, *sequence)).pools
    assert [(life.opened_seq, life.released_seq) for life in lives] == [(1, 2), (3, 4)]


def _real_starts() -> list[list[Record]]:
    """Records of one start that was retried, one that failed, one whose arena grew."""
    kept: list[list[Record]] = []
    tight = {"total_bytes": 4 * GIB, "engine": {"row": 4 * MIB}}
    from startup_fsm.budget import Knobs
    from startup_fsm.plan import single_capture

    for options in (
        {**tight, "knobs": Knobs(utilization=1.0, graph_estimate="none", retries=2)},
        {**tight, "knobs": Knobs(utilization=1.0, graph_estimate="none")},
        {"plan": single_capture(), "total_bytes": 4 * GIB},
        {"knobs": Knobs(utilization=0.25)},
    ):
        boot, engine = counting_start(**options)
        taken: list[Record] = []
        boot.recorder.listeners.append(taken.append)
        with contextlib.suppress(Exception):  # two of them are meant to fail
            boot.run(engine)
        kept.append(taken)
    return kept


REAL = _real_starts()


def whatever(run: RunState, sequence: Sequence[Record]) -> None:
    """Everything that a reader does with a fold."""
    for alive in (False, True):
        verdict = diagnose([Source(run=run, is_alive=alive, stacks=() if alive else ("a:1 b",))])
        orjson.dumps(report([verdict]))
        assert verdict.exit_code in (0, 2, 3)
    for visit in run.visits:
        judge(visit, run)
    allowed_targets(run)
    replay(sequence).divergence()


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_no_order_of_real_records_raises(data: st.DataObject) -> None:
    """Shuffled, repeated, cut and mixed, real records fold, are diagnosed and judged again without an exception."""
    pool = (
        [record for start in REAL for record in start] if data.draw(st.booleans()) else data.draw(st.sampled_from(REAL))
    )
    sequence = data.draw(st.lists(st.sampled_from(pool), max_size=60))
    if data.draw(st.booleans()):
        sequence.sort(key=lambda record: record.seq)
    whatever(fold(sequence), sequence)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_no_hole_in_real_records_raises(data: st.DataObject) -> None:
    """A real start without some of its records, and with some of them twice, reads to its end."""
    start = data.draw(st.sampled_from(REAL))
    gone = data.draw(st.sets(st.integers(0, len(start) - 1), max_size=12))
    twice = data.draw(st.sets(st.integers(0, len(start) - 1), max_size=4))
    sequence = [record for at, record in enumerate(start) if at not in gone for _ in range(2 if at in twice else 1)]
    whatever(fold(sequence), sequence)


ODD = st.one_of(
    st.none(), st.integers(-3, 3), st.floats(), st.text(max_size=3), st.lists(st.integers(-9, 9), max_size=2),
    st.dictionaries(st.text(max_size=3), st.integers(-9, 9), max_size=2),
)  # fmt: skip
NAMES = st.sampled_from(
    ["checkpoint_bytes", "block_tokens", "name", "bytes", "holders", "digest", "addresses", "equal", "left_bytes"]
)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_no_fact_of_an_engine_raises(data: st.DataObject) -> None:
    """Notes, probe results, knobs and figures may hold anything: a judgement does not depend on their types."""
    odd = st.dictionaries(NAMES, ODD)
    knobs = data.draw(st.dictionaries(st.sampled_from(["gpu_memory_utilization", "requested_bytes", "max_model_len", "kv_cache_memory_bytes", "graph_estimate"]), ODD))  # fmt: skip
    sequence = []
    for record in data.draw(st.sampled_from(REAL)):
        event = record.event
        if isinstance(event, RunStarted):
            event = attrs.evolve(event, knobs=knobs)
        elif isinstance(event, NoteAdded):
            event = attrs.evolve(event, note=data.draw(odd))
        elif isinstance(event, events.ProbeRecorded):
            probe = data.draw(st.sampled_from(["workspace", "holders_kv", "holders_profiling_kv", "weights", "replay", "kv_addresses"]))  # fmt: skip
            event = attrs.evolve(event, probe=probe, result=data.draw(odd), skipped=None)
        elif isinstance(event, events.SnapshotTaken) and data.draw(st.integers(0, 5)) == 0:
            event = attrs.evolve(event, snapshot=Snapshot(total_bytes=0, free_bytes=0))
        elif isinstance(event, events.BudgetComputed) and data.draw(st.booleans()):
            event = attrs.evolve(event, total_bytes=0, block_bytes=0)
        elif isinstance(event, DecisionMade):
            event = attrs.evolve(event, inputs=data.draw(odd))
        sequence.append(attrs.evolve(record, event=event))
    whatever(fold(sequence), sequence)
