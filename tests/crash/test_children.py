"""Children of a start: one that was forked writes nothing into its journal, one that was spawned has a file of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from startup_fsm.journal import read_journal

START = """
import os, sys
from startup_fsm import throwaway
from startup_fsm.engines.counting import CountingEngine
from startup_fsm.testing import counting_start

class Parent(CountingEngine):
    def load_weights(self, step):
        pid = os.fork()
        if pid == 0:
            {child}
            os._exit(0)
        {parent}
        super().load_weights(step)

plan = throwaway().with_deadlines({"load_weights": 600})
boot, engine = counting_start(journal=sys.argv[1], plan=plan, mirror=sys.stdout)
boot.run(Parent(device=engine.device))
"""

#: What a forked child may do with what it has inherited, each in a child of its own.
CALLS = """
import os, sys, threading
from startup_fsm.events import DecisionMade
from startup_fsm.testing import counting_start

def leave_the_state_and_go_on(boot, step):
    boot.course.open.__exit__(None, None, None)
    with boot.state("profile_activations"):
        pass

def record_on_a_thread(boot, step):
    thread = threading.Thread(target=step.note, kwargs={"child": 1})
    thread.start()
    thread.join()

CALLS = [
    lambda boot, step: step.note(child=1),
    lambda boot, step: boot.recorder.record(DecisionMade(decision="child", reason="")),
    lambda boot, step: step.capture(1, lambda: None),
    lambda boot, step: boot.recorder.sync(),
    lambda boot, step: boot.course.open.__exit__(ValueError, ValueError("child"), None),
    lambda boot, step: boot.finish(),
    lambda boot, step: boot.fail("child"),
    lambda boot, step: boot.close(),
    lambda boot, step: sys.exit(0),
    leave_the_state_and_go_on,
    record_on_a_thread,
]

class Hook:
    def before_state(self, *, state, **future):
        if state != "load_weights" or sys.argv[2] == "undisturbed":
            return
        for call in CALLS:
            pid = os.fork()
            if pid == 0:
                try:
                    call(boot, boot.course.open.step)
                finally:
                    os._exit(0)
            os.waitpid(pid, 0)

boot, engine = counting_start(journal=sys.argv[1], mirror=sys.stdout, hooks=[Hook()])
boot.run(engine)
"""


def kinds(runs):
    """Kind of every event of the only journal there, which has no problem."""
    (path,) = runs.glob("*/*.jsonl")
    journal = read_journal(path)
    assert journal.problems == ()
    return [record.kind for record in journal.records]


def test_forked_children(tmp_path, python, doctor):
    """Whatever forked children call, the journal, the mirror and the verdict are what they are without them."""
    outputs = {}
    for name in ("undisturbed", "disturbed"):
        process = python(CALLS, tmp_path / name, name)
        output, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors
        outputs[name] = output.encode()

    assert kinds(tmp_path / "disturbed") == kinds(tmp_path / "undisturbed")
    (written,), (mirrored,) = doctor(tmp_path / "disturbed"), doctor(text=outputs["disturbed"])
    assert written["outcome"] == mirrored["outcome"] == "ready"
    assert written["findings"] == mirrored["findings"] == []
    assert written["figures"] == mirrored["figures"]


@pytest.mark.parametrize("call", ["pass", "step.note(child=1)"])
def test_forked_child_that_stays(tmp_path, python, doctor, gist, call):
    """A child that lives on does not make a dead start look alive: its copy of the journal is closed."""
    child = f"{call}; print('child', os.getpid(), flush=True); __import__('signal').pause()"
    process = python(START.replace("{child}", child).replace("{parent}", "os.waitpid(pid, 0)"), tmp_path)
    pid = next(int(line.split()[1]) for line in process.stdout if line.startswith("child"))
    try:
        assert doctor(tmp_path)[0]["outcome"] == "running"
        process.send_signal(signal.SIGKILL)
        process.wait()

        held = [str(each.readlink()) for each in Path(f"/proc/{pid}/fd").iterdir()]
        (verdict,) = doctor(tmp_path)
    finally:
        os.kill(pid, signal.SIGKILL)

    assert [name for name in held if name.endswith(".jsonl")] == []
    assert gist(verdict) == ("incomplete", "load_weights", "run.ended_without_trace")


SPAWN = """
import multiprocessing, os, sys
from startup_fsm.testing import counting_start

def child(runs):
    boot, engine = counting_start(journal=runs)
    boot.run(engine)
    print(boot.recorder.run, boot.recorder.process, os.getpid(), flush=True)

if __name__ == "__main__":
    method, runs = sys.argv[1:]
    boot, engine = counting_start(journal=runs)
    with boot.state("init_device"):
        process = multiprocessing.get_context(method).Process(target=child, args=(runs,))
        process.start()
        process.join()
        assert process.exitcode == 0
    print(boot.recorder.run, boot.recorder.process, os.getpid(), flush=True)
"""


@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_child_with_its_own_start(tmp_path, environment, doctor, method):
    """A child that makes its own Bootstrap joins the run of its parent, with a file of its own."""
    script = tmp_path / "script.py"
    script.write_text(SPAWN, encoding="utf-8")
    command = [sys.executable, str(script), method, str(tmp_path / "runs")]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)
    assert ran.returncode == 0, ran.stderr
    (run, process, pid), (parents_run, parents_process, _) = (line.split() for line in ran.stdout.splitlines())

    assert (run, process) == (parents_run, f"engine-{pid}")
    assert parents_process == "rank-00000"
    files = {path.name for path in (tmp_path / "runs" / run).iterdir()}
    assert files == {"rank-00000.1.jsonl", f"engine-{pid}.1.jsonl"}
    (verdict,) = doctor(tmp_path / "runs")
    assert (verdict["ranks"], verdict["outcome"], verdict["failed_state"]) == (2, "incomplete", "init_device")


def test_grandchild_of_a_killed_start(tmp_path, python, doctor, gist):
    """A program that a start runs holds nothing of its journal either."""
    parent = "print('child', pid, flush=True); os.waitpid(pid, 0)"
    child = "os.execvp('sleep', ['sleep', '600'])"
    process = python(START.replace("{child}", child).replace("{parent}", parent), tmp_path)
    pid = next(int(line.split()[1]) for line in process.stdout if line.startswith("child"))
    process.send_signal(signal.SIGKILL)
    process.wait()
    try:
        (verdict,) = doctor(tmp_path)
    finally:
        os.kill(pid, signal.SIGKILL)

    assert gist(verdict) == ("incomplete", "load_weights", "run.ended_without_trace")
