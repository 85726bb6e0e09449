"""From what somebody names to starts, and from bad input to one sentence."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import attrs
import orjson
import pytest

from startup_fsm.codec import CODEC
from startup_fsm.diagnose import diagnose
from startup_fsm.errors import JournalError, UnknownSchema
from startup_fsm.events import Event, Record, RunStarted, StateEntered, StateLeft
from startup_fsm.identity import boot_id, host_name
from startup_fsm.journal import JournalWriter
from startup_fsm.mirror import mirror_texts
from startup_fsm.reading import read_starts

RUN = "20300101T000000Z-00000000"


def records(
    *events: Event, run: str = RUN, rank: int | None = 0, attempt: int = 1, process: str | None = None
) -> list[Record]:
    """Events of one process, numbered."""
    name = process or f"rank-{rank:05d}"
    return [
        Record(run=run, process=name, rank=rank, attempt=attempt, seq=seq, t=seq * 1000, kind=event.kind, event=event)
        for seq, event in enumerate(events)
    ]


def opening(**facts: object) -> list[Event]:
    """A start that stands inside its second state."""
    return [
        RunStarted(**facts),  # type: ignore[arg-type]
        StateEntered(state="init_device"),
        StateLeft(state="init_device"),
        StateEntered(state="load_weights", edge="advance", source="init_device"),
    ]


def encoded(given: list[Record]) -> list[bytes]:
    """Lines of a journal."""
    return [CODEC.encode(record) for record in given]


def write(directory: Path, given: list[Record]) -> Path:
    """A journal where its process would write it."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{given[0].process}.{given[0].attempt}.jsonl"
    path.write_bytes(b"".join(encoded(given)))
    return path


@pytest.fixture
def stdin() -> Iterator[Callable[[bytes], None]]:
    """Puts bytes into standard input, as a pipe."""
    kept = os.dup(0)
    threads: list[threading.Thread] = []

    def put(content: bytes) -> None:
        reader, writer = os.pipe()

        def fill() -> None:
            with os.fdopen(writer, "wb") as pipe:
                pipe.write(content)

        os.dup2(reader, 0)
        os.close(reader)
        threads.append(threading.Thread(target=fill))
        threads[-1].start()

    yield put
    os.dup2(kept, 0)
    os.close(kept)
    for thread in threads:
        thread.join()


def test_one_file(tmp_path: Path):
    """A journal is one start with one process; that others were not looked at is said."""
    (start,) = read_starts(write(tmp_path / RUN, records(*opening())))

    assert (start.run, start.attempt, start.source) == (RUN, 1, "journal")
    assert [process.label for process in start.processes] == ["rank 0"]
    assert start.processes[0].history.state == "load_weights"
    assert start.unseen[0] == "other processes of this run: one journal was read"


def test_run_directory(tmp_path: Path):
    """A run directory is one start for each attempt, with all its processes."""
    for attempt in (1, 2):
        for rank in (1, 0):
            write(tmp_path / RUN, records(*opening(), rank=rank, attempt=attempt))
    write(tmp_path / RUN, records(*opening(), rank=None, process="engine-77"))
    first, second = read_starts(tmp_path / RUN)

    assert [process.label for process in first.processes] == ["engine-77", "rank 0", "rank 1"]
    assert [process.label for process in second.processes] == ["rank 0", "rank 1"]
    assert (first.attempt, second.attempt) == (1, 2)
    assert first.origin == str(tmp_path / RUN)
    assert not any("one journal" in each for each in first.unseen)


def test_newest_run(tmp_path: Path):
    """Of a directory of runs the newest is read, by the time in its name, whatever the clock of the file system says."""
    for stamp in ("20300101T000000Z-aa", "20300102T000000Z-bb", "20291231T235959Z-cc"):
        write(tmp_path / stamp, records(*opening(), run=stamp))
    os.utime(tmp_path / "20300102T000000Z-bb", (0, 0))
    (tmp_path / "20400101T000000Z-empty").mkdir()
    (tmp_path / "notes.txt").write_text("no run")

    assert [start.run for start in read_starts(tmp_path)] == ["20300102T000000Z-bb"]


def test_newest_run_of_a_launcher(tmp_path: Path):
    """Runs that a launcher named are told apart by when they changed."""
    for number, name in enumerate(("slurm-9", "slurm-10", "torchelastic-x")):
        write(tmp_path / name, records(*opening(), run=name))
        os.utime(tmp_path / name, (1_000 - number, 1_000 - number))

    assert [start.run for start in read_starts(tmp_path)] == ["slurm-9"]


def test_standard_input(stdin: Callable[[bytes], None]):
    """A journal comes through a pipe as well."""
    stdin(b"".join(encoded(records(*opening()))))
    (start,) = read_starts("-")

    assert (start.run, start.origin, start.source) == (RUN, "-", "journal")


