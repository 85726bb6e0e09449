"""Killed inside every state of every plan, and between them: the doctor names the state, every time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from startup_fsm.plan import PLANS

DRIVER = Path(__file__).with_name("driver.py")
MOMENTS = ("begin", "end", "left")
STATES = {name: [state.name for state in make().states] for name, make in PLANS.items()}


@pytest.fixture
def killed(tmp_path, environment):
    """
    Start one process for each state of a plan, and send each a signal where it waits.

    Gives the directories of runs by state, and how the processes ended.
    """

    def kill(plan, moment, number, way="embedded"):
        command = [sys.executable, str(DRIVER), str(tmp_path), plan, moment, way, *STATES[plan]]
        endings = {}
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as driver:
            for line in driver.stdout:
                state, *said = line.split()
                if said[0] == "ended":
                    endings[state] = int(said[1])
                else:
                    os.kill(int(said[0]), number)
        assert set(endings) == set(STATES[plan])
        return {state: tmp_path / state for state in STATES[plan]}, set(endings.values())

    return kill


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("plan", STATES)
def test_sigkill(killed, doctor, gist, plan, moment):
    """After SIGKILL in any state, or right after it, the verdict is that the journal ends there without a trace."""
    runs, endings = killed(plan, moment, signal.SIGKILL)

    verdicts = dict(zip(runs, doctor(*runs.values()), strict=True))

    assert endings == {-signal.SIGKILL}
    expected = {state: ("incomplete", state, "run.ended_without_trace") for state in runs}
    assert {state: gist(verdict) for state, verdict in verdicts.items()} == expected
    where = "after" if moment == "left" else "inside"
    stops = {state: f"the journal stops {where} {state}; nothing says why" for state in runs}
    assert {state: verdict["findings"][0]["message"] for state, verdict in verdicts.items()} == stops


@pytest.mark.parametrize("plan", ["throwaway", "observed"])
def test_sigterm_in_an_embedding(killed, doctor, gist, plan):
    """An embedding gets no signal handler from us: SIGTERM ends it as SIGKILL does, and the state is named."""
    runs, endings = killed(plan, "end", signal.SIGTERM)

    verdicts = zip(runs, doctor(*runs.values()), strict=True)

    assert endings == {-signal.SIGTERM}
    expected = {state: ("incomplete", state, "run.ended_without_trace") for state in runs}
    assert {state: gist(verdict) for state, verdict in verdicts} == expected


@pytest.mark.parametrize(
    ("plan", "moment"),
    [("throwaway", "begin"), ("throwaway", "left"), ("single_capture", "end"), ("eager", "end")],
)
def test_sigterm_of_the_command(killed, doctor, gist, plan, moment):
    """Our own command records SIGTERM before it dies of it, in any state and between two."""
    runs, endings = killed(plan, moment, signal.SIGTERM, way="command")

    verdicts = zip(runs, doctor(*runs.values()), strict=True)

    assert endings == {-signal.SIGTERM}
    expected = {state: ("interrupted", state, "run.ended_by_signal") for state in runs}
    assert {state: gist(verdict) for state, verdict in verdicts} == expected


@pytest.mark.parametrize("moment", MOMENTS)
def test_interrupt_from_the_keyboard(killed, doctor, gist, moment):
    """Ctrl-C is an exception that passes through us and is recorded on its way, in any state and between two."""
    runs, endings = killed("throwaway", moment, signal.SIGINT)

    verdicts = zip(runs, doctor(*runs.values()), strict=True)

    assert endings == {-signal.SIGINT}
    expected = {state: ("interrupted", state, "run.ended_by_signal") for state in runs}
    assert {state: gist(verdict) for state, verdict in verdicts} == expected


def test_sigterm_of_a_whole_process(tmp_path, environment, doctor, gist):
    """The command as anybody runs it: it dies of SIGTERM, and says in which state and where its journal is."""
    factory = """
        import time
        from startup_fsm.devices.simulated import SimulatedDevice
        from startup_fsm.engines.counting import CountingEngine

        def make():
            device = SimulatedDevice(4 << 30)
            return Waits(device=device), {"device": device}

        class Waits(CountingEngine):
            def verify(self, step):
                print("waiting", flush=True)
                time.sleep(600)
    """
    (tmp_path / "waits.py").write_text(textwrap.dedent(factory), encoding="utf-8")
    command = [sys.executable, "-m", "startup_fsm", "run", "waits:make", "--runs", "runs"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=tmp_path, env=environment, **pipes) as process:
        assert process.stdout.readline() == "waiting\n"
        process.send_signal(signal.SIGTERM)
        said = process.stderr.read()

    (verdict,) = doctor(tmp_path / "runs")

    assert process.returncode == -signal.SIGTERM
    assert said.startswith("startup-fsm: SIGTERM in verify; journal: runs/")
    assert gist(verdict) == ("interrupted", "verify", "run.ended_by_signal")
