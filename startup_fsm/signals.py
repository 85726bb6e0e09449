"""
Signals that end a start of ours are recorded before they do.

Only the command line uses this: an embedding program keeps its own handlers.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Final

from startup_fsm.bootstrap import Bootstrap
from startup_fsm.events import SignalReceived

#: Recorded when they arrive during a start of ours. An interrupt from the keyboard is an exception in Python already.
_SIGNALS: Final = (signal.SIGTERM, signal.SIGHUP)


@contextmanager
def signals_recorded(boot: Bootstrap) -> Iterator[None]:
    """
    While this is open, a signal that asks the process to end is recorded and synced, then does what it did before.

    Outside the main thread nothing is done: only that one may change what signals do.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    recorder = _SignalRecorder(boot)
    for number in _SIGNALS:
        before = signal.getsignal(number)
        if before is not signal.SIG_IGN:
            recorder.before[number] = before
            signal.signal(number, recorder)
    try:
        yield
    finally:
        for each, handler in recorder.before.items():
            # Another handler may have been set meanwhile; it stays.
            if signal.getsignal(each) is recorder:
                signal.signal(each, handler or signal.SIG_DFL)


class _SignalRecorder:
    """What is called when a signal arrives: first to have it recorded, then to let it through."""

    def __init__(self, boot: Bootstrap) -> None:
        self.before: dict[int, Callable[[int, FrameType | None], Any] | int | None] = {}
        self._boot = boot
        self._pid = os.getpid()
        self._arrived: set[int] = set()
        self._recorded: set[int] = set()

    def __call__(self, number: int, frame: FrameType | None) -> None:
        # A forked child has inherited this, and has no journal.
        if number in self._recorded or os.getpid() != self._pid:
            self._let_through(number, frame)
        elif number not in self._arrived:
            self._arrived.add(number)
            # On another thread: this one may be in the middle of writing an event, and goes on with it.
            threading.Thread(target=self._record, args=(number,), daemon=True).start()

    def _record(self, number: int) -> None:
        boot = self._boot
        try:
            boot.recorder.record(SignalReceived(signal=signal.Signals(number).name, state=boot.history.state))
            boot.recorder.sync()
        finally:
            self._recorded.add(number)
            if not callable(self.before.get(number)):
                # The main thread may be inside C code that never comes back to run a handler, or about to block: from
                # here on the kernel ends the process, whatever that thread does.
                self._say(number)
                _restore_default(number)
            os.kill(self._pid, number)

    def _let_through(self, number: int, frame: FrameType | None) -> None:
        before = self.before.get(number) or signal.SIG_DFL
        signal.signal(number, before)
        if callable(before):
            before(number, frame)
            return
        if os.getpid() == self._pid:
            self._say(number)
        os.kill(os.getpid(), number)

    def _say(self, number: int) -> None:
        # By descriptor: the interrupted thread may be inside a write of the stream.
        name, state = signal.Signals(number).name, self._boot.history.state
        where = f" in {state}" if state else ""
        text = f"startup-fsm: {name}{where}; journal: {self._boot.path or 'none'}\n"
        # A progress bar hides the cursor.
        shown = "\r\x1b[?25h" if sys.stderr.isatty() else ""
        os.write(2, (shown + text).encode("utf-8", "backslashreplace"))


def _restore_default(number: int) -> None:
    """What ``signal.signal`` does for ``SIG_DFL``, which Python allows on the main thread only."""
    libc = ctypes.CDLL(None)
    libc.signal.argtypes = (ctypes.c_int, ctypes.c_void_p)
    libc.signal.restype = ctypes.c_void_p
    libc.signal(number, None)
