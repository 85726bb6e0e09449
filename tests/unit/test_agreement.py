"""Several ranks in one process: what they agree on, who hears of a death, and how a start with all of them goes."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from startup_fsm import identity, meetings
from startup_fsm.agreement import SoloAgreement, StoreAgreement
from startup_fsm.bootstrap import Bootstrap
from startup_fsm.budget import Knobs
from startup_fsm.devices.simulated import SimulatedDevice
from startup_fsm.diagnose import diagnose
from startup_fsm.engines.counting import CountingEngine
from startup_fsm.errors import BudgetError, CheckFailed, PeerFailed
from startup_fsm.journal import read_journal
from startup_fsm.links import Links
from startup_fsm.memory import GIB, MIB
from startup_fsm.plan import driven, observed, throwaway
from startup_fsm.reading import read_starts
from startup_fsm.sources import Source
from startup_fsm.stores import tcp_store
from startup_fsm.testing import MemoryStore, counting_start, over_ranks

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def small_heap():
    """A start collects garbage often; what is alive already need not be looked at each time."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    """A start of these tests is nobody's child."""
    for variable in list(os.environ):
        if variable.startswith(("STARTUP_FSM_", "TORCHELASTIC_", "SLURM_", "RANK", "WORLD_SIZE", "MASTER_")):
            monkeypatch.delenv(variable)


def die(agreement):
    """What the kernel does when a process is killed: its connections end, and nothing was said."""
    agreement.links.close(well=False)


def closed(agreement, result, *, well=True):
    """A rank that is done."""
    agreement.close(well=well)
    return result


class Torn:
    """A client of a store, of which one call fails."""

    def __init__(self, store, call):
        self._store, self._call = store, call

    def __getattr__(self, name):
        if name == self._call:
            raise ConnectionResetError("torn")
        return getattr(self._store, name)


def joined(connects, **options):
    """The agreements of as many ranks as there are ways to a store."""
    agreements = [None] * len(connects)

    def join(rank):
        options.setdefault("deadline_s", 30)
        agreements[rank] = StoreAgreement(rank, len(connects), connects[rank], **options)

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(len(connects))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return agreements


