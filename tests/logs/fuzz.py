"""
Many hostile logs through the importer, and what broke.

    python -m tests.logs.fuzz [--count 1000] [--seed 0] [--jobs 2] [--keep DIR] [--shrink]

Log ``n`` of a run is made from seed + n alone, so each that breaks something can be made again: ``--count 1 --seed N``.
Every failure is told once for each place that it comes from, with its seed; ``--keep`` writes the logs that failed,
``--shrink`` makes them as short as they still fail. Exit code 1 where anything broke.
"""

from __future__ import annotations

import argparse
import collections
import multiprocessing
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Final

import attrs

from tests.logs.fuzz_checks import TooSlow, check
from tests.logs.fuzz_logs import make

#: Every so many logs are held against the schema, and imported.
THOROUGH: Final = 50
_STRIDE: Final = 250


@attrs.frozen
class Failure:
    """A log that broke something: its seed, where the code stood, and what was said."""

    seed: int
    place: str
    text: str


@attrs.define
class Tally:
    """What a run saw; ``slowest`` holds seconds for each 100 KB, seconds, bytes, and seed."""

    logs: int = 0
    size: int = 0
    seconds: float = 0.0
    outcomes: collections.Counter[str] = attrs.field(factory=collections.Counter)
    failures: list[Failure] = attrs.field(factory=list)
    slowest: list[tuple[float, float, int, int]] = attrs.field(factory=list)

    def add(self, other: Tally) -> None:
        """Take in what another part of the run saw."""
        self.logs += other.logs
        self.size += other.size
        self.seconds += other.seconds
        self.outcomes += other.outcomes
        self.failures += other.failures
        self.slowest = sorted([*self.slowest, *other.slowest], reverse=True)[:10]


def failure_of(data: bytes, seed: int, path: Path, tally: Tally | None = None) -> Failure | None:
    """What a log breaks; None where everything holds."""
    path.write_bytes(data)
    try:
        checked = check(path, is_thorough=seed % THOROUGH == 0)
    except (Exception, TooSlow) as error:  # noqa: BLE001 - whatever comes is what is looked for
        return Failure(seed, _place(error), "".join(traceback.format_exception(error))[-3_000:])
    if tally is not None:
        tally.seconds += checked.seconds
        tally.outcomes.update(checked.outcomes or ("nothing",))
        rate = checked.seconds / max(len(data), 50_000) * 100_000
        tally.slowest = sorted([*tally.slowest, (rate, checked.seconds, len(data), seed)], reverse=True)[:10]
    return None


def _place(error: BaseException) -> str:
    """Type and innermost line of ours: failures with one place are one failure."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if "startup_fsm" in frame.filename or "fuzz" in frame.filename]
    frame = ours[-1] if ours else frames[-1]
    return f"{type(error).__name__} at {Path(frame.filename).name}:{frame.lineno} in {frame.name}"


def fuzz(seeds: Iterable[int]) -> Tally:
    """The logs of these seeds."""
    tally = Tally()
    with tempfile.TemporaryDirectory(prefix="fuzz-") as directory:
        path = Path(directory) / "fuzz.log"
        for seed in seeds:
            data = make(seed)
            tally.logs += 1
            tally.size += len(data)
            if (failure := failure_of(data, seed, path, tally)) is not None:
                tally.failures.append(failure)
    return tally


def shrunk(data: bytes, seed: int, path: Path, place: str) -> bytes:
    """As few lines, then as few bytes, as still fail in the same place."""

    def fails(candidate: bytes) -> bool:
        failure = failure_of(candidate, seed, path)
        return failure is not None and failure.place == place

    lines = _fewer(data.split(b"\n"), lambda each: fails(b"\n".join(each)))
    pieces = _fewer([bytes((each,)) for each in b"\n".join(lines)], lambda each: fails(b"".join(each)))
    return b"".join(pieces)


def _fewer(items: list[bytes], fails: Callable[[list[bytes]], bool]) -> list[bytes]:
    size = len(items) // 2
    while size:
        at = 0
        while at < len(items):
            without = items[:at] + items[at + size :]
            if fails(without):
                items = without
            else:
                at += size
        size //= 2
    return items


def _run(count: int, seed: int, jobs: int) -> Iterator[Tally]:
    parts = [range(begin, min(begin + _STRIDE, seed + count)) for begin in range(seed, seed + count, _STRIDE)]
    if jobs == 1:
        yield from map(fuzz, parts)
        return
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        yield from pool.imap_unordered(fuzz, parts)


def main() -> int:
    """A run with a report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--shrink", action="store_true")
    given = parser.parse_args()
    tally, began = Tally(), time.monotonic()
    for part in _run(given.count, given.seed, given.jobs):
        tally.add(part)
    print(f"{tally.logs} logs, {tally.size / 1e6:.1f} MB, {time.monotonic() - began:.0f} s", end="")
    print(f" ({tally.seconds:.0f} s of reading, {tally.size / 1e6 / (tally.seconds or 1):.2f} MB/s)")
    print(", ".join(f"{outcome} {count}" for outcome, count in tally.outcomes.most_common()))
    for rate, seconds, size, seed in tally.slowest:
        print(f"slow: {seconds:.3f} s for {size} bytes ({rate:.3f} s for 100 KB), seed {seed}")
    _tell(tally.failures, given.keep, is_shrinking=given.shrink)
    return 1 if tally.failures else 0


def _tell(failures: list[Failure], keep: Path | None, *, is_shrinking: bool) -> None:
    places: dict[str, list[Failure]] = {}
    for failure in sorted(failures, key=lambda each: each.seed):
        places.setdefault(failure.place, []).append(failure)
    for place, found in places.items():
        print(f"\n== {len(found)} x {place}; seeds {', '.join(str(each.seed) for each in found[:8])}")
        print(found[0].text)
        if keep is None:
            continue
        keep.mkdir(parents=True, exist_ok=True)
        path = keep / f"{found[0].seed}.log"
        data = make(found[0].seed)
        if is_shrinking:
            data = shrunk(data, found[0].seed, path, place)
        path.write_bytes(data)
        print(f"kept as {path}: {data[:400]!r}")


if __name__ == "__main__":
    sys.exit(main())
