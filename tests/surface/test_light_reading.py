"""Whoever reads a journal loads nothing that starts an engine."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from startup_fsm.journal import read_journal
from startup_fsm.mirror import mirror_texts
from startup_fsm.testing import counting_start

ROOT = Path(__file__).parents[2]
FORBIDDEN = {"asyncio", "pynvml", "structlog", "torch", "transitions"}

_LOADED = """
import sys
from startup_fsm.cli import main
code = main(sys.argv[1:])
print(code, *{name.partition(".")[0] for name in sys.modules}, file=sys.stderr)
"""


@pytest.fixture(scope="module")
def journal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The journal of a start with 51 graphs."""
    boot, engine = counting_start(journal=tmp_path_factory.mktemp("runs"), engine={"sizes": range(1, 52)})
    boot.run(engine)
    assert boot.path is not None
    return boot.path


def loaded(*arguments: str) -> set[str]:
    """Top-level modules that a verb has loaded when it is done."""
    command = [sys.executable, "-c", _LOADED, *arguments]
    ran = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    code, *modules = ran.stderr.split()
    assert code == "0"
    return set(modules)


@pytest.mark.parametrize("verb", ["doctor", "time", "blame", "chain", "verify", "plan"])
@pytest.mark.parametrize("options", [(), ("--json",)])
def test_verbs(journal: Path, verb: str, options: tuple[str, ...]):
    """A verb that reads a journal loads none of them, for a page or for JSON."""
    assert loaded(verb, str(journal), *options) & FORBIDDEN == set()


@pytest.mark.parametrize("arguments", [("watch",), ("trace", "--output", "-")])
def test_views_over_time(journal: Path, arguments: tuple[str, ...]):
    """Neither does one that follows a start, or draws it on a line of time."""
    verb, *options = arguments
    assert loaded(verb, str(journal), *options) & FORBIDDEN == set()


def test_mirror(journal: Path, tmp_path: Path):
    """Fishing a journal out of a container's output loads none of them either."""
    log = tmp_path / "container.log"
    log.write_text("\n".join(text for record in read_journal(journal).records for text in mirror_texts(record)))

    assert loaded("doctor", str(log)) & FORBIDDEN == set()


def test_help():
    """Nor does help."""
    assert loaded("--help") & (FORBIDDEN - {"transitions", "structlog", "asyncio"}) == set()


@pytest.mark.slow
def test_doctor_starts_fast(journal: Path):
    """The doctor as a whole process takes no more than twice what importing its libraries takes."""
    spec = importlib.util.spec_from_file_location("doctor_start", ROOT / "benchmarks" / "doctor_start.py")
    assert spec is not None
    assert spec.loader is not None
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    doctor, imports = benchmark.measured(journal, 15)

    assert doctor <= benchmark.LIMIT * imports
