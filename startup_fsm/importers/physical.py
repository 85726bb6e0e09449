r"""
Blocks of bytes to lines of text: decoded, split, cleaned, and out of whatever wrapped them.

Incremental and of bounded memory: a line without end is given in the parts that ``\r`` ends, and a part that is too
long is cut. What comes out never depends on where the blocks were cut.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator
from typing import Final

import attrs

from startup_fsm.importers.wrappers import OWN, Wrappers, is_soiled, scrubbed

#: Longest line, or part of one, in bytes of UTF-8.
LIMIT: Final = 64 << 10
#: Bytes that tell the encoding.
_HEAD: Final = 256

_BOMS: Final = ((b"\xef\xbb\xbf", None), (b"\xff\xfe", "utf-16-le"), (b"\xfe\xff", "utf-16-be"))
#: Bytes of UTF-8 that begin no character, and those that begin one of two UTF-16 units.
_CONTINUATION: Final = bytes(range(0x80, 0xC0))
_ASTRAL: Final = bytes(range(0xF0, 0xF8))

#: vLLM up to 0.30 prints the process once a line, so before the first state of a progress bar only.
_WRITER: Final = re.compile(r"\([^()\s][^()]{0,160} ?pid=\d{1,12}[^()]{0,80}\)", re.ASCII)
_NAMED: Final = ("(", "INFO ", "WARNING ", "ERROR ", "DEBUG ", "[20", "[rank")


@attrs.frozen(slots=True)
class Line:
    r"""
    One line of text without anything around it.

    Attributes:
        number: From 1; parts that ``\r`` separates and lines out of one JSON string share it. Never falls.
        text: Without control characters but tab, and without space at its end.
        offset: Bytes that were fed before the physical line, a byte order mark among them.
    """

    number: int
    text: str
    offset: int


class Physical:
    """
    Lines out of the blocks of one file.

    Args:
        number: Of its first line, where the reading begins further down.
    """

    def __init__(self, number: int = 1) -> None:
        self._number = number
        self._offset = 0
        self._head: bytes | None = b""
        self._decoder: codecs.IncrementalDecoder | None = None
        self._wrappers = Wrappers()
        #: The line that has not ended: what is there, how many bytes went before, and whether the rest is left out.
        self._tail = bytearray()
        self._gone = 0
        self._is_skipping = False
        self._writer = ""
        self._cut = 0

    @property
    def cut(self) -> int:
        """How many lines, or parts of one, were longer than :data:`LIMIT`."""
        return self._cut + self._wrappers.cut

    def feed(self, block: bytes) -> Iterator[Line]:
        """The lines that end in a block of any size; to be read to the end before the next one is fed."""
        yield from self._fed(self._decoded(block, is_last=False))

    def close(self) -> Iterator[Line]:
        """What no line feed ended."""
        yield from self._fed(self._decoded(b"", is_last=True))
        last, offset = self._number - 1, self._offset
        if self._tail or self._gone:
            last += 1
            yield from self._ended(bytes(self._tail))
        for text in self._wrappers.close():
            yield from self._parts(text, last, offset)

    def _decoded(self, block: bytes, *, is_last: bool) -> bytes:
        """A block as UTF-8; empty as long as the encoding is not known."""
        if self._head is not None:
            self._head += block
            if len(self._head) < _HEAD and not is_last:
                return b""
            block, self._head = self._head, None
            mark, encoding = _encoding(block)
            self._offset += mark
            block = block[mark:]
            if encoding is not None:
                self._decoder = codecs.getincrementaldecoder(encoding)("replace")
        if self._decoder is None:
            return block
        return self._decoder.decode(block, is_last).encode("utf-8", "replace")

    def _fed(self, data: bytes) -> Iterator[Line]:
        end = data.rfind(b"\n") + 1
        if end:
            whole = bytes(self._tail) + data[:end]
            self._tail.clear()
            yield from self._whole(whole)
        self._tail += data[end:]
        if len(self._tail) > LIMIT or self._is_skipping:
            yield from self._overflown()

    def _whole(self, data: bytes) -> Iterator[Line]:
        """Lines of which every one has ended; the first may have begun in parts that are given already."""
        soiled = is_soiled(data)
        wide = self._decoder is not None
        for raw in data[:-1].split(b"\n"):
            if self._gone or len(raw) > LIMIT:
                yield from self._ended(raw)
                continue
            text = raw.decode("utf-8", "replace")
            if soiled:
                text = scrubbed(text.rstrip("\r"))
            if text.startswith(OWN) and "\r" not in text:
                yield Line(self._number, text.rstrip(), self._offset)
            else:
                for inner in self._wrappers.unwrap(text):
                    yield from self._parts(inner, self._number, self._offset)
            self._number += 1
            self._offset += _width(raw) + 2 if wide else len(raw) + 1

    def _ended(self, raw: bytes) -> Iterator[Line]:
        """A line that is, or was, too long, to its end."""
        self._tail = bytearray(raw)
        yield from self._overflown()
        if not self._is_skipping:
            yield from self._given(bytes(self._tail), is_whole=not self._gone)
        self._gone += self._measured(len(self._tail)) + (1 if self._decoder is None else 2)
        self._tail.clear()
        self._number += 1
        self._offset += self._gone
        self._gone, self._is_skipping, self._writer = 0, False, ""

    def _overflown(self) -> Iterator[Line]:
        r"""Parts of a line that is too long, as ``\r`` ends them; what is left is short, or left out."""
        while True:
            if self._is_skipping:
                end = self._tail.find(b"\r") + 1
                self._drop(end or len(self._tail))
                self._is_skipping = not end
            if self._is_skipping or len(self._tail) <= LIMIT:
                return
            end = self._tail.rfind(b"\r", 0, LIMIT + 1)
            if end < 0:
                self._cut += 1
                self._is_skipping, end = True, LIMIT
            yield from self._given(bytes(self._tail[:end]), is_whole=False)
            self._drop(end if self._is_skipping else end + 1)

    def _given(self, raw: bytes, *, is_whole: bool) -> Iterator[Line]:
        for inner in self._wrappers.unwrap(scrubbed(raw.decode("utf-8", "replace").rstrip("\r"))):
            yield from self._parts(inner, self._number, self._offset, is_whole=is_whole)

    def _parts(self, text: str, number: int, offset: int, *, is_whole: bool = True) -> Iterator[Line]:
        r"""The parts that ``\r`` separates, each with its writer, empty ones left out; an empty line is one part."""
        if "\r" not in text and not self._writer:
            text = text.rstrip()
            if text or is_whole:
                yield Line(number, text, offset)
            return
        parts = [part for each in text.split("\r") if (part := each.rstrip())]
        for part in parts or ([""] if is_whole else []):
            writer = _WRITER.match(part)
            if writer is not None:
                self._writer = writer[0]
                if part == self._writer and len(parts) > 1:
                    continue
            is_named = part.startswith(_NAMED) or not (part and self._writer)
            yield Line(number, part if is_named else f"{self._writer} {part}", offset)
        if is_whole:
            self._writer = ""

    def _drop(self, size: int) -> None:
        self._gone += self._measured(size)
        del self._tail[:size]

    def _measured(self, size: int) -> int:
        return size if self._decoder is None else _width(self._tail[:size])


def _encoding(head: bytes) -> tuple[int, str | None]:
    """Length of a byte order mark, and UTF-16 by it or by every other byte that is NUL; None is UTF-8."""
    for mark, encoding in _BOMS:
        if head.startswith(mark):
            return len(mark), encoding
    even, odd = head[:_HEAD:2], head[1:_HEAD:2]
    for encoding, text, nuls in (("utf-16-le", even, odd), ("utf-16-be", odd, even)):
        if len(nuls) >= 4 and nuls.count(0) > 0.7 * len(nuls) and text.count(0) < 0.1 * len(text):
            return 0, encoding
    return 0, None


def _width(raw: bytes | bytearray) -> int:
    """Bytes that a piece of UTF-8 had as UTF-16."""
    units = len(raw.translate(None, _CONTINUATION)) + len(raw) - len(raw.translate(None, _ASTRAL))
    return 2 * units
