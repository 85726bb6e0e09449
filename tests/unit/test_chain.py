"""The critical chain over ranks: who was waited for, what it adds up to, and who is slower than the others."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import attrs
import pytest

from startup_fsm.chain import chain, straggler_findings
from startup_fsm.events import (
    Event,
    GraphCaptured,
    Origin,
    RanksAgreed,
    Record,
    RunFinished,
    RunStarted,
    StateEntered,
    StateFailed,
    StateLeft,
)
from startup_fsm.fold import fold
from startup_fsm.sources import Source
from startup_fsm.testing import counting_start

S = 1_000_000_000
#: 2030-01-01, in ns.
WALL = 1_893_456_000 * S


def left(state: str, cpu_s: float = 0.0) -> StateLeft:
    """The end of a state."""
    return StateLeft(state=state, cpu_ns=round(cpu_s * S))


def source(rank: int | None, events: Iterable[tuple[float | None, Event]], **started: Any) -> Source:
    """A process whose events lie so many seconds after its first; None for no time."""
    name = "engine-1" if rank is None else f"rank-{rank:05d}"
    first: list[tuple[float | None, Event]] = [(0.0, RunStarted(**{"wall_ns": WALL, "host": "host-a", **started}))]
    records = [
        Record(
            run="run",
            process=name,
            rank=rank,
            seq=seq,
            t=None if t is None else round(t * S),
            kind=each.kind,
            event=each,
        )
        for seq, (t, each) in enumerate([*first, *events])
    ]
    return Source(run=fold(records))


def went(*states: tuple[str, float, float]) -> list[tuple[float | None, Event]]:
    """States with the second of their entry and of their end."""
    return [pair for name, began, ended in states for pair in ((began, StateEntered(state=name)), (ended, left(name)))]


def usual(load_s: float = 10.0, began_s: float = 0.0, waits_s: float = 0.0) -> list[tuple[float | None, Event]]:
    """Loading, then capture together, which ends ``waits_s`` after this rank's own five seconds."""
    loaded = began_s + load_s
    captured = loaded + waits_s + 5
    return went(("load_weights", began_s, loaded), ("capture_graphs", loaded, captured))


def four(slow: int, by_s: float = 15.0) -> list[Source]:
    """Four ranks, one of them slower in loading; the others wait for it in the capture."""
    return [
        source(rank, usual(10.0 + (by_s if rank == slow else 0.0), waits_s=0.0 if rank == slow else by_s))
        for rank in range(4)
    ]


