"""A disk that is full, or may not be written: the start goes on, says so once, and the mirror has all of it."""

from __future__ import annotations

import os
import subprocess
import textwrap

import pytest

from startup_fsm.journal import read_journal

START = """
import resource, sys
from startup_fsm import throwaway
from startup_fsm.testing import counting_start

options = {}
{before}
boot, engine = counting_start(journal=sys.argv[1], mirror=sys.stdout, rank=0, **options)
boot.run(engine)
print("ready", file=sys.stderr)
"""
RUN = {"STARTUP_FSM_RUN": "r1"}
SAID = "startup-fsm: the journal cannot be written"


def started(python, runs, before=""):
    """Run a start that writes its journal there; gives its output and what it said."""
    output, said = python(START.replace("{before}", textwrap.dedent(before)), runs, env=RUN).communicate(timeout=60)
    return output.encode(), said


def mounted(target, *options):
    """Mount a file system, or skip the test and say why it was not possible."""
    target.mkdir(exist_ok=True)
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    ran = subprocess.run(["mount", *options, str(target)], capture_output=True, text=True, check=False)
    if ran.returncode:
        pytest.skip(f"mounting is not permitted here: {ran.stderr.strip()}")


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 16 KiB; a start writes about 40."""
    disk = tmp_path / "disk"
    mounted(disk, "-t", "tmpfs", "-o", "size=16k", "none")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


@pytest.fixture
def read_only_disk(tmp_path):
    """A disk that nobody may write."""
    disk = tmp_path / "disk"
    mounted(disk, "-t", "tmpfs", "-o", "ro", "none")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


def test_full_disk(small_disk, python, doctor):
    """A disk that fills up in the middle: ready, said once, the mirror is complete and the file reads to where it ends."""
    output, said = started(python, small_disk)

    assert said.count(SAID) == 1
    assert said.endswith("ready\n")
    journal = read_journal(small_disk / "r1" / "rank-00000.1.jsonl")
    assert journal.problems == ()
    assert 0 < len(journal.records) < 100
    (mirrored,) = doctor(text=output)
    assert (mirrored["outcome"], mirrored["failed_state"]) == ("ready", None)
    assert [finding["code"] for finding in mirrored["findings"]] == ["journal.unwritable"]
    (torn,) = doctor(small_disk)
    assert torn["outcome"] == "incomplete"


@pytest.mark.parametrize("limit", [0, 300, 5_000])
def test_file_size_limit(tmp_path, python, doctor, limit):
    """The same with a limit on the size of a file, wherever in a line it falls: what is there are whole lines."""
    before = f"resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))"
    output, said = started(python, tmp_path, before)

    assert said.count(SAID) == 1
    assert said.endswith("ready\n")
    journal = read_journal(tmp_path / "r1" / "rank-00000.1.jsonl")
    assert journal.problems == ()
    assert journal.size <= limit
    (mirrored,) = doctor(text=output)
    assert mirrored["outcome"] == "ready"
    assert [finding["code"] for finding in mirrored["findings"]] == ["journal.unwritable"]


def test_disk_with_room_again(tmp_path, python, doctor):
    """A disk that has room again before the end gets every event after all; the verdict tells of the gap in between."""
    before = """
    class Room:
        def after_state(self, *, state, **future):
            if state == "size_kv":
                resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))

    resource.setrlimit(resource.RLIMIT_FSIZE, (5_000, 1 << 20))
    options["hooks"] = [Room()]
    """
    output, said = started(python, tmp_path, before)

    assert said.count(SAID) == 1
    assert read_journal(tmp_path / "r1" / "rank-00000.1.jsonl").problems == ()
    (written,), (mirrored,) = doctor(tmp_path), doctor(text=output)
    for verdict in (written, mirrored):
        assert verdict["outcome"] == "ready"
        assert [finding["code"] for finding in verdict["findings"]] == ["journal.unwritable"]
    assert written["figures"] == mirrored["figures"]


def test_read_only_disk(read_only_disk, python, doctor):
    """A directory on a read-only disk: ready, said once, and the mirror has everything."""
    output, said = started(python, read_only_disk)

    assert said.count(SAID) == 1
    assert "Read-only file system" in said
    assert said.endswith("ready\n")
    (mirrored,) = doctor(text=output)
    assert mirrored["outcome"] == "ready"


def test_directory_below_a_file(tmp_path, python, doctor):
    """A directory that cannot be made because a file is in its way: the same."""
    (tmp_path / "file").write_text("in the way", encoding="utf-8")

    output, said = started(python, tmp_path / "file" / "runs")

    assert said.count(SAID) == 1
    assert "Not a directory" in said
    assert said.endswith("ready\n")
    (mirrored,) = doctor(text=output)
    assert mirrored["outcome"] == "ready"


def test_deadline_on_a_read_only_disk(tmp_path, python):
    """A state with a deadline needs a file beside the journal; where there can be none, the start goes on all the same."""
    (tmp_path / "file").write_text("in the way", encoding="utf-8")
    before = 'options["plan"] = throwaway().with_deadlines({"load_weights": 60})'

    _, said = started(python, tmp_path / "file" / "runs", before)

    assert said.endswith("ready\n")
