"""What several ranks make of each other's words: neighbours, decisions, and findings. Pure."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from startup_fsm import ranks
from startup_fsm.events import BudgetComputed, CheckJudged, PeerFailed, RanksAgreed, RunStarted, StateEntered
from startup_fsm.events import Record as Line
from startup_fsm.fold import RunState, fold
from startup_fsm.ranks import Ending, Failure
from startup_fsm.sources import Source


def history(*events, rank=0):
    """The fold of these events of one rank."""
    return fold(
        Line(run="r", process=f"rank-{rank:05d}", rank=rank, seq=seq, t=seq, kind=event.kind, event=event)
        for seq, event in enumerate(events)
    )


class TestNeighbours:
    """Who has a connection with whom."""

    @given(st.integers(2, 1_100), st.data())
    def test_they_are_each_others(self, size, data):
        """A neighbour's neighbour is this rank, and there are at most twice as many as the size has digits."""
        rank = data.draw(st.integers(0, size - 1))
        found = ranks.neighbours(rank, size)

        assert all(rank in ranks.neighbours(each, size) for each in found)
        assert rank not in found
        assert 1 <= len(found) <= 2 * (size - 1).bit_length()

    @pytest.mark.parametrize(
        ("size", "degree", "links"), [(2, 1, 1), (4, 3, 6), (8, 5, 20), (256, 15, 1_920), (1_024, 19, 9_728)]
    )
    def test_how_many_they_are(self, size, degree, links):
        """The figures of the documentation."""
        degrees = [len(ranks.neighbours(rank, size)) for rank in range(size)]

        assert set(degrees) == {degree}
        assert sum(degrees) // 2 == links

    @pytest.mark.parametrize("size", [3, 4, 5, 7, 8, 13, 16])
    def test_news_gets_past_two_that_are_stuck(self, size):
        """Whichever one is dead and whichever other is stuck, all that are left hear of it."""
        for dead, stuck in itertools.permutations(range(size), 2):
            left = set(range(size)) - {dead, stuck}
            heard = set(ranks.neighbours(dead, size)) & left
            todo = list(heard)
            while todo:
                fresh = (set(ranks.neighbours(todo.pop(), size)) & left) - heard
                heard |= fresh
                todo += fresh
            assert heard == left

    def test_one_rank_has_none(self):
        """Nobody is one's own neighbour."""
        assert ranks.neighbours(0, 1) == ()


class TestDecisions:
    """What all ranks conclude from the same offers."""

    def test_the_smallest_offer(self):
        """It decides, and its rank is named; where all are equal nobody is."""
        assert ranks.least({0: 5, 1: 3, 2: 3}) == (3, 1)
        assert ranks.least({0: 5, 1: 5}) == (5, None)

    @pytest.mark.parametrize(
        ("endings", "expected"),
        [
            ([Ending(), Ending()], (None, None)),
            ([Ending(), Ending(edge="shrink", failed="oom")], (1, "shrink")),
            ([Ending(edge="shrink", failed="oom"), Ending(edge="shrink", failed="oom")], (0, "shrink")),
            ([Ending(edge="shrink", failed="oom"), Ending(edge="no_graphs", failed="oom")], (0, None)),
            ([Ending(edge="shrink", failed="oom"), Ending(failed="raised")], (1, None)),
            ([Ending(), Ending(failed="raised"), Ending(failed="raised")], (1, None)),
        ],
    )
    def test_the_way_on(self, endings, expected):
        """All take one edge or none; the rank that fails for good is named before one that could go on."""
        assert ranks.way(dict(enumerate(endings))) == expected

    def test_endings_as_data(self):
        """What a rank leaves at the meeting is read as it was."""
        for ending in (Ending(), Ending(failed="x"), Ending(edge="e", failed="x")):
            assert Ending.from_data(ending.as_data()) == ending

    def test_what_differs(self):
        """Settings that are not the same on all, with each one's value."""
        settings = {2: {"a": 1, "b": 2}, 0: {"a": 1, "b": 3, "c": None}, 1: {"a": 1, "b": 2}}

        assert ranks.differing(settings) == {"b": {"rank 0": 3, "rank 1": 2, "rank 2": 2}}
        assert ranks.differing({}) == {}

    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("plain", "plain"),
            ("two\nlines\tand \x1b[31mcolour\x00", "two lines and [31mcolour"),
            ("x" * 600, "x" * 497 + "..."),
            ("\n" * 10_000, ""),
        ],
    )
    def test_text_that_crosses_ranks(self, text, expected):
        """One line, no control characters, at most 500 characters."""
        assert ranks.bounded(text) == expected

    def test_a_failure_in_words(self):
        """Rank, state and reason; what is not known is left out."""
        assert str(Failure(rank=3, state="load_weights", reason="no disk")) == "rank 3 failed in load_weights: no disk"
        assert str(Failure(rank=3)) == "rank 3 failed"
        assert Failure(rank=ranks.STORE).label == "the store"


