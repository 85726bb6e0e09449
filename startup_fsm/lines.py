"""
Blocks of a journal file to its lines, whether the file is whole or still grows.

Of a line longer than :data:`startup_fsm.codec.MAX_LINE` only its first bytes are held. No torch, no structlog.
"""

from __future__ import annotations

from collections.abc import Iterator

import attrs

from startup_fsm.codec import MAX_LINE


@attrs.frozen(slots=True)
class Line:
    """
    One line of a file.

    Attributes:
        number: From 1.
        offset: Of its first byte.
        text: Its bytes without the newline, cut where it is too long.
        length: Bytes that it has in the file, without the newline.
        complete: Whether its newline is there.
    """

    number: int
    offset: int
    text: bytes
    length: int
    complete: bool


class Lines:
    """Takes the bytes of a file in order, gives its lines; half a line is kept until it is whole."""

    def __init__(self) -> None:
        self._number = 1
        self._offset = 0
        self._held = bytearray()
        self._length = 0

    @property
    def offset(self) -> int:
        """Bytes in whole lines so far."""
        return self._offset

    @property
    def taken(self) -> int:
        """Bytes taken so far, half a line included."""
        return self._offset + self._length

    def feed(self, block: bytes) -> Iterator[Line]:
        """The next bytes; the lines that they make whole."""
        start = 0
        while (end := block.find(b"\n", start)) >= 0:
            self._hold(block, start, end)
            yield Line(self._number, self._offset, bytes(self._held), self._length, complete=True)
            self._offset += self._length + 1
            self._number, start = self._number + 1, end + 1
            self.forget_half()
        self._hold(block, start, len(block))

    def _hold(self, block: bytes, start: int, end: int) -> None:
        self._length += end - start
        if len(self._held) <= MAX_LINE:
            self._held += block[start : min(end, start + MAX_LINE + 1 - len(self._held))]

    def forget_half(self) -> None:
        """What came of a line that is not whole is taken again: its writer has cut it off."""
        self._held.clear()
        self._length = 0

    def rest(self) -> Line | None:
        """The last line, where its newline is missing."""
        if not self._length:
            return None
        return Line(self._number, self._offset, bytes(self._held), self._length, complete=False)
