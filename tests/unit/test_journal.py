"""Journals: what was written is there whatever happens, what cannot be read is a problem with a place."""

from __future__ import annotations

import errno
import fcntl
import gc
import multiprocessing
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path

import orjson
import pytest

from startup_fsm import journal as journal_module
from startup_fsm.codec import CODEC, MAX_LINE
from startup_fsm.errors import JournalError, UnknownSchema
from startup_fsm.events import DecisionMade, NoteAdded, Record
from startup_fsm.fold import fold
from startup_fsm.journal import Journal, JournalWriter, file_name, is_network, read_descriptor, read_journal
from startup_fsm.recorder import Recorder
from startup_fsm.testing import counting_start


def line(seq: int, note: object = None) -> bytes:
    """One good line."""
    event = NoteAdded(note={} if note is None else {"note": note})
    return CODEC.encode(Record(run="r", process="p", seq=seq, t=seq, kind=event.kind, event=event))


def written(path: Path, *parts: bytes) -> Path:
    """A file with these bytes."""
    path.write_bytes(b"".join(parts))
    return path


def kinds(journal: Journal) -> list[tuple[str, int, int, int | None]]:
    """Problems as kind, line, offset, seq."""
    return [(each.kind, each.line, each.offset, each.seq) for each in journal.problems]


def seqs(journal: Journal) -> list[int]:
    """Sequence numbers that were read."""
    return [record.seq for record in journal.records]


class Disk:
    """``os.write`` of a disk that is about to be full."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.room: int | None = None
        self._write = os.write
        monkeypatch.setattr(journal_module.os, "write", self.write)

    def write(self, descriptor: int, data: bytes) -> int:
        if self.room is None:
            return self._write(descriptor, data)
        if self.room == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        count = self._write(descriptor, data[: self.room])
        self.room -= count
        return count


@pytest.fixture(autouse=True)
def small_heap() -> Iterator[None]:
    """A start collects garbage often; what is alive already need not be looked at each time."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


def test_what_was_appended_is_read_back(tmp_path: Path) -> None:
    """Lines come back in order, also before the writer is closed."""
    writer = JournalWriter(tmp_path / "run", "rank-00000")
    for seq in range(3):
        writer.append(line(seq))
    assert writer.path == tmp_path / "run" / "rank-00000.1.jsonl"
    assert seqs(read_journal(writer.path)) == [0, 1, 2]
    writer.close()
    writer.close()
    journal = read_journal(writer.path)
    assert journal.problems == ()
    assert journal.size == writer.path.stat().st_size
    writer.append(line(3))
    assert seqs(read_journal(writer.path)) == [0, 1, 2]


def test_attempts_are_counted_by_file(tmp_path: Path) -> None:
    """Without a number the first free one is taken; a number that is taken is refused by name."""
    assert [JournalWriter(tmp_path, "engine-7").attempt for _ in range(3)] == [1, 2, 3]
    assert JournalWriter(tmp_path, "engine-7", attempt=9).path.name == file_name("engine-7", 9)
    with pytest.raises(JournalError, match="attempt 2 has a journal already") as caught:
        JournalWriter(tmp_path, "engine-7", attempt=2)
    assert caught.value.path == str(tmp_path / "engine-7.2.jsonl")
    assert caught.value.hint is not None


def test_a_writer_holds_the_lock_until_it_closes(tmp_path: Path) -> None:
    """A second writer that asks for the lock is refused as long as the first writes."""
    writer = JournalWriter(tmp_path, "p")
    with writer.path.open("ab") as second:
        with pytest.raises(BlockingIOError):
            fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
        writer.close()
        fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_short_write_is_cut_back(tmp_path: Path, disk: Disk, capsys: pytest.CaptureFixture[str]) -> None:
    """Half a line never stays in the file; the line is kept, and written after all at the end."""
    writer = JournalWriter(tmp_path, "p")
    writer.append(line(0))
    size = writer.path.stat().st_size
    disk.room = 10
    writer.append(line(1))
    assert writer.path.stat().st_size == size
    assert writer.trouble is not None
    writer.append(line(2))
    disk.room = None
    writer.close()
    assert writer.trouble is None
    journal = read_journal(writer.path)
    assert seqs(journal) == [0, 1, 2]
    assert journal.problems == ()
    assert capsys.readouterr().err.count("the journal cannot be written") == 1


