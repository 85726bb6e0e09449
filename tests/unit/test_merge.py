"""Journals of several ranks on one clock."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from startup_fsm.events import NoteAdded, RanksAgreed, Record, RunStarted
from startup_fsm.journal import read_journal
from startup_fsm.merge import LOOK_NS, Clock, clocks, merged
from startup_fsm.testing import counting_start, over_ranks

SECOND = 1_000_000_000


def journal(*times, wall, boot="a", rank=0, met=()):
    """Records at these times (ns), of which those in ``met`` are meetings."""
    first = RunStarted(wall_ns=wall, boot_id=boot)
    events = [RanksAgreed(topic="m", agreed=1, waited_ns=1) if t in met else NoteAdded(note={"t": t}) for t in times]
    return [
        Record(run="r", process=f"rank-{rank:05d}", rank=rank, seq=seq, t=t, kind=event.kind, event=event)
        for seq, (t, event) in enumerate([(0, first), *zip(times, events, strict=True)])
    ]


def test_one_host():
    """The wall clock at the beginning is enough, and exact."""
    both = [journal(5, 20, wall=1_000), journal(1, 2, wall=1_010, rank=1)]

    assert clocks(both) == [Clock(offset_ns=0, error_ns=0), Clock(offset_ns=10, error_ns=0)]
    assert [(each.at_ns, each.source) for each in merged(both)] == [(0, 0), (5, 0), (10, 1), (11, 1), (12, 1), (20, 0)]


def test_two_hosts_whose_wall_clocks_differ():
    """Meetings lay them over each other; how far those disagree is the error, and a look at least."""
    ahead = 7 * SECOND
    here = journal(SECOND, 2 * SECOND, 3 * SECOND, wall=SECOND, met={SECOND, 2 * SECOND, 3 * SECOND})
    late = [SECOND, 2 * SECOND + 4 * LOOK_NS, 3 * SECOND]
    there = journal(*late, wall=SECOND + ahead, boot="b", rank=1, met=set(late))

    first, second = clocks([here, there])
    assert first == Clock(offset_ns=0, error_ns=0)
    assert second == Clock(offset_ns=0, error_ns=2 * LOOK_NS, meetings=3)


def test_two_hosts_that_never_met():
    """The wall clocks are all there is, and nothing says how far they are off."""
    assert clocks([journal(wall=5), journal(wall=9, boot="b")])[1] == Clock(offset_ns=4, error_ns=None)


def test_without_a_clock():
    """A journal that has lost its beginning stands with the earliest; nothing raises."""
    lost = journal(3, wall=None)[1:]
    assert clocks([lost, journal(1, wall=9)]) == [Clock(offset_ns=0, error_ns=None), Clock(offset_ns=0, error_ns=0)]
    assert clocks([lost, []]) == [Clock(offset_ns=0, error_ns=None)] * 2
    assert list(merged([])) == []


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.one_of(st.none(), st.integers(0, 10**9)), max_size=8), min_size=1, max_size=5))
def test_the_order_of_each_journal_is_kept(times):
    """Whatever its clock says, and all records are there."""
    journals = [journal(*each, wall=1_000 * at, rank=at) for at, each in enumerate(times)]
    stream = list(merged(journals))

    assert len(stream) == sum(map(len, journals))
    for at, records in enumerate(journals):
        assert [each.record.seq for each in stream if each.source == at] == [record.seq for record in records]
    assert all(one.at_ns <= two.at_ns for one, two in itertools.pairwise(stream))


def test_a_real_start(tmp_path):
    """Meetings of a start over ranks lie at one instant, give or take a look."""

    def start(agreement):
        boot, engine = counting_start(agreement=agreement, journal=tmp_path)
        boot.run(engine)
        return boot.path

    journals = [read_journal(path).records for path in over_ranks(3, start)]
    met = {}
    for each in merged(journals):
        if each.record.kind == "ranks_agreed":
            met.setdefault(each.record.event.topic, []).append(each.at_ns)

    assert set(met) == {"fingerprint", "blocks", "ready"}
    for times in met.values():
        assert len(times) == 3
        assert max(times) - min(times) < 5 * LOOK_NS
