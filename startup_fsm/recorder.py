"""The one place where a live start becomes events: stamps the envelope, folds, writes, mirrors, counts its cost."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from startup_fsm.codec import CODEC, Codec
from startup_fsm.events import DecisionMade, Event, Record
from startup_fsm.fold import RunState
from startup_fsm.journal import JournalWriter

Listener = Callable[[Record], None]
Writing = Callable[[Record, bytes], None]


class Recorder:
    """
    Records the events of one process.

    Args:
        run, process, rank: The envelope.
        writer: The journal; None keeps the start in memory only.

    Attributes:
        mirrors: Called with every record and its line, in order, under the lock.
        listeners: Called with every record, outside the lock.
        state: The fold of everything recorded; the live machine stands on it.
        bookkeeping_ns: Time spent here, without syncing.
        measuring_ns: Time spent on snapshots, settling and probes; added to by those who measure.
    """

    def __init__(
        self, run: str, process: str, rank: int | None, writer: JournalWriter | None, codec: Codec = CODEC
    ) -> None:
        self.run = run
        self.process = process
        self.rank = rank
        self.writer = writer
        self.attempt = writer.attempt if writer is not None else 1
        self.state = RunState()
        self.mirrors: list[Writing] = []
        self.listeners: list[Listener] = []
        self.bookkeeping_ns = 0
        self.measuring_ns = 0
        self._codec = codec
        self._began = time.monotonic_ns()
        self._seq = 0
        self._told = False
        self._waiting: deque[Event] = deque()
        self._is_writing = False
        self._pid = os.getpid()
        # The watchdog records from its own thread.
        self._lock = threading.RLock()

    @property
    def is_ours(self) -> bool:
        """False in a forked child: it records nothing."""
        return os.getpid() == self._pid

    @property
    def path(self) -> Path | None:
        """Where the journal is; None for a start in memory."""
        return None if self.writer is None else self.writer.path

    @property
    def now_ns(self) -> int:
        """Monotonic ns since this recorder was made."""
        return time.monotonic_ns() - self._began

    @property
    def syncing_ns(self) -> int:
        """Time that the disk took."""
        return 0 if self.writer is None else self.writer.syncing_ns

    def record(self, event: Event) -> None:
        """
        Record one event; in a forked child, nothing.

        A signal handler may call it too: an event that comes in the middle of another is written right after that one.
        """
        if not self.is_ours:
            return
        before = time.perf_counter_ns()
        with self._lock:
            self._waiting.append(event)
            if self._is_writing:
                return
            records = self._write()
            self.bookkeeping_ns += time.perf_counter_ns() - before
        if self.writer is not None:
            self._tell_trouble(self.writer)
        # Outside the lock: a hook that is overdue is recorded from another thread.
        for record in records:
            for listener in self.listeners:
                listener(record)

    def _write(self) -> list[Record]:
        """Write down what waits, in order."""
        records = []
        self._is_writing = True
        try:
            while self._waiting:
                records.append(self._written(self._waiting.popleft()))
        finally:
            self._is_writing = False
        return records

    def _written(self, event: Event) -> Record:
        record = Record(
            run=self.run,
            process=self.process,
            rank=self.rank,
            attempt=self.attempt,
            seq=self._seq,
            t=self.now_ns,
            kind=event.kind,
            event=event,
        )
        self._seq += 1
        self.state.apply(record)
        if self.writer is not None or self.mirrors:
            line = self._codec.encode(record)
            if self.writer is not None:
                self.writer.append(line)
            for mirror in self.mirrors:
                mirror(record, line)
        return record

    def _tell_trouble(self, writer: JournalWriter) -> None:
        # Once: the mirror, or a disk that has room again, may still carry it to a reader.
        if writer.trouble is not None and not self._told:
            self._told = True
            self.record(DecisionMade(decision="journal_in_memory", reason=writer.trouble, state=self.state.state))

    def sync(self, *, edge: bool = False) -> None:
        """Ask the disk to keep the journal; see :meth:`JournalWriter.sync`."""
        if self.writer is not None and self.is_ours:
            self.writer.sync(edge=edge)

    def close(self) -> None:
        """Let go of the journal."""
        if self.is_ours:
            with self._lock:
                # What a signal handler left that ended the event before it by an exception.
                self._write()
        if self.writer is not None and self.is_ours:
            self.writer.close()
