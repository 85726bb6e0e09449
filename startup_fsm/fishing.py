"""
Journals out of mirrored lines: what a container printed is read like the files that it wrote.

Texts in, journals out, as :func:`startup_fsm.journal.read_journal` gives them, so that everything else works on them
unchanged. No structlog, torch or asyncio.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Literal

import attrs

from startup_fsm.codec import CODEC, MAX_LINE, Codec
from startup_fsm.errors import DecodeError
from startup_fsm.events import Record
from startup_fsm.journal import Journal, Problem, file_name
from startup_fsm.mirror import Head, Key, Place, Source, Text, digest_of, find_texts, names, unpacked

_PENDING_LIMIT: Final = 64 << 20
_PROBLEM_LIMIT: Final = 1_000


@attrs.frozen(kw_only=True)
class Catch:
    """
    What was fished out of a stream.

    Attributes:
        journals: One for each start of a process, in the order of run, process and attempt; records in the order of
            ``seq``. Two starts under one name and attempt, as in a container that restarts without its journal, are
            two journals.
        problems: Torn texts of which nobody can say whose they are.
        texts: Mirrored texts that were whole, repetitions included.
        size: Bytes read.
    """

    journals: tuple[Journal, ...]
    problems: tuple[Problem, ...]
    texts: int
    size: int


def fish(source: Source, path: str = "-", *, codec: Codec = CODEC) -> Catch:
    """
    Find mirrored texts among other text, put parts together, and give the journals they came from.

    The stream is read in blocks; text before and after on the same line, wrappers that escape, repeated lines and any
    order are all right. What is missing or torn is a problem, never an exception.

    Args:
        source: A binary file or pipe, bytes, or lines.
        path: Name of the source in the paths of the journals.
        codec: Decodes the events.

    Raises:
        UnknownSchema: A whole event was written by a newer version.
    """
    net = _Net(codec)
    size = 0
    for text in find_texts(source):
        if isinstance(text, int):
            size = text
        else:
            net.take(text)
    return net.catch(path, size)


@attrs.frozen(slots=True)
class _Caught:
    """A whole event, and where its text (the first of its parts) stands."""

    place: Place
    digest: bytes
    record: Record
    size: int


@attrs.define(slots=True)
class _Parts:
    """The parts of one event that came so far."""

    place: Place
    head: Head
    pieces: dict[int, bytes]
    size: int = 0


@attrs.frozen(slots=True)
class _Loss:
    """Something that could not be read; nobody's where ``head`` is None."""

    place: Place
    message: str
    head: Head | None

    @property
    def seq(self) -> int:
        return 0 if self.head is None else self.head.seq

    def problem(self, kind: Literal["torn", "broken"]) -> Problem:
        text = f"{self.place}: {self.message}"
        return Problem(kind=kind, offset=self.place.offset, line=self.place.line, message=text)


_Start = dict[int, _Caught]
_Event = tuple[Key, int, bytes, int]


