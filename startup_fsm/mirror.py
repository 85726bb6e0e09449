"""
The text form of events in log lines, and finding such texts again among any other output.

    startup_fsm|0|<run>|<process>|<attempt>|<seq>|<part>|<of>|<digest>|<check>|<body>|

``body`` is the journal line (or a numbered part of it) with ``"`` written as ``'`` and every byte that some wrapper
may escape written as ``~hh``. So the text is printable ASCII without quotes, backslashes and angle brackets: it
stands in a JSON string as it is, and again inside the JSON string of a container runtime. ``digest`` is BLAKE2b of
the whole journal line, ``check`` the CRC-32 of this text. ``startup_fsm.fishing`` makes journals of them again.
No structlog, torch or asyncio.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO, Final

import attrs

from startup_fsm.codec import CODEC, Codec
from startup_fsm.events import Record

#: What every mirrored text begins with; a stream without these bytes holds none.
MARKER: Final = b"startup_fsm|"

#: Longest mirrored line in bytes, newline included: writes to a pipe are whole up to PIPE_BUF, 4,096 on Linux.
LINE_LIMIT: Final = 4_096

#: Longest text in bytes; what is left of :data:`LINE_LIMIT` is for the key and the other fields of the line.
TEXT_LIMIT: Final = 3_800

_FORMAT: Final = b"0"
_SEPARATORS: Final = 10
_NAME_LIMIT: Final = 200
_PART_LIMIT: Final = 9_999
# Part, count, digest, check and their separators, at their longest.
_TAIL: Final = len("9999|9999|") + 17 + 9 + 1

# A wrapper may write a quote as \u0027 (six bytes), and so on for each further wrapper: a text grows at most so far.
_REGION: Final = 32 << 10
_CHUNK: Final = 1 << 20

# Printable ASCII without what JSON, HTML and our own format escape; the double quote has a sign of its own.
_UNSAFE: Final = re.compile(rb"""[^ !"#$%()*+,\-./0-9:;=?@A-Z\[\]^_`a-z{}]""")
_ESCAPE: Final = re.compile(rb"~([0-9a-f]{2})")
_WRAPPED: Final = re.compile(rb"\\u00([0-9a-fA-F]{2})")
_NUMBER: Final = re.compile(rb"[0-9]{1,19}")

#: An open binary file or pipe, all bytes at once, or lines with or without their newlines.
Source = BinaryIO | bytes | Iterable[bytes | str]

#: Run and process as they stand in the text, and the attempt.
Key = tuple[bytes, bytes, int]


def holds_mirror(block: bytes) -> bool:
    """Whether a block of a stream holds (the beginning of) a mirrored text."""
    return MARKER in block


