"""Processes of several hosts on one clock."""

from __future__ import annotations

from startup_fsm.chain import chain
from startup_fsm.clocks import LOOK_NS, Beginning, beginnings, on_one_clock
from startup_fsm.events import NoteAdded, RanksAgreed, Record, RunStarted, StateEntered, StateLeft
from startup_fsm.fold import fold
from startup_fsm.reading import read_starts
from startup_fsm.sources import Source, meetings_of
from startup_fsm.testing import counting_start, over_ranks

SECOND = 1_000_000_000


def source(*happened, wall, boot="a", rank=0):
    """A process with these events, each behind its time in ns; a bare time is a note."""
    pairs = [(0, RunStarted(wall_ns=wall, boot_id=boot, host=f"host-{boot}"))]
    pairs += [each if isinstance(each, tuple) else (each, NoteAdded(note={})) for each in happened]
    records = [
        Record(run="r", process=f"rank-{rank:05d}", rank=rank, seq=seq, t=t, kind=event.kind, event=event)
        for seq, (t, event) in enumerate(pairs)
    ]
    return Source(run=fold(records), meetings=meetings_of(records))


def met(t, topic="m"):
    return t, RanksAgreed(topic=topic, agreed=1, waited_ns=1)


def test_one_host():
    """The wall clock at the beginning is enough, and exact."""
    both = [source(5, 20, wall=1_000), source(1, 2, wall=1_010, rank=1)]

    assert beginnings(both) == [Beginning(wall_ns=1_000, error_ns=0), Beginning(wall_ns=1_010, error_ns=0)]


def test_two_hosts_whose_wall_clocks_differ():
    """Meetings lay them over each other; how far those disagree is the error, and a look at least."""
    here = source(*map(met, (SECOND, 2 * SECOND, 3 * SECOND)), wall=SECOND)
    late = map(met, (SECOND, 2 * SECOND + 4 * LOOK_NS, 3 * SECOND))
    there = source(*late, wall=8 * SECOND, boot="b", rank=1)

    assert beginnings([here, there]) == [
        Beginning(wall_ns=SECOND, error_ns=0),
        Beginning(wall_ns=SECOND, error_ns=2 * LOOK_NS, meetings=3),
    ]


def test_what_was_only_written_down_beside_a_meeting_is_none():
    """Nobody waited there, so its time says nothing of the others."""
    beside = (5 * SECOND, RanksAgreed(topic="devices", agreed=2))
    both = [source(met(SECOND), beside, wall=0), source(met(SECOND), met(9), wall=SECOND, boot="b", rank=1)]

    assert [each.meetings for each in both] == [{("m", 0): SECOND}, {("m", 0): SECOND, ("m", 1): 9}]
    assert beginnings(both)[1].meetings == 1


def test_two_hosts_that_never_met():
    """The wall clocks are all there is, and nothing says how far they are off."""
    assert beginnings([source(wall=5), source(wall=9, boot="b")])[1] == Beginning(wall_ns=9, error_ns=None)


def test_without_a_clock():
    """A journal that has lost its beginning tells nothing; nothing raises."""
    lost = Source(run=fold([]))
    assert beginnings([lost, source(1, wall=9)]) == [
        Beginning(wall_ns=None, error_ns=None),
        Beginning(wall_ns=9, error_ns=0),
    ]
    assert beginnings([lost, lost]) == [Beginning(wall_ns=None, error_ns=None)] * 2
    assert beginnings([]) == []


def test_the_chain_of_two_hosts_waits_for_the_right_one():
    """Rank 1 comes 6 s late by its meetings, although its host's clock says that it was a minute early."""
    early = [met(SECOND), (2 * SECOND, StateEntered(state="verify")), (10 * SECOND, StateLeft(state="verify"))]
    late = [met(SECOND), (8 * SECOND, StateEntered(state="verify")), (10 * SECOND, StateLeft(state="verify"))]
    ranks = [source(*early, wall=100 * SECOND), source(*late, wall=40 * SECOND, boot="b", rank=1)]
    found = chain(ranks)

    assert on_one_clock(ranks).error_ns == LOOK_NS
    (meeting,) = found.meetings
    assert (meeting.last, meeting.waited_ns) == ("rank 1", {"rank 0": 6 * SECOND})
    assert "what lies within 100 ms: the clocks of 2 hosts are laid over each other by their meetings" in found.unseen


def test_the_meetings_of_a_real_start(tmp_path):
    """All ranks have left one before anybody has left the next, also by the common clock."""

    def start(agreement):
        boot, engine = counting_start(agreement=agreement, journal=tmp_path)
        boot.run(engine)

    over_ranks(3, start)
    (read,) = read_starts(tmp_path)
    began = [each.wall_ns for each in beginnings(read.sources)]
    times = {}
    for wall, each in zip(began, read.sources, strict=True):
        for (topic, _), t in each.meetings.items():
            times.setdefault(topic, []).append(wall + t)

    assert list(times) == ["fingerprint", "blocks", "ready"]
    assert [len(each) for each in times.values()] == [3, 3, 3]
    assert max(times["fingerprint"]) <= min(times["blocks"])
    assert max(times["blocks"]) <= min(times["ready"])
