"""
Append-only journals: one file of lines for each process and attempt.

    runs/<run_id>/<process>.<attempt>.jsonl

Writing is one ``write`` of one line on an ``O_APPEND`` descriptor, so that SIGKILL loses nothing. Reading tolerates a
torn last line, reports every hole with its offset, and holds one line in memory at a time. No torch, no structlog.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shutil
import sys
import tempfile
import time
import weakref
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Literal

import attrs

from startup_fsm.codec import CODEC, MAX_LINE, Codec
from startup_fsm.errors import DecodeError, JournalError, UnknownSchema
from startup_fsm.events import Record
from startup_fsm.lines import Line, Lines

#: Durability ``process``: synced at failure and at the end. ``disk``: at the edges between states too.
Durability = Literal["process", "disk"]

_CHUNK: Final = 1 << 20
_KEPT_LIMIT: Final = 64 << 20
_MOST_PROBLEMS: Final = 1_000
_NETWORK: Final = ("nfs", "cifs", "smb", "ceph", "lustre", "gpfs", "beegfs", "glusterfs", "9p", "afs", "fuse.")
#: Containers without root stand on this; it is a local disk.
_LOCAL: Final = ("fuse.fuse-overlayfs",)


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
        fields, kinds = before.split(), after.split()
        if len(fields) < 5 or not kinds:
            continue
        point = re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), fields[4])
        if len(point) >= len(longest) and (real == point or real.startswith(point.rstrip("/") + "/")):
            longest, kind = point, kinds[0]
    return kind.startswith(_NETWORK) and kind not in _LOCAL


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
        self._kept: deque[bytes] = deque()
        self._kept_bytes = 0
        self._descriptor: int | None = None
        self._offset = 0
        self._final: Path | None = None
        self._process = process
        self._closed = False
        self.attempt = attempt or 1
        self.path = directory / file_name(process, self.attempt)
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._open(process, chosen=attempt)
        except OSError as error:
            self._fall_back(error)
        let_go = weakref.WeakMethod(self._let_go)
        os.register_at_fork(after_in_child=lambda: method() if (method := let_go()) else None)

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
                os.close(descriptor)
                raise
        return descriptor

    @property
    def is_ours(self) -> bool:
        """False in a forked child, whose copy of this object must not write."""
        if os.getpid() == self._pid:
            return True
        self._let_go()
        return False

    def _let_go(self) -> None:
        """In a forked child: its copy of the descriptor would hold the lock when the parent is long gone."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            with contextlib.suppress(OSError):
                os.close(descriptor)

    def append(self, line: bytes) -> None:
        """Write one line, newline included; never raises for the disk's sake."""
        if not self.is_ours or self._closed:
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
        said, self.trouble = self.trouble is not None, f"{self.path}: {error.strerror or error}"
        if said:
            return
        # A daemon may have no stderr, or one that nobody reads any more.
        with contextlib.suppress(AttributeError, OSError, ValueError):
            sys.stderr.write(
                f"startup-fsm: the journal cannot be written: {self.trouble}; the start goes on, events stay in "
                "memory\nhint: free space, or choose another directory for journals\n"
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
        """Write what was kept, if the disk takes it by now; sync; let go of the file. Harmless when repeated."""
        if not self.is_ours or self._closed:
            return
        self._closed = True
        with contextlib.suppress(OSError):
            self._write_kept()
        if self._descriptor is None:
            return
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

    def _write_kept(self) -> None:
        if not self._kept:
            return
        if self._descriptor is None:
            self.directory.mkdir(parents=True, exist_ok=True)
            # The lines name this attempt, so no other will do.
            self._open(self._process, chosen=self.attempt)
        if self._descriptor is None:
            return
        # What a failed write left behind would tear the line after it.
        os.ftruncate(self._descriptor, self._offset)
        while self._kept:
            self._write(self._descriptor, self._kept[0])
            self._kept.popleft()
        self.trouble = None


#: ``torn`` the last line, ``broken`` one in the middle, ``gap`` events are missing, ``order`` one is out of place.
ProblemKind = Literal["torn", "broken", "gap", "order"]


@attrs.frozen(kw_only=True)
class Problem:
    """
    Something wrong with a journal file.

    Attributes:
        kind: What.
        offset: Byte offset of the line.
        line: Line number from 1.
        message: One sentence.
        seq: Of the next good event, or of the one that is out of place; None where there is none.
    """

    kind: ProblemKind
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


def read_journal(path: str | Path, *, codec: Codec = CODEC) -> Journal:
    """
    Read one journal file; what cannot be read is a problem, not an exception.

    Raises:
        JournalError: The file cannot be opened.
        UnknownSchema: It was written by a newer version.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return read_descriptor(descriptor, str(path), codec=codec)
        finally:
            os.close(descriptor)
    except JournalError:
        raise
    except (OSError, ValueError) as error:
        msg = f"{path}: {getattr(error, 'strerror', None) or error}"
        hint = "name a run directory, a journal file, or - for standard input"
        raise JournalError(msg, path=str(path), hint=hint) from None


def read_descriptor(descriptor: int, path: str, *, codec: Codec = CODEC) -> Journal:
    """
    Read a journal from an open file or pipe.

    Raises:
        UnknownSchema: It was written by a newer version.
    """
    found, lines = Reading(path, codec=codec), Lines()
    while block := os.read(descriptor, _CHUNK):
        for line in lines.feed(block):
            found.take(line)
    if (rest := lines.rest()) is not None:
        found.take(rest)
    return found.journal()


class Reading:
    """What was read of one file so far, line by line."""

    def __init__(self, path: str, *, codec: Codec = CODEC) -> None:
        self._path = path
        self._codec = codec
        self._records: list[Record] = []
        self._problems: list[Problem] = []
        self._left_out = 0
        self._size = 0
        self._unplaced = 0

    @property
    def records(self) -> Sequence[Record]:
        """In file order."""
        return self._records

    def take(self, line: Line) -> None:
        """
        One more line.

        Raises:
            UnknownSchema: A newer version wrote it.
        """
        self._size = line.offset + line.length + line.complete
        if not line.text.strip() and line.complete:
            return
        try:
            record = self._decoded(line)
        except DecodeError as error:
            kind: Literal["torn", "broken"] = "broken" if line.complete else "torn"
            self._add(kind, line, error.message, None)
            return
        for at in range(len(self._problems) - self._unplaced, len(self._problems)):
            self._problems[at] = attrs.evolve(self._problems[at], seq=record.seq)
        self._unplaced = 0
        expected = self._records[-1].seq + 1 if self._records else 0
        if record.seq != expected:
            text = f"seq {record.seq} where {expected} should stand"
            self._add("gap" if record.seq > expected else "order", line, text, record.seq)
        self._records.append(record)

    def _decoded(self, line: Line) -> Record:
        if line.length >= MAX_LINE:
            msg = f"the line has {line.length} bytes; a journal line has at most {MAX_LINE}"
            raise DecodeError(msg, where="line")
        try:
            return self._codec.decode(line.text)
        except UnknownSchema as error:
            msg = f"{self._path}: line {line.number}, byte {line.offset}: {error.message}"
            raise UnknownSchema(msg, path=self._path, offset=line.offset, hint=error.hint) from None

    def _add(self, kind: ProblemKind, line: Line, text: str, seq: int | None) -> None:
        if len(self._problems) >= _MOST_PROBLEMS:
            self._left_out += 1
            return
        text = f"line {line.number}, byte {line.offset}: {text}"
        self._problems.append(Problem(kind=kind, offset=line.offset, line=line.number, message=text, seq=seq))
        self._unplaced += seq is None

    def journal(self) -> Journal:
        """All of it so far."""
        problems = list(self._problems)
        if self._left_out:
            last = problems[-1]
            problems[-1] = attrs.evolve(last, message=f"{last.message}; and {self._left_out} more like it")
        return Journal(self._path, tuple(self._records), tuple(problems), self._size)
