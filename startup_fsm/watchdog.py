"""
A state that passes its deadline leaves its stack behind, whoever is stuck where.

Two look at it. A daemon thread takes the stack of the stuck thread, reports it, and writes those of all threads into a
side file. Where that thread cannot run, because C code holds the interpreter lock and does not let go, the timer of
``faulthandler`` writes the side file instead: it needs no lock.

That is also its danger. A thread that runs while it is dumped without the lock can crash the process (seen with Python
3.11: one segmentation fault in 60 dumps, when threads woke at that instant). So the timer is set a grace behind the
deadline and taken back as soon as the daemon thread runs: it fires only where no Python moves.

Nothing here calls CUDA, and nothing of it goes on in a forked child.
"""

from __future__ import annotations

import contextlib
import faulthandler
import math
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Final

import attrs

from startup_fsm.events import StateStalled
from startup_fsm.stacks import LEFT, parse_stacks, stack_lines

#: Gets the stack of the overdue thread, outermost line first; runs on the sentry's thread.
Report = Callable[[tuple[str, ...]], None]

# How long whoever comes to rest waits for a report that is being written, so that it stands before what follows.
_REPORTING_S: Final = 1.0
# How long the sentry may be kept from running before faulthandler looks instead.
_GRACE_S: Final = 1.0


@attrs.define(slots=True, eq=False)
class Watch:
    """
    One thread under watch.

    Attributes:
        due: When its time is over, by ``time.monotonic``.
        thread: Its identity.
        report: Called once, when it is overdue.
        overdue: Whether that happened.
    """

    due: float
    thread: int
    report: Report
    overdue: bool = False
    reporting: threading.Lock = attrs.field(factory=threading.Lock)


