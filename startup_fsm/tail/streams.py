"""
Text that grows: the log of an engine, mirrored lines, a journal that comes through a pipe.

What a log says of a start is told by all its lines together, so it is read anew when it has grown: the longer that
takes, the less often.
"""

from __future__ import annotations

import os
import re
import select
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Protocol

import attrs

from startup_fsm.errors import JournalError, UnknownSchema
from startup_fsm.reading import STDIN, starts_in
from startup_fsm.starts import Start
from startup_fsm.tail.base import Bar, Sight
from startup_fsm.verdict import Outcome
from startup_fsm.verdicts import judge

#: Reading anew takes at most a tenth of the time.
_REST: Final = 9
_SOONEST_S: Final = 0.3
#: How long a log that tells of a failure stands still before nothing more is expected: where nobody is seen to write
#: it, and where somebody is.
_FAILED_S: Final = 3.0
_FAILED_AND_HELD_S: Final = 30.0
#: How long a log that tells of no end stands still where nobody is seen to write it.
_SILENT_S: Final = 300.0
#: Seconds between two looks for who has it open.
_LOOK_S: Final = 5.0
#: What is kept of a pipe.
_MOST: Final = 1 << 30
_BLOCK: Final = 1 << 16
_AT_ONCE: Final = 64 << 20
_END: Final = 8 << 10

_BAR: Final = re.compile(
    rb"([A-Z][\w -]{2,60})(?:\([^()\r\n]{0,80}\))?: {1,4}\d{1,3}%(?:\|[^|\r\n]{0,200}\|| Completed \|) {0,4}"
    rb"(\d{1,7})/(\d{1,7})"
)


def last_bar(text: bytes) -> Bar | None:
    """The last progress bar of the end of a log."""
    bars = _BAR.findall(text)
    if not bars:
        return None
    label, done, total = bars[-1]
    return Bar(label.decode("ascii", "replace").strip(), int(done), int(total))


class Growing(Protocol):
    """Bytes that somebody else writes."""

    @property
    def is_ended(self) -> bool:
        """Whether no more can come."""

    @property
    def changed(self) -> float:
        """When they last grew, seconds since the epoch."""

    def poll(self) -> bool:
        """Whether there are others than before."""

    def is_written(self) -> bool:
        """Whether somebody is seen to have them open for writing."""

    def opened(self) -> int:
        """A descriptor at the beginning; the caller closes it."""

    def drain(self) -> None:
        """Read on to the end, and forget what comes."""

    def close(self) -> None:
        """Let go of what is open."""


class GrowingFile:
    """
    A file, by name: one that is truncated or replaced is another one.

    Args:
        path: Where it is.
        begin: Bytes at its beginning that do not count.
    """

    is_ended = False

    def __init__(self, path: Path, begin: int = 0) -> None:
        self.changed = time.time()
        self._path = path
        self._begin = begin
        self._identity: tuple[int, int] | None = None
        self._size = 0

    def poll(self) -> bool:
        """Whether it is another one, or has another size."""
        try:
            status = self._path.stat()
        except FileNotFoundError:
            return False
        identity = status.st_dev, status.st_ino
        if self._identity is not None and (identity != self._identity or status.st_size < self._size):
            self._begin = 0
        before, self._identity, self._size = (self._identity, self._size), identity, status.st_size
        self.changed = status.st_mtime
        return before != (identity, status.st_size)

    def is_written(self) -> bool:
        """Whether a process that this user may look at has it open for writing."""
        return self._identity is not None and any(_writers(self._identity))

    def opened(self) -> int:
        """At the first byte that counts."""
        descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        os.lseek(descriptor, self._begin, os.SEEK_SET)
        return descriptor

    def drain(self) -> None:
        """Nothing waits for a file to be read."""

    def close(self) -> None:
        """No descriptor is kept."""


def _writers(identity: tuple[int, int]) -> Iterator[str]:
    """Numbers of processes that have a file open for writing, as far as this user may know."""
    own = str(os.getpid())
    with os.scandir("/proc") as processes:
        numbers = [entry.name for entry in processes if entry.name.isdecimal() and entry.name != own]
    for number in numbers:
        try:
            with os.scandir(f"/proc/{number}/fd") as descriptors:
                for entry in descriptors:
                    status = entry.stat()
                    if (status.st_dev, status.st_ino) == identity and _is_for_writing(number, entry.name):
                        yield number
        except OSError:
            # It has ended meanwhile, has closed that file, or belongs to somebody else.
            continue


def _is_for_writing(process: str, descriptor: str) -> bool:
    text = Path(f"/proc/{process}/fdinfo/{descriptor}").read_text(encoding="ascii")
    flags = re.search(r"^flags:\s+([0-7]+)$", text, re.MULTILINE)
    return flags is not None and int(flags[1], 8) & os.O_ACCMODE != os.O_RDONLY


