"""
Where the ranks of a start meet, and what a start does there: one run, one configuration, one number of KV blocks, one
way on after each state, and one end.

A start of one rank meets nobody: every method returns at once. What came of a meeting is in the journal of every rank
as ``ranks_agreed``; the failure of another rank as ``peer_failed``, once.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import attrs

from startup_fsm import identity, ranks
from startup_fsm.agreement import DEADLINE_S, Agreement, SoloAgreement, StoreAgreement
from startup_fsm.dialing import host_names
from startup_fsm.edges import Edge, Plan
from startup_fsm.errors import PeerFailed, RestartRequired, text_of
from startup_fsm.events import BudgetComputed, DecisionMade, Event, RanksAgreed, RunStarted
from startup_fsm.events import PeerFailed as PeerFailedEvent
from startup_fsm.journal import file_name
from startup_fsm.ranks import Ending, Failure, label, labelled
from startup_fsm.recorder import Recorder
from startup_fsm.stores import tcp_store
from startup_fsm.verdict import EXIT_PEER

#: Settings of so many sides are compared, and so many characters of each value.
_MOST_SIDES: Final = 8
_LONGEST_VALUE: Final = 200
_CLOSING_S: Final = 1.0


def join(rank: int | None, attempt: int) -> tuple[Agreement, str | None]:
    """
    The agreement of this process with the other ranks of its launcher, and why it is alone where it should not be.

    Blocks until all ranks are there. Where they do not come, the first boundary raises it.
    """
    size = identity.world_size()
    chosen = rank if rank is not None else identity.rank_of()
    if size == 1 or chosen is None or chosen >= size:
        return SoloAgreement(chosen), None
    address = identity.store_address()
    if address is None:
        return SoloAgreement(chosen), f"there are {size} ranks and no store is known: set {identity.STORE_VARIABLE}"
    host, port, is_agents = address
    connect, keeps = tcp_store(host, port, keeps=chosen == 0 and not is_agents)
    return (
        StoreAgreement(
            chosen,
            size,
            connect,
            where=f"the store at {host}:{port}",
            hosts=host_names(host),
            boot=identity.boot_id(),
            attempt=f"{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}.{attempt}",
            keeps_store=keeps,
            deadline_s=identity.ranks_deadline_s() or DEADLINE_S,
        ),
        None,
    )


def run_and_attempt(agreement: Agreement, run: str, first_free: Callable[[str], int]) -> tuple[str, int | None]:
    """
    The run that all ranks are part of, and the attempt that it is for all of them; None leaves it to the journal.

    Args:
        agreement: Of the ranks.
        run: What this rank would call it; rank 0 decides.
        first_free: The first attempt of a run that has no journal of this process yet.
    """
    if agreement.size == 1:
        return run, None
    try:
        run = str(agreement.exchange("run", run).offers[0])
        return run, max(agreement.exchange("attempt", first_free(run)).offers.values())
    except PeerFailed:
        # The first boundary raises it again, and then there is a journal to tell it to.
        return run, None


def first_free(directory: Path, process: str, least: int) -> int:
    """The first attempt of a process, from ``least`` on, that has no journal in a run directory yet."""
    attempt = least
    while (directory / file_name(process, attempt)).exists():
        attempt += 1
    return attempt


class Meetings:
    """
    The meetings of one start.

    Args:
        agreement: With the other ranks.
        recorder: Where it is written down what came of them.
        device: Identity of this rank's device; None where it has none that could be shared.
        end: Ends this process, with its exit code; called on a thread of ours.

    Attributes:
        again: Starts a new process in the place of this one, given the reason, and returns where it may not; None where
            nobody can. Called on a thread of ours too.
    """

    def __init__(
        self, agreement: Agreement, recorder: Recorder, device: str | None, *, end: Callable[[int], object] = os._exit
    ) -> None:
        self.agreement = agreement
        self._recorder = recorder
        self._device = device
        self._end = end
        self.again: Callable[[str], None] | None = None
        self._lock = threading.Lock()
        self._noted = False
        self._trouble: str | None = None
        self._is_refused = False
        if not self.is_alone:
            agreement.watch(self._seen, self._leave)

    @property
    def is_alone(self) -> bool:
        """Whether there is nobody to meet."""
        return self.agreement.size == 1

    def check(self) -> None:
        """
        A boundary: the place where a start learns that another rank failed.

        Raises:
            PeerFailed: It did.
        """
        if not self.is_alone:
            self._noting("join", self.agreement.check)

    def began(self) -> None:
        """Say what of the agreement does not work, once."""
        if self.agreement.unreached:
            names = [label(rank) for rank in self.agreement.unreached]
            reason = "they live and no connection to them could be made: their end would not be seen from here"
            self._record(DecisionMade(decision="ranks_unwatched", reason=reason, inputs={"ranks": names}))

    def explain(self, error: BaseException) -> bool:
        """Whether another rank had failed before this one raised something that may come of it."""
        return not self.is_alone and isinstance(error, Exception) and self.agreement.has_failed()

    def entered(self, state: str) -> None:
        """A state was entered: tell the others where we are, and hear of them."""
        if not self.is_alone:
            self._trouble = None
            self.agreement.say(state)
            self.check()

    def compare(self, started: RunStarted) -> None:
        """All ranks start the same thing, each on a device of its own; a check judges what is recorded here."""
        if self.is_alone:
            return
        offer = {"fingerprint": started.fingerprint, "device": self._device and f"{self._device} on {started.host}"}
        met = self._meet(ranks.FINGERPRINT, offer)
        prints = {rank: each["fingerprint"] for rank, each in met.offers.items()}
        sides = ranks.shared(prints)
        self._agreed(ranks.FINGERPRINT, started.fingerprint if len(sides) == 1 else None, prints, met.waited_ns)
        shared = ranks.shared({rank: each["device"] for rank, each in met.offers.items()})
        if shared:
            twice = {rank: device for device, those in shared.items() if those[1:] for rank in those}
            self._record(
                RanksAgreed(
                    topic=ranks.DEVICES, agreed=None if twice else len(shared), offers=labelled(twice), waited_ns=0
                )
            )
        if len(sides) > 1:
            self._compare_settings(started, [those[0] for those in sides.values()][:_MOST_SIDES])

    def refused(self) -> None:
        """What was compared may not be started: all ranks have come to that by themselves, and need not be told."""
        self._is_refused = True

    def _compare_settings(self, started: RunStarted, speakers: list[int]) -> None:
        own = {"engine": started.engine, "engine_version": started.engine_version, "plan": started.plan.get("name")}
        own |= {name: str(value)[:_LONGEST_VALUE] for name, value in started.knobs.items()}
        met = self._meet(ranks.SETTINGS, own if self.agreement.rank in speakers else None)
        said = {rank: each for rank, each in met.offers.items() if isinstance(each, Mapping)}
        self._record(RanksAgreed(topic=ranks.SETTINGS, agreed=ranks.differing(said), waited_ns=met.waited_ns))

    def sized(self, computed: BudgetComputed) -> BudgetComputed:
        """
        The budget with the KV blocks that every rank can have.

        Raises:
            PeerFailed: The smallest rank has too few, and this one would have enough.
        """
        if self.is_alone:
            return computed
        met = self._meet(ranks.BLOCKS, computed.blocks)
        agreed, decided = ranks.least(met.offers)
        self._record(
            RanksAgreed(
                topic=ranks.BLOCKS,
                agreed=agreed,
                offers=labelled(met.offers),
                decided_by=None if decided is None else label(decided),
                waited_ns=met.waited_ns,
            )
        )
        needed = max(1, -(-(computed.needed_bytes or 0) // computed.block_bytes))
        if decided is not None and agreed < needed and not computed.missing_bytes:
            reason = f"it can have {agreed} KV blocks, {needed} are needed"
            raise self._noted_failure(Failure(rank=decided, state=computed.state, reason=reason))
        return attrs.evolve(computed, blocks=agreed, kv_bytes=agreed * computed.block_bytes)

    def left(self, state: str, plan: Plan) -> None:
        """
        A state is about to be left well: where a failure in it could be answered, all ranks take the same way on.

        Raises:
            PeerFailed: Another rank failed in it; with the edge that all take now, if there is one.
        """
        if self.is_alone or not self.may_recover(state, plan):
            return
        first, reason, edge = self._way_on(state, Ending())
        if first is None:
            return
        failure = Failure(rank=first, state=state, reason=reason)
        if edge is None:
            raise self._noted_failure(failure)
        raise PeerFailed(str(failure), rank=first, state=state, reason=reason, edge=edge)

    def recovered(self, edge: Edge | None, state: str, plan: Plan, reason: str) -> Edge | None:
        """What this rank wanted to do about its failure, where all ranks do the same; else None."""
        if self.is_alone or not self.may_recover(state, plan):
            return edge
        wanted = None if edge is None else edge.name
        try:
            _, _, agreed = self._way_on(state, Ending(edge=wanted, failed=ranks.bounded(reason)))
        except PeerFailed:
            # Another one failed for good meanwhile; our own failure is what this rank ends with.
            return None
        return edge if edge is not None and agreed == edge.name else None

    def may_recover(self, state: str, plan: Plan) -> bool:
        """Whether a failure in this state has an answer left: then all ranks meet at its end."""
        taken = self._recorder.state.edges_taken
        return any(
            plan.allows(state, edge.name, taken=taken[state, edge.name])
            for edge in plan.recoveries(state)
            if not plan.is_free
        )

    def _way_on(self, state: str, own: Ending) -> tuple[int | None, str, str | None]:
        topic = f"end of {state}"
        met = self._meet(topic, own.as_data())
        endings = {rank: Ending.from_data(each) for rank, each in met.offers.items()}
        first, edge = ranks.way(endings)
        failed = {rank: each.as_data() for rank, each in endings.items() if each.failed is not None}
        self._record(
            RanksAgreed(
                topic=topic,
                agreed="advance" if first is None else edge,
                offers=labelled(failed),
                decided_by=None if first is None else label(first),
                waited_ns=met.waited_ns,
            )
        )
        return first, "" if first is None else endings[first].failed or "", edge

    def ready(self) -> None:
        """
        No rank is ready before all are.

        Raises:
            PeerFailed: One failed.
        """
        if not self.is_alone:
            met = self._meet(ranks.READY, True)
            self._agreed(ranks.READY, True, met.offers, met.waited_ns)

    def failed(self, state: str | None, error: BaseException | str, *, is_final: bool) -> None:
        """This rank failed: say so, and end the others where nothing can be done about it."""
        if self.is_alone or self._noted or self._is_refused or isinstance(error, PeerFailed):
            return
        if isinstance(error, str):
            # What a state failed of is more than that the start failed.
            reason = self._trouble or error
        else:
            first = (text_of(error).splitlines() or [""])[0]
            reason = f"{type(error).__name__}: {first}" if first else type(error).__name__
        self._trouble = reason
        self.agreement.say(state, reason)
        if is_final:
            self.agreement.fail(state, reason, restart=isinstance(error, RestartRequired))

    def close(self, *, well: bool) -> None:
        """The start is over here."""
        self.agreement.close(well=well or self._is_refused)

    def _meet(self, topic: str, offer: Any) -> Any:
        return self._noting(topic, lambda: self.agreement.exchange(topic, offer))

    def _noting(self, topic: str, call: Callable[[], Any]) -> Any:
        """What a call gives; a failure of another rank is written down before it goes on."""
        try:
            return call()
        except PeerFailed as error:
            if error.missing and not self._noted:
                names = tuple(label(rank) for rank in error.missing)
                self._record(RanksAgreed(topic=topic, missing=names))
            self._note(Failure(rank=error.rank, state=error.state, reason=error.reason))
            raise

    def _noted_failure(self, failure: Failure) -> PeerFailed:
        self._note(failure)
        # All ranks come to the same end from the same offers; whoever has not read them yet hears the same.
        self.agreement.fail(failure.state, failure.reason, rank=failure.rank)
        return PeerFailed(str(failure), rank=failure.rank, state=failure.state, reason=failure.reason)

    def _agreed(self, topic: str, agreed: Any, offers: Mapping[int, Any], waited_ns: int) -> None:
        """Of offers that are all the same, one is enough."""
        shown = labelled(offers) if agreed is None else {}
        self._record(RanksAgreed(topic=topic, agreed=agreed, offers=shown, waited_ns=waited_ns))

    def _record(self, event: Event) -> None:
        self._recorder.record(event)

    def _note(self, failure: Failure) -> None:
        with self._lock:
            if self._noted:
                return
            self._noted = True
        self._record(PeerFailedEvent(peer=failure.label, state=failure.state, reason=failure.reason))

    # On the thread that watches.

    def _seen(self, failure: Failure) -> None:
        self._in_time(lambda: self._note(failure), self._recorder.sync)

    def _leave(self, failure: Failure) -> None:
        state = self._recorder.state.state
        where = f" in {state}" if state else ""
        text = f"startup-fsm: {failure}; this rank did not come out of its work{where}, and is ended\n"
        with contextlib.suppress(OSError):
            os.write(2, text.encode("utf-8", "backslashreplace"))
        self._in_time(self._recorder.close)
        if failure.restart and self.again is not None:
            self.again(str(failure))
        self._end(EXIT_PEER)

    @staticmethod
    def _in_time(*calls: Callable[[], object]) -> None:
        """The main thread may be stuck inside the journal, with its lock: then it is not waited for."""

        def all_of_them() -> None:
            for call in calls:
                call()

        thread = threading.Thread(target=all_of_them, name="startup-fsm-ranks-journal", daemon=True)
        thread.start()
        thread.join(_CLOSING_S)
