"""Real processes, and what the doctor says of what they left behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def environment():
    """Of this machine, without a run or a launcher around it."""
    ours = ("STARTUP_FSM_", "TORCHELASTIC_", "SLURM_", "RANK", "LOCAL_RANK", "WORLD_SIZE")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    return {**kept, "PYTHONPATH": str(ROOT)}


@pytest.fixture
def doctor(environment):
    """Ask the command about one or more paths, or about a text: the verdicts, in order."""

    def ask(*paths, text=None):
        given = ["-"] if text is not None else map(str, paths)
        command = [sys.executable, "-m", "startup_fsm", "doctor", "--json", *given]
        ran = subprocess.run(command, input=text, env=environment, capture_output=True, check=False, timeout=120)
        assert ran.returncode in (0, 2, 3), ran.stderr.decode()
        return json.loads(ran.stdout)["runs"]

    return ask


@pytest.fixture
def python(environment):
    """Run a script in a process of its own; gives what ``subprocess.Popen`` gives, with text streams."""
    started = []

    def run(script, *arguments, **options):
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **options}
        command = [sys.executable, "-c", textwrap.dedent(script), *map(str, arguments)]
        more = options.pop("env", {})
        process = subprocess.Popen(command, env=environment | more, **options)
        started.append(process)
        return process

    yield run
    for process in started:
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream is not None:
                stream.close()


@pytest.fixture(scope="session")
def gist():
    """What a reader looks at first: outcome, failed state, the code of the first finding."""

    def of(verdict):
        codes = [finding["code"] for finding in verdict["findings"]]
        return verdict["outcome"], verdict["failed_state"], codes[0] if codes else None

    return of