class GrowingPipe:
    """A pipe, copied into a file without a name as it comes: what a start says is short."""

    def __init__(self, descriptor: int) -> None:
        self.is_ended = False
        self.changed = time.time()
        self._descriptor = descriptor
        self._copy = tempfile.TemporaryFile()  # noqa: SIM115 - it lives as long as this does
        self._size = 0

    def poll(self) -> bool:
        """Take what has come, without waiting for more."""
        taken = 0
        while taken < _AT_ONCE and not self.is_ended and select.select([self._descriptor], [], [], 0)[0]:
            block = os.read(self._descriptor, _BLOCK)
            self.is_ended = not block
            taken += len(block)
            if self._size < _MOST:
                self._copy.write(block)
                self._size += len(block)
        if taken:
            self._copy.flush()
            self.changed = time.time()
        return taken > 0

    def is_written(self) -> bool:
        """Whether it has not come to its end."""
        return not self.is_ended

    def opened(self) -> int:
        """The copy, by a descriptor with a position of its own."""
        return os.open(f"/proc/self/fd/{self._copy.fileno()}", os.O_RDONLY | os.O_CLOEXEC)

    def drain(self) -> None:
        """Read on to the end, and forget what comes."""
        while os.read(self._descriptor, _BLOCK):
            pass

    def close(self) -> None:
        """Let go of the copy; the pipe is whoever's it was."""
        self._copy.close()


class TextTail:
    """
    The last start that a growing text tells of.

    Args:
        source: Its bytes.
        name: What was named: its origin.
    """

    def __init__(self, source: Growing, name: str) -> None:
        self._source = source
        self._name = name
        self._shown = "standard input" if name == STDIN else name
        self._start: Start | None = None
        self._outcome: Outcome = "running"
        self._is_new = False
        self._has_read = False
        self._read_at = 0.0
        self._looked_at = -_LOOK_S
        self._is_written = True

    def poll(self) -> bool:
        """Read anew where it has grown, and reading it is not too dear by now."""
        self._is_new = self._source.poll() or self._is_new
        if not self._is_new or (time.monotonic() < self._read_at and not self._source.is_ended):
            return False
        self._is_new, began = False, time.process_time()
        changed = self._read()
        # What the first reading takes is mostly the loading of those who read.
        took = time.process_time() - began if self._has_read else 0.0
        self._has_read = True
        self._read_at = time.monotonic() + max(_SOONEST_S, took * _REST)
        return changed

    def _read(self) -> bool:
        try:
            starts = self._starts()
        except UnknownSchema:
            raise
        except JournalError:
            # Nothing that says anything yet.
            return False
        start = starts[-1]
        if start.source in ("journal", "mirror"):
            is_alive = not self._source.is_ended
            alive = [
                attrs.evolve(each, is_alive=is_alive and each.history.finished is None) for each in start.processes
            ]
            start = attrs.evolve(start, processes=tuple(alive))
        before, self._start = self._start, start
        self._outcome = judge(start.sources, source=start.source, origin=start.origin).outcome
        return before is None or _counts(before) != _counts(start)

    def _starts(self) -> tuple[Start, ...]:
        descriptor = self._opened()
        try:
            return starts_in(descriptor, self._shown, self._name)
        finally:
            os.close(descriptor)

    def _opened(self) -> int:
        try:
            return self._source.opened()
        except OSError as error:
            text = f"{self._shown}: {error.strerror or error}"
            raise JournalError(text, path=self._name, hint="let this user read it") from None

    @property
    def is_over(self) -> bool:
        """Whether the start is ready or dead, or nobody is left to say more."""
        if self._is_new:
            return False
        if self._source.is_ended or self._outcome == "ready":
            return True
        quiet = time.time() - self._source.changed
        if self._outcome not in ("running", "incomplete"):
            return quiet > _FAILED_S and (quiet > _FAILED_AND_HELD_S or not self._is_held())
        return quiet > _SILENT_S and not self._is_held()

    def _is_held(self) -> bool:
        now = time.monotonic()
        if now - self._looked_at >= _LOOK_S:
            self._looked_at, self._is_written = now, self._source.is_written()
        return self._is_written

    def sight(self) -> Sight | None:
        """What was read last, and the bar that stands at the end of the text."""
        if self._start is None:
            return None
        quiet = max(0.0, time.time() - self._source.changed)
        return Sight(start=self._start, quiet_s=(quiet,) * len(self._start.processes), bar=self._bar())

    def _bar(self) -> Bar | None:
        try:
            descriptor = self._opened()
        except JournalError:
            return None
        try:
            size = os.fstat(descriptor).st_size
            return last_bar(os.pread(descriptor, _END, max(0, size - _END)))
        finally:
            os.close(descriptor)

    def final(self) -> Start:
        """All that there is by now; what was read before, where the file is gone."""
        try:
            return self._starts()[-1]
        except JournalError:
            if self._start is None:
                raise
            return self._start

    def drain(self) -> None:
        """Where it is a pipe: read on to its end."""
        self._source.drain()

    def close(self) -> None:
        """Of its bytes."""
        self._source.close()


def _counts(start: Start) -> tuple[object, ...]:
    """What changes when anything is read that was not there before."""
    processes = tuple((each.history.process, each.history.records, each.is_alive) for each in start.processes)
    return start.run, start.attempt, processes