def test_one_process_is_its_states_in_order():
    """Of one process the chain is all of its states, with the time between them and after them."""
    events = [*went(("load_weights", 1, 4), ("verify", 4.5, 6)), (7.0, RunFinished(end="ready"))]
    found = chain([source(0, events)])

    assert found.clock == "one"
    assert [(each.state, each.began_ns, each.took_ns) for each in found.steps] == [
        (None, 0, 1 * S),
        ("load_weights", 1 * S, 3 * S),
        (None, 4 * S, S // 2),
        ("verify", round(4.5 * S), round(1.5 * S)),
        (None, 6 * S, 1 * S),
    ]
    assert found.total_ns == 7 * S == sum(each.took_ns or 0 for each in found.steps)
    assert found.meetings == found.stragglers == ()


def test_what_took_most_of_a_state():
    """Graphs where they take most of it; else its body, with how much of it ran on the processor."""
    events: list[tuple[float | None, Event]] = [
        (0, StateEntered(state="load_weights")),
        (10, left("load_weights", cpu_s=1)),
        (10, StateEntered(state="capture_graphs")),
        (12, GraphCaptured(state="capture_graphs", size=2, pool="0.1", duration_ns=2 * S)),
        (14, GraphCaptured(state="capture_graphs", size=1, pool="0.1", duration_ns=1 * S)),
        (14, left("capture_graphs", cpu_s=4)),
    ]
    loaded, captured = chain([source(0, events)]).steps

    assert (loaded.what, loaded.what_ns) == ("its body, cpu 10%", 10 * S)
    assert (captured.what, captured.what_ns) == ("2 graphs", 3 * S)


def test_a_live_start_adds_up():
    """The chain of a start of ours lasts from its first event to its last, without a hole."""
    boot, engine = counting_start()
    boot.run(engine)
    found = chain([Source(run=boot.history)])

    assert found.total_ns == boot.history.last_t
    assert sum(each.took_ns or 0 for each in found.steps) == found.total_ns
    assert [each.state for each in found.steps if each.state] == [visit.state for visit in boot.history.visits]


@pytest.mark.parametrize("slow", range(4))
def test_the_chain_runs_through_the_rank_that_is_late(slow: int):
    """Where ranks meet, the chain goes on with the one that came last, and its time counts from then."""
    found = chain(four(slow))
    loaded, captured = [each for each in found.steps if each.state is not None]

    assert (loaded.process, loaded.took_ns) == (f"rank {slow}", 25 * S)
    assert captured.took_ns == 5 * S
    assert captured.waited_for in (None, f"rank {slow}")
    assert found.total_ns == 30 * S
    assert found.clock == "wall"


def test_who_waited_how_long():
    """A meeting names the rank that came last, and what each of the others waited."""
    (met,) = chain(four(2)).meetings

    assert (met.state, met.last, met.began_ns) == ("capture_graphs", "rank 2", 25 * S)
    assert met.waited_ns == {"rank 0": 15 * S, "rank 1": 15 * S, "rank 3": 15 * S}
    assert met.longest_ns == 15 * S


def test_the_straggler_is_named_with_state_and_by_how_much():
    """A rank above the median by more than a fifth and a second is a straggler; whoever waits for it is none."""
    (found,) = chain(four(3)).stragglers

    assert (found.process, found.state) == ("rank 3", "load_weights")
    assert (found.took_ns, found.median_ns, found.over_ns) == (25 * S, 10 * S, 15 * S)


@pytest.mark.parametrize(
    ("median_s", "by_s", "is_slow"), [(10, 2.0, False), (10, 2.1, True), (1, 1.0, False), (1, 1.1, True)]
)
def test_tolerance(median_s: float, by_s: float, *, is_slow: bool):
    """A fifth of the median or a second, whichever is more, is allowed."""
    ranks = [source(rank, went(("load_weights", 0, median_s + (by_s if rank == 1 else 0)))) for rank in range(3)]

    assert bool(chain(ranks).stragglers) == is_slow


def test_waiting_is_no_straggling():
    """Of two ranks the early one is longer in the state that they do together; neither is slow."""
    early, late = source(0, went(("profile_activations", 0, 40))), source(1, went(("profile_activations", 30, 40)))

    assert chain([early, late]).stragglers == ()


def test_slow_inside_a_state_that_is_done_together():
    """What a rank takes after the last has come counts as its own."""
    ranks = [source(rank, went(("capture_graphs", 10 * (rank == 1), 60 if rank == 2 else 20))) for rank in range(4)]
    (found,) = chain(ranks).stragglers

    assert (found.process, found.took_ns, found.median_ns) == ("rank 2", 50 * S, 10 * S)


def test_wall_clocks_are_laid_over_each_other():
    """A journal that begins 30 s later has its states 30 s later."""
    ranks = [source(0, usual(waits_s=30)), source(1, usual(), wall_ns=WALL + 30 * S)]
    found = chain(ranks)
    (met,) = found.meetings

    assert (met.last, met.waited_ns) == ("rank 1", {"rank 0": 30 * S})
    assert found.total_ns == 45 * S
    assert found.stragglers == ()
    assert [each.process for each in found.steps if each.state == "load_weights"] == ["rank 1"]


def test_agreement_makes_any_state_a_meeting():
    """Ranks meet where they agree on something, whatever the state is called."""
    events = [
        [(at, StateEntered(state="plan_experts")), (9.0, RanksAgreed(topic="blocks")), (9.0, left("plan_experts"))]
        for at in (1.0, 8.0)
    ]
    (met,) = chain([source(rank, each) for rank, each in enumerate(events)]).meetings

    assert (met.state, met.last, met.longest_ns) == ("plan_experts", "rank 1", 7 * S)


def test_clocks_that_contradict_an_agreement():
    """Nobody leaves an agreement before all have come: clocks that say so are apart by at least as much."""
    events: Sequence[tuple[float | None, Event]] = [
        (1.0, StateEntered(state="size_kv")),
        (2.0, RanksAgreed(topic="blocks")),
        (2.0, left("size_kv")),
    ]
    ranks = [source(0, events), source(1, events, wall_ns=WALL + 5 * S, host="host-b")]
    unseen = chain(ranks).unseen

    assert any("by their clocks rank 0 left size_kv 4000.0 ms before rank 1 came to it" in each for each in unseen)
    assert any("clocks of 2 hosts" in each for each in unseen)


def test_clocks_that_cannot_be_related():
    """Without wall clocks no rank is said to wait, and only states of one's own are compared."""
    ranks = [
        source(
            rank,
            went(("load_weights", 0, 30 if rank == 2 else 10), ("verify", 30, 90 if rank == 1 else 40)),
            wall_ns=None,
        )
        for rank in range(3)
    ]
    found = chain(ranks)

    assert (found.clock, found.meetings) == ("unknown", ())
    assert [(each.process, each.state) for each in found.stragglers] == [("rank 2", "load_weights")]
    assert {each.process for each in found.steps} == {"rank 1"}
    assert any("how the clocks of the processes relate" in each for each in found.unseen)


def logged(label: str, states: Sequence[tuple[str, int]], *, has_time: bool = True) -> Source:
    """A process of a text log: states with the line of their entry; every line is a second where there is time."""
    events = [(0, RunStarted(source="sglang", label=label))]
    for (name, line), after in zip(states, [*states[1:], ("", states[-1][1] + 1)], strict=True):
        events += [(line, StateEntered(state=name)), (after[1], left(name))]
    records = [
        Record(
            run="log",
            process=label,
            seq=seq,
            t=line * S if has_time else None,
            kind=each.kind,
            event=each,
            origin=Origin(source="sglang", line=line),
        )
        for seq, (line, each) in enumerate(events)
    ]
    return Source(run=fold(records), origins={each.seq: each.origin for each in records if each.origin})


def test_one_log_has_one_clock():
    """Processes of a text log need no wall clock; those without a state are left out."""
    ranks = [
        logged("TP0", [("load_weights", 1), ("capture_graphs", 5)]),
        logged("TP1", [("load_weights", 2), ("capture_graphs", 9)]),
    ]
    found = chain([*ranks, attrs.evolve(ranks[0], run=fold([]))])

    assert (found.clock, found.processes) == ("log", 2)
    assert [(each.last, each.longest_ns) for each in found.meetings] == [("TP1", 1 * S)]


def test_a_log_without_times_is_in_the_order_of_its_lines():
    """Where nothing has a time, lines tell who came last, and nothing is said of how long."""
    ranks = [
        logged("TP0", [("load_weights", 1), ("capture_graphs", 5), ("verify", 20)], has_time=False),
        logged("TP1", [("load_weights", 2), ("capture_graphs", 9), ("verify", 12)], has_time=False),
    ]
    found = chain(ranks)

    assert [(each.process, each.state) for each in found.steps] == [
        ("TP1", "load_weights"),
        ("TP0", "capture_graphs"),
        ("TP0", "verify"),
    ]
    assert found.steps[1].waited_for == "TP1"
    assert (found.total_ns, found.meetings, found.stragglers) == (None, (), ())
    assert {(each.began_ns, each.took_ns) for each in found.steps} == {(None, None)}


def test_the_chain_ends_where_a_rank_failed_of_its_own():
    """Of ranks that failed the first with a reason of its own ends the chain, not the one that heard of it later."""

    def failing(rank: int, at: float, category: str) -> Source:
        failed = StateFailed(state="verify", error_type="E", category=category, message="m")
        return source(rank, [*usual(), (15.0, StateEntered(state="verify")), (at, failed)])

    found = chain([failing(0, 40, "peer"), failing(1, 20, "oom")])
    last = [each for each in found.steps if each.state == "verify"]

    assert [(each.process, each.ended) for each in last] == [("rank 1", "failed")]
    assert found.total_ns == 20 * S


def test_states_against_their_order_come_to_an_end():
    """Journals whose states wait for each other in a circle still make a chain."""
    ranks = [
        source(0, went(("verify", 0, 20), ("capture_graphs", 1, 21))),
        source(1, went(("capture_graphs", 2, 22), ("verify", 3, 23))),
    ]

    assert len(chain(ranks).steps) <= 8


def test_nothing_to_chain():
    """A start that came to no state has an empty chain."""
    found = chain([source(0, [])])

    assert (found.steps, found.total_ns, found.processes) == ((), None, 0)


def test_findings_of_stragglers():
    """Each is a note of its process, with the numbers and the events that show it."""
    ((at, found),) = straggler_findings(four(1))

    assert (at, found.code, found.severity, found.state) == (1, "time.straggler", "note", "load_weights")
    assert found.message == "rank 1 took 25.0 s in load_weights, 15.0 s more than the median of the ranks"
    assert (found.observed, found.expected, found.tolerance) == (25 * S, 10 * S, 2 * S)
    assert found.evidence == (1, 2)
