"""
Hostile logs, each from a seed: kept logs and lines of the grammars, cut, mixed and soiled.

A mutation takes lines and gives lines; lines are bytes without their end, and what is between two may be more than a
line feed when all is done.
"""

from __future__ import annotations

import base64
import functools
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Final

from tests.logs import fuzz_words as words

Lines = list[bytes]
Mutation = Callable[[Lines, random.Random], Lines]

_HERE: Final = Path(__file__).parent
#: A log is cut to so many bytes; what is larger is made by :data:`HEAVY`.
LONGEST: Final = 200_000

_PIECES: Final = (
    *(
        b"\0",
        b"\0" * 50,
        b"\r",
        b"\r\r\r",
        b"\n",
        b"\r\n",
        b"\t",
        b"\x0b",
        b"\x0c",
        b"\x1c",
        b"\x85",
        b"\x7f",
        b"\x08" * 9,
    ),
    *(
        b"\x1b[31m",
        b"\x1b[0m",
        b"\x1b[" + b"1;" * 200 + b"m",
        b"\x1b]8;;http://x\x07",
        b"\x1b]0;" + b"t" * 3000,
        b"\x9b2J",
    ),
    *(
        b"\x1b",
        b"\x1b[",
        b"\x1bP",
        b"^[[1;36m",
        b"[0;36m",
        b"#033[1m",
        b"\xff\xfe",
        b"\xfe\xff",
        b"\xef\xbb\xbf",
        b"\xff",
    ),
    *(
        b"\xc3",
        b"\xed\xa0\x80",
        b"\xf4\x90\x80\x80",
        b"\xc0\x80",
        "A\u0301\u200b\u00a0".encode(),
        "\u2028\u2029".encode(),
    ),
    *(
        "INFO".encode("utf-16-le"),
        "Traceback".encode("utf-16-be"),
        "\u202edaolk\u202c\u2066".encode(),
        "\U0001f600".encode(),
    ),
    *(
        b"<script>alert(1)</script>",
        b"<img src=x onerror=y>",
        b"[bold red]x[/bold red]",
        b"[/]",
        b"@everyone",
        b"@user/team",
    ),
    *(
        b"`",
        b"```",
        b"``` x ```",
        b"|",
        b"\\",
        b"\\`",
        b"](http://x)",
        b"![x](y)",
        b"&lt;",
        b"&#64;",
        b"<!--",
        b"]]>",
        b"${x}",
    ),
    *(
        b"../../x",
        b"/../../etc/passwd",
        b"%s%n%x",
        b"{0.__class__}",
        b"' OR 1=1 --",
        b"\x00\x01\x02",
        b"(",
        b")" * 60,
        b"[" * 300,
    ),
    *(
        b"startup_fsm|0|r|p|1|0|1|1|",
        b"startup_fsm|",
        b"startup_fsm|0|a|b|1|5|1|1|00|00|{'v':1}|",
        b'{"v":1,"run":"x",',
    ),
    *(
        b"Traceback (most recent call last):",
        b"Tried to allocate 2.00 GiB",
        b"Killed",
        b"[repeated 999999999x across cluster]",
    ),
)


@functools.cache
def kept() -> tuple[bytes, ...]:
    """The logs that are kept beside this file."""
    return tuple(path.read_bytes() for path in sorted(_HERE.rglob("*.log")))


def make(seed: int) -> bytes:
    """The log of a seed: the same bytes wherever grammars and kept logs are the same."""
    draw = random.Random(seed)
    lines = _base(draw)
    for _ in range(draw.choice((0, 1, 1, 2, 2, 3, 4, 6))):
        lines = draw.choice(MUTATIONS)(lines, draw)
    data = _joined(lines, draw)[:LONGEST]
    for _ in range(draw.choice((0, 0, 1, 2))):
        data = draw.choice((_truncated, _flipped, _soiled, _soiled))(data, draw)
    if draw.random() < 0.02:
        encoding = draw.choice(("utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-8-sig"))
        data = data.decode("utf-8", "replace").encode(encoding)[:LONGEST]
    return data


def _base(draw: random.Random) -> Lines:
    logs = kept()
    kind = draw.random()
    if kind < 0.45 or not logs:
        return [each.encode("utf-8", "replace") for each in words.synthetic(draw, draw.choice((1, 5, 20, 60, 150)))]
    lines = draw.choice(logs).split(b"\n")
    if kind < 0.6:
        begin = draw.randrange(len(lines))
        return lines[begin : begin + draw.choice((3, 30, 300))]
    return lines if kind < 0.9 else [*lines, *draw.choice(logs).split(b"\n")]