def test_a_short_write_that_cannot_be_cut_back_tears_nothing_else(
    tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where even cutting back fails, the lines after it do not end up behind half a line."""
    writer = JournalWriter(tmp_path, "p")
    writer.append(line(0))
    disk.room = 10

    def refuse(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(journal_module.os, "ftruncate", refuse)
    writer.append(line(1))
    monkeypatch.undo()
    writer.append(line(2))
    assert [each.kind for each in read_journal(writer.path).problems] == ["torn"]
    writer.close()
    assert seqs(read_journal(writer.path)) == [0, 1, 2]


def test_a_full_disk_is_said_once_and_ends_nothing(
    tmp_path: Path, disk: Disk, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a full disk the start goes on in memory; what could be written stays good."""
    writer = JournalWriter(tmp_path, "p")
    writer.append(line(0))
    disk.room = 0
    for seq in range(1, 50):
        writer.append(line(seq))
    writer.close()
    assert seqs(read_journal(writer.path)) == [0]
    assert writer.trouble is not None
    assert "No space left on device" in writer.trouble
    said = capsys.readouterr().err
    assert said.count("No space left") == 1
    assert "hint: " in said


def test_a_full_disk_is_an_event_of_a_start(tmp_path: Path, disk: Disk) -> None:
    """A start on a disk that fills up becomes ready, says so in its history, and writes the rest at the end."""
    boot, engine = counting_start(journal=tmp_path)
    writer = boot.recorder.writer
    assert writer is not None
    disk.room = 9_000

    class Cleaner:
        def before_state(self, *, state: str, **future: object) -> None:
            if state == "verify":
                disk.room = None

    boot.hooks._hooks.extend(type(boot.hooks)([Cleaner()], boot._record)._hooks)
    boot.run(engine)
    journal = read_journal(writer.path)
    assert journal.problems == ()
    assert fold(journal.records).position == "ended"
    said = [record.event for record in journal.records if isinstance(record.event, DecisionMade)]
    assert [each.decision for each in said].count("journal_in_memory") == 1


@pytest.mark.parametrize("stderr", ["none", "closed"])
def test_a_process_without_stderr_starts_too(
    tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch, stderr: str
) -> None:
    """Where nobody listens to stderr, a full disk still ends nothing."""
    writer = JournalWriter(tmp_path, "p")
    with Path(os.devnull).open("w") as closed:
        pass
    monkeypatch.setattr(sys, "stderr", None if stderr == "none" else closed)
    disk.room = 0
    writer.append(line(0))
    assert writer.trouble is not None


def test_memory_for_kept_lines_is_bounded(tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    """A start that runs on for long on a full disk keeps the first lines and does not eat the host."""
    monkeypatch.setattr(journal_module, "_KEPT_LIMIT", 1_000)
    writer = JournalWriter(tmp_path, "p")
    disk.room = 0
    for seq in range(100):
        writer.append(line(seq))
    assert sum(map(len, writer._kept)) <= 1_000
    disk.room = None
    writer.close()
    assert seqs(read_journal(writer.path)) == list(range(len(seqs(read_journal(writer.path)))))


def test_a_directory_that_cannot_be_made_ends_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where the directory cannot be made now but can at the end, the journal is written after all."""
    blocked = tmp_path / "runs"
    blocked.write_text("a file")
    writer = JournalWriter(blocked / "run", "p")
    writer.append(line(0))
    assert writer.trouble is not None
    assert "hint: " in capsys.readouterr().err
    blocked.unlink()
    writer.close()
    assert seqs(read_journal(writer.path)) == [0]


def test_a_read_only_directory_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A start in a directory that cannot be written becomes ready; the history says why there is no file."""
    opened = os.open

    def refuse(path: str, flags: int, *args: int, **names: int) -> int:
        # As root nothing is read-only, so the system call says it.
        if flags & os.O_CREAT and str(tmp_path) in str(path):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return opened(path, flags, *args, **names)

    monkeypatch.setattr(journal_module.os, "open", refuse)
    boot, engine = counting_start(journal=tmp_path)
    boot.run(engine)
    assert boot.history.position == "ended"
    assert [each.decision for _, each in boot.history.decisions].count("journal_in_memory") == 1
    assert capsys.readouterr().err.count("Permission denied") == 1


def test_a_disk_that_cannot_sync_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failing fdatasync is trouble, not an exception, and is said once."""
    writer = JournalWriter(tmp_path, "p", durability="disk")

    def refuse(_: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(journal_module.os, "fdatasync", refuse)
    writer.append(line(0))
    writer.sync(edge=True)
    writer.sync()
    assert writer.trouble is not None
    assert writer.syncs == 2
    writer.close()


@pytest.mark.parametrize(("durability", "syncs"), [("process", 0), ("disk", 1)])
def test_edges_are_synced_only_when_asked(tmp_path: Path, durability: journal_module.Durability, syncs: int) -> None:
    """Durability ``process`` leaves edges to the kernel; both sync at the end."""
    writer = JournalWriter(tmp_path, "p", durability=durability)
    writer.append(line(0))
    writer.sync(edge=True)
    assert writer.syncs == syncs
    writer.close()
    assert writer.syncs == syncs + 1


def test_a_forked_child_writes_nothing_and_lets_go_of_the_lock(tmp_path: Path) -> None:
    """A child writes nothing, and does not hold the journal when its parent is gone."""
    writer = JournalWriter(tmp_path, "p")
    recorder = Recorder("r", "p", None, writer)
    recorder.record(NoteAdded(note={"who": "parent"}))
    release, released = os.pipe()
    begin, begun = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            recorder.record(NoteAdded(note={"who": "child"}))
            os.write(begun, b"x")
            os.read(release, 1)
            writer.append(line(1))
            writer.sync()
            writer.close()
        finally:
            os._exit(0)
    recorder.record(NoteAdded(note={"who": "parent"}))
    writer.close()
    os.read(begin, 1)
    try:
        with writer.path.open("rb") as reader:
            # The child still lives; its copy of the descriptor is closed.
            fcntl.flock(reader, fcntl.LOCK_SH | fcntl.LOCK_NB)
    finally:
        os.write(released, b"x")
        assert os.waitpid(child, 0)[1] == 0
    for descriptor in (release, released, begin, begun):
        os.close(descriptor)
    journal = read_journal(writer.path)
    assert [record.event.note["who"] for record in journal.records] == ["parent", "parent"]  # type: ignore[attr-defined]
    assert journal.problems == ()


def test_a_forgotten_writer_is_not_kept_alive_by_its_fork_handler(tmp_path: Path) -> None:
    """The handler that closes a child's copy holds no writer."""
    writer = JournalWriter(tmp_path, "p")
    writer.close()
    gone = threading.Event()
    import weakref

    weakref.finalize(writer, gone.set)
    del writer
    gc.collect()
    assert gone.is_set()


def _start_in_child(directory: str) -> None:
    boot, engine = counting_start(journal=directory)
    boot.run(engine)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_child_that_starts_an_engine_has_a_file_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """A child joins the run of its parent and writes beside it."""
    for variable in ("STARTUP_FSM_RUN", "STARTUP_FSM_RUN_OWNER", "RANK", "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID"):
        monkeypatch.delenv(variable, raising=False)
    boot, _engine = counting_start(journal=tmp_path)
    with boot.state("init_device"):
        child = multiprocessing.get_context(method).Process(target=_start_in_child, args=(str(tmp_path),))
        child.start()
        child.join(60)
        assert child.exitcode == 0
    (run,) = tmp_path.iterdir()
    assert sorted(each.name for each in run.iterdir()) == sorted([f"engine-{child.pid}.1.jsonl", "rank-00000.1.jsonl"])
    assert fold(read_journal(run / f"engine-{child.pid}.1.jsonl").records).position == "ended"
    parent = read_journal(run / "rank-00000.1.jsonl")
    assert {record.process for record in parent.records} == {"rank-00000"}
    assert parent.problems == ()


def test_holes_and_disorder_are_problems_with_their_place(tmp_path: Path) -> None:
    """A hole, a repetition, a broken line and a torn end are each named with line, offset and seq."""
    parts = [line(0), line(2), line(1), line(1), b"{broken}\n", b"\n", line(3), b'{"v":0,"run"']
    journal = read_journal(written(tmp_path / "j", *parts))
    offsets = [sum(map(len, parts[:count])) for count in range(len(parts))]
    assert seqs(journal) == [0, 2, 1, 1, 3]
    assert kinds(journal) == [
        ("gap", 2, offsets[1], 2),
        ("order", 3, offsets[2], 1),
        ("order", 4, offsets[3], 1),
        ("broken", 5, offsets[4], 3),
        ("gap", 7, offsets[6], 3),
        ("torn", 8, offsets[7], None),
    ]
    for problem in journal.problems:
        assert problem.message.startswith(f"line {problem.line}, byte {problem.offset}: ")
    assert journal.size == sum(map(len, parts))


def test_a_lost_beginning_is_a_gap(tmp_path: Path) -> None:
    """A file that begins in the middle says so."""
    assert kinds(read_journal(written(tmp_path / "j", line(5), line(6)))) == [("gap", 1, 0, 5)]


def test_a_wrong_type_is_a_broken_line_with_its_path(tmp_path: Path) -> None:
    """The message of a broken line names line, byte, seq and field."""
    wrong = line(1).replace(b'"payload":{}', b'"payload":{"visit":"1"}')
    journal = read_journal(written(tmp_path / "j", line(0), wrong, line(2)))
    assert journal.problems[0].message == (
        f"line 2, byte {len(line(0))}: seq 1: payload.visit: expected an integer, found '1'"
    )


def test_a_last_line_without_its_newline_counts_when_it_is_whole(tmp_path: Path) -> None:
    """What parses whole was written whole."""
    journal = read_journal(written(tmp_path / "j", line(0), line(1)[:-1]))
    assert seqs(journal) == [0, 1]
    assert journal.problems == ()


def test_an_empty_file_is_an_empty_journal(tmp_path: Path) -> None:
    """Nothing is no problem of a file; empty lines are none either."""
    assert read_journal(written(tmp_path / "j")) == Journal(str(tmp_path / "j"), (), (), 0)
    assert read_journal(written(tmp_path / "k", b"\n\n \n")).problems == ()


def test_binary_is_broken_lines_and_bounded_problems(tmp_path: Path) -> None:
    """A file of another kind gives a bounded number of problems, and the last says how many more there were."""
    garbage = bytes(byte for byte in range(256)) * 8 + b"\n"
    journal = read_journal(written(tmp_path / "j", garbage * 3_000))
    assert journal.records == ()
    assert len(journal.problems) == 1_000
    assert journal.problems[-1].message.endswith("and 26000 more like it")
    assert {each.kind for each in journal.problems} == {"broken"}


def test_a_newer_schema_says_where(tmp_path: Path) -> None:
    """A journal of a newer version is refused by name, with file, line and offset."""
    path = written(tmp_path / "j", line(0), line(1).replace(b'"v":0', b'"v":7'))
    with pytest.raises(UnknownSchema, match=r"j: line 2, byte \d+: the journal has schema 7") as caught:
        read_journal(path)
    assert caught.value.offset == len(line(0))
    assert caught.value.hint is not None


@pytest.mark.parametrize("name", ["missing", ".", "nul\0l"])
def test_what_is_no_file_is_one_error(tmp_path: Path, name: str) -> None:
    """A missing file, a directory and an impossible name are each one clear error."""
    with pytest.raises(JournalError) as caught:
        read_journal(f"{tmp_path}/{name}")
    assert caught.value.hint is not None
    assert str(tmp_path) in caught.value.message


def test_one_line_of_any_length_takes_bounded_memory(tmp_path: Path) -> None:
    """512 MiB in one line (a sparse file) are read with less than 64 MiB more than before."""
    path = written(tmp_path / "j", line(0), b"{")
    with path.open("r+b") as file:
        file.truncate(512 << 20)
        file.seek(0, os.SEEK_END)
        file.write(b"\n" + line(1))
    script = textwrap.dedent("""
        import resource, sys
        from startup_fsm.journal import read_journal
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        journal = read_journal(sys.argv[1])
        after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        assert [record.seq for record in journal.records] == [0, 1]
        assert [problem.kind for problem in journal.problems] == ["broken"], journal.problems
        assert "536870" in journal.problems[0].message, journal.problems
        assert after - before < 64 << 10, after - before
    """)
    subprocess.run([sys.executable, "-c", script, path], check=True, timeout=60)


def test_the_longest_line_is_read_and_one_byte_more_is_not(tmp_path: Path) -> None:
    """A line of 1 MiB with its newline is whole; a longer one is broken, whatever it holds."""
    empty = len(line(0, ""))
    longest, over = line(0, "a" * (MAX_LINE - empty)), line(0, "a" * (MAX_LINE - empty - 1)) + b""
    assert len(longest) == MAX_LINE
    assert seqs(read_journal(written(tmp_path / "j", longest))) == [0]
    padded = over[:-2] + b" " * 2 + over[-2:]
    journal = read_journal(written(tmp_path / "k", padded, line(1)))
    assert kinds(journal)[0] == ("broken", 1, 0, 1)


def test_a_file_that_is_being_written_reads_at_any_time(tmp_path: Path) -> None:
    """Read while it grows, a journal has no problem but a torn end, and never goes backwards."""
    writer = JournalWriter(tmp_path, "p")
    stop = threading.Event()

    def write() -> None:
        seq = 0
        while not stop.is_set() and seq < 5_000:
            writer.append(line(seq, "x" * (seq % 300)))
            seq += 1

    thread = threading.Thread(target=write)
    thread.start()
    seen = 0
    try:
        for _ in range(20):
            journal = read_journal(writer.path)
            assert [each.kind for each in journal.problems] in ([], ["torn"])
            assert seqs(journal) == list(range(len(journal.records)))
            assert len(journal.records) >= seen
            seen = len(journal.records)
    finally:
        stop.set()
        thread.join()
        writer.close()


def test_a_pipe_is_read_like_a_file() -> None:
    """Standard input need not be seekable, and may come in pieces."""
    reading, writing = os.pipe()
    whole = b"".join(line(seq) for seq in range(20))

    def feed() -> None:
        for at in range(0, len(whole), 7):
            os.write(writing, whole[at : at + 7])
        os.close(writing)

    thread = threading.Thread(target=feed)
    thread.start()
    journal = read_descriptor(reading, "-")
    thread.join()
    os.close(reading)
    assert seqs(journal) == list(range(20))


def test_every_truncation_of_a_real_journal_reads_with_the_right_last_state(tmp_path: Path) -> None:
    """Cut after any byte, a journal reads without an exception, torn at most at its end, and knows its state."""
    boot, engine = counting_start(journal=tmp_path, engine={"sizes": (1, 2)})
    boot.run(engine)
    assert boot.path is not None
    whole = boot.path.read_bytes()
    lines = whole.splitlines(keepends=True)
    # What a reader must say after so many whole lines, computed without the fold.
    states: list[tuple[str | None, str]] = [(None, "before")]
    for each in lines:
        body = orjson.loads(each)
        state, position = states[-1]
        match body["kind"]:
            case "state_entered":
                state, position = body["payload"]["state"], "open"
            case "state_left":
                position = "left"
            case "run_finished":
                position = "ended"
        states.append((state, position))
    ends = [0]
    for each in lines:
        ends.append(ends[-1] + len(each))
    path = tmp_path / "cut.jsonl"
    with path.open("wb") as file:
        file.write(whole)
    count = len(lines)
    # From the end, so that one file is cut shorter and shorter; whole prefixes are decoded once.
    cache: dict[bytes, Record] = {}

    class Cached:
        def decode(self, text: bytes) -> Record:
            if text not in cache:
                cache[text] = CODEC.decode(text)
            return cache[text]

    folded = -1
    for size in range(len(whole), -1, -1):
        os.truncate(path, size)
        while count and ends[count] - 1 > size:
            count -= 1
        # Without its newline a line is whole already.
        is_torn = size not in (ends[count], ends[count] - 1)
        journal = read_journal(path, codec=Cached())  # type: ignore[arg-type]
        assert len(journal.records) == count
        assert [each.kind for each in journal.problems] == (["torn"] if is_torn else [])
        if count != folded:
            folded, history = count, fold(journal.records)
            assert (history.state, history.position) == states[count]
            assert history.violations == []


MOUNTS = """
22 1 254:1 / / rw,relatime shared:1 - ext4 /dev/root rw
30 22 0:26 / /mnt/nfs rw - nfs4 server:/export rw
31 22 0:27 / /mnt/my\\040share rw - cifs //server/share rw
32 30 0:28 / /mnt/nfs/local rw - xfs /dev/sdb rw
33 22 0:29 / /fuse rw - fuse.sshfs host: rw
34 22 0:30 / /box rw - fuse.fuse-overlayfs overlay rw
35 22 0:31 / /lustre rw - lustre mgs:/fs rw
36 22 0:32 / /tab\\011bed rw - ceph mon:/ rw
37 22 0:33 / /over rw - nfs server:/a rw
38 37 0:34 / /over rw - tmpfs tmpfs rw
39 22 0:35 / /mnt/nfsish rw - ext4 /dev/sdc rw
garbage
40 22 - tmpfs
41 22 0:36 / /half rw -
"""


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/", False),
        ("/home/me/runs", False),
        ("/mnt/nfs/runs", True),
        ("/mnt/nfs", True),
        ("/mnt/nfs/local/runs", False),
        ("/mnt/nfsother", False),
        ("/mnt/nfsish/runs", False),
        ("/mnt/my share/runs", True),
        ("/fuse/x", True),
        ("/box/runs", False),
        ("/lustre/scratch/me", True),
        ("/tab\tbed/x", True),
        ("/over/x", False),
        ("/half/x", False),
    ],
)
def test_network_file_systems_are_told_by_the_mount_table(
    monkeypatch: pytest.MonkeyPatch, path: str, expected: bool
) -> None:
    """The longest mount point that holds the path decides, the later of two on one point."""
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: MOUNTS)
    monkeypatch.setattr(journal_module.os.path, "realpath", str)
    assert is_network(Path(path)) is expected


def test_without_a_mount_table_nothing_is_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the kernel does not tell, the journal is written where it was asked for."""

    def refuse(*_: object, **__: object) -> str:
        raise FileNotFoundError(errno.ENOENT, "no", "/proc/self/mountinfo")

    monkeypatch.setattr(Path, "read_text", refuse)
    assert is_network(Path("/x")) is False


def test_on_a_network_file_system_the_journal_is_copied_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is written on this host, its name is taken at once, and the copy is whole."""
    monkeypatch.setattr(journal_module, "is_network", lambda _: True)
    monkeypatch.setattr(journal_module.tempfile, "tempdir", str(tmp_path / "local"))
    (tmp_path / "local").mkdir()
    writer = JournalWriter(tmp_path / "net", "p")
    second = JournalWriter(tmp_path / "net", "p")
    assert (writer.attempt, second.attempt) == (1, 2)
    writer.append(line(0))
    assert writer.path.parent == tmp_path / "local"
    assert seqs(read_journal(writer.path)) == [0]
    writer.close()
    second.close()
    assert writer.path == tmp_path / "net" / "p.1.jsonl"
    assert seqs(read_journal(writer.path)) == [0]
    assert list((tmp_path / "local").iterdir()) == []
