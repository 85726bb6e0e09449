"""
Connections between the ranks of one start, so that the death of any of them is seen by all, and named.

Each rank keeps a plain TCP connection with a few others (``ranks.neighbours``). Over it go the state that it is in,
its failure, and news of others, passed on once. A connection that ends without a word is a death: the kernel closes it
whatever killed the process. Only a host that is lost says nothing; the kernel's keep-alive finds that after 30 s, and
is answered by the kernel too, so that a process which is busy in C code is not taken for dead.

One daemon thread a start. Nothing here calls CUDA, a collective or the store.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import selectors
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

import attrs
import orjson

from startup_fsm.dialing import Link, answer, caller_of, dial, keep_alive, listener, may_be_greeting
from startup_fsm.ranks import STORE, Failure, bounded, neighbours

# How long a death waits for somebody else's word on it, and for other deaths of the same instant.
_SETTLING_S: Final = 0.1
_LONGEST_LINE: Final = 8_192
_MOST_UNSENT: Final = 64_000
_MOST_STRANGERS: Final = 64

Told = Callable[[Failure], None]


class Links:
    """
    The connections of one rank.

    Args:
        rank, size: Of this process.
        grace_s: Seconds that the main thread has after bad news to end by itself.

    Attributes:
        failure: The first failure among the ranks, also our own; None while all is well.
        taken: Set by the main thread once it knows of the failure and ends by itself.
        sent_messages, sent_bytes: What went out so far, for those who count.
    """

    def __init__(self, rank: int, size: int, *, grace_s: float) -> None:
        self.rank = rank
        self.neighbours = neighbours(rank, size)
        self.failure: Failure | None = None
        self.taken = threading.Event()
        self.sent_messages = 0
        self.sent_bytes = 0
        self._grace_s = grace_s
        self._pid = os.getpid()
        self._key = secrets.token_hex(8)
        self._news = threading.Event()
        self._lock = threading.RLock()
        self._links: dict[int, Link] = {}
        self._strangers: list[Link] = []
        self._lost: dict[int, float] = {}
        self._ends_at: float | None = None
        self._seen: Told | None = None
        self._leave: Told | None = None
        self._word: Mapping[str, Any] = {}
        self._closed = False
        self._posted: deque[Callable[[], None]] = deque()
        self._listener = listener()
        self._wake_up, self._woken = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        for each in (self._listener, self._woken):
            each.setblocking(False)
            self._selector.register(each, selectors.EVENT_READ)
        let_go = weakref.WeakMethod(self._let_go)
        os.register_at_fork(after_in_child=lambda: method() if (method := let_go()) else None)
        self._thread = threading.Thread(target=self._run, name="startup-fsm-ranks", daemon=True)
        self._thread.start()

    @property
    def is_ours(self) -> bool:
        """False in a forked child, which has let go of every connection."""
        return os.getpid() == self._pid

    def address(self, hosts: tuple[str, ...], boot: str | None) -> dict[str, Any]:
        """Where others find this rank, as plain data: names of its host, the port, and the key to come in with."""
        return {"hosts": list(hosts), "port": self._listener.getsockname()[1], "boot": boot, "key": self._key}

    def connect(self, addresses: Mapping[int, Mapping[str, Any]], boot: str | None) -> tuple[int, ...]:
        """
        Open the connections to those at ``addresses``; the others open theirs to us.

        One of this very host that refuses is dead, and that is news. Gives the ranks that could not be reached for
        another reason: a firewall may lie between, and that must not end a start.
        """
        silent: set[Any] = set()
        unreached = []
        for rank, address in addresses.items():
            theirs = address.get("boot")
            link, is_gone = None, False
            if theirs not in silent:
                link, is_gone = dial(rank, address, caller=self.rank, is_near=boot is not None and theirs == boot)
            if link is not None:
                self._enlist(link, rank)
                self._post(partial(self._listen, link))
            elif is_gone and boot is not None and theirs == boot:
                self._post(partial(self._lose, rank))
            else:
                unreached.append(rank)
                silent.add(theirs)
        return tuple(unreached)

    def watch(self, seen: Told, leave: Told) -> None:
        """
        Say who is told of a failure of another rank, on our thread.

        Args:
            seen: Called as soon as it is known.
            leave: Called when the main thread has not taken it within the grace.
        """
        self._post(partial(self._watched, seen, leave))

    def say(self, **word: Any) -> None:
        """Tell the neighbours where we are: ``state``, and ``trouble`` in it."""
        if not self.is_ours:
            return
        with self._lock:
            self._word = word
            self._send_all(word)

    def announce(self, failure: Failure) -> None:
        """Spread a failure that this rank knows of first, most often its own."""
        if not self.is_ours:
            return
        with self._lock:
            if self.failure is None:
                self.failure = failure
                self.taken.set()
                self._send_all({"failed": attrs.asdict(failure)})
        self._news.set()

    def wait(self, seconds: float) -> bool:
        """Wait for a failure so long; whether there is one."""
        return self._news.wait(seconds)

    @property
    def is_settling(self) -> bool:
        """Whether a connection was lost and nobody knows yet what that means."""
        return bool(self._lost) and self.failure is None

    def close(self, *, well: bool) -> None:
        """Say goodbye where the start ended well, and let go of everything. Harmless when repeated."""
        if not self.is_ours or self._closed:
            return
        with self._lock:
            if well:
                self._send_all({"bye": True})
            self._closed = True
        self._wake()
        if threading.current_thread() is not self._thread:
            self._thread.join(1.0)
        self._let_go()

    def _let_go(self) -> None:
        # No ``shutdown``, and no ``unregister``: a forked child shares both with its parent.
        for link in [*self._links.values(), *self._strangers]:
            link.socket.close()
        for each in (self._listener, self._wake_up, self._woken, self._selector):
            with contextlib.suppress(OSError):
                each.close()

    def _enlist(self, link: Link, rank: int) -> None:
        """A connection whose other side is known; it hears at once what the others have heard."""
        link.socket.setblocking(False)
        keep_alive(link.socket)
        with self._lock:
            link.rank = rank
            self._links[rank] = link
            if self._word:
                self._send(link, self._word)
            if self.failure is not None:
                self._send(link, {"failed": attrs.asdict(self.failure)})

    def _post(self, call: Callable[[], None]) -> None:
        """Have something done on our thread."""
        self._posted.append(call)
        self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            self._wake_up.send(b"!")

    # From here on: our thread.

    def _run(self) -> None:
        while not self._closed:
            try:
                for key, _ in self._selector.select(self._patience()):
                    self._serve(key.fileobj, key.data)
                self._settle()
            except Exception:  # noqa: BLE001 - one connection's trouble must not end the watch over the others
                time.sleep(_SETTLING_S)

    def _patience(self) -> float | None:
        """Seconds until something has to be done by itself."""
        times = [*self._lost.values()] if self.failure is None else []
        if self._ends_at is not None and self._leave is not None:
            times.append(self._ends_at)
        return max(0.0, min(times) - time.monotonic()) if times else None

    def _serve(self, ready: object, link: Link | None) -> None:
        if link is not None:
            self._read(link)
        elif ready is self._listener:
            self._accept()
        else:
            with contextlib.suppress(BlockingIOError):
                self._woken.recv(4096)
            while self._posted:
                self._posted.popleft()()

    def _watched(self, seen: Told, leave: Told) -> None:
        self._seen, self._leave = seen, leave
        if self.failure is not None and self._ends_at is not None:
            # It came before anybody could be told.
            self._ends_at = time.monotonic() + self._grace_s
            self._tell(self.failure)

    def _accept(self) -> None:
        accepted, _ = self._listener.accept()
        accepted.setblocking(False)
        link = Link(accepted)
        self._strangers.append(link)
        self._selector.register(accepted, selectors.EVENT_READ, link)
        if len(self._strangers) > _MOST_STRANGERS:
            self._drop(self._strangers[0])

    def _listen(self, link: Link) -> None:
        self._forget(link)
        self._selector.register(link.socket, selectors.EVENT_READ, link)

    def _read(self, link: Link) -> None:
        try:
            block = link.socket.recv(4096)
        except BlockingIOError:
            return
        except ConnectionResetError:
            # It died with something of ours unread.
            self._ended(link, None)
            return
        except OSError as error:
            self._ended(link, f"its host was lost: {bounded(error.strerror or str(error))}")
            return
        if not block:
            self._ended(link, None)
            return
        link.held += block
        if link.rank is None and not may_be_greeting(link.held):
            # Whoever takes this port for another service, such as a store, must not be left waiting.
            self._drop(link)
            return
        while (end := link.held.find(b"\n")) >= 0:
            line = bytes(link.held[:end])
            del link.held[: end + 1]
            if link.rank is None:
                self._greeted(link, line)
            else:
                self._told(link, line)
        if len(link.held) > _LONGEST_LINE:
            # None of ours; what it may have to say is not worth the memory, and its end no death.
            link.is_done = True
            self._drop(link)

    def _greeted(self, link: Link, line: bytes) -> None:
        caller = caller_of(line, self._key)
        if caller is None or caller not in self.neighbours:
            self._drop(link)
            return
        with self._lock:
            # Once the caller has its answer it may go on to a meeting, and we behind it, up to our goodbye.
            answer(link, self.rank)
            self._enlist(link, caller)
        self._listen(link)

    def _told(self, link: Link, line: bytes) -> None:
        try:
            word = orjson.loads(line)
        except orjson.JSONDecodeError:
            return
        if not isinstance(word, dict):
            return
        if word.get("bye"):
            link.is_done = True
        elif isinstance(failed := word.get("failed"), dict):
            self._learn(_failure(failed))
        else:
            state, trouble = word.get("state"), word.get("trouble")
            link.state = bounded(state) if isinstance(state, str) else None
            link.trouble = bounded(trouble) if isinstance(trouble, str) else None

    def _ended(self, link: Link, how: str | None) -> None:
        self._drop(link)
        if link.rank is None or link.is_done or self._links.get(link.rank) is not link:
            return
        link.trouble = link.trouble or how
        self._lose(link.rank)

    def _lose(self, rank: int) -> None:
        self._lost.setdefault(rank, time.monotonic() + _SETTLING_S)

    def _drop(self, link: Link) -> None:
        self._forget(link)
        link.socket.close()

    def _forget(self, link: Link) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(link.socket)
        if link in self._strangers:
            self._strangers.remove(link)

    def _settle(self) -> None:
        now = time.monotonic()
        if self.failure is None and self._lost and min(self._lost.values()) <= now:
            self._learn(self._death())
        if self._ends_at is None or now < self._ends_at or self._leave is None or self.failure is None:
            return
        self._ends_at = None
        if not self.taken.is_set():
            self._leave(self.failure)

    def _death(self) -> Failure:
        """Of those that were lost at once, the one that had said something; else the lowest rank."""
        lost = {rank: self._links.get(rank) for rank in sorted(self._lost)}
        rank = next((rank for rank, link in lost.items() if link is not None and link.trouble), min(lost))
        link = lost[rank]
        reason = "its process ended without a word" if link is None or not link.trouble else link.trouble
        others = [str(each) for each in lost if each != rank]
        if others:
            reason += f"; lost at the same time: {', '.join(others[:8])}"
        return Failure(rank=rank, state=None if link is None else link.state, reason=reason)

    def _learn(self, failure: Failure) -> None:
        """News of another rank: pass it on, then tell our own."""
        with self._lock:
            if self.failure is not None:
                return
            self.failure = failure
            self._send_all({"failed": attrs.asdict(failure)})
        if failure.rank == self.rank and not failure.given_up:
            # Others know of our own failure before we have come to tell it; they leave, and those are no deaths.
            return
        self._ends_at = time.monotonic() + self._grace_s
        self._news.set()
        self._tell(failure)

    def _tell(self, failure: Failure) -> None:
        if self._seen is not None:
            with contextlib.suppress(Exception):
                self._seen(failure)

    def _send_all(self, word: Mapping[str, Any]) -> None:
        if self.is_ours and not self._closed:
            for link in list(self._links.values()):
                self._send(link, word)

    def _send(self, link: Link, word: Mapping[str, Any]) -> None:
        line = orjson.dumps(word) + b"\n"
        # Whoever does not read for so long is stuck; it will read the connection's end, or nothing any more.
        if len(link.unsent) + len(line) > _MOST_UNSENT:
            return
        link.unsent += line
        self.sent_messages += 1
        self.sent_bytes += len(line)
        with contextlib.suppress(OSError):
            done = link.socket.send(link.unsent, socket.MSG_DONTWAIT)
            del link.unsent[:done]


def _failure(data: Mapping[str, Any]) -> Failure:
    rank, state = data.get("rank"), data.get("state")
    return Failure(
        rank=rank if type(rank) is int else STORE,
        state=bounded(state) if isinstance(state, str) else None,
        reason=bounded(str(data.get("reason", ""))),
        restart=data.get("restart") is True,
        given_up=data.get("given_up") is True,
    )
