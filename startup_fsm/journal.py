"""
Append-only journals: one file of lines for each process and attempt.

    runs/<run_id>/<process>.<attempt>.jsonl

Writing is one ``write`` of one line on an ``O_APPEND`` descriptor, so that SIGKILL loses nothing. Reading tolerates a
torn last line, reports every hole with its offset, and holds one line in memory at a time. No torch, no structlog.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Literal

import attrs

from startup_fsm.codec import CODEC, MAX_LINE, Codec
from startup_fsm.errors import DecodeError, JournalError
from startup_fsm.events import Record

#: Durability ``process``: synced at failure and at the end. ``disk``: at the edges between states too.
Durability = Literal["process", "disk"]

_CHUNK: Final = 1 << 20
_KEPT_LIMIT: Final = 64 << 20
_NETWORK: Final = ("nfs", "cifs", "smb", "ceph", "lustre", "gpfs", "beegfs", "glusterfs", "9p", "afs", "fuse.")


def file_name(process: str, attempt: int) -> str:
    """Name of the journal of one process and attempt inside its run directory."""
    return f"{process}.{attempt}.jsonl"


def is_network(path: Path) -> bool:
    """Whether a path lies on a network file system, where locks and syncs cannot be relied on."""
    try:
        mounts = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        real = os.path.realpath(path)
    except OSError:
        return False
    longest, kind = "", ""
    for line in mounts:
        before, _, after = line.partition(" - ")
        point = before.split()[4].replace("\\040", " ")
        if len(point) >= len(longest) and (real == point or real.startswith(point.rstrip("/") + "/")):
            longest, kind = point, after.split()[0]
    return kind.startswith(_NETWORK)


class JournalWriter:
    """
    The only writer of one journal file.

    Trouble with the disk never reaches the caller: the lines are kept in memory, it is said once on stderr, and
    :meth:`close` tries to write them after all. A forked child's copy writes nothing.

    Args:
        directory: The run directory; made when missing.
        process: ``rank-00003`` or ``engine-<pid>``.
        attempt: From 1; None takes the first that has no file yet.
        durability: When the disk is asked to keep it.

    Attributes:
        path: Where the journal is, or would be.
        trouble: Why lines are kept in memory; None while the file is good.
        syncing_ns, syncs: What the disk cost so far.
    """

    def __init__(
        self, directory: Path, process: str, *, attempt: int | None = None, durability: Durability = "process"
    ) -> None:
        self.directory = directory
        self.durability = durability
        self.trouble: str | None = None
        self.syncing_ns = 0
        self.syncs = 0
        self._pid = os.getpid()
        self._kept: list[bytes] = []
        self._kept_bytes = 0
        self._descriptor: int | None = None
        self._offset = 0
        self._final: Path | None = None
        self.attempt = attempt or 1
        self.path = directory / file_name(process, self.attempt)
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._open(process, chosen=attempt)
        except OSError as error:
            self._fall_back(error)

    def _open(self, process: str, *, chosen: int | None) -> None:
        while True:
            self.path = self.directory / file_name(process, self.attempt)
            try:
                self._descriptor = self._created(self.path)
            except FileExistsError:
                if chosen is not None:
                    msg = f"{self.path}: attempt {chosen} has a journal already"
                    raise JournalError(msg, path=str(self.path), hint="a second writer would mix two starts") from None
                self.attempt += 1
            else:
                return

    def _created(self, path: Path) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        descriptor = os.open(path, flags, 0o644)
        if is_network(path):
            # Appends and locks are not to be trusted there: write on this host and copy at the end.
            os.close(descriptor)
            self._final = path
            descriptor, local = tempfile.mkstemp(prefix="startup-fsm-", suffix=".jsonl")
            fcntl.fcntl(descriptor, fcntl.F_SETFL, os.O_APPEND)
            self.path = Path(local)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
                raise
        return descriptor

    @property
    def is_ours(self) -> bool:
        """False in a forked child, whose copy of this object must not write."""
        if os.getpid() == self._pid:
            return True
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
        return False

    def append(self, line: bytes) -> None:
        """Write one line, newline included; never raises for the disk's sake."""
        if not self.is_ours:
            return
        if self._descriptor is None or self.trouble is not None:
            self._keep(line)
            return
        try:
            self._write(self._descriptor, line)
        except OSError as error:
            self._keep(line)
            self._fall_back(error)

    def _write(self, descriptor: int, line: bytes) -> None:
        written = os.write(descriptor, line)
        if written != len(line):
            os.ftruncate(descriptor, self._offset)
            raise OSError(errno.ENOSPC, f"only {written} of {len(line)} bytes were written")
        self._offset += written

    def _keep(self, line: bytes) -> None:
        if self._kept_bytes + len(line) <= _KEPT_LIMIT:
            self._kept.append(line)
            self._kept_bytes += len(line)

    def _fall_back(self, error: OSError) -> None:
        if isinstance(error, JournalError):
            raise error
        self.trouble = f"{self.path}: {error.strerror or error}"
        sys.stderr.write(
            f"startup-fsm: the journal cannot be written: {self.trouble}; the start goes on, events stay in memory\n"
            "hint: free space, or choose another directory for journals\n"
        )

    def sync(self, *, edge: bool = False) -> None:
        """Ask the disk to keep what was written; at an ``edge`` only with durability ``disk``."""
        if (edge and self.durability != "disk") or self._descriptor is None or not self.is_ours:
            return
        before = time.perf_counter_ns()
        try:
            os.fdatasync(self._descriptor)
        except OSError as error:
            if self.trouble is None:
                self._fall_back(error)
        self.syncs += 1
        self.syncing_ns += time.perf_counter_ns() - before

    def close(self) -> None:
        """Write what was kept, if the disk takes it by now; sync; let go of the file."""
        if not self.is_ours or self._descriptor is None:
            return
        try:
            while self._kept:
                self._write(self._descriptor, self._kept[0])
                self._kept.pop(0)
            self.trouble = None
        except OSError:
            pass
        self.sync()
        descriptor, self._descriptor = self._descriptor, None
        os.close(descriptor)
        if self._final is not None:
            try:
                shutil.copyfile(self.path, self._final)
                self.path.unlink()
                self.path = self._final
            except OSError as error:
                self._fall_back(error)


