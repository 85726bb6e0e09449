"""A state that does not come back: the stack of the line that is stuck, whatever ends the process then."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from startup_fsm.journal import read_journal
from startup_fsm.stacks import read_stacks

START = """
import ctypes, sys, time
from startup_fsm import throwaway
from startup_fsm.engines.counting import CountingEngine
from startup_fsm.testing import counting_start

class Stuck(CountingEngine):
    def capture(self, step, size):
        if step.state == "capture_graphs":
            print(boot.path, flush=True)
            {line}
        super().capture(step, size)

plan = throwaway().with_deadlines({"capture_graphs": {seconds}})
boot, engine = counting_start(journal=sys.argv[1], plan=plan)
boot.run(Stuck(device=engine.device))
print("ready", flush=True)
"""

#: Of code that lets other threads run, and of C code that does not.
LINES = {"polite": "time.sleep(600)", "holding": "ctypes.PyDLL(None).sleep(600)"}


def wait_until(is_true):
    """Wait for something that another process does; a minute is for ever."""
    patience = time.monotonic() + 60
    while not is_true():
        assert time.monotonic() < patience
        time.sleep(0.02)


def stalls_in(path):
    """The stalls that a journal tells of so far."""
    return [record.event for record in read_journal(path).records if record.kind == "state_stalled"]


@pytest.fixture
def stuck(tmp_path, python):
    """Start an engine that is stuck in its real capture; gives the process and its journal."""

    def start(line, seconds=0.2):
        process = python(START.replace("{line}", line).replace("{seconds}", str(seconds)), tmp_path)
        path = process.stdout.readline().strip()
        assert path, process.stderr.read()
        return process, path

    return start


def test_stall_in_python(stuck, doctor, gist):
    """While it is stuck the journal says where; after SIGKILL that is a hang, with the stack of the stuck line."""
    process, path = stuck(LINES["polite"])
    wait_until(lambda: stalls_in(path))
    process.send_signal(signal.SIGKILL)
    process.wait()

    (verdict,) = doctor(path)

    assert gist(verdict) == ("hang", "capture_graphs", "state.stalled")
    (event,) = stalls_in(path)
    assert (event.state, event.visit, event.deadline_ns) == ("capture_graphs", 1, 200_000_000)
    assert event.stack[-1].endswith(" capture")
    assert verdict["findings"][0]["evidence"][-1]["text"] == event.stack[-1]


def test_stall_in_c(stuck, doctor, gist):
    """A state stuck in C code that keeps the interpreter lock: the file of faulthandler has the stack, and it is a hang."""
    process, path = stuck(LINES["holding"])
    side_file = path.removesuffix(".jsonl") + ".stacks"
    wait_until(lambda: read_stacks(side_file))
    process.send_signal(signal.SIGKILL)
    process.wait()

    (verdict,) = doctor(path)

    assert stalls_in(path) == []
    assert gist(verdict) == ("hang", "capture_graphs", "state.stalled")
    assert verdict["findings"][0]["evidence"][-1]["text"].endswith(" capture")


def test_stall_that_is_still_going_on(stuck, doctor):
    """While the process lives the start is running, and the stall is there to be seen."""
    process, path = stuck(LINES["polite"])
    wait_until(lambda: stalls_in(path))

    (verdict,) = doctor(path)

    assert process.poll() is None
    assert verdict["outcome"] == "running"
    assert "state.stalled" in [finding["code"] for finding in verdict["findings"]]


@pytest.mark.parametrize("line", ["time.sleep(0.5)", "ctypes.PyDLL(None).usleep(500_000)"])
def test_stall_that_went_on(stuck, doctor, line):
    """A stall that ended is a warning on a start that came to ready, also where C code kept the lock meanwhile."""
    process, path = stuck(f"time.sleep(0) if size != 16 else {line}")
    assert process.stdout.read().endswith("ready\n")

    (verdict,) = doctor(path)

    assert verdict["outcome"] == "ready"
    assert [(each["code"], each["severity"], each["state"]) for each in verdict["findings"]] == [
        ("state.stalled", "warning", "capture_graphs")
    ]
    assert verdict["findings"][0]["evidence"][-1]["text"].split(": ")[0].endswith(" capture")


def test_no_side_file_is_left(stuck):
    """A start without a stall leaves its journal and nothing beside it."""
    process, path = stuck("pass", seconds=600)
    assert process.stdout.read().endswith("ready\n")

    assert list(Path(path).parent.iterdir()) == [Path(path)]
