"""
Agreement of the ranks of one start, over a c10d store of its own and never over a collective.

At a meeting every rank leaves its offer; the last one to come puts them together, and all read the same result. Bad
news comes over ``links``, and ends the wait of whoever is at a meeting. A start of one rank has ``SoloAgreement``,
which does nothing and loads nothing. Nothing here calls CUDA.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol

import attrs
import orjson

from startup_fsm.codec import as_plain
from startup_fsm.errors import PeerFailed
from startup_fsm.links import Links, Told
from startup_fsm.ranks import STORE, Failure, bounded, label
from startup_fsm.stores import Store

#: Seconds that a rank waits for the others, at the beginning and wherever all meet.
DEADLINE_S: Final = 1_800.0
#: Seconds that a main thread has to end by itself after bad news.
GRACE_S: Final = 2.0
# A meeting whose last rank has come is found at once; one that has to wait costs the store ten questions a second.
_FIRST_LOOK_S: Final = 0.001
_LATER_LOOKS_S: Final = 0.1
# How long a lost store waits for the news that explains it.
_EXPLAINED_S: Final = 1.5
_PARTING_S: Final = 5.0
# How long a rank whose work raised waits for the news of another that explains it: a collective may notice first.
_MOMENT_S: Final = 0.5


@attrs.frozen(kw_only=True)
class Meeting:
    """
    What came of one meeting.

    Attributes:
        offers: Of every rank.
        waited_ns: How long this rank waited for the others.
    """

    offers: Mapping[int, Any]
    waited_ns: int = 0


class Agreement(Protocol):
    """What the rest of the package sees of the ranks of a start. Every method is harmless in a forked child."""

    @property
    def rank(self) -> int | None:
        """Of this process; None where nobody gave it one."""

    @property
    def size(self) -> int:
        """How many ranks there are; 1 needs no agreement."""

    @property
    def unreached(self) -> tuple[int, ...]:
        """Neighbours that live and cannot be reached: their death would not be seen from here."""

    def exchange(self, topic: str, offer: Any) -> Meeting:
        """
        Meet all ranks, and get the offer of each.

        Raises:
            PeerFailed: One failed, did not come in time, or is at another meeting.
        """

    def check(self) -> None:
        """Raise :class:`PeerFailed` where a rank failed."""

    def has_failed(self) -> bool:
        """Whether another rank failed, as far as is known within a moment."""

    def say(self, state: str | None, trouble: str | None = None) -> None:
        """Tell others in which state we are, so that they can name it, and what is wrong there."""

    def fail(self, state: str | None, reason: str, *, restart: bool = False, rank: int | None = None) -> None:
        """Say that a rank failed, this one or another that all know of: all others end."""

    def watch(self, seen: Told, leave: Told) -> None:
        """Say what is called on a failure of another rank; see :meth:`startup_fsm.links.Links.watch`."""

    def close(self, *, well: bool) -> None:
        """The start is over for this rank; ``well`` where it came to ready. Harmless when repeated."""


class SoloAgreement:
    """A start of one rank: everything is agreed already."""

    size = 1
    unreached: tuple[int, ...] = ()

    def __init__(self, rank: int | None = None) -> None:
        self.rank = rank

    def exchange(self, topic: str, offer: Any) -> Meeting:
        """What was offered."""
        return Meeting(offers={self.rank or 0: offer})

    def check(self) -> None:
        """Nobody else can fail."""

    def has_failed(self) -> bool:
        """There is no other rank."""
        return False

    def say(self, state: str | None, trouble: str | None = None) -> None:
        """Nobody listens."""

    def fail(self, state: str | None, reason: str, *, restart: bool = False, rank: int | None = None) -> None:
        """Nobody listens."""

    def watch(self, seen: Told, leave: Told) -> None:
        """Nothing will be seen."""

    def close(self, *, well: bool) -> None:
        """Nothing is open."""


class StoreAgreement:
    """
    The ranks of one start, joined over a store.

    Args:
        rank, size: Of this process.
        connect: Opens the store; called again where it is lost before everybody is there.
        where: What the store is called in messages, such as ``host:port``.
        hosts: Names or addresses at which other ranks may find this host.
        boot: Identity of this host's boot; None where the kernel does not tell.
        attempt: Changes with every restart, so that nothing of an earlier one is found in a store that stays.
        keeps_store: Whether the store lives in this process, so that it must be the last to leave.
        deadline_s, grace_s: Seconds; see :data:`DEADLINE_S` and :data:`GRACE_S`.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        connect: Callable[[float], Store],
        *,
        where: str = "the store",
        hosts: tuple[str, ...] = ("127.0.0.1",),
        boot: str | None = None,
        attempt: str = "0",
        keeps_store: Callable[[], bool] = lambda: False,
        deadline_s: float = DEADLINE_S,
        grace_s: float = GRACE_S,
    ) -> None:
        self.rank = rank
        self.size = size
        self.unreached: tuple[int, ...] = ()
        self.links = Links(rank, size, grace_s=grace_s)
        self._where = where
        self._deadline_s = deadline_s
        self._keeps_store = keeps_store
        self._base = f"startup_fsm/{attempt}"
        self._meeting = 0
        self._visit = 0
        self._refusal: PeerFailed | None = None
        self._closed = False
        self._store: Store | None = None
        try:
            self._join(connect, self.links.address(hosts, boot), boot)
        except PeerFailed as refusal:
            # Whoever made this object has no journal yet: it is told at the first boundary.
            self._refusal = refusal

    def _join(self, connect: Callable[[float], Store], address: Mapping[str, Any], boot: str | None) -> None:
        until = time.monotonic() + self._deadline_s
        while True:
            try:
                # One that is kept here must be gone before another can be made at its place.
                self._store = None
                self._store = connect(max(1.0, until - time.monotonic()))
                # A process may start twice, and may come to a store that is about to go: the next one has no count.
                visits = f"{self._base}/visits/{self.rank}"
                if not self._visit or not self._store.add(visits, 0):
                    self._visit = self._store.add(visits, 1)
                self._meeting = 0
                self._store.set(self._key(f"address/{self.rank}"), orjson.dumps(address).decode())
                self._meet("join", None, until)
                break
            except PeerFailed:
                raise
            except Exception as error:
                if time.monotonic() >= until:
                    text = f"{self._where} could not be reached within {self._deadline_s:g} s: {bounded(str(error))}"
                    raise self._failed(Failure(rank=STORE, reason=text)) from error
                time.sleep(_LATER_LOOKS_S)
        try:
            after = [rank for rank in self.links.neighbours if rank > self.rank]
            given = self._store.multi_get([self._key(f"address/{rank}") for rank in after]) if after else []
            addresses = {rank: orjson.loads(each) for rank, each in zip(after, given, strict=True)}
        except Exception as error:
            raise self._store_lost(error) from error
        self.unreached = self.links.connect(addresses, boot)

    def _key(self, name: str) -> str:
        return f"{self._base}/{self._visit}/{name}"

    def exchange(self, topic: str, offer: Any) -> Meeting:
        """See :meth:`Agreement.exchange`."""
        self.check()
        began = time.monotonic_ns()
        try:
            offers = self._meet(topic, offer, time.monotonic() + self._deadline_s)
        except PeerFailed:
            raise
        except Exception as error:
            raise self._store_lost(error) from error
        return Meeting(offers=offers, waited_ns=time.monotonic_ns() - began)

    def _meet(self, topic: str, offer: Any, until: float) -> dict[int, Any]:
        store = self._store
        if store is None:
            raise self._failed(Failure(rank=STORE, reason="there is none"))
        self._meeting += 1
        key = self._key(str(self._meeting))
        store.set(f"{key}/{self.rank}", orjson.dumps([topic, as_plain(offer)]).decode())
        everything = f"{key}/all"
        if store.add(f"{key}/came", 1) == self.size:
            offers = store.multi_get([f"{key}/{rank}" for rank in range(self.size)])
            gathered = b"[" + b",".join(offers) + b"]"
            store.set(everything, gathered.decode())
        else:
            self._wait(store, everything, topic, until)
            gathered = store.get(everything)
        said = orjson.loads(gathered)
        elsewhere = next((rank for rank, (theirs, _) in enumerate(said) if theirs != topic), None)
        if elsewhere is not None:
            reason = f"is at the meeting {said[elsewhere][0]!r} where {label(self.rank)} is at {topic!r}"
            raise self._failed(Failure(rank=elsewhere, reason=bounded(reason)))
        return {rank: theirs for rank, (_, theirs) in enumerate(said)}

    def _wait(self, store: Store, key: str, topic: str, until: float) -> None:
        delay = _FIRST_LOOK_S
        while not store.check([key]):
            if time.monotonic() >= until:
                raise self._missing(store, topic)
            self.links.wait(delay)
            while self.links.is_settling:
                # The store may have died with that rank, and torch is loud about it.
                self.links.wait(_FIRST_LOOK_S)
            if self.links.failure is not None and not self._came(store, key):
                self.check()
            delay = min(delay * 1.5, _LATER_LOOKS_S)

    def _came(self, store: Store, key: str) -> bool:
        """
        Whether a meeting is complete although a rank has failed since: then all go on with what came of it.

        Otherwise whoever reads faster would decide what the others still see.
        """
        try:
            return store.check([key])
        except Exception:  # noqa: BLE001 - it went with the rank that failed
            return False

    def _missing(self, store: Store, topic: str) -> PeerFailed:
        key = self._key(str(self._meeting))
        missing = [rank for rank in range(self.size) if not store.check([f"{key}/{rank}"])]
        names = ", ".join(label(rank) for rank in missing[:8]) + (" and others" if len(missing) > 8 else "")
        reason = f"did not come to the meeting {topic!r} within {self._deadline_s:g} s; missing: {names}"
        failure = Failure(rank=missing[0] if missing else STORE, reason=reason, given_up=True)
        self.links.announce(failure)
        return _peer_failed(failure, missing=missing)

    def _store_lost(self, error: Exception) -> PeerFailed:
        """The store went with the rank that kept it; the news of that rank comes over the links."""
        if self.links.wait(_EXPLAINED_S) and self.links.failure is not None:
            self.links.taken.set()
            return _peer_failed(self.links.failure)
        reason = f"{self._where} was lost: {bounded(str(error))}"
        return self._failed(Failure(rank=STORE, reason=reason))

    def _failed(self, failure: Failure) -> PeerFailed:
        self.links.announce(failure)
        return _peer_failed(failure)

    def check(self) -> None:
        """See :meth:`Agreement.check`."""
        if self._refusal is not None:
            raise self._refusal
        failure = self.links.failure
        is_own = failure is not None and failure.rank == self.rank and not failure.given_up
        if failure is not None and not is_own and self.links.is_ours and not self._closed:
            self.links.taken.set()
            raise _peer_failed(failure)

    def has_failed(self) -> bool:
        """See :meth:`Agreement.has_failed`."""
        self.links.wait(_MOMENT_S)
        while self.links.is_settling:
            self.links.wait(_FIRST_LOOK_S)
        failure = self.links.failure
        return failure is not None and failure.rank != self.rank

    def say(self, state: str | None, trouble: str | None = None) -> None:
        """See :meth:`Agreement.say`."""
        self.links.say(state=state, **({} if trouble is None else {"trouble": bounded(trouble)}))

    def fail(self, state: str | None, reason: str, *, restart: bool = False, rank: int | None = None) -> None:
        """See :meth:`Agreement.fail`."""
        whose = self.rank if rank is None else rank
        self.links.announce(Failure(rank=whose, state=state, reason=bounded(reason), restart=restart))

    def watch(self, seen: Told, leave: Told) -> None:
        """See :meth:`Agreement.watch`."""
        self.links.watch(seen, leave)

    def close(self, *, well: bool) -> None:
        """See :meth:`Agreement.close`."""
        if self._closed or not self.links.is_ours:
            return
        self._closed = True
        if well and self._store is not None:
            self._part(self._store)
        self.links.close(well=well)
        self._store = None

    def _part(self, store: Store) -> None:
        """Whoever keeps the store waits until all others have read their last result, but not for ever."""
        try:
            left = store.add(self._key("left"), 1)
            until = time.monotonic() + (_PARTING_S if self._keeps_store() else 0)
            while left < self.size and time.monotonic() < until and self.links.failure is None:
                time.sleep(_FIRST_LOOK_S)
                left = store.add(self._key("left"), 0)
        except Exception:  # noqa: BLE001 - all that was to be agreed is agreed
            return


def _peer_failed(failure: Failure, *, missing: Sequence[int] = ()) -> PeerFailed:
    return PeerFailed(
        str(failure),
        rank=failure.rank,
        state=failure.state,
        reason=failure.reason,
        restart=failure.restart,
        missing=missing,
        hint=f"read the journal of {failure.label}" if failure.rank != STORE else "look at what the ranks talk through",
    )
