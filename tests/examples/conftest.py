"""Examples are run as their readers run them: in a process of their own, in an empty directory."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


@pytest.fixture(scope="session")
def environment():
    """The environment of a reader: no run of ours to join, the package and its command at hand."""
    outer = {name: value for name, value in os.environ.items() if not name.startswith("STARTUP_FSM_")}
    path = f"{Path(sys.executable).parent}{os.pathsep}{outer.get('PATH', '')}"
    return outer | {"PYTHONPATH": str(ROOT), "PATH": path}


@pytest.fixture
def run(tmp_path, environment):
    """Run Python in an empty directory; gives its output."""

    def of(*command, returns=(0,), cwd=tmp_path):
        ran = subprocess.run(
            [sys.executable, *map(str, command)],
            cwd=cwd,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        assert ran.returncode in returns, ran.stderr
        return ran.stdout

    return of


@pytest.fixture
def example(run):
    """Run one example; gives its output and the verdicts on the journals that it names, in order."""

    def of(name):
        output = run(EXAMPLES / name)
        journals = re.findall(r"startup-fsm doctor (\S+)", output) or ["runs"]
        report = run("-m", "startup_fsm", "doctor", "--json", *journals, returns=(0, 2, 3))
        return output, json.loads(report)["runs"]

    return of