class TestMeeting:
    """All ranks leave an offer, and get all of them."""

    @pytest.mark.parametrize("size", [2, 3, 4, 9])
    def test_everybody_gets_every_offer(self, size):
        """Several meetings in a row, each with its own offers."""

        def start(agreement):
            met = [agreement.exchange(f"m{turn}", {"at": (agreement.rank, turn)}) for turn in range(5)]
            return closed(agreement, [each.offers for each in met])

        expected = [{rank: {"at": [rank, turn]} for rank in range(size)} for turn in range(5)]
        assert over_ranks(size, start) == [expected] * size

    def test_waiting_is_measured(self):
        """Those that come first know how long they waited; the last one hardly did."""

        def start(agreement):
            if agreement.rank == 2:
                time.sleep(0.3)
            return closed(agreement, agreement.exchange("m", None).waited_ns / 1e9)

        first, second, last = over_ranks(3, start)
        assert first > 0.25
        assert second > 0.25
        assert last < 0.2

    def test_who_does_not_come_is_named(self):
        """After the deadline every waiting rank names those that are missing, and they hear that they were given up."""

        def start(agreement):
            if agreement.rank in (1, 3):
                agreement.links.wait(10)
            try:
                agreement.exchange("blocks", 1)
            except PeerFailed as error:
                return closed(agreement, (error.rank, error.missing, str(error)), well=False)

        results = over_ranks(4, start, deadline_s=0.5)
        reason = "rank 1 failed: did not come to the meeting 'blocks' within 0.5 s; missing: rank 1, rank 3"
        waiting = [results[0], results[2]]
        assert {text.partition("\n")[0] for _, _, text in waiting} == {reason}
        assert (1, (1, 3)) in [(rank, missing) for rank, missing, _ in waiting]
        assert results[3][0] == 1

    def test_nobody_comes(self):
        """A rank whose others never start is told so at its first boundary, after the deadline."""
        agreement = StoreAgreement(1, 3, lambda _: MemoryStore(), deadline_s=0.2)
        with pytest.raises(PeerFailed, match="did not come to the meeting 'join'") as caught:
            agreement.check()

        assert caught.value.missing == (0, 2)
        agreement.close(well=False)

    def test_a_store_that_is_not_there(self):
        """What could not be reached, and how long it was tried."""

        def refused(_):
            raise RuntimeError("connection refused")

        agreement = StoreAgreement(1, 3, refused, where="the store at h:1", deadline_s=0.2)
        with pytest.raises(PeerFailed, match=r"store at h:1 could not be reached within 0\.2 s: connection refused"):
            agreement.exchange("m", None)
        agreement.close(well=False)

    def test_a_connection_that_is_lost_while_joining(self):
        """It is made again, and the rank is counted once."""
        store = MemoryStore()
        clients = iter([Torn(store, "set"), store])
        agreements = joined([lambda _: store, lambda _: next(clients)])

        assert [each._visit for each in agreements] == [1, 1]
        for agreement in agreements:
            agreement.check()
            agreement.close(well=True)

    def test_a_store_that_is_replaced_while_joining(self):
        """A rank that came to one which was about to go starts again in the next one."""
        old, new = MemoryStore(), MemoryStore()
        clients = iter([Torn(old, "check"), new])
        agreements = joined([lambda _: new, lambda _: next(clients)])

        assert [each._visit for each in agreements] == [1, 1]
        for agreement in agreements:
            agreement.check()
            agreement.close(well=True)

    def test_ranks_at_different_meetings(self):
        """A program that is not the same on all ranks is told where each of them is."""

        def start(agreement):
            try:
                agreement.exchange("blocks" if agreement.rank else "ready", None)
            except PeerFailed as error:
                return closed(agreement, error.message, well=False)

        first, second = over_ranks(2, start)
        assert first == "rank 1 failed: is at the meeting 'blocks' where rank 0 is at 'ready'"
        assert second in (first, "rank 0 failed: is at the meeting 'ready' where rank 1 is at 'blocks'")

    def test_a_store_that_is_lost(self):
        """Whoever waits there ends, and says that it was lost; the others hear it."""
        store = MemoryStore()
        agreements = joined([lambda _: store] * 2)
        agreements[0]._store = Torn(store, "check")
        with pytest.raises(PeerFailed, match="the store was lost: torn") as caught:
            agreements[0].exchange("m", None)

        assert caught.value.rank == -1
        assert agreements[1].links.wait(10)
        with pytest.raises(PeerFailed, match="the store was lost"):
            agreements[1].check()
        for agreement in agreements:
            agreement.close(well=False)

    def test_a_second_start_of_the_same_processes(self):
        """The same store serves another start: nothing of the first is found there."""
        store = MemoryStore()

        def start(agreement):
            agreement.close(well=True)
            again = StoreAgreement(agreement.rank, 2, lambda _: store, deadline_s=30)
            return closed(again, again.exchange("m", agreement.rank + 10).offers)

        def first(agreement):
            agreement.exchange("m", agreement.rank)
            return start(agreement)

        assert over_ranks(2, first) == [{0: 10, 1: 11}] * 2