def _joined(lines: Lines, draw: random.Random) -> bytes:
    between = draw.choice((b"\n", b"\n", b"\n", b"\n", b"\n", b"\r\n", b"\r", b"\n\n"))
    return between.join(lines) + draw.choice((b"\n", b"\n", b""))


def _truncated(data: bytes, draw: random.Random) -> bytes:
    return data[: draw.randrange(len(data) + 1)]


def _flipped(data: bytes, draw: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(min(len(data), draw.choice((1, 5, 50)))):
        changed[draw.randrange(len(data))] = draw.randrange(256)
    return bytes(changed)


def _soiled(data: bytes, draw: random.Random) -> bytes:
    for _ in range(draw.choice((1, 3, 20))):
        at = draw.randrange(len(data) + 1)
        data = data[:at] + draw.choice(_PIECES) + data[at:]
    return data


def _dropped(lines: Lines, draw: random.Random) -> Lines:
    share = draw.random()
    return [each for each in lines if draw.random() < share]


def _doubled(lines: Lines, draw: random.Random) -> Lines:
    return [each for each in lines for _ in range(draw.choice((1, 1, 1, 2, 5)))]


def _shuffled(lines: Lines, draw: random.Random) -> Lines:
    return draw.sample(lines, len(lines))


def _reversed(lines: Lines, draw: random.Random) -> Lines:
    return lines[::-1]


def _interleaved(lines: Lines, draw: random.Random) -> Lines:
    others = [_base(draw) for _ in range(draw.choice((1, 2, 4)))]
    left = [list(reversed(each)) for each in (lines, *others)]
    mixed: Lines = []
    while left := [each for each in left if each]:
        mixed.append(draw.choice(left).pop())
    return mixed


def _glued(lines: Lines, draw: random.Random) -> Lines:
    """Halves of lines, each behind one of another line."""
    halves = [(each[: (cut := draw.randrange(len(each) + 1))], each[cut:]) for each in lines]
    firsts, seconds = [one for one, _ in halves], [other for _, other in halves]
    draw.shuffle(seconds)
    return [one + other for one, other in zip(firsts, seconds, strict=True)]


def _renumbered(lines: Lines, draw: random.Random) -> Lines:
    """Hostile numbers where numbers were."""
    share = draw.choice((0.02, 0.2, 1.0))
    return [_with_numbers(each, draw) if draw.random() < share else each for each in lines]


def _with_numbers(line: bytes, draw: random.Random) -> bytes:
    pieces = words.NUMBERS.split(line)
    for at in range(1, len(pieces), 2):
        if draw.random() < 0.3:
            pieces[at] = draw.choice(words.HOSTILE_NUMBERS).encode("utf-8", "replace")
    return b"".join(pieces)


_UNITS: Final = (b"GiB", b"GB", b"MiB", b"MB", b"KiB", b"bytes", b"TiB", b" B", b"PiB", b"gib", b"")


def _other_units(lines: Lines, draw: random.Random) -> Lines:
    return [each.replace(draw.choice(_UNITS[:4]), draw.choice(_UNITS)) for each in lines]


def _long_line(lines: Lines, draw: random.Random) -> Lines:
    filling = draw.choice(
        (b"x", b" ", b"a b ", b"(", b"\r", b"1,", b"TP0 ", b"-", b"::", b"/", b"\xe2\x96\x88", b"x\r")
    )
    long = filling * (draw.choice((300, 5_000, 70_000)) // len(filling))
    at = draw.randrange(len(lines) + 1)
    before = lines[at - 1] if at else b""
    return [*lines[:at], before + long, long + before, *lines[at:]]


def _chained(lines: Lines, draw: random.Random) -> Lines:
    deep = words.traceback(draw, draw.choice((3, 40, 200)))
    at = draw.randrange(len(lines) + 1)
    return [*lines[:at], *(each.encode("utf-8", "replace") for each in deep), *lines[at:]]


def _many_ranks(lines: Lines, draw: random.Random) -> Lines:
    said = words.message(draw).encode("utf-8", "replace")
    count = draw.choice((8, 64, 1_500))
    ranks = [b"(Worker_TP%d pid=%d) INFO 01-02 03:04:05 [a.py:1] %s" % (each, each, said) for each in range(count)]
    return [*lines, *ranks]


def _mislabelled(lines: Lines, draw: random.Random) -> Lines:
    label = draw.choice(words.HOSTILE_LABELS).encode("utf-8", "replace")
    return [each.replace(b" TP0", label).replace(b" pid=", label + b" pid=") for each in lines]


def _settings(lines: Lines, draw: random.Random) -> Lines:
    at = draw.randrange(len(lines) + 1)
    said = [(words.prefix(draw) + words.settings(draw)).encode("utf-8", "replace") for _ in range(draw.randint(1, 4))]
    return [*lines[:at], *said, *lines[at:]]


def _crash_loop(lines: Lines, draw: random.Random) -> Lines:
    times = draw.choice((3, 30, 400))
    banner = draw.choice((b"INFO 01-02 03:04:05 [api_server.py:1] vLLM API server version 0.11.0", *lines[:2]))
    return [banner, *lines[: draw.choice((0, 2, 9))]] * times


def _hostile_json(draw: random.Random) -> bytes:
    text = words.line(draw)
    deep = draw.choice((3, 300, 2_000))
    value = draw.choice(
        (
            json.dumps({"log": text + "\n", "stream": "stderr", "time": "2026-01-02T03:04:05Z"}),
            '{"log":' * deep + json.dumps(text) + "}" * deep,
            '{"message":' + "[" * deep + "]" * deep + "}",
            json.dumps({"log": json.dumps({"log": json.dumps({"log": text})})}),
            '{"log": "a", "log": ' + json.dumps(text) + ', "stream": 7}',
            '{"message": ' + draw.choice(("1" + "0" * 400, "NaN", "1e999", "null", "[1,2,300]", "[65,66]", "{}")) + "}",
            '{"log": "\\ud800\\udfff \\u0000 \\u001b[31m", "stream": "stdout", "logtag": "P"}',
            json.dumps(
                {"levelname": "ERROR", "message": text, "asctime": "01-02 03:04:05", "name": "x", "process": 10**30}
            ),
            json.dumps({"MESSAGE": list(text.encode("utf-8", "replace")[:200])}),
            json.dumps({"v": 1, "run": "x", "process": "p", "seq": 0, "kind": "run_started", "payload": {}}),
            json.dumps(
                {"level": "INFO", "message": "\n".join([text] * 20), "timestamp": "2026-01-02 03:04:05", "name": "vllm"}
            ),
        )
    )
    return value.encode("utf-8", "replace")


def _with_json(lines: Lines, draw: random.Random) -> Lines:
    for _ in range(draw.choice((1, 5))):
        at = draw.randrange(len(lines) + 1)
        lines = [*lines[:at], _hostile_json(draw), *lines[at:]]
    return lines


def _wrapped(lines: Lines, draw: random.Random) -> Lines:
    """All lines behind what a runtime, a shipper or a launcher puts before them."""
    kind = draw.randrange(7)
    if kind == 0:
        return [
            json.dumps({"log": each.decode("utf-8", "replace") + "\n", "stream": "stderr"}).encode() for each in lines
        ]
    if kind == 1:
        tags = (b"F", b"F", b"P")
        return [b"2026-01-02T03:04:05.678901234Z stderr %s %s" % (draw.choice(tags), each) for each in lines]
    heads = (b"vllm-1  | ", b"[1,0]<stderr>: ", b"Jan  2 03:04:05 node vllm[77]: ", b"pod-a-b app ", b"<6>")
    return [heads[kind - 2] + each for each in lines]


def _mirrored(lines: Lines, draw: random.Random) -> Lines:
    """Fragments of our own mirrored lines, which a log may hold torn."""
    torn = b"startup_fsm|0|run|%s|1|%d|1|1|%s|" % (base64.b32encode(draw.randbytes(5)), draw.randrange(9), b"0" * 16)
    at = draw.randrange(len(lines) + 1)
    return [*lines[:at], torn[: draw.randrange(len(torn))] + draw.choice(_PIECES), *lines[at:]]


def _soiled_lines(lines: Lines, draw: random.Random) -> Lines:
    share = draw.choice((0.05, 0.5))
    return [_soiled(each, draw) if draw.random() < share else each for each in lines]


MUTATIONS: Final[tuple[Mutation, ...]] = (
    *(_dropped, _doubled, _shuffled, _reversed, _interleaved, _glued, _renumbered, _renumbered, _other_units),
    *(_long_line, _chained, _many_ranks, _mislabelled, _settings, _crash_loop, _with_json, _wrapped, _soiled_lines),
    *(_mirrored,),
)