class Sentry:
    """
    One daemon thread, started with the first watch, that reports every thread still busy when its time is over.

    Short watches cost no switch between threads: it is woken only by one that ends earlier than all others.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._pid = os.getpid()
        self._wake = threading.Condition()
        self._watches: list[Watch] = []
        self._until = math.inf
        self._thread: threading.Thread | None = None
        self._closed = False

    def watch(self, seconds: float, report: Report) -> Watch:
        """Watch the calling thread for so many seconds; call :meth:`rest` with what this gives."""
        watch = Watch(time.monotonic() + seconds, threading.get_ident(), report)
        if os.getpid() != self._pid or self._closed:
            return watch
        with self._wake:
            self._watches.append(watch)
            if self._thread is None:
                self._begin()
            elif watch.due < self._until:
                self._wake.notify()
        return watch

    def _begin(self) -> None:
        thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        # A process that may have no more threads, or that is going down, starts without a sentry.
        with contextlib.suppress(RuntimeError):
            thread.start()
            self._thread = thread

    def rest(self, watch: Watch) -> None:
        """The thread came through; a report that is being written is waited for, a second at most."""
        if os.getpid() != self._pid:
            return
        with self._wake:
            if watch in self._watches:
                self._watches.remove(watch)
        if watch.overdue and watch.reporting.acquire(timeout=_REPORTING_S):
            watch.reporting.release()

    def close(self) -> None:
        """End the thread."""
        if os.getpid() != self._pid:
            return
        with self._wake:
            self._closed = True
            self._watches.clear()
            self._wake.notify()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_REPORTING_S)

    def _run(self) -> None:
        while (watch := self._next()) is not None:
            try:
                frame = sys._current_frames().get(watch.thread)  # noqa: SLF001 - documented, and the only way
                # A reporter's own trouble must not end the watch over everything else.
                with contextlib.suppress(Exception):
                    watch.report(() if frame is None else stack_lines(frame))
            finally:
                frame = None
                watch.reporting.release()

    def _next(self) -> Watch | None:
        """The next overdue watch, with its lock held; None at the end."""
        with self._wake:
            while not self._closed:
                watch = min(self._watches, key=lambda each: each.due, default=None)
                self._until = math.inf if watch is None else watch.due
                if watch is None:
                    self._wake.wait()
                elif (left := watch.due - time.monotonic()) > 0:
                    self._wake.wait(left)
                else:
                    self._watches.remove(watch)
                    watch.overdue = True
                    watch.reporting.acquire()
                    return watch
        return None


@attrs.frozen(kw_only=True)
class _State:
    """The state under watch."""

    stalled: StateStalled
    watch: Watch
    offset: int


class Watchdog:
    """
    Watches the thread that runs a state.

    ``faulthandler`` has one timer a process: while a state with a deadline is open it is ours, and one that the engine
    set is lost.

    Args:
        on_stall: Gets the event, once for each visit. Runs on a thread of its own, or, where that thread was blind
            behind a lock that C code held, on the thread of :meth:`rest`. What it raises is dropped.
        stacks: The side file, ``<process>.<attempt>.stacks`` beside the journal; made with the first deadline and
            removed at :meth:`close` when empty. None does without.
    """

    def __init__(self, on_stall: Callable[[StateStalled], None], stacks: Path | None = None) -> None:
        self._on_stall = on_stall
        self._stacks = stacks
        self._pid = os.getpid()
        self._sentry = Sentry("startup-fsm-watchdog")
        self._state: _State | None = None
        self._descriptor: int | None = None
        self._armed = False
        self._at_fork = False

    def watch(self, state: str, visit: int, deadline_s: float | None) -> None:
        """
        Watch the calling thread until :meth:`rest`; what was watched before is at rest.

        Args:
            state: Name of the state.
            visit: From 1.
            deadline_s: Seconds that it may take; None, or more than a lock can wait, for no deadline.

        Raises:
            ValueError: The deadline is not positive.
        """
        if os.getpid() != self._pid:
            return
        self.rest()
        if deadline_s is None or deadline_s > threading.TIMEOUT_MAX:
            return
        if not deadline_s > 0:
            msg = f"state {state}: a deadline of {deadline_s} s; it must be positive\nhint: None is no deadline"
            raise ValueError(msg)
        self._open()
        stalled = StateStalled(state=state, visit=visit, deadline_ns=round(deadline_s * 1e9))
        offset, thread = self._size(), threading.get_ident()

        def report(stack: tuple[str, ...]) -> None:
            self._on_stall(attrs.evolve(stalled, stack=self._seen(stalled, offset, thread, stack)))

        self._state = _State(stalled=stalled, watch=self._sentry.watch(deadline_s, report), offset=offset)
        self._arm(deadline_s + _GRACE_S)

    def _seen(self, stalled: StateStalled, offset: int, thread: int, stack: tuple[str, ...]) -> tuple[str, ...]:
        """The stack to report: what faulthandler saw, where the sentry came late and the thread has moved on."""
        if (state := self._state) is not None and state.stalled is stalled:
            self._disarm()
        dump = self._read(offset)
        if not dump and self._descriptor is not None:
            # With the lock in hand, so that no thread moves.
            with contextlib.suppress(OSError, RuntimeError, ValueError):
                faulthandler.dump_traceback(self._descriptor, all_threads=True)
        return parse_stacks(dump, thread=thread) or stack

    def rest(self) -> None:
        """
        The state was left, well or not.

        A report that is being written is waited for, so that it stands before what follows: hold no lock that
        ``on_stall`` takes.
        """
        state, self._state = self._state, None
        if os.getpid() != self._pid or state is None:
            return
        self._disarm()
        self._sentry.rest(state.watch)
        dump = self._read(state.offset)
        if not state.watch.overdue and time.monotonic() >= state.watch.due:
            # The sentry never got to run.
            stack = parse_stacks(dump, thread=state.watch.thread)
            with contextlib.suppress(Exception):
                self._on_stall(attrs.evolve(state.stalled, stack=stack))
        if dump and self._descriptor is not None:
            with contextlib.suppress(OSError):
                os.write(self._descriptor, f"{LEFT}{state.stalled.state}, visit {state.stalled.visit}\n".encode())

    def close(self) -> None:
        """Rest, end the thread, remove the side file where it is empty."""
        self.rest()
        self._sentry.close()
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is None:
            return
        with contextlib.suppress(OSError):
            empty = os.fstat(descriptor).st_size == 0
            os.close(descriptor)
            if empty and self._stacks is not None and os.getpid() == self._pid:
                self._stacks.unlink()

    def _open(self) -> None:
        if self._stacks is None or self._descriptor is not None:
            return
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC
        # A directory that cannot be written must not keep an engine from starting: the thread still watches.
        with contextlib.suppress(OSError):
            self._stacks.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(self._stacks, flags, 0o644)

    def _size(self) -> int:
        return 0 if self._descriptor is None else os.fstat(self._descriptor).st_size

    def _read(self, offset: int) -> str:
        """What faulthandler wrote since ``offset``."""
        if self._descriptor is None:
            return ""
        with contextlib.suppress(OSError):
            return os.pread(self._descriptor, 1 << 20, offset).decode("utf-8", "replace")
        return ""

    def _arm(self, seconds: float) -> None:
        if self._descriptor is None:
            return
        if not self._at_fork:
            self._at_fork = True
            _pause_at_fork(weakref.ref(self))
        # A deadline beyond what its timer counts is none.
        with contextlib.suppress(OverflowError, RuntimeError):
            faulthandler.dump_traceback_later(seconds, repeat=False, file=self._descriptor, exit=False)
            self._armed = True

    def _disarm(self) -> None:
        if self._armed:
            self._armed = False
            faulthandler.cancel_dump_traceback_later()

    def pause(self) -> None:
        """Before a fork: a child that inherits a running timer of faulthandler hangs when it exits."""
        if os.getpid() == self._pid:
            self._disarm()

    def resume(self) -> None:
        """After a fork, in the parent: go on with the time that is left."""
        state = self._state
        if os.getpid() == self._pid and state is not None and not state.watch.overdue:
            self._arm(max(state.watch.due + _GRACE_S - time.monotonic(), 0.001))


def _pause_at_fork(reference: weakref.ref[Watchdog]) -> None:
    def pause() -> None:
        if (watchdog := reference()) is not None:
            watchdog.pause()

    def resume() -> None:
        if (watchdog := reference()) is not None:
            watchdog.resume()

    os.register_at_fork(before=pause, after_in_parent=resume)