def test_mirrored_lines_on_standard_input(stdin: Callable[[bytes], None]):
    """Mirrored lines among other text, from several processes: one start, from a mirror."""
    texts = [text for rank in range(3) for record in records(*opening(), rank=rank) for text in mirror_texts(record)]
    stdin("\n".join(f"INFO x {text} y\nother text" for text in texts).encode())
    (start,) = read_starts("-")

    assert start.source == "mirror"
    assert [process.history.state for process in start.processes] == ["load_weights"] * 3
    assert diagnose(start.sources, source=start.source).source == "mirror"


def test_mirrored_lines_in_a_file_that_looks_like_json(tmp_path: Path):
    """A log of JSON lines is no journal for that."""
    path = tmp_path / "container.log"
    path.write_text("".join(f'{{"log":"{text}"}}\n' for each in records(*opening()) for text in mirror_texts(each)))
    (start,) = read_starts(path)

    assert (start.source, start.origin, start.is_whole) == ("mirror", str(path), True)


def test_container_that_restarts(tmp_path: Path):
    """The same names again in one stream are another start."""
    path = tmp_path / "container.log"
    once = [text for each in records(*opening()) for text in mirror_texts(each)]
    again = [text for each in records(*opening(pid=2)) for text in mirror_texts(each)]
    path.write_text("\n".join([*once, *again]))

    assert [start.run for start in read_starts(path)] == [RUN, RUN]


def test_lost_beginning(tmp_path: Path):
    """Where the first line is lost, the others say whose they are."""
    path = tmp_path / "rank-00003.2.jsonl"
    path.write_bytes(b"".join(encoded(records(*opening(), rank=3, attempt=2))[1:]))
    (start,) = read_starts(path)

    assert (start.run, start.attempt, start.processes[0].label) == (RUN, 2, "rank 3")
    assert "seq 1 where 0 should stand" in " ".join(start.unseen)


def test_damaged_first_line(tmp_path: Path):
    """A journal whose first line is broken is still a journal."""
    path = tmp_path / "copied"
    first, *others = encoded(records(*opening()))
    path.write_bytes(b"\0" * len(first) + b"\n" + b"".join(others))
    (start,) = read_starts(path)

    assert start.source == "journal"
    assert [problem.kind for problem in start.processes[0].journal.problems] == ["broken", "gap"]


def test_side_file(tmp_path: Path):
    """What faulthandler left beside a journal comes with it."""
    path = write(tmp_path / RUN, records(*opening()))
    path.with_suffix(".stacks").write_text(
        'Timeout (0:00:01)!\nThread 0x00007f (most recent call first):\n  File "a.py", line 3 in stuck\n'
    )
    (start,) = read_starts(tmp_path / RUN)

    assert start.processes[0].stacks == ("a.py:3 stuck",)
    assert start.sources[0].stacks == ("a.py:3 stuck",)


def test_every_truncation(tmp_path: Path):
    """Cut at any byte, a journal is read as far as it goes, or says that no event is whole; nothing else happens."""
    whole = encoded(records(*opening()))
    content = b"".join(whole)
    path = tmp_path / "rank-00000.1.jsonl"
    for size in range(len(content)):
        path.write_bytes(content[:size])
        if size < len(whole[0]) - 1:
            with pytest.raises(JournalError):
                read_starts(path)
        else:
            (start,) = read_starts(path)
            assert start.run == RUN


def test_being_written(tmp_path: Path):
    """While its writer holds the journal, a start is running and a torn last line is one being written."""
    writer = JournalWriter(tmp_path / RUN, "rank-00000")
    lines = encoded(records(*opening(pid=os.getpid(), host=host_name(), boot_id=boot_id())))
    for line in [*lines[:3], lines[3][:20]]:
        writer.append(line)
    (start,) = read_starts(tmp_path / RUN)
    writer.close()
    (after,) = read_starts(tmp_path / RUN)

    assert start.processes[0].is_alive
    assert start.processes[0].journal.problems == ()
    assert diagnose(start.sources).outcome == "running"
    assert not after.processes[0].is_alive
    assert [problem.kind for problem in after.processes[0].journal.problems] == ["torn"]


def test_lock_of_a_dead_writer(tmp_path: Path):
    """A child that still holds the lock does not keep a dead start alive."""
    gone = subprocess.Popen([sys.executable, "-c", "pass"])
    gone.wait()
    writer = JournalWriter(tmp_path / RUN, "rank-00000")
    for line in encoded(records(*opening(pid=gone.pid, host=host_name(), boot_id=boot_id()))):
        writer.append(line)
    (start,) = read_starts(tmp_path / RUN)
    writer.close()

    assert not start.processes[0].is_alive


def test_reading_does_not_disturb_a_writer(tmp_path: Path):
    """A journal that is read while it is written loses nothing."""
    writer = JournalWriter(tmp_path / RUN, "rank-00000")
    for line in encoded(records(*opening())):
        writer.append(line)
        read_starts(tmp_path / RUN)
    writer.close()

    assert writer.trouble is None
    assert len(read_starts(tmp_path / RUN)[0].processes[0].journal.records) == 4


def test_one_bad_file_of_many(tmp_path: Path):
    """A journal without an event does not hide those of the other processes; it is a problem of the start."""
    write(tmp_path / RUN, records(*opening()))
    empty = tmp_path / RUN / "rank-00001.1.jsonl"
    empty.touch()
    (start,) = read_starts(tmp_path / RUN)

    assert len(start.processes) == 1
    assert f"{empty}: the file is empty" in start.processes[0].journal.problems[-1].message