class _Net:
    """Gathers texts in any order."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self._starts: dict[Key, list[_Start]] = {}
        self._pending: dict[_Event, _Parts] = {}
        self._pending_bytes = 0
        self._losses: list[_Loss] = []
        self._unlisted = 0
        self._count = 0

    def take(self, text: Text) -> None:
        """One text, whole or torn."""
        head = text.head
        if head is None or text.trouble is not None:
            self._lose(text.place, text.trouble or "the mirrored text is torn", head)
            return
        self._count += 1
        if self._has(head):
            return
        if head.of == 1:
            self._decode(text.place, head, text.body)
        else:
            self._add(text.place, head, text.body)

    def _has(self, head: Head) -> bool:
        starts = self._starts.get(head.key, ())
        return any(head.seq in start and start[head.seq].digest == head.digest for start in starts)

    def _add(self, place: Place, head: Head, body: bytes) -> None:
        event = (head.key, head.seq, head.digest, head.of)
        parts = self._pending.setdefault(event, _Parts(place, head, {}))
        if head.part in parts.pieces:
            return
        parts.pieces[head.part] = body
        parts.size += len(body)
        self._pending_bytes += len(body)
        if len(parts.pieces) == head.of:
            del self._pending[event]
            self._pending_bytes -= parts.size
            self._decode(parts.place, head, b"".join(parts.pieces[part] for part in range(1, head.of + 1)))
        while self._pending_bytes > _PENDING_LIMIT:
            self._give_up(next(iter(self._pending)))

    def _give_up(self, event: _Event) -> None:
        parts = self._pending.pop(event)
        self._pending_bytes -= parts.size
        head = parts.head
        missing = [str(part) for part in range(1, head.of + 1) if part not in parts.pieces]
        shown = ", ".join(missing[:8]) + (", ..." if len(missing) > 8 else "")
        self._lose(
            parts.place, f"seq {head.seq} came in {head.of} parts, of which {len(missing)} are missing: {shown}", head
        )

    def _decode(self, place: Place, head: Head, body: bytes) -> None:
        plain = unpacked(body)
        if digest_of(plain) != head.digest or len(plain) >= MAX_LINE:
            self._lose(place, f"seq {head.seq} does not match its digest", head)
            return
        try:
            record = self._codec.decode(plain)
        except DecodeError as error:
            self._lose(place, error.message, head)
            return
        if names(record) != head.key or record.seq != head.seq:
            self._lose(place, f"seq {head.seq} holds seq {record.seq} of {record.process}", head)
            return
        starts = self._starts.setdefault(head.key, [{}])
        # Another event under the same number is another start; what follows belongs to the latest.
        if head.seq in starts[-1]:
            starts.append({})
        starts[-1][head.seq] = _Caught(place, head.digest, record, len(plain) + 1)

    def _lose(self, place: Place, message: str, head: Head | None) -> None:
        if len(self._losses) < _PROBLEM_LIMIT:
            self._losses.append(_Loss(place, message, head))
        else:
            self._unlisted += 1

    def catch(self, path: str, size: int) -> Catch:
        """Close the net: what is still in parts is lost."""
        for event in list(self._pending):
            self._give_up(event)
        journals: list[Journal] = []
        for key in sorted(self._starts):
            losses = [loss for loss in self._losses if loss.head is not None and loss.head.key == key]
            journals.extend(_journals(path, self._starts[key], losses))
        stray = [loss for loss in self._losses if loss.head is None or loss.head.key not in self._starts]
        if self._unlisted:
            stray.append(_Loss(self._losses[-1].place, f"and {self._unlisted} more torn texts after this one", None))
        problems = tuple(loss.problem("broken") for loss in stray)
        return Catch(journals=tuple(journals), problems=problems, texts=self._count, size=size)


def _journals(path: str, starts: list[_Start], losses: list[_Loss]) -> Iterator[Journal]:
    # A torn text that came again whole is no loss; a loss belongs to the first start that lacks its event.
    of_start: list[list[_Loss]] = [[] for _ in starts]
    for loss in losses:
        lacking = [index for index, start in enumerate(starts) if loss.seq not in start]
        if lacking:
            of_start[lacking[0]].append(loss)
    for index, start in enumerate(starts):
        caught = [start[seq] for seq in sorted(start)]
        first = caught[0].record
        name = f"{path}#{first.run}/{file_name(first.process, first.attempt)}" + (f"#{index + 1}" if index else "")
        records = tuple(each.record for each in caught)
        yield Journal(name, records, tuple(_problems(caught, of_start[index])), sum(each.size for each in caught))


def _problems(caught: list[_Caught], losses: list[_Loss]) -> Iterator[Problem]:
    """Losses and gaps in the order of ``seq``; what is lost behind the last event is torn, as in a file."""
    waiting = sorted(losses, key=lambda loss: loss.seq)
    expected = 0
    for each in caught:
        seq = each.record.seq
        while waiting and waiting[0].seq < seq:
            yield waiting.pop(0).problem("broken")
        if seq != expected:
            text = f"{each.place}: seq {seq} where {expected} should stand"
            yield Problem(kind="gap", offset=each.place.offset, line=each.place.line, message=text, seq=seq)
        expected = seq + 1
    for loss in waiting:
        yield loss.problem("torn")