class TestDeath:
    """A connection that ends without a word is a death, and all hear of it."""

    @pytest.mark.parametrize(("size", "victim"), [(2, 0), (3, 2), (4, 0), (4, 3), (9, 4)])
    def test_all_others_name_the_rank_and_its_state(self, size, victim):
        """At a meeting, within a second, whoever had a connection with it and whoever had not."""

        def start(agreement):
            agreement.say(f"state_of_{agreement.rank}")
            agreement.exchange("all said it", None)
            if agreement.rank == victim:
                time.sleep(0.1)
                die(agreement)
                return time.monotonic()
            try:
                agreement.exchange("never", None)
            except PeerFailed as error:
                return closed(agreement, (time.monotonic(), error.rank, error.state, error.reason), well=False)

        results = over_ranks(size, start)
        killed = results.pop(victim)
        assert {each[1:] for each in results} == {(victim, f"state_of_{victim}", "its process ended without a word")}
        assert max(each[0] for each in results) - killed < 1

    def test_what_it_had_said_is_its_reason(self):
        """A rank that told of its trouble and then ended is named with that."""

        def start(agreement):
            agreement.say("verify", "ValueError: broken" if agreement.rank else None)
            agreement.exchange("m", None)
            if agreement.rank:
                time.sleep(0.1)
                return die(agreement)
            try:
                agreement.exchange("never", None)
            except PeerFailed as error:
                return closed(agreement, (error.state, error.reason), well=False)

        assert over_ranks(2, start)[0] == ("verify", "ValueError: broken")

    def test_a_failure_is_told_in_clean_words(self):
        """What a rank says when it fails reaches the others bounded and without control characters."""

        def start(agreement):
            if agreement.rank == 1:
                agreement.fail("load_weights", "no\nsuch \x1b[31mfile " + "x" * 1_000, restart=True)
                agreement.check()
                return closed(agreement, None, well=False)
            while True:
                try:
                    agreement.check()
                    time.sleep(0.005)
                except PeerFailed as error:
                    return closed(agreement, error, well=False)

        error = over_ranks(5, start)[4]
        assert (error.rank, error.state, error.restart) == (1, "load_weights", True)
        assert re.fullmatch(r"no such \[31mfile x+\.\.\.", error.reason)
        assert len(error.reason) == 500

    def test_the_first_failure_counts(self):
        """Whoever ends because of another one is not named by those that hear of both."""

        def start(agreement):
            if agreement.rank == 2:
                agreement.fail("verify", "the first")
                return closed(agreement, None, well=False)
            try:
                while True:
                    agreement.check()
                    time.sleep(0.001)
            except PeerFailed as error:
                # Nobody is so slow that this is heard before the first.
                time.sleep(0.5)
                agreement.fail("verify", "because of it")
                return closed(agreement, error.rank, well=False)

        assert over_ranks(4, start) == [2, 2, None, 2]

    def test_a_goodbye_is_no_death(self):
        """A rank that came to ready and left does not end the others."""

        def start(agreement):
            agreement.exchange("ready", None)
            if agreement.rank == 1:
                return closed(agreement, None)
            time.sleep(0.4)
            agreement.check()
            return closed(agreement, "fine")

        assert over_ranks(3, start) == ["fine", None, "fine"]

    def test_who_does_not_come_out_of_its_work_is_ended(self):
        """After the grace the watcher ends a process whose main thread came to no boundary; one that did is left."""
        left = []

        def start(agreement):
            agreement.watch(lambda failure: left.append(("seen", agreement.rank, failure.rank)), leave(agreement))
            agreement.exchange("m", None)
            if agreement.rank == 0:
                agreement.fail("verify", "x")
                return closed(agreement, None, well=False)
            if agreement.rank == 1:
                with pytest.raises(PeerFailed):
                    agreement.exchange("never", None)
            time.sleep(0.6)
            return closed(agreement, None, well=False)

        def leave(agreement):
            return lambda failure: left.append(("left", agreement.rank, failure.rank))

        over_ranks(3, start, grace_s=0.2)
        assert sorted(left) == [("left", 2, 0), ("seen", 1, 0), ("seen", 2, 0)]

    def test_strangers_are_not_listened_to(self):
        """Somebody who connects without the key, says too much, or says nothing harms nobody."""

        def start(agreement):
            if agreement.rank == 0:
                port = agreement.links.address((), None)["port"]
                for words in (b"GET / HTTP/1.1\r\n\r\n", b"startup-fsm wrong 1\n", b"x" * 100_000, b"\xff\xfe\n", b""):
                    with socket.create_connection(("127.0.0.1", port)) as stranger, contextlib.suppress(OSError):
                        stranger.sendall(words)
                idle = [socket.create_connection(("127.0.0.1", port)) for _ in range(100)]
            met = agreement.exchange("m", agreement.rank)
            if agreement.rank == 0:
                for each in idle:
                    each.close()
            agreement.check()
            return closed(agreement, met.offers)

        assert over_ranks(3, start) == [{0: 0, 1: 1, 2: 2}] * 3

    def test_a_rank_that_cannot_be_reached_is_no_dead_one(self, monkeypatch):
        """Behind a firewall it is only unwatched, and that is known."""
        walled = {"hosts": ["127.0.0.1"], "port": 1, "boot": "another", "key": ""}
        monkeypatch.setattr(Links, "address", lambda *_: walled)
        store = MemoryStore()
        agreements = joined([lambda _: store] * 2, boot="mine")

        assert [each.unreached for each in agreements] == [(1,), ()]
        agreements[0].check()
        for agreement in agreements:
            agreement.close(well=True)

    def test_a_rank_of_this_host_that_refuses_is_dead(self, monkeypatch):
        """It had been there to say where it listens, and is there no more."""
        walled = {"hosts": [], "port": 1, "boot": "mine", "key": ""}
        monkeypatch.setattr(Links, "address", lambda *_: walled)
        store = MemoryStore()
        agreements = joined([lambda _: store] * 2, boot="mine")

        assert agreements[0].links.wait(10)
        assert agreements[0].links.failure.rank == 1
        for agreement in agreements:
            agreement.close(well=False)


