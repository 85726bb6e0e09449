"""
Journals as they grow: one file by its offset, and all files of one run.

No descriptor is kept. A journal is opened when its size or its time has changed, and asked for its writer's lock only
where it has bytes and stands still; a writer takes its lock before its first byte and never again.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection
from pathlib import Path
from typing import Final

from startup_fsm.codec import MAX_LINE
from startup_fsm.errors import JournalError
from startup_fsm.fold import RunState
from startup_fsm.journal import Reading
from startup_fsm.lines import Lines
from startup_fsm.reading import is_gone, is_held, read_starts
from startup_fsm.starts import Process, Start
from startup_fsm.states import READY
from startup_fsm.tail.base import Sight

#: Seconds between two questions whether a journal that stands still has its writer.
_ASK_S: Final = 0.5
#: Seconds that a run is over before it counts: another rank may be about to make its journal.
_SETTLE_S: Final = 0.5
#: The same where the launcher has announced more ranks than there are.
_MISSING_S: Final = 10.0
#: The same where a start has failed whose process lives on: it may be about to start again in its own place.
_RESTART_S: Final = 15.0
#: First bytes of a journal: they hold its run and process, and of our own the clock.
_HEAD: Final = 512
_BLOCK: Final = 1 << 20
_MOST_RANKS: Final = 1 << 20


class JournalTail:
    """
    One journal, read as it grows; one that was truncated or replaced is read from its beginning again.

    Attributes:
        path: Where it is.
        history: The fold of what was read.
        is_alive: False once its writer is known to be gone.
        changed: When it last grew, seconds since the epoch.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.is_alive = True
        self.changed = time.time()
        self._stamp: tuple[int, ...] = ()
        self._ask_at = 0.0
        self._is_released = False
        self._begin()

    def _begin(self) -> None:
        self.history = RunState()
        self._identity: tuple[int, int] | None = None
        self._head = b""
        self._lines = Lines()
        self._reading = Reading(str(self.path))
        self._process: Process | None = None

    def poll(self, status: os.stat_result | None, now: float) -> bool:
        """
        Read what has come; True where that changes anything.

        Args:
            status: Of the file now; None where it is gone.
            now: Monotonic seconds.
        """
        if status is None:
            return self._lost()
        stamp = status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
        if stamp == self._stamp:
            return status.st_size > 0 and self.is_alive and now >= self._ask_at and self._ask(now)
        self._ask_at = now + _ASK_S if self._stamp else now
        self._stamp, self.changed = stamp, status.st_mtime
        self.is_alive, self._is_released = True, False
        self._process = None
        try:
            descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return self._lost()
        except OSError as error:
            text = f"{self.path}: {error.strerror or error}"
            raise JournalError(text, path=str(self.path), hint="let this user read it") from None
        try:
            return self._read(descriptor)
        finally:
            os.close(descriptor)

    def _lost(self) -> bool:
        changed, self.is_alive, self._process, self._stamp = self.is_alive, False, None, ()
        return changed

    def _ask(self, now: float) -> bool:
        if self._is_released:
            # Nobody has held it, and nothing has come since that was asked.
            self.is_alive, self._process = False, None
            return True
        try:
            descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            self._is_released = not is_held(descriptor) or is_gone(self.history.started)
        finally:
            os.close(descriptor)
        self._ask_at = now if self._is_released else now + _ASK_S
        return False

    def _read(self, descriptor: int) -> bool:
        status, lines = os.fstat(descriptor), self._lines
        identity = status.st_dev, status.st_ino
        is_endless = lines.taken - lines.offset > MAX_LINE
        again = self._identity is not None and (
            identity != self._identity
            or status.st_size < (lines.taken if is_endless else lines.offset)
            or os.pread(descriptor, len(self._head), 0) != self._head
        )
        if again:
            self._begin()
            lines = self._lines
        self._identity = identity
        if not is_endless:
            # A writer whose write came back short cuts it off and writes something else there.
            lines.forget_half()
        os.lseek(descriptor, lines.taken, os.SEEK_SET)
        begun = len(self._reading.records)
        while block := os.read(descriptor, _BLOCK):
            for line in lines.feed(block):
                self._reading.take(line)
        if not self._head and lines.offset:
            self._head = os.pread(descriptor, min(_HEAD, lines.offset), 0)
        return self._fold(begun) or again

    def _fold(self, begun: int) -> bool:
        records = self._reading.records[begun:]
        for record in records:
            self.history.apply(record)
        if records and self.history.started is None:
            # The beginning is lost; every line says whose it is.
            first, history = self._reading.records[0], self.history
            history.run, history.process, history.rank = first.run, first.process, first.rank
            history.attempt = first.attempt
        return bool(records)

    @property
    def is_over(self) -> bool:
        """Whether it has its last event, or nobody is there to write one."""
        return self.history.finished is not None or not self.is_alive

    @property
    def may_restart(self) -> bool:
        """Whether it has failed and its process, on this host, is still there."""
        finished, started = self.history.finished, self.history.started
        if finished is None or finished[1].end == READY or started is None or started.pid is None:
            return False
        return started.host == os.uname().nodename and not is_gone(started)

    @property
    def process(self) -> Process:
        """As the reader has it, without the side file."""
        if self._process is None:
            journal, history = self._reading.journal(), self.history
            is_alive = self.is_alive and history.finished is None
            self._process = Process(journal=journal, history=history, is_alive=is_alive)
        return self._process