def mirror_texts(record: Record, line: bytes | None = None, *, codec: Codec = CODEC) -> list[str]:
    """
    One event as texts for log lines: printable ASCII, at most :data:`TEXT_LIMIT` bytes each.

    Args:
        record: The event with its envelope.
        line: What the journal got, where it is at hand: saves encoding it again.
        codec: Encodes the record where ``line`` is None.
    """
    plain = (codec.encode(record) if line is None else line).rstrip(b"\n")
    body = _packed(plain)
    head = b"|".join((_FORMAT, *names(record)[:2], b"%d|%d|" % (record.attempt, record.seq)))
    room = TEXT_LIMIT - len(MARKER) - len(head) - _TAIL
    of = -(-len(body) // room)
    digest = digest_of(plain)
    texts = []
    for part in range(1, of + 1):
        piece = body[(part - 1) * room : part * room]
        front = head + b"%d|%d|%s|" % (part, of, digest)
        texts.append((MARKER + front + _check(front, piece) + b"|" + piece + b"|").decode("ascii"))
    return texts


def names(record: Record) -> Key:
    """Whose event it is, as it stands in the text."""
    return _name(record.run), _name(record.process), record.attempt


def digest_of(plain: bytes) -> bytes:
    """BLAKE2b of a journal line without its newline: 16 hexadecimal digits."""
    # Here and not above: it loads OpenSSL, and most readers of a journal never need it.
    from hashlib import blake2b

    return blake2b(plain, digest_size=8).hexdigest().encode()


def unpacked(body: bytes) -> bytes:
    """The journal line, without its newline, of a whole body."""
    return _ESCAPE.sub(lambda found: bytes((int(found[1], 16),)), body.replace(b"'", b'"'))


def _packed(plain: bytes) -> bytes:
    return _UNSAFE.sub(_escaped, plain).replace(b'"', b"'")


def _escaped(found: re.Match[bytes]) -> bytes:
    return b"~%02x" % found[0][0]


def _name(name: str) -> bytes:
    """A name in the head of a text; a very long one is cut and told apart by its digest."""
    plain = name.encode("utf-8", "backslashreplace")
    packed = _packed(plain)
    return packed if len(packed) <= _NAME_LIMIT else packed[: _NAME_LIMIT - 18] + b"~~" + digest_of(plain)


def _check(front: bytes, piece: bytes) -> bytes:
    return b"%08x" % zlib.crc32(piece, zlib.crc32(front))


@attrs.frozen(slots=True)
class Place:
    """Where something stands in a stream: byte offset, and line from 1."""

    offset: int
    line: int

    def __str__(self) -> str:
        return f"line {self.line}, byte {self.offset}"


@attrs.frozen(slots=True)
class Head:
    """What a text says of itself."""

    key: Key
    seq: int
    part: int
    of: int
    digest: bytes


@attrs.frozen(slots=True)
class Text:
    """
    A mirrored text as it was found.

    Attributes:
        place: Where it begins.
        head: Whose it is; None where that cannot be read, and not to be trusted where ``trouble`` is set.
        body: Its part of the event, packed.
        trouble: What is wrong with it; None for a text that is whole.
    """

    place: Place
    head: Head | None
    body: bytes
    trouble: str | None


def _text(place: Place, region: bytes, *, whole: bool) -> Text:
    region = region[len(MARKER) :]
    if b"\\" in region:
        # None of ours is a backslash: whatever wrapped the line put it there.
        region = _WRAPPED.sub(lambda found: bytes((int(found[1], 16),)), region).replace(b"\\", b"")
    fields = region.split(b"|")
    head = _head(fields)
    trouble = None
    if len(fields) > 1 and fields[0] != _FORMAT and _NUMBER.fullmatch(fields[0]):
        trouble = f"the mirrored text has format {fields[0].decode()}; this version of startup-fsm reads format 0"
    elif not whole or head is None or len(fields) != _SEPARATORS + 1:
        trouble = "the mirrored text is torn"
    elif fields[8] != _check(b"|".join(fields[:8]) + b"|", fields[9]):
        trouble = "the mirrored text does not match its checksum"
    return Text(place, head, b"" if trouble else fields[9], trouble)


def _head(fields: list[bytes]) -> Head | None:
    if len(fields) < 9 or fields[0] != _FORMAT or not all(map(_NUMBER.fullmatch, fields[3:7])):
        return None
    attempt, seq, part, of = map(int, fields[3:7])
    if not 1 <= part <= of <= _PART_LIMIT:
        return None
    return Head((fields[1], fields[2], attempt), seq, part, of, fields[7])


def find_texts(source: Source) -> Iterator[Text | int]:
    """
    Every mirrored text of a stream, whole or not, in the order of the stream; last the number of bytes read.

    Memory is bounded by one block and one text, whatever the length of lines.
    """
    held, offset, line = b"", 0, 1
    for block in _blocks(source):
        held += block
        at = 0
        while (start := held.find(MARKER, at)) >= 0:
            line += held.count(b"\n", at, start)
            end, whole = _end(held, start)
            if end is None:
                at = start
                break
            yield _text(Place(offset + start, line), held[start:end], whole=whole)
            at = end
        else:
            # The last bytes may be the beginning of a marker.
            keep = max(at, len(held) - len(MARKER) + 1)
            line += held.count(b"\n", at, keep)
            at = keep
        held, offset = held[at:], offset + at
    if held.startswith(MARKER):
        yield _text(Place(offset, line), held, whole=False)
    yield offset + len(held)


def _end(held: bytes, start: int) -> tuple[int | None, bool]:
    """Where the text that begins at ``start`` ends, and whether it is whole; None asks for more bytes."""
    first = start + len(MARKER)
    limit = start + _REGION
    stop = held.find(b"\n", first, limit)
    again = held.find(MARKER, first, limit if stop < 0 else stop)
    if again >= 0:
        stop = again
    end = first
    for _ in range(_SEPARATORS):
        end = held.find(b"|", end, limit if stop < 0 else stop) + 1
        if not end:
            break
    if end:
        return end, True
    if stop >= 0:
        return stop, False
    return (limit, False) if len(held) >= limit else (None, False)


def _blocks(source: Source) -> Iterator[bytes]:
    if isinstance(source, (bytes, bytearray, memoryview)):
        yield bytes(source)
        return
    read: Any = getattr(source, "read", None)
    if read is not None:
        while block := read(_CHUNK):
            yield _as_bytes(block)
        return
    for line in [source] if isinstance(source, str) else source:
        block = _as_bytes(line)
        yield block if block.endswith(b"\n") else block + b"\n"


def _as_bytes(block: bytes | str) -> bytes:
    return block.encode("utf-8", "replace") if isinstance(block, str) else bytes(block)
