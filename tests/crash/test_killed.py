"""Killed inside every state of every plan, and between them: the doctor names the state, every time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from startup_fsm.plan import PLANS

DRIVER = Path(__file__).with_name("driver.py")
MOMENTS = ("begin", "end", "left")
STATES = {name: [state.name for state in make().states] for name, make in PLANS.items()}


@pytest.fixture
def killed(tmp_path, environment):
    """Start one process for each state of a plan, kill each where it waits, and give the journals by state."""

    def kill(plan, moment, by):
        command = [sys.executable, str(DRIVER), str(tmp_path), plan, moment, *STATES[plan]]
        journals = {}
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as driver:
            for line in driver.stdout:
                state, pid, path = line.split()
                journals[state] = Path(path)
                os.kill(int(pid), by)
        return journals

    return kill


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("plan", STATES)
def test_sigkill(killed, doctor, gist, plan, moment):
    """After SIGKILL in any state, or right after it, the verdict is that the journal ends there without a trace."""
    journals = killed(plan, moment, signal.SIGKILL)

    verdicts = dict(zip(journals, doctor(*journals.values()), strict=True))

    expected = {state: ("incomplete", state, "run.ended_without_trace") for state in STATES[plan]}
    assert {state: gist(verdict) for state, verdict in verdicts.items()} == expected
    where = "after" if moment == "left" else "inside"
    stops = {state: f"the journal stops {where} {state}; nothing says why" for state in STATES[plan]}
    assert {state: verdict["findings"][0]["message"] for state, verdict in verdicts.items()} == stops


@pytest.mark.parametrize("plan", STATES)
def test_sigterm_without_a_handler(killed, doctor, gist, plan):
    """An embedding gets no signal handler from us: SIGTERM ends it as SIGKILL does, and the state is named."""
    journals = killed(plan, "end", signal.SIGTERM)

    verdicts = zip(journals, doctor(*journals.values()), strict=True)

    expected = {state: ("incomplete", state, "run.ended_without_trace") for state in STATES[plan]}
    assert {state: gist(verdict) for state, verdict in verdicts} == expected
