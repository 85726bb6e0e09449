"""A state past its deadline: its stack in an event, and in the side file where no thread of Python can run."""

from __future__ import annotations

import ctypes
import gc
import math
import os
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from startup_fsm.stacks import read_stacks
from startup_fsm.watchdog import Sentry, Watchdog


class Stalls(list):
    """Collects events and lets a test wait for the first."""

    def __init__(self):
        super().__init__()
        self.came = threading.Event()

    def __call__(self, event):
        self.append(event)
        self.came.set()


@pytest.fixture
def stalls() -> Stalls:
    return Stalls()


@pytest.fixture
def watchdog(stalls, tmp_path):
    dog = Watchdog(stalls, tmp_path / "rank-00000.1.stacks")
    yield dog
    dog.close()


def threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("startup-fsm-watchdog")]


def the_stuck_line(stalls):
    assert stalls.came.wait(20)  # the stuck line


def the_line_that_keeps_the_lock():
    ctypes.PyDLL(None).usleep(600_000)


class TestWatchdog:
    def test_stall(self, watchdog, stalls):
        """The event names state, visit and deadline, and its stack ends in the line that is stuck."""
        watchdog.watch("capture_graphs", 2, 0.05)
        the_stuck_line(stalls)
        watchdog.rest()
        (event,) = stalls
        assert (event.state, event.visit, event.deadline_ns) == ("capture_graphs", 2, 50_000_000)
        ours = [line for line in event.stack if line.startswith(f"{__file__}:")]
        assert "test_stall" in ours[0]
        assert ours[-1].endswith("the_stuck_line: assert stalls.came.wait(20)  # the stuck line")

    def test_side_file(self, watchdog, stalls, tmp_path):
        """While it is stuck the side file holds the stack; once it was left the dump is nobody's, and the file stays."""
        path = tmp_path / "rank-00000.1.stacks"
        watchdog.watch("capture_graphs", 1, 0.05)
        deadline = time.monotonic() + 20
        while not read_stacks(path) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert any("test_side_file" in line for line in read_stacks(path))
        watchdog.rest()
        assert read_stacks(path) == ()
        watchdog.close()
        assert "left capture_graphs, visit 1" in path.read_text()

    def test_no_stall(self, watchdog, stalls, tmp_path):
        """States within their deadlines leave nothing, and an empty side file goes at the end."""
        for visit in range(1, 200):
            watchdog.watch("load_weights", visit, 60)
            watchdog.rest()
        assert len(threads()) == 1
        watchdog.close()
        assert stalls == []
        assert threads() == []
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize("deadline", [None, math.inf, 1e300])
    def test_lazy(self, watchdog, tmp_path, deadline):
        """Without a deadline there is no thread and no file."""
        watchdog.watch("load_weights", 1, deadline)
        assert threads() == []
        watchdog.rest()
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize("deadline", [0, -1, math.nan])
    def test_bad_deadline(self, watchdog, deadline):
        """A deadline that is not positive is refused with the state's name."""
        with pytest.raises(ValueError, match="state verify: a deadline of"):
            watchdog.watch("verify", 1, deadline)

    def test_far_deadline(self, watchdog, stalls):
        """A deadline of centuries is one that does not pass."""
        watchdog.watch("verify", 1, threading.TIMEOUT_MAX)
        watchdog.rest()
        assert stalls == []

    def test_once(self, watchdog, stalls):
        """A visit is reported once, the next visit again."""
        for visit in (1, 2):
            stalls.came.clear()
            watchdog.watch("verify", visit, 0.02)
            assert stalls.came.wait(20)
            time.sleep(0.1)
            watchdog.rest()
        assert [event.visit for event in stalls] == [1, 2]

    def test_behind_the_lock(self, watchdog, stalls, tmp_path, monkeypatch):
        """C code that keeps the interpreter's lock: the side file has the stack, and it is reported on the way out."""
        monkeypatch.setattr("startup_fsm.watchdog._GRACE_S", 0.1)
        watchdog.watch("capture_graphs", 1, 0.05)
        the_line_that_keeps_the_lock()
        watchdog.rest()
        (event,) = stalls
        assert event.stack[-1].endswith(" the_line_that_keeps_the_lock")
        text = (tmp_path / "rank-00000.1.stacks").read_text()
        assert text.startswith("Timeout (0:00:00.15")
        assert "test_behind_the_lock" in text

    def test_no_dump_without_the_lock(self, watchdog, stalls, tmp_path, monkeypatch):
        """Where the thread could run, the timer that dumps without the lock is taken back: it can crash running threads."""
        monkeypatch.setattr("startup_fsm.watchdog._GRACE_S", 0.2)
        watchdog.watch("capture_graphs", 1, 0.05)
        assert stalls.came.wait(20)
        time.sleep(0.4)
        watchdog.rest()
        text = (tmp_path / "rank-00000.1.stacks").read_text()
        assert "Timeout" not in text
        assert "test_no_dump_without_the_lock" in text

    def test_sentry_never_ran(self, stalls, tmp_path, monkeypatch):
        """Where the thread had no chance before the state was left, who leaves it reports what faulthandler saw."""
        monkeypatch.setattr(Sentry, "_begin", lambda _: None)
        dog = Watchdog(stalls, tmp_path / "x.stacks")
        monkeypatch.setattr("startup_fsm.watchdog._GRACE_S", 0.1)
        dog.watch("capture_graphs", 1, 0.05)
        the_line_that_keeps_the_lock()
        dog.rest()
        dog.close()
        (event,) = stalls
        assert event.stack[-1].endswith(" the_line_that_keeps_the_lock")

    def test_reporter_raises(self, tmp_path):
        """A reporter's own trouble ends nothing."""
        seen = Stalls()

        def report(event):
            seen(event)
            raise RuntimeError

        dog = Watchdog(report, None)
        for visit in (1, 2):
            seen.came.clear()
            dog.watch("verify", visit, 0.02)
            assert seen.came.wait(20)
            dog.rest()
        dog.close()
        assert len(seen) == 2

    @pytest.mark.parametrize("place", ["missing/dir/x.stacks", "file/x.stacks"])
    def test_place(self, stalls, tmp_path, place):
        """A side file that cannot be made, or whose folder is missing, keeps nobody from being watched."""
        (tmp_path / "file").write_text("no folder")
        dog = Watchdog(stalls, tmp_path / place)
        dog.watch("verify", 1, 0.02)
        assert stalls.came.wait(20)
        dog.close()

    def test_other_thread(self, watchdog, stalls):
        """The stack is that of the thread that asked, whichever it is."""

        def body():
            watchdog.watch("verify", 1, 0.05)
            the_stuck_line(stalls)
            watchdog.rest()

        thread = threading.Thread(target=body)
        thread.start()
        thread.join()
        assert "the_stuck_line" in "".join(stalls[0].stack)

    def test_forgotten(self, stalls, tmp_path):
        """A watchdog that was closed and dropped leaves nothing behind for later forks."""
        dog = Watchdog(stalls, tmp_path / "x.stacks")
        dog.watch("verify", 1, 60)
        dog.close()
        del dog
        gc.collect()
        child = os.fork()
        if child == 0:
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0