class TestTorchStore:
    """The transport as it is used: torch's own store."""

    def test_somebody_else_lives_there(self):
        """A service that answers at that address and says nothing is no store: the deadline holds all the same."""
        with socket.create_server(("127.0.0.1", 0)) as silent:
            connect, keeps = tcp_store("127.0.0.1", silent.getsockname()[1], keeps=True)
            began = time.monotonic()
            agreement = StoreAgreement(0, 2, connect, where="the store", deadline_s=1.5)
            assert time.monotonic() - began < 30
            with pytest.raises(PeerFailed, match=r"the store could not be reached within 1\.5 s"):
                agreement.check()
            assert not keeps()
            agreement.close(well=False)

    def test_one_of_the_ranks_keeps_it(self, tmp_path):
        """Rank 0 makes the store, the others find it, and it stays until all have read the last result."""
        script = """
            import os, sys
            from startup_fsm import meetings
            agreement, why = meetings.join(None, 1)
            assert why is None, why
            print([agreement.exchange("m", agreement.rank + turn).offers for turn in range(3)])
            agreement.close(well=True)
        """
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "STARTUP_FSM_STORE": f"127.0.0.1:{port}"}
        code = "\n".join(line[12:] for line in script.splitlines())
        running = [
            subprocess.Popen(
                [sys.executable, "-c", code],
                env={**environment, "RANK": str(rank), "WORLD_SIZE": "3"},
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in (2, 1, 0)
        ]
        said = {process.communicate(timeout=120)[0] for process in running}

        assert said == {f"{[{rank: rank + turn for rank in range(3)} for turn in range(3)]}\n"}
        assert [process.returncode for process in running] == [0, 0, 0]


class Failing(CountingEngine):
    """Fails as it is told to: by state, once or always."""

    fails = None

    def capture(self, step, size):
        self._maybe(step)
        super().capture(step, size)

    def allocate_kv(self, step, blocks):
        self._maybe(step)
        super().allocate_kv(step, blocks)

    def commit_kv(self, step, blocks):
        self._maybe(step)

    def load_weights(self, step):
        self._maybe(step)
        super().load_weights(step)

    def verify(self, step):
        self._maybe(step)
        super().verify(step)

    def _maybe(self, step):
        if self.fails is None or step.state != self.fails[0]:
            return
        _, how = self.fails
        self.fails = None
        if how == "raised":
            raise ValueError("a word\nand another")
        if how == "capture":
            step.capture(1, self.device.forbid_in_capture)
        if step.state.startswith("capture"):
            step.capture(1, lambda: self.device.malloc(self.device.memory.free_bytes + MIB))
        self.device.malloc(self.device.memory.free_bytes + MIB)


def started(size, tmp_path, *, fails=None, totals=None, make_plan=None, identities=None, mode="default", **knobs):
    """
    A start over ranks: what came of each, and the folds of their journals.

    ``fails`` is by rank; knobs are one value for all, or a list with one for each.
    """
    boots = [None] * size

    def start(agreement):
        rank = agreement.rank
        own = {name: value[rank] if isinstance(value, list) else value for name, value in knobs.items()}
        device = SimulatedDevice((totals or [4 * GIB] * size)[rank])
        if identities is not None:
            device.identity = identities[rank]
        boot = boots[rank] = Bootstrap(
            plan=None if make_plan is None else make_plan(),
            journal=tmp_path,
            device=device,
            knobs=Knobs(**own),
            agreement=agreement,
            discover=False,
            progress=False,
            mode=mode,
        )
        boot.meetings._end = [].append
        engine = Failing(device=device)
        engine.fails = (fails or {}).get(rank)
        return boot.run(engine)

    results = over_ranks(size, start)
    for boot in boots:
        boot.close()
    return results, [boot.history for boot in boots]


def edges(history):
    """State and edge of every recovery."""
    return [(chosen.state, chosen.edge) for _, chosen in history.recoveries]


def agreed(history, topic):
    """The last agreement on a topic."""
    return next(event for _, event in reversed(history.agreements) if event.topic == topic)


class TestStart:
    """Whole starts over several ranks, on simulated devices."""

    def test_devices_of_different_sizes(self, tmp_path):
        """One run, one attempt, and the KV blocks of the smallest rank, with every offer on record."""
        results, histories = started(4, tmp_path, totals=[6 * GIB, 4 * GIB, 5 * GIB, 7 * GIB])

        assert {each.blocks for each in results} == {2163}
        assert len({history.run for history in histories}) == 1
        assert {history.attempt for history in histories} == {1}
        for rank, history in enumerate(histories):
            blocks = agreed(history, "blocks")
            assert (blocks.agreed, blocks.decided_by) == (2163, "rank 1")
            assert blocks.offers == {"rank 0": 4006, "rank 1": 2163, "rank 2": 3085, "rank 3": 4928}
            assert history.violations == []
            assert history.budgets[-1][1].kv_bytes == 2163 * MIB
            assert history.visits[-1].state == "verify"
            assert history.process == f"rank-{rank:05d}"
            assert [event.topic for _, event in history.agreements] == ["fingerprint", "blocks", "ready"]
        (start,) = read_starts(tmp_path)
        verdict = diagnose(start.sources)
        assert (verdict.outcome, verdict.ranks) == ("ready", 4)
        assert [(each.finding.code, each.rank) for each in verdict.findings] == [("ranks.uneven", "rank 0")]

    def test_different_settings(self, tmp_path):
        """They are refused on every rank before anything is done, with both sides named."""
        results, histories = started(3, tmp_path, utilization=[0.9, 0.9, 0.8])

        assert all(isinstance(each, CheckFailed) for each in results)
        said = "rank 0, rank 1 and rank 2 start different things: gpu_memory_utilization is 0.9 on rank 0 and 0.8 on rank 2"
        for error, history in zip(results, histories, strict=True):
            assert [each.code for each in error.findings] == ["ranks.disagree"]
            assert error.findings[0].message == said
            assert [visit.state for visit in history.visits] == ["init_device"]
            assert history.peer_failures == []
        verdict = diagnose([Source(run=history) for history in histories])
        assert (verdict.outcome, verdict.failed_state) == ("error", "init_device")
        assert [each.finding.code for each in verdict.findings] == ["ranks.disagree"]

    def test_different_plans(self, tmp_path):
        """Bounds of edges belong to the plan."""
        results, _ = started(2, tmp_path, retries=[0, 1])

        assert "retries is 0 on rank 0 and 1 on rank 1" in str(results[0])

    def test_two_ranks_on_one_device(self, tmp_path):
        """Both are named, and the device."""
        results, histories = started(4, tmp_path, identities=["GPU-a", "GPU-b", "GPU-a", "GPU-c"])

        host = histories[0].started.host
        assert {str(each.findings[0].message) for each in results} == {
            f"rank 0, rank 2 use one device: GPU-a on {host}"
        }
        assert {each.findings[0].code for each in results} == {"ranks.same_device"}

    def test_devices_that_differ(self, tmp_path):
        """Where each rank has its own, that is on record in one word."""
        _, histories = started(2, tmp_path, identities=["GPU-a", "GPU-b"])

        assert agreed(histories[0], "devices").agreed == 2
        assert agreed(histories[0], "devices").offers == {}

    def test_observing(self, tmp_path):
        """In the mode observe it is a finding, and all go on."""
        results, histories = started(2, tmp_path, utilization=[0.9, 0.8], mode="observe")

        assert [each.blocks for each in results] == [1753, 1753]
        verdict = diagnose([Source(run=history) for history in histories])
        assert verdict.outcome == "ready"
        assert verdict.findings[0].finding.code == "ranks.disagree"

    def test_a_rank_that_fails_ends_the_others(self, tmp_path):
        """As PeerFailed, with rank, state and reason; in every journal, and in the verdict as its failure."""
        results, histories = started(4, tmp_path, fails={2: ("load_weights", "raised")})

        assert isinstance(results.pop(2), ValueError)
        for error in results:
            assert isinstance(error, PeerFailed)
            assert (error.rank, error.state, error.reason) == (2, "load_weights", "ValueError: a word")
        failed = histories.pop(2)
        assert failed.peer_failures == []
        for history in histories:
            ((_, event),) = history.peer_failures
            assert (event.peer, event.state, event.reason) == ("rank 2", "load_weights", "ValueError: a word")
            assert history.current.failed.category == "peer"
        (start,) = read_starts(tmp_path)
        verdict = diagnose(start.sources)
        assert (verdict.outcome, verdict.failed_state, verdict.failed_rank) == ("error", "load_weights", "rank 2")
        assert [each.finding.code for each in verdict.findings] == ["state.raised", "ranks.peer_failed"]

    def test_what_a_collective_raises_that_lost_its_other_side(self, tmp_path):
        """The exception stays what it is, the state is one that failed by a peer, and nobody is told otherwise."""

        class Waiting(CountingEngine):
            agreement = None

            def load_weights(self, step):
                if self.agreement.rank == 1:
                    raise KeyError("no shard")
                self.agreement.links.wait(10)
                raise RuntimeError("connection closed by peer")

        def start(agreement):
            boot = Bootstrap(device=SimulatedDevice(GIB), journal=tmp_path, agreement=agreement, discover=False)
            engine = Waiting(device=boot.device)
            engine.agreement = agreement
            try:
                boot.run(engine)
            except (KeyError, RuntimeError) as error:
                return (
                    type(error),
                    boot.history.current.failed.category,
                    [each.peer for _, each in boot.history.peer_failures],
                )

        waiting, failed, other = over_ranks(3, start)
        assert failed == (KeyError, "raised", [])
        assert waiting == other == (RuntimeError, "peer", ["rank 1"])

    def test_the_others_alone_name_it(self, tmp_path):
        """Without the journal of the rank that failed, those of the others tell of it."""
        _, histories = started(3, tmp_path, fails={2: ("load_weights", "raised")})
        verdict = diagnose([Source(run=history) for history in histories[:2]])

        assert verdict.outcome == "error"
        assert [each.finding.code for each in verdict.findings] == ["ranks.peer_failed"]
        assert verdict.findings[0].finding.message == "rank 2 failed in load_weights: ValueError: a word"
        assert "the journal of rank 2" in verdict.unseen

    def test_the_smallest_rank_has_too_little(self, tmp_path):
        """It says what is missing; the others that it is too small for all of them."""
        results, histories = started(3, tmp_path, totals=[4 * GIB, int(1.4 * GIB), 4 * GIB])

        assert isinstance(results[1], BudgetError)
        for rank in (0, 2):
            assert isinstance(results[rank], PeerFailed)
            assert (results[rank].rank, results[rank].state) == (1, "size_kv")
            assert results[rank].reason == "it can have 0 KV blocks, 64 are needed"
            assert agreed(histories[rank], "blocks").decided_by == "rank 1"
            assert histories[rank].budgets[-1][1].blocks > 2_000
        verdict = diagnose([Source(run=history) for history in histories])
        assert (verdict.failed_rank, verdict.findings[0].finding.code) == ("rank 1", "budget.negative")

    def test_an_embedding_of_its_own_order(self, tmp_path):
        """A program that keeps control, under a plan without order, hears of a failure at its next state."""

        def start(agreement):
            boot = Bootstrap(
                plan=observed(), journal=tmp_path, device=SimulatedDevice(GIB), agreement=agreement, discover=False
            )
            with boot:
                with boot.state("load_weights"):
                    if agreement.rank == 1:
                        raise KeyError("no shard")
                with boot.state("warmup"):
                    agreement.links.wait(10)
                with boot.state("verify"):
                    return "not reached"

        first, second = over_ranks(2, start)
        assert isinstance(second, KeyError)
        assert isinstance(first, PeerFailed)
        assert (first.rank, first.state, first.reason) == (1, "load_weights", "KeyError: 'no shard'")


RUNGS = [
    ("throwaway", "capture_graphs", "oom", {"retries": 1}, "recover"),
    ("throwaway", "allocate_kv", "oom", {"retries": 1}, "shrink"),
    ("throwaway", "verify", "oom", {"retries": 1}, "shrink"),
    ("throwaway", "capture_throwaway", "oom", {"fewer_sizes": 1}, "fewer_sizes"),
    ("throwaway", "capture_graphs", "oom", {"fewer_sizes": 1}, "fewer_sizes"),
    ("throwaway", "verify", "oom", {"fewer_sizes": 1}, "fewer_sizes"),
    ("throwaway", "capture_throwaway", "capture", {"allow_eager": True}, "recover"),
    ("throwaway", "capture_graphs", "capture", {"allow_eager": True}, "no_graphs"),
    ("throwaway", "verify", "oom", {"allow_eager": True}, "no_graphs"),
    ("single_capture", "commit_kv", "oom", {"retries": 1}, "shrink"),
    ("single_capture", "verify", "oom", {"retries": 1}, "shrink"),
    ("single_capture", "capture_graphs", "oom", {"fewer_sizes": 1}, "fewer_sizes"),
    ("single_capture", "verify", "oom", {"fewer_sizes": 1}, "fewer_sizes"),
    ("single_capture", "capture_graphs", "capture", {"allow_eager": True}, "recover"),
    ("single_capture", "verify", "oom", {"allow_eager": True}, "no_graphs"),
]


class TestLadder:
    """All ranks take the same rung, or none does."""

    @pytest.mark.parametrize(("plan", "state", "how", "knobs", "edge"), RUNGS)
    def test_all_climb_with_the_one_that_failed(self, tmp_path, plan, state, how, knobs, edge):
        """Four ranks, one of which fails once: each takes the edge, all are ready, with the same sizes and blocks."""
        results, histories = started(
            4, tmp_path, fails={1: (state, how)}, make_plan=lambda: driven(plan, **knobs), **knobs
        )

        assert {each.blocks for each in results} == {results[0].blocks}
        for rank, history in enumerate(histories):
            assert edges(history) == [(state, edge)]
            assert history.violations == []
            failed = next(visit for visit in history.visits if visit.failed is not None)
            assert failed.failed.category == (how if rank == 1 else "peer")
            topics = [(event.topic, event.agreed) for _, event in history.agreements]
            assert (f"end of {state}", edge) in topics
            assert history.peer_failures == []
        captured = [history.last("capture_graphs") for history in histories]
        left = [[event.size for _, event in visit.captures] for visit in captured if visit is not None and visit.left]
        assert all(sizes == left[0] for sizes in left)
        verdict = diagnose([Source(run=history) for history in histories])
        assert verdict.outcome == "ready"

    def test_without_a_knob_nobody_climbs(self, tmp_path):
        """The rank that failed fails, the others as its peers."""
        results, histories = started(3, tmp_path, fails={0: ("capture_graphs", "oom")})

        assert [type(each).__name__ for each in results] == ["DeviceOutOfMemoryError", "PeerFailed", "PeerFailed"]
        assert [edges(history) for history in histories] == [[], [], []]
        assert results[1].state == "capture_graphs"

    def test_two_ranks_that_want_different_ways(self, tmp_path):
        """One ran out, another may not capture at all: no edge answers both, so none is taken."""
        fails = {0: ("capture_graphs", "oom"), 2: ("capture_graphs", "capture")}
        results, histories = started(3, tmp_path, fails=fails, retries=1, allow_eager=True)

        assert not any(hasattr(each, "blocks") for each in results)
        assert [edges(history) for history in histories] == [[], [], []]
        assert isinstance(results[1], PeerFailed)
        assert results[1].rank == 0

    def test_two_ranks_that_fail_alike(self, tmp_path):
        """They take one edge together."""
        fails = {0: ("verify", "oom"), 2: ("verify", "oom")}
        results, histories = started(3, tmp_path, fails=fails, retries=1)

        assert len({each.blocks for each in results}) == 1
        assert [edges(history) for history in histories] == [[("verify", "shrink")]] * 3

    def test_one_that_fails_for_good_among_those_that_could_go_on(self, tmp_path):
        """It is named by all, and nobody goes on."""
        fails = {0: ("verify", "oom"), 1: ("verify", "raised")}
        results, histories = started(3, tmp_path, fails=fails, retries=1)

        assert [type(each).__name__ for each in results] == ["DeviceOutOfMemoryError", "ValueError", "PeerFailed"]
        assert (results[2].rank, results[2].reason) == (1, "raised: a word")
        assert [edges(history) for history in histories] == [[], [], []]
        verdict = diagnose([Source(run=history) for history in histories])
        assert verdict.failed_rank in ("rank 0", "rank 1")

    def test_no_meeting_without_need(self, tmp_path):
        """Only states whose failure has an answer end with a meeting."""
        _, histories = started(2, tmp_path, make_plan=lambda: throwaway(retries=1))

        topics = [event.topic for _, event in histories[0].agreements]
        assert topics == [
            "fingerprint", "blocks", "end of allocate_kv", "end of capture_graphs", "end of verify", "ready",
        ]  # fmt: skip


class TestAlone:
    """A start of one rank, and one that does not know of the others."""

    def test_nothing_of_it_is_loaded(self):
        """A start of one process imports no torch and opens no connection."""
        code = (
            "import sys, threading\n"
            "from startup_fsm.testing import counting_start\n"
            "boot, engine = counting_start()\n"
            "boot.run(engine)\n"
            "assert isinstance(boot.meetings.agreement.size, int) and boot.meetings.is_alone\n"
            "print('torch' in sys.modules, [t.name for t in threading.enumerate()])\n"
        )
        ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
        assert ran.stdout == "False ['MainThread']\n"

    def test_its_methods_do_nothing(self):
        """Whatever is agreed on is what was offered."""
        solo = SoloAgreement(3)
        solo.check()
        solo.say("verify", "x")
        solo.fail("verify", "x")
        solo.watch(print, print)
        solo.close(well=True)
        assert (solo.size, solo.rank, solo.exchange("m", 7).offers) == (1, 3, {3: 7})

    def test_ranks_without_a_store(self, monkeypatch):
        """Each starts alone, as a rank, and says so once."""
        monkeypatch.setenv("RANK", "2")
        monkeypatch.setenv("WORLD_SIZE", "4")
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", "29500")
        boot, engine = counting_start()
        boot.run(engine)

        (decision,) = [event for _, event in boot.history.decisions if event.decision == "ranks_alone"]
        assert decision.reason == "there are 4 ranks and no store is known: set STARTUP_FSM_STORE"
        assert boot.history.rank == 2
        assert boot.history.agreements == []

    @pytest.mark.parametrize(
        ("given", "expected"),
        [
            ({}, (None, 1)),
            ({"RANK": "3", "WORLD_SIZE": "8"}, (3, 8)),
            ({"RANK": "3"}, (3, 1)),
            ({"RANK": "0", "WORLD_SIZE": "x"}, (0, 1)),
            ({"SLURM_PROCID": "5", "SLURM_NTASKS": "16"}, (5, 16)),
            ({"SLURM_PROCID": "0", "SLURM_NTASKS": "16", "SLURM_STEP_NUM_TASKS": "1"}, (None, 1)),
            ({"SLURM_NTASKS": "16"}, (None, 1)),
            ({"RANK": "1", "WORLD_SIZE": "2", "SLURM_PROCID": "5", "SLURM_NTASKS": "16"}, (1, 2)),
        ],
    )
    def test_who_a_launcher_says_we_are(self, given, expected):
        """Those of torchrun, else those of a Slurm step."""
        assert (identity.rank_of(given), identity.world_size(given)) == expected

    @pytest.mark.parametrize(
        ("given", "expected"),
        [
            ({}, None),
            ({"MASTER_ADDR": "h", "MASTER_PORT": "1"}, None),
            ({"MASTER_ADDR": "h", "MASTER_PORT": "1", "TORCHELASTIC_USE_AGENT_STORE": "True"}, ("h", 1, True)),
            ({"MASTER_ADDR": "h", "MASTER_PORT": "1", "TORCHELASTIC_USE_AGENT_STORE": "False"}, None),
            ({"STARTUP_FSM_STORE": "h:7"}, ("h", 7, False)),
            ({"STARTUP_FSM_STORE": "[::1]:7"}, ("::1", 7, False)),
            ({"STARTUP_FSM_STORE": "h"}, None),
            ({"STARTUP_FSM_STORE": ":7"}, None),
        ],
    )
    def test_where_ranks_meet(self, given, expected):
        """The agent's store, else our own variable; the port of the engine's process group is none."""
        assert identity.store_address(given) == expected

    def test_attempts_are_the_same_on_all_ranks(self, tmp_path):
        """A rank that left a journal of an earlier attempt takes the others along to the next one."""
        (tmp_path / "mine").mkdir()
        (tmp_path / "mine" / "rank-00001.1.jsonl").touch()

        def start(agreement):
            run, attempt = meetings.run_and_attempt(
                agreement, "mine", lambda run: meetings.first_free(tmp_path / run, f"rank-0000{agreement.rank}", 1)
            )
            return closed(agreement, (run, attempt))

        assert over_ranks(3, start) == [("mine", 2)] * 3

    def test_a_forked_child_lets_go(self):
        """It holds no connection of its parent's, and whatever it calls does nothing."""

        def start(agreement):
            agreement.exchange("m", None)
            if agreement.rank:
                agreement.links.wait(1)
                return closed(agreement, agreement.links.failure)
            pid = os.fork()
            if pid == 0:
                held = [each for each in agreement.links._links.values() if each.socket.fileno() != -1]
                agreement.say("verify")
                agreement.fail("verify", "x")
                agreement.check()
                agreement.close(well=False)
                os._exit(7 if not held else 8)
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            return closed(agreement, code)

        assert over_ranks(2, start) == [7, None]


def test_a_journal_of_ranks_reads_back(tmp_path):
    """What came of every meeting survives the file."""
    _, histories = started(2, tmp_path)
    for history in histories:
        path = tmp_path / history.run / f"{history.process}.1.jsonl"
        kinds = [record.kind for record in read_journal(path).records]
        assert kinds.count("ranks_agreed") == 3