class RunTail:
    """
    All journals of a run directory, or one of them.

    Args:
        directory: Where they are.
        only: The name of the one that is followed; None follows all, those that come later too.
        besides: Names of those that do not count.
    """

    def __init__(self, directory: Path, *, only: str | None = None, besides: Collection[str] = ()) -> None:
        self._directory = directory
        self._only = only
        self._besides = frozenset(besides)
        self._files: dict[str, JournalTail] = {}
        self._changed_at = time.monotonic()

    def poll(self) -> bool:
        """Read what has come, new files too."""
        now = time.monotonic()
        found = self._found()
        for name in found:
            if name not in self._files:
                self._files[name] = JournalTail(self._directory / name)
        changed = sum(tail.poll(found.get(name), now) for name, tail in self._files.items()) > 0
        if changed:
            self._changed_at = now
        return changed

    def _found(self) -> dict[str, os.stat_result]:
        found = {}
        try:
            if self._only is not None:
                return {self._only: (self._directory / self._only).stat()}
            with os.scandir(self._directory) as entries:
                for entry in entries:
                    if entry.name.endswith(".jsonl") and entry.name not in self._besides:
                        found[entry.name] = entry.stat()
        except FileNotFoundError:
            return found
        except OSError as error:
            where = str(self._directory)
            raise JournalError(
                f"{where}: {error.strerror or error}", path=where, hint="let this user read it"
            ) from None
        return found

    def _tails(self) -> list[JournalTail]:
        """Those of the newest attempt that have said anything."""
        said = [self._files[name] for name in sorted(self._files) if self._files[name].history.records]
        newest = max((tail.history.attempt for tail in said), default=1)
        return [tail for tail in said if tail.history.attempt == newest]

    @property
    def is_over(self) -> bool:
        """Whether every process has finished or is gone, for a moment by now."""
        tails = self._tails() or list(self._files.values())
        if not tails or not all(tail.is_over for tail in tails):
            return False
        return time.monotonic() - self._changed_at >= self._patience(tails)

    def _patience(self, tails: Collection[JournalTail]) -> float:
        if self._only is None and any(tail.may_restart for tail in tails):
            return _RESTART_S
        return _MISSING_S if self._missing(tails) else _SETTLE_S

    def _missing(self, tails: Collection[JournalTail]) -> int:
        announced = 0
        for tail in tails:
            started = tail.history.started
            size = "" if started is None else started.environment.get("WORLD_SIZE", "")
            if size.isascii() and size.isdecimal() and len(size) < 8:
                announced = max(announced, int(size))
        return 0 if self._only is not None or announced > _MOST_RANKS else max(0, announced - len(tails))

    def sight(self) -> Sight | None:
        """The newest attempt."""
        tails = self._tails()
        if not tails:
            return None
        now = time.time()
        start = Start(
            run=tails[0].history.run,
            attempt=tails[0].history.attempt,
            source="journal",
            origin=self._origin,
            is_whole=self._only is None,
            processes=tuple(tail.process for tail in tails),
        )
        quiet = tuple(max(0.0, now - tail.changed) for tail in tails)
        return Sight(start=start, quiet_s=quiet, missing=self._missing(tails))

    @property
    def _origin(self) -> str:
        return str(self._directory if self._only is None else self._directory / self._only)

    def final(self) -> Start:
        """What the doctor would read; what was read before, where the files are gone."""
        try:
            starts = read_starts(self._origin)
        except JournalError:
            seen = self.sight()
            if seen is None or os.path.exists(self._origin):  # noqa: PTH110 - a name, as it was given
                raise
            return seen.start
        return starts[-1]

    def drain(self) -> None:
        """Nothing waits for a file to be read."""

    def close(self) -> None:
        """No descriptor is kept."""
