"""
Strict decode and fold of 10,000 realistic events against orjson alone on the same bytes.

    python benchmarks/decode.py [EVENTS]

Realistic: what starts of the counting engine write, with 51 graphs each, in their own mixture. Prints both times
(best of fifteen) and their ratio.
"""

from __future__ import annotations

import gc
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import orjson

from startup_fsm.bootstrap import Bootstrap
from startup_fsm.codec import CODEC
from startup_fsm.devices.simulated import SimulatedDevice
from startup_fsm.engines.counting import CountingEngine
from startup_fsm.fold import fold
from startup_fsm.memory import GIB, MIB

SIZES = tuple(range(1, 52))
ROUNDS = 15


def lines_of_one_start(directory: Path) -> list[bytes]:
    """The journal of one start, line by line."""
    device = SimulatedDevice(8 * GIB)
    boot = Bootstrap(journal=directory, device=device, discover=False, progress=False)
    boot.run(CountingEngine(device=device, sizes=SIZES, row=MIB // 64))
    if boot.path is None:
        msg = "a start with a journal has a path"
        raise RuntimeError(msg)
    return boot.path.read_bytes().splitlines()


def best(*bodies: Callable[[], object]) -> list[float]:
    """Processor seconds of the fastest round of each, in turn: what else runs on the machine hits both alike."""
    times: list[list[float]] = [[] for _ in bodies]
    for _ in range(ROUNDS):
        for body, taken in zip(bodies, times, strict=True):
            gc.collect()
            before = time.process_time()
            body()
            taken.append(time.process_time() - before)
    return [min(taken) for taken in times]


def main(wanted: int = 10_000) -> float:
    """Measure, print, and return the ratio."""
    with tempfile.TemporaryDirectory() as directory:
        one = lines_of_one_start(Path(directory))
    starts = [one] * (wanted // len(one)) + [one[: wanted % len(one)]]
    plain, ours = best(
        lambda: [[orjson.loads(line) for line in lines] for lines in starts],
        lambda: [fold([CODEC.decode(line) for line in lines]) for lines in starts],
    )
    count = sum(map(len, starts))
    size = sum(len(line) for lines in starts for line in lines)
    print(f"{count} events, {size} bytes: orjson {plain * 1e3:.1f} ms, decode and fold {ours * 1e3:.1f} ms")
    print(f"ratio {ours / plain:.2f}")
    return ours / plain


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
