"""Signals are recorded, then do what they did before."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from startup_fsm.bootstrap import Bootstrap
from startup_fsm.events import NoteAdded
from startup_fsm.signals import signals_recorded
from startup_fsm.testing import counting_start


@pytest.fixture
def before() -> Iterator[list[int]]:
    """A handler of the program's own, and the signals that reached it."""
    reached: list[int] = []
    kept = signal.signal(signal.SIGTERM, lambda number, _: reached.append(number))
    yield reached
    signal.signal(signal.SIGTERM, kept)


@pytest.fixture
def boot() -> Bootstrap:
    """A start inside its first state."""
    made, _ = counting_start()
    made.state("init_device").__enter__()
    return made


def wait_for(true: Callable[[], Any]) -> None:
    """Let handlers run until it is so."""
    until = time.monotonic() + 10
    while not true():
        assert time.monotonic() < until
        time.sleep(0.005)


def test_recorded_and_passed_on(boot: Bootstrap, before: list[int]):
    """One signal is one event with its state, and reaches the handler that was there."""
    with signals_recorded(boot):
        os.kill(os.getpid(), signal.SIGTERM)
        wait_for(lambda: before)

    assert before == [signal.SIGTERM]
    assert [(each.signal, each.state) for _, each in boot.history.signals] == [("SIGTERM", "init_device")]


def test_seq_stays_whole(boot: Bootstrap, before: list[int]):
    """A signal in the middle of recording does not come between a number and its event."""
    seen: list[int] = []
    sent = threading.Event()

    def interrupt(record: Any, *_: Any) -> None:
        seen.append(record.seq)
        if not sent.is_set():
            sent.set()
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.05)

    boot.recorder.mirrors.append(interrupt)
    with signals_recorded(boot):
        boot.recorder.record(NoteAdded(state="init_device", note={}))
        wait_for(lambda: before)

    assert seen == sorted(set(seen))
    assert len(seen) == 2


def test_handlers_come_back(boot: Bootstrap, before: list[int]):
    """Afterwards the handlers are those that were there."""
    handler = signal.getsignal(signal.SIGTERM)
    with signals_recorded(boot):
        assert signal.getsignal(signal.SIGTERM) is not handler

    assert signal.getsignal(signal.SIGTERM) is handler


def test_ignored_stays_ignored(boot: Bootstrap):
    """What was ignored, as under nohup, stays ignored and is no event."""
    kept = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with signals_recorded(boot):
            os.kill(os.getpid(), signal.SIGHUP)
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, kept)

    assert boot.history.signals == []


def test_another_thread(boot: Bootstrap):
    """Outside the main thread nothing is installed, and nothing fails."""
    found: list[Any] = []

    def body() -> None:
        with signals_recorded(boot):
            found.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()

    assert found == [signal.getsignal(signal.SIGTERM)]


_FORKING = """
import os, signal, sys, time
from startup_fsm.signals import signals_recorded
from startup_fsm.testing import counting_start
boot, _ = counting_start()
with signals_recorded(boot):
    with boot.state("init_device"):
        child = os.fork()
        if child == 0:
            time.sleep(30)
            os._exit(0)
        time.sleep(0.1)
        os.kill(child, signal.SIGTERM)
        _, status = os.waitpid(child, 0)
        print(os.WTERMSIG(status), len(boot.history.signals))
"""


def test_forked_child():
    """A forked child ends by the signal and records nothing."""
    ran = subprocess.run([sys.executable, "-c", _FORKING], capture_output=True, text=True, check=True)

    assert ran.stdout.split() == [str(int(signal.SIGTERM)), "0"]