FORK = textwrap.dedent("""
    import os, pathlib, sys, threading, time
    from startup_fsm.watchdog import Watchdog

    stalls = []
    path = pathlib.Path(sys.argv[1])
    dog = Watchdog(stalls.append, path)
    dog.watch("verify", 1, 0.5)
    child = os.fork()
    if child == 0:
        time.sleep(1)
        dog.watch("verify", 2, 0.01)
        time.sleep(0.1)
        dog.rest()
        dog.close()
        print("child", len(stalls), threading.active_count(), path.exists(), flush=True)
        sys.exit(0)
    status = os.waitpid(child, 0)[1]
    dog.rest()
    print("parent", len(stalls), status, path.read_text().count("Current thread"), flush=True)
""")


def test_fork(tmp_path):
    """A child that forks off under watch reports nothing, removes nothing and exits; its parent is watched on."""
    done = subprocess.run(
        [sys.executable, "-c", FORK, str(tmp_path / "x.stacks")], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.split("\n")[:2] == ["child 0 1 True", "parent 1 0 1"]


class TestSentry:
    def test_nested(self):
        """Several watches at once: only those whose time is over are reported, the earliest first."""
        sentry = Sentry("startup-fsm-test")
        seen = []
        came = threading.Event()
        long = sentry.watch(60, lambda _: seen.append("long"))
        later = sentry.watch(0.1, lambda _: came.set())
        sooner = sentry.watch(0.02, lambda _: seen.append("sooner"))
        assert came.wait(20)
        for watch in (sooner, later, long):
            sentry.rest(watch)
        sentry.close()
        assert seen == ["sooner"]
        assert (sooner.overdue, later.overdue, long.overdue) == (True, True, False)

    def test_waits_for_report(self):
        """Whoever comes to rest while the report is written goes on behind it."""
        sentry = Sentry("startup-fsm-test")
        begun, order = threading.Event(), []

        def report(_):
            begun.set()
            time.sleep(0.1)
            order.append("report")

        watch = sentry.watch(0.01, report)
        assert begun.wait(20)
        sentry.rest(watch)
        order.append("rest")
        sentry.close()
        assert order == ["report", "rest"]