@pytest.mark.parametrize(
    ("name", "content", "message", "hint"),
    [
        ("rank-00000.1.jsonl", b"", "the file is empty", "before its first event"),
        ("any.log", b"", "the file is empty", "name a run directory"),
        ("rank-00000.1.jsonl", b'{"v":0,"ru', "no whole event in this journal: line 1, byte 0", "killed"),
        ("rank-00000.1.jsonl", b'{"v":0}\n', "no whole event in this journal: line 1, byte 0: seq", "killed"),
        ("core", bytes(range(256)) * 64, "neither a journal nor text", "name a run directory"),
        ("vllm.log", b"INFO 01-01 engine started\n" * 9, "no line of this text says anything", "from its first line"),
        ("torn.log", b"x startup_fsm|0|run|rank-0|1|0|1|1|0123", "no whole event in this text: line 1", "killed"),
    ],
)
def test_bad_files(tmp_path: Path, name: str, content: bytes, message: str, hint: str):
    """One sentence with the path and the place, and what to do."""
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(JournalError) as caught:
        read_starts(path)

    assert caught.value.message.startswith(f"{path}: ")
    assert message in caught.value.message
    assert hint in (caught.value.hint or "")


def test_newer_schema(tmp_path: Path):
    """A newer version is refused by its number, with the path and the place."""
    path = write(tmp_path, records(*opening()))
    data = [orjson.loads(line) for line in path.read_bytes().splitlines()]
    path.write_bytes(b"".join(orjson.dumps(each | {"v": 99}) + b"\n" for each in data))
    with pytest.raises(UnknownSchema) as caught:
        read_starts(path)

    assert f"{path}: " in caught.value.message
    assert "schema 99" in caught.value.message
    assert caught.value.hint


@pytest.mark.parametrize("path", ["no/such/path", "nul\0byte", "/proc/self/mem"])
def test_bad_paths(path: str):
    """A path that is none, or that cannot be read, is one sentence."""
    with pytest.raises(JournalError) as caught:
        read_starts(path)

    assert caught.value.hint


def test_directory_without_journals(tmp_path: Path):
    """A directory that holds no journal says so, and how journals are named."""
    (tmp_path / "sub" / "subsub").mkdir(parents=True)
    with pytest.raises(JournalError, match="no journal in this directory") as caught:
        read_starts(tmp_path)

    assert "<process>.<attempt>.jsonl" in (caught.value.hint or "")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_unreadable_file(tmp_path: Path):
    """A file that this user may not read is named, with what to do."""
    path = write(tmp_path, records(*opening()))
    path.chmod(0)
    with pytest.raises(JournalError, match="Permission denied") as caught:
        read_starts(path)

    assert caught.value.hint == "let this user read it"


# Not ru_maxrss: that of a child begins with what its parent had.
_MEASURE = r"""
import re, sys
from startup_fsm.errors import JournalError
from startup_fsm.reading import read_starts
try:
    read_starts(sys.argv[1])
except JournalError as error:
    print(error.message)
print(re.search(r"VmHWM:\s*([0-9]+) kB", open("/proc/self/status").read())[1])
"""


@pytest.mark.parametrize(
    ("begin", "message"), [(b'{"v":0,', "the line has 1073741824 bytes"), (b"text", "neither a journal nor text")]
)
def test_a_gibibyte_of_one_line(tmp_path: Path, begin: bytes, message: str):
    """However long a line is, it takes no more memory than a line may."""
    path = tmp_path / "rank-00000.1.jsonl"
    with path.open("wb") as file:
        file.write(begin)
        file.truncate(1 << 30)
    ran = subprocess.run([sys.executable, "-c", _MEASURE, str(path)], capture_output=True, text=True, check=True)
    said, kib = ran.stdout.splitlines()

    assert message in said
    assert int(kib) < 200 << 10


def test_many_broken_lines(tmp_path: Path):
    """A file of nothing but broken lines is read in bounded time, and says where it begins."""
    path = tmp_path / "rank-00000.1.jsonl"
    path.write_bytes(b'{"v":0,"run":1}\n' * 200_000)
    with pytest.raises(JournalError, match="line 1, byte 0"):
        read_starts(path)


def test_many_empty_lines(tmp_path: Path):
    """Looking for an event among white space is no more than one pass."""
    path = tmp_path / "white"
    path.write_bytes(b"\n \t\n{\n" * 400_000)
    with pytest.raises(JournalError):
        read_starts(path)


def test_unknown_kinds_are_said(tmp_path: Path):
    """Events of a kind that this version does not know are counted among what is not seen."""
    given = records(*opening())
    data = orjson.loads(CODEC.encode(attrs.evolve(given[-1], seq=4))) | {"kind": "surprise"}
    path = write(tmp_path, given)
    path.write_bytes(path.read_bytes() + orjson.dumps(data) + b"\n")
    (start,) = read_starts(path)

    assert any("surprise" in each for each in start.unseen)
