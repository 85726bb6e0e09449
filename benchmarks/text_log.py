"""
How long the doctor takes over the text log of a server that has served for weeks, and how much memory.

    python benchmarks/text_log.py [--log START.log] [--size 1024] [--runs 3]

A real start is followed by generated access and statistics lines up to so many MiB. The doctor, a whole process, and
``grep -cE`` with ten fragments read the same file in turns. Then the doctor reads a log of 100 KB, and a process
imports the libraries that it stands on. Printed: medians in seconds, ratios, limits, and the peak of resident memory.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

#: Most that the doctor may take in units of ``grep``, in MB, and in units of the imports.
LIMIT, MEMORY_MB, SMALL_LIMIT = 4.0, 100, 2.5

#: What is looked for, with ``grep``.
TEN: Final = (
    "Traceback|out of memory|Killed|died unexpectedly|API server version|LLM engine|server_args=|Load weight begin"
    "|to load model|broadcast block found"
)

#: What the doctor stands on.
IMPORTS: Final = "import attrs, cattrs, orjson, rich.console, rich.table, cyclopts"

_HERE: Final = Path(__file__).resolve().parent
_START: Final = _HERE.parent / "tests" / "logs" / "started" / "ready.log"


def serving_lines(seed: int = 0) -> Iterator[str]:
    """Lines of a server at work, without end: requests, and statistics every ten of them."""
    draw = random.Random(seed)
    while True:
        for _ in range(9):
            address = f"10.0.{draw.randrange(256)}.{draw.randrange(256)}:{draw.randrange(1024, 65536)}"
            path = draw.choice(("/v1/chat/completions", "/v1/completions", "/health", "/metrics"))
            yield f'(APIServer pid=300) INFO:     {address} - "POST {path} HTTP/1.1" 200 OK\n'
        clock = f"01-15 {draw.randrange(24):02}:{draw.randrange(60):02}:{draw.randrange(60):02}"
        yield (
            f"(APIServer pid=300) INFO {clock} [loggers.py:271] Engine 000: Avg prompt throughput:"
            f" {draw.random() * 9000:.1f} tokens/s, Avg generation throughput: {draw.random() * 900:.1f} tokens/s,"
            f" Running: {draw.randrange(200)} reqs, Waiting: {draw.randrange(9)} reqs, GPU KV cache usage:"
            f" {draw.random() * 100:.1f}%, Prefix cache hit rate: {draw.random() * 100:.1f}%\n"
        )


def write_log(path: Path, start: bytes, size: int) -> None:
    """A start, then serving lines up to ``size`` bytes."""
    lines = serving_lines()
    piece = "".join(next(lines) for _ in range(40_000)).encode()
    with path.open("wb") as file:
        file.write(start)
        while file.tell() < size:
            file.write(piece[: size - file.tell()])


def timed(command: list[str]) -> tuple[float, int, bytes]:
    """Seconds, peak of resident memory in KiB, and what a command printed."""
    before = time.perf_counter()
    with tempfile.TemporaryFile() as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
        _, _, usage = os.wait4(process.pid, 0)
        taken = time.perf_counter() - before
        process.returncode = 0
        out.seek(0)
        return taken, usage.ru_maxrss, out.read()


def compared(one: list[str], other: list[str], runs: int) -> tuple[float, float, int]:
    """Medians of two commands that are run in turns, and the peak of the first."""
    both = [(timed(one), timed(other)) for _ in range(runs + 1)][1:]
    first = statistics.median(each[0][0] for each in both)
    second = statistics.median(each[1][0] for each in both)
    return first, second, max(each[0][1] for each in both)


def main() -> None:
    """Both comparisons."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--log", type=Path, default=_START)
    parser.add_argument("--size", type=int, default=1024, metavar="MIB")
    parser.add_argument("--runs", type=int, default=3)
    arguments = parser.parse_args()
    start = arguments.log.read_bytes()
    doctor = [sys.executable, "-m", "startup_fsm", "doctor"]
    with tempfile.TemporaryDirectory() as directory:
        large, small = Path(directory) / "large.log", Path(directory) / "small.log"
        write_log(large, start, arguments.size << 20)
        grep = ["grep", "-cE", TEN, str(large)]
        ours, theirs, peak = compared([*doctor, str(large)], grep, arguments.runs)
        size = f"{arguments.size} MiB: doctor {ours:.2f} s, grep {theirs:.2f} s"
        print(f"{size}, ratio {ours / theirs:.2f} (at most {LIMIT})")
        print(f"peak memory {peak / 1000:.0f} MB (at most {MEMORY_MB})")
        write_log(small, start, 100_000)
        imports = [sys.executable, "-c", IMPORTS]
        ours, theirs, _ = compared([*doctor, str(small)], imports, 5 * arguments.runs)
        size = f"100 KB: doctor {ours * 1000:.0f} ms, imports {theirs * 1000:.0f} ms"
        print(f"{size}, ratio {ours / theirs:.2f} (at most {SMALL_LIMIT})")


if __name__ == "__main__":
    main()
