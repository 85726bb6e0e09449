"""
The mirror: every event also as a structured log line, so that the output of a container holds the journal.

The only module that imports structlog, with a logger of its own: ``structlog.configure`` is never called and has no
effect here. What a line holds, and how it is read back, is in :mod:`startup_fsm.mirror`.
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
import threading
from collections.abc import MutableMapping
from typing import IO, Any, Final

import orjson
import structlog

from startup_fsm.codec import CODEC, Codec
from startup_fsm.events import Record
from startup_fsm.mirror import LINE_LIMIT, mirror_texts

#: The field that holds the mirrored text.
KEY: Final = "journal"

# The names beside the text are for people; a state or a kind may be as long as it likes, a line may not.
_NAME_LIMIT: Final = 48
_ORDER: Final = ("timestamp", "level", "event", "process", "state", KEY)
_LEVELS: Final = {
    "state_failed": "error",
    "peer_failed": "error",
    "oom_observed": "error",
    "hook_failed": "warning",
    "recovery_chosen": "warning",
    "signal_received": "warning",
    "state_stalled": "warning",
}
_FULL_S: Final = 1.0
# What JSON would escape, which makes a line longer than it looks.
_PLAIN: Final = dict.fromkeys([*range(32), 127, ord('"'), ord("\\")], "?")


class Mirror:
    """
    Writes events as log lines of at most 4,096 bytes, newline included.

    One ``write`` a line where the stream has a file descriptor: a pipe keeps such lines whole, whoever else writes to
    it. A stream that cannot be written turns the mirror off, said once; nothing is ever raised. A forked child's copy
    writes nothing.

    Args:
        stream: Text or binary; None takes ``sys.stderr``, or ``sys.stdout`` with ``stdout``.
        stdout: Which of the two.
        codec: Encodes events that come without their line.

    Attributes:
        trouble: Why it is off; None while it is on.
    """

    def __init__(
        self, stream: IO[str] | IO[bytes] | None = None, *, stdout: bool = False, codec: Codec = CODEC
    ) -> None:
        self.trouble: str | None = None
        self._codec = codec
        self._pid = os.getpid()
        chosen = stream if stream is not None else (sys.stdout if stdout else sys.stderr)
        self._log: Any = structlog.wrap_logger(
            _Lines(chosen),
            processors=[
                structlog.processors.add_log_level,
                structlog.processors.TimeStamper(fmt="iso", utc=True),
                _rendered,
            ],
            wrapper_class=structlog.make_filtering_bound_logger(0),
            context_class=dict,
            cache_logger_on_first_use=True,
        )

    def write(self, record: Record, line: bytes | None = None) -> None:
        """
        One event; larger ones take several lines.

        Args:
            record: The event with its envelope.
            line: What the journal got, where it is at hand: saves encoding it again.
        """
        if self.trouble is not None or os.getpid() != self._pid:
            return
        try:
            say = getattr(self._log, _LEVELS.get(record.kind, "info"))
            names = {"process": _short(record.process)}
            if state := getattr(record.event, "state", None):
                names["state"] = _short(str(state))
            for text in mirror_texts(record, line, codec=self._codec):
                say(_short(record.kind), **names, **{KEY: text})
        except Exception as error:  # noqa: BLE001 - a log line is never worth a start
            self._turn_off(error)

    def _turn_off(self, error: Exception) -> None:
        self.trouble = f"{type(error).__name__}: {error}"
        # It may be stderr itself that broke, or there is none.
        with contextlib.suppress(Exception):
            sys.stderr.write(
                f"startup-fsm: events are no longer mirrored: {self.trouble}; the start and its journal go on\n"
                "hint: the reader of this output has gone, or its disk is full\n"
            )


class _Lines:
    """What structlog calls a logger: takes rendered lines, one ``write`` each."""

    def __init__(self, stream: IO[Any] | None) -> None:
        self._stream = stream
        self._lock = threading.Lock()

    def info(self, line: bytes) -> None:
        if self._stream is None:
            msg = "this process has no such stream"
            raise OSError(msg)
        try:
            # Asked each time: a stream that was closed says so, and its number may be another file's by now.
            descriptor = self._stream.fileno()
        except (OSError, AttributeError):
            # No descriptor: kept in memory, or captured. One that is closed raises ValueError.
            with self._lock:
                self._stream.write(line.decode() if _is_text(self._stream) else line)
                self._stream.flush()
        else:
            _write(descriptor, line)

    warning = error = info


def _is_text(stream: IO[Any]) -> bool:
    return isinstance(getattr(stream, "encoding", None), str) or not hasattr(stream, "readinto")


def _write(descriptor: int, line: bytes) -> None:
    while True:
        try:
            line = line[os.write(descriptor, line) :]
        except BlockingIOError:
            # A pipe that somebody made non-blocking, and that is full: whole or not at all.
            poll = select.poll()
            poll.register(descriptor, select.POLLOUT)
            if not poll.poll(_FULL_S * 1_000):
                msg = f"nobody reads it: full for {_FULL_S:g} s"
                raise OSError(msg) from None
        if not line:
            return


def _short(name: str) -> str:
    plain = name[:_NAME_LIMIT].encode("ascii", "replace").decode()
    return plain.translate(_PLAIN) + ("..." if len(name) > _NAME_LIMIT else "")


def _rendered(_: Any, __: str, fields: MutableMapping[str, Any]) -> bytes:
    line = orjson.dumps({name: fields[name] for name in _ORDER if name in fields}) + b"\n"
    if len(line) > LINE_LIMIT:
        line = orjson.dumps({KEY: fields[KEY]}) + b"\n"
    return line