@attrs.frozen(kw_only=True)
class Problem:
    """
    Something wrong with a journal file.

    Attributes:
        kind: ``torn`` (last line), ``broken`` (a line in the middle), ``gap`` (missing events), ``order``.
        offset: Byte offset of the line.
        line: Line number from 1.
        message: One sentence.
        seq: Of the next good event; None where there is none.
    """

    kind: Literal["torn", "broken", "gap", "order"]
    offset: int
    line: int
    message: str
    seq: int | None = None


@attrs.frozen
class Journal:
    """What one file says: records in file order, and what is wrong with it."""

    path: str
    records: tuple[Record, ...]
    problems: tuple[Problem, ...] = ()
    size: int = 0


@attrs.frozen(slots=True)
class _Line:
    number: int
    offset: int
    text: bytes
    length: int
    complete: bool


def _lines(descriptor: int) -> Iterator[_Line]:
    """Lines in chunks; of a line longer than :data:`MAX_LINE` only its first bytes are held."""
    number, offset, held, length = 1, 0, bytearray(), 0
    while chunk := os.read(descriptor, _CHUNK):
        start = 0
        while (end := chunk.find(b"\n", start)) >= 0:
            length += end - start
            if len(held) <= MAX_LINE:
                held += chunk[start:end][: MAX_LINE + 1 - len(held)]
            yield _Line(number, offset, bytes(held), length, complete=True)
            offset += length + 1
            number, length, start = number + 1, 0, end + 1
            held.clear()
        length += len(chunk) - start
        if len(held) <= MAX_LINE:
            held += chunk[start:][: MAX_LINE + 1 - len(held)]
    if length:
        yield _Line(number, offset, bytes(held), length, complete=False)


def read_journal(path: str | Path, *, codec: Codec = CODEC) -> Journal:
    """
    Read one journal file; what cannot be read is a problem, not an exception.

    Raises:
        JournalError: The file cannot be opened.
        UnknownSchema: It was written by a newer version.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        msg = f"{path}: {error.strerror}"
        raise JournalError(
            msg, path=str(path), hint="name a run directory, a journal file, or - for standard input"
        ) from None
    try:
        return read_descriptor(descriptor, str(path), codec=codec)
    finally:
        os.close(descriptor)


def read_descriptor(descriptor: int, path: str, *, codec: Codec = CODEC) -> Journal:
    """Read a journal from an open file or pipe."""
    records: list[Record] = []
    problems: list[Problem] = []
    size = 0
    pending: Problem | None = None
    for line in _lines(descriptor):
        size = line.offset + line.length
        if pending is not None:
            problems.append(pending)
            pending = None
        if not line.text.strip() and line.complete:
            continue
        try:
            if line.length >= MAX_LINE:
                msg = f"the line has {line.length} bytes; a journal line has at most {MAX_LINE}"
                raise DecodeError(msg, where="line")  # noqa: TRY301 - one place makes the problem
            record = codec.decode(line.text)
        except DecodeError as error:
            kind: Literal["torn", "broken"] = "broken" if line.complete else "torn"
            text = f"line {line.number}, byte {line.offset}: {error.message}"
            pending = Problem(kind=kind, offset=line.offset, line=line.number, message=text)
            continue
        expected = records[-1].seq + 1 if records else 0
        if record.seq != expected:
            kind_of = "gap" if record.seq > expected else "order"
            text = f"line {line.number}, byte {line.offset}: seq {record.seq} where {expected} should stand"
            problems.append(
                Problem(kind=kind_of, offset=line.offset, line=line.number, message=text, seq=record.seq)  # type: ignore[arg-type]
            )
        records.append(record)
    if pending is not None:
        problems.append(pending)
    return Journal(path, tuple(records), tuple(problems), size)


def find_journals(path: str | Path) -> tuple[Path, ...]:
    """
    Journal files under a path: itself, those of a run directory, or those of every run in a directory of runs.

    Raises:
        JournalError: Nothing is there.
    """
    root = Path(path)
    if not root.exists():
        msg = f"{path}: no such file or directory"
        raise JournalError(msg, path=str(path), hint="name a run directory, a journal file, or - for standard input")
    if not root.is_dir():
        return (root,)
    found = sorted(root.glob("*.jsonl")) or sorted(root.glob("*/*.jsonl"))
    if not found:
        msg = f"{path}: no journal in this directory"
        raise JournalError(
            msg, path=str(path), hint="journals are files named <process>.<attempt>.jsonl in a run directory"
        )
    return tuple(found)
