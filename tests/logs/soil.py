"""
Logs as they come out of container runtimes, journals, shippers, terminals and editors. No line is lost.

Each way of soiling takes the lines of a log as bytes, without their ends, and gives the bytes of a file. What is random
is drawn from a seed, so a log is always soiled in the same way.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable
from typing import Final

Lines = list[bytes]
Soiler = Callable[[Lines, random.Random], bytes]

_BAR: Final = (
    b"Fetching 4 files:  50%|#####     | 2/4 [00:01<00:01,  1.5it/s]\r"
    b"Fetching 4 files: 100%|##########| 4/4 [00:02<00:00,  2.0it/s]\r"
)
#: The same on a very wide terminal: longer than docker's entries are, and of few states.
_WIDE_BAR: Final = b"".join(b"Fetching 4 files:  %d%%|%s| %d/4\r" % (25 * at, b"#" * 5_000, at) for at in range(5))
#: Bytes after which docker begins another entry.
_CHUNK: Final = 16 << 10
#: What a writer that is no text leaves in a log.
_JUNK: Final = (b"\x00garbled \x80\xff\xfe bytes", b"\xc3\x28 \xa0\xa1", b"\xf0\x28\x8c\x28 not a letter")


def _joined(lines: Iterable[bytes], end: bytes = b"\n") -> bytes:
    return b"".join(line + end for line in lines)


def _stamp(number: int, rng: random.Random) -> bytes:
    return b"2026-01-15T%02d:%02d:%02d.%09dZ" % (
        10 + number // 3600,
        number // 60 % 60,
        number % 60,
        rng.randrange(10**9),
    )


def _compose(lines: Lines, rng: random.Random) -> Lines:
    return [b"vllm-1  | " + line for line in lines]


def _numbered_service(lines: Lines, rng: random.Random) -> Lines:
    return [b"inference-server-12 | " + line for line in lines]


def _cri(lines: Lines, rng: random.Random) -> Lines:
    stream = rng.choice([b"stdout", b"stderr"])
    return [b"%s %s F %s" % (_stamp(number, rng), stream, line) for number, line in enumerate(lines)]


def _cri_in_halves(lines: Lines, rng: random.Random) -> Lines:
    """The runtime writes long lines in parts, each of which is a line of the file."""
    halves: Lines = []
    for number, line in enumerate(lines):
        rest = line
        while len(rest) > 120:
            at = _boundary(rest, rng.randrange(60, 120))
            halves.append(b"%s stderr P %s" % (_stamp(number, rng), rest[:at]))
            rest = rest[at:]
        halves.append(b"%s stderr F %s" % (_stamp(number, rng), rest))
    return halves


def _boundary(line: bytes, at: int) -> int:
    """The same place, or before it, where no letter of several bytes is cut."""
    while at > 1 and line[at] & 0xC0 == 0x80:
        at -= 1
    return at


def _journald(lines: Lines, rng: random.Random) -> Lines:
    return [
        b"Jan 15 10:%02d:%02d node7 python3[4242]: " % (n // 60 % 60, n % 60) + line for n, line in enumerate(lines)
    ]


def _journald_iso(lines: Lines, rng: random.Random) -> Lines:
    stamp = b"2026-01-15T10:%02d:%02d+0000 node7 vllm-serve[77]: "
    return [stamp % (n // 60 % 60, n % 60) + line for n, line in enumerate(lines)]


def _kubectl(lines: Lines, rng: random.Random) -> Lines:
    return [b"[pod/vllm-5d9c7b6f4-x2x9q/server] " + line for line in lines]


def _shipped(lines: Lines, rng: random.Random) -> Lines:
    return [
        b"2026-01-15 10:%02d:%02d.%03d  " % (n // 60 % 60, n % 60, rng.randrange(1000)) + line
        for n, line in enumerate(lines)
    ]


def _stamped(lines: Lines, rng: random.Random) -> Lines:
    return [_stamp(number, rng) + b" " + line for number, line in enumerate(lines)]


def _coloured(lines: Lines, rng: random.Random) -> Lines:
    return [b"\x1b[36m" + line + b"\x1b[0m" for line in lines]


def _coloured_inside(lines: Lines, rng: random.Random) -> Lines:
    """Process, level and file in colours of their own, as an engine writes to a terminal."""
    found: Lines = []
    for line in lines:
        painted = line
        for level, code in ((b"INFO", b"32"), (b"WARNING", b"33"), (b"ERROR", b"31"), (b"DEBUG", b"37")):
            painted = painted.replace(level + b" ", b"\x1b[" + code + b"m" + level + b"\x1b[0m ", 1)
        name, bracket, rest = painted.partition(b") ")
        if bracket and name.startswith(b"("):
            painted = b"\x1b[0;36m" + name + b")\x1b[0;0m " + rest
        found.append(painted)
    return found


def _docker_json(lines: Lines, rng: random.Random) -> Lines:
    streams = ("stdout", "stderr")
    return [_entry(line.decode("utf-8", "replace") + "\n", rng.choice(streams)) for line in lines]


def _docker_json_in_chunks(lines: Lines, rng: random.Random) -> Lines:
    """Docker cuts a line every 16 KiB, and an entry ends with a line end only where the line does."""
    entries: Lines = []
    for line in lines:
        bar = _WIDE_BAR if rng.random() < 0.1 else b""
        text, stream = (bar + line).decode("utf-8", "replace") + "\n", rng.choice(("stdout", "stderr"))
        while len(text.encode()) > _CHUNK:
            first = text.encode()[:_CHUNK].decode()
            entries.append(_entry(first, stream))
            text = text[len(first) :]
        entries.append(_entry(text, stream))
    return entries


def _entry(text: str, stream: str) -> bytes:
    return json.dumps({"log": text, "stream": stream, "time": "2026-01-15T10:00:00.000000000Z"}).encode()


def _shipper_json(lines: Lines, rng: random.Random) -> Lines:
    return [
        json.dumps(
            {"@timestamp": "2026-01-15T10:00:00.000Z", "level": "info", "message": line.decode("utf-8", "replace")}
        ).encode()
        for line in lines
    ]


def _with_bars(lines: Lines, rng: random.Random) -> Lines:
    """A bar of somebody else without an end stands before some lines."""
    return [(_BAR if rng.random() < 0.2 else b"") + line for line in lines]


def _with_junk(lines: Lines, rng: random.Random) -> Lines:
    found: Lines = []
    for line in lines:
        if rng.random() < 0.2:
            found.append(rng.choice(_JUNK))
        found.append(line)
    return found


def _twice(outer: Callable[[Lines, random.Random], Lines], inner: Callable[[Lines, random.Random], Lines]) -> Soiler:
    return lambda lines, rng: _joined(outer(inner(lines, rng), rng))


def _once(way: Callable[[Lines, random.Random], Lines]) -> Soiler:
    return lambda lines, rng: _joined(way(lines, rng))


def _windows(lines: Lines, rng: random.Random) -> bytes:
    return _joined(lines, b"\r\n")


def _wide(encoding: str, mark: bytes, end: bytes) -> Soiler:
    return lambda lines, _: mark + _joined(lines, end).decode("utf-8", "replace").encode(encoding)


def _marked(lines: Lines, rng: random.Random) -> bytes:
    """The mark that editors put before UTF-8."""
    return b"\xef\xbb\xbf" + _joined(lines)


def _without_an_end(lines: Lines, rng: random.Random) -> bytes:
    return _joined(lines)[:-1]


WAYS: Final[dict[str, Soiler]] = {
    "compose": _once(_compose),
    "compose, numbered": _once(_numbered_service),
    "cri": _once(_cri),
    "cri in halves": _once(_cri_in_halves),
    "journald": _once(_journald),
    "journald iso": _once(_journald_iso),
    "kubectl": _once(_kubectl),
    "shipper": _once(_shipped),
    "stamps": _once(_stamped),
    "ansi": _once(_coloured),
    "ansi inside": _once(_coloured_inside),
    "docker json": _once(_docker_json),
    "docker json in chunks": _once(_docker_json_in_chunks),
    "shipper json": _once(_shipper_json),
    "bars": _once(_with_bars),
    "junk": _once(_with_junk),
    "crlf": _windows,
    "utf-8 with a mark": _marked,
    "utf-16 le": _wide("utf-16-le", b"\xff\xfe", b"\n"),
    "utf-16 be": _wide("utf-16-be", b"\xfe\xff", b"\r\n"),
    "no last end": _without_an_end,
    "compose of cri": _twice(_compose, _cri),
    "kubectl of stamps": _twice(_kubectl, _stamped),
    "journald of compose": _twice(_journald, _compose),
    "docker json of ansi": _twice(_docker_json, _coloured_inside),
    "compose of bars and junk": lambda lines, rng: _joined(_with_junk(_compose(_with_bars(lines, rng), rng), rng)),
}


def soiled(log: bytes, way: str, seed: str) -> bytes:
    """
    A log that went through something.

    Args:
        log: Its bytes, as its engine wrote them.
        way: A key of ``WAYS``.
        seed: What its random parts are drawn from.
    """
    lines = log.removesuffix(b"\n").split(b"\n")
    return WAYS[way](lines, random.Random(f"{way} {seed}"))