class TestFindings:
    """What a reader is told."""

    def test_ranks_that_start_different_things(self):
        """Both sides are named, and the settings that differ with their values."""
        run = history(
            RunStarted(fingerprint="aa"),
            StateEntered(state="init_device"),
            RanksAgreed(topic="fingerprint", agreed=None, offers={"rank 0": "aa", "rank 1": "bb", "rank 2": "bb"}),
            RanksAgreed(topic="settings", agreed={"gpu_memory_utilization": {"rank 0": "0.9", "rank 1": "0.8"}}),
        )
        (found,) = ranks.judged_alike(run)

        assert (found.code, found.severity, found.evidence) == ("ranks.disagree", "error", (2,))
        assert found.message == (
            "rank 0 and rank 1, rank 2 start different things: gpu_memory_utilization is 0.9 on rank 0 and 0.8 on rank 1"
        )

    def test_ranks_on_one_device(self):
        """Each device that is used twice is named with its ranks."""
        offers = {"rank 0": "GPU-1 on a", "rank 2": "GPU-1 on a", "rank 1": "GPU-2 on a", "rank 3": "GPU-2 on a"}
        run = history(RunStarted(), RanksAgreed(topic="devices", agreed=None, offers=offers))

        assert [(each.code, each.message) for each in ranks.judged_alike(run)] == [
            ("ranks.same_device", "rank 0, rank 2 use one device: GPU-1 on a"),
            ("ranks.same_device", "rank 1, rank 3 use one device: GPU-2 on a"),
        ]

    def test_ranks_that_agree(self):
        """Nothing is found where fingerprints and devices are as they should be."""
        run = history(
            RunStarted(), RanksAgreed(topic="fingerprint", agreed="aa"), RanksAgreed(topic="devices", agreed=4)
        )
        assert ranks.judged_alike(run) == []

    @pytest.mark.parametrize(
        ("offers", "share"),
        [
            ({"rank 0": 100, "rank 1": 100}, None),
            ({"rank 0": 95, "rank 1": 100}, None),
            ({"rank 0": 60, "rank 1": 100}, "25%"),
        ],
    )
    def test_uneven_ranks(self, offers, share):
        """More than a tenth of all that the ranks could have had is worth a warning, in bytes where they are known."""
        decided = None if share is None and offers["rank 0"] == 100 else "rank 0"
        budget = BudgetComputed(
            available_bytes=0,
            block_bytes=1 << 20,
            blocks=0,
            kv_bytes=0,
            requested_bytes=0,
            total_bytes=0,
            reachable_bytes=0,
        )
        agreed = RanksAgreed(topic="blocks", agreed=min(offers.values()), offers=offers, decided_by=decided)
        found = ranks.judged_even(history(RunStarted(), agreed, budget))

        if share is None:
            assert found == []
        else:
            assert [(each.code, each.severity, each.bytes) for each in found] == [("ranks.uneven", "warning", 40 << 20)]
            assert share in found[0].message
            assert "rank 0 has 60 KV blocks to offer, others up to 100 (40.00 MiB more)" in found[0].message

    def test_who_is_missing(self):
        """The meeting and the ranks that did not come, with a bound on their number."""
        missing = tuple(f"rank {rank}" for rank in range(1, 12))
        run = history(RunStarted(), StateEntered(state="size_kv"), RanksAgreed(topic="blocks", missing=missing))
        (found,) = ranks.judged_missing(run)

        assert (found.code, found.state) == ("ranks.missing", "size_kv")
        assert found.message.startswith("rank 1, rank 2, ")
        assert found.message.endswith("rank 8 and 3 more did not come to the meeting 'blocks'")

    def test_what_is_not_seen(self):
        """Ranks that the others name and whose journals were not read."""
        agreed = RanksAgreed(topic="blocks", agreed=1, offers={"rank 0": 1, "rank 1": 1, "rank 2": 2})
        run = history(RunStarted(), agreed, PeerFailed(peer="the store"))

        assert ranks.unseen([Source(run=run)]) == ["the journal of rank 1, rank 2"]
        assert ranks.unseen([Source(run=history(RunStarted()))]) == []

    def test_what_is_no_cause(self):
        """What a rank says of the failure of another is an echo where that one's journal was read too."""
        from startup_fsm.findings import Finding

        said = Finding(code="ranks.peer_failed", severity="error", message="rank 2 failed in verify: x")

        assert ranks.comes_last(said, ["rank 0", "rank 2"])
        assert not ranks.comes_last(said, ["rank 0", "rank 20"])

    def test_damaged_agreements_are_no_finding(self):
        """Whatever stands in a journal, judging it raises nothing."""
        odd = [None, "x", 3, [1], {"a": 1}]
        for agreed, offers in itertools.product(
            odd, [{}, {"rank 0": None}, {"rank 0": "x", "rank 1": 2}, {"rank 0": [1]}]
        ):
            events = [
                RanksAgreed(topic=topic, agreed=agreed, offers=offers, decided_by="rank 0")
                for topic in ("fingerprint", "settings", "devices", "blocks")
            ]
            run = history(RunStarted(), *events, CheckJudged(check="x", state="y"))
            for judge in (ranks.judged_alike, ranks.judged_even, ranks.judged_missing):
                assert isinstance(judge(run), list)
            assert isinstance(run, RunState)
