"""
How large ``startup-fsm report`` makes the page of 8 ranks with 2,000 events each, how long that takes, and how soon the
page can be used, against a page that is empty.

    python benchmarks/report_page.py [--ranks 8] [--events 2000] [--runs 7]

The browser is Debian's chromium, driven by playwright; without one only the writing is measured. Printed: bytes, median
seconds of the whole command, median ms from navigation until the page has drawn itself, the same for an empty page, and
their ratio.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from startup_fsm.codec import CODEC
from startup_fsm.events import (
    BudgetComputed,
    BudgetTerm,
    CheckJudged,
    Event,
    GraphCaptured,
    HookRan,
    NoteAdded,
    PoolOpened,
    ProbeRecorded,
    Record,
    RunFinished,
    RunStarted,
    SnapshotTaken,
    StateEntered,
    StateLeft,
)
from startup_fsm.memory import GIB, MIB, PoolUsage, Snapshot
from startup_fsm.plan import throwaway

#: What is promised: bytes of the page, seconds to write it, ms until it can be used.
LARGEST: Final = 1_500_000
SLOWEST_WRITING: Final = 2.0
SLOWEST_DRAWING: Final = 1_000

EMPTY: Final = """<!doctype html><html lang="en"><meta charset="utf-8"><title>empty</title><body><p>nothing</p>
<script>document.documentElement.dataset.ready = String(Math.round(performance.now()))</script>
"""

TOTAL: Final = 80 * GIB
RUN: Final = "20260101T000000Z-00000000"


def written_start(directory: Path, *, ranks: int, events: int) -> Path:
    """Journals of one start with so many ranks and events of each; the run directory."""
    run = directory / RUN
    run.mkdir(parents=True)
    for rank in range(ranks):
        lines = [CODEC.encode(record) for record in records(rank, events)]
        (run / f"rank-{rank:05}.1.jsonl").write_bytes(b"".join(lines))
    return run


def records(rank: int, count: int) -> Iterator[Record]:
    """A start that comes to ready, with as many captures and notes as it takes to have ``count`` events."""
    t = 0
    for seq, event in enumerate(happened(rank, count)):
        t += 900_000 + (seq * 7919 + rank * 104_729) % 40_000_000
        yield Record(
            run=RUN, process=f"rank-{rank:05}", rank=rank, seq=seq, t=t, kind=event.kind, origin=None, event=event
        )


def happened(rank: int, count: int) -> list[Event]:
    """The events; what does not fit a plain start goes into captures, hooks, probes and notes."""
    plan = throwaway()
    names = [state.name for state in plan.states if state.name != "recover_allocator"]
    found: list[Event] = [
        RunStarted(
            wall_ns=1_790_000_000_000_000_000 + rank * 40_000_000,
            host=f"node{rank // 4}.cluster.example.com",
            pid=41_000 + rank,
            boot_id="0b5c6a1e-6a0e-4d5e-9a55-3b1f8f3f0c11",
            engine="counting",
            device="simulated 80 GiB",
            plan=plan.as_data(),
            knobs={"gpu_memory_utilization": 0.9, "max_model_len": 8192, "model": "/home/somebody/models/secret-8b"},
            environment={"CUDA_VISIBLE_DEVICES": str(rank)},
        )
    ]
    holds = {"default": 0, "kv": 0, "throwaway_graphs": 0, "graphs": 0}
    more = max(0, count - 2 - 7 * len(names)) // 2
    for number, name in enumerate(names):
        source = names[number - 1] if number else None
        found.append(StateEntered(state=name, edge="advance" if number else None, source=source))
        found.append(SnapshotTaken(state=name, label="enter", snapshot=snapshot(holds, rank)))
        if name in ("capture_throwaway", "capture_graphs"):
            purpose = "throwaway_graphs" if name == "capture_throwaway" else "graphs"
            pool = "0.2" if name == "capture_throwaway" else "0.4"
            found.append(PoolOpened(pool=pool, purpose=purpose, state=name))
            found += [filler(name, pool, at, more, rank) for at in range(more)]
            holds[purpose] = 3 * GIB
        changed(name, holds)
        if name == "size_kv":
            found.append(budget(holds, rank))
        found.append(SnapshotTaken(state=name, label="leave", snapshot=snapshot(holds, rank)))
        found.append(CheckJudged(check="neighbours_still", state=name))
        found.append(CheckJudged(check="workspaces_still", state=name))
        found.append(StateLeft(state=name, duration_ns=1_000_000_000, cpu_ns=900_000_000, measuring_ns=2_000_000))
    found.append(RunFinished(end="ready", state="verify", duration_ns=90_000_000_000))
    return found


def filler(state: str, pool: str, at: int, of: int, rank: int) -> Event:
    """What happens between two edges: graphs most of the time, no two alike."""
    if at % 3 == 0:
        return HookRan(hook="lease", moment="on_event", state=state, duration_ns=40_000 + at * 31 + rank)
    if at % 10 == 1:
        result = {"bytes": at * MIB, "name": f"workspace-{at}", "address": f"{(at * 4099 + rank) << 21:x}"}
        return ProbeRecorded(probe="workspace", state=state, result=result)
    if at % 10 == 2:
        return NoteAdded(state=state, note={"tokens": at * 16 + rank, "path": f"/srv/scratch/run-{rank}/part-{at}.bin"})
    return GraphCaptured(
        state=state, size=max(1, of - at), pool=pool, duration_ns=11_000_000 + at * 1_301 + rank,
        pool_delta_bytes=(at % 5) * MIB, outside_delta_bytes=(at % 7 == 0) * 2 * MIB, kept_bytes=at * 4_096, nodes=300,
    )  # fmt: skip


def changed(state: str, holds: dict[str, int]) -> None:
    """What a state does to the pools."""
    if state == "load_weights":
        holds["default"] = 15 * GIB
    elif state == "teardown":
        holds["throwaway_graphs"] = 0
    elif state == "allocate_kv":
        holds["kv"] = 48 * GIB


def budget(holds: dict[str, int], rank: int) -> BudgetComputed:
    """The budget of 80 GiB at 0.9."""
    used = holds["default"] + 2 * GIB
    terms = [("requested", TOTAL * 9 // 10), ("used_by_us", -used), ("graphs", -3 * GIB), ("headroom", -GIB)]
    terms.append(("margin", -(TOTAL // 1000)))
    available = sum(size for _, size in terms) - rank * MIB
    terms.append(("shortfall", -rank * MIB))
    blocks = available // (2 * MIB)
    return BudgetComputed(
        terms=tuple(BudgetTerm(term=name, bytes=size, source="made") for name, size in terms),
        available_bytes=available, block_bytes=2 * MIB, blocks=blocks, kv_bytes=blocks * 2 * MIB,
        requested_bytes=TOTAL * 9 // 10, total_bytes=TOTAL, reachable_bytes=TOTAL - rank * MIB, needed_bytes=GIB,
    )  # fmt: skip


def snapshot(holds: dict[str, int], rank: int) -> Snapshot:
    """A device whose context takes 2 GiB."""
    pools = [
        PoolUsage(pool=f"0.{at}", purpose=purpose, reserved_bytes=size, active_bytes=size)
        for at, (purpose, size) in enumerate(holds.items())
        if size or purpose == "default"
    ]
    reserved = sum(holds.values())
    own = reserved + 2 * GIB + rank * MIB
    return Snapshot(
        total_bytes=TOTAL, free_bytes=TOTAL - own, process_bytes=own, allocated_bytes=reserved, reserved_bytes=reserved,
        allocated_peak_bytes=reserved, reserved_peak_bytes=reserved, pools=tuple(pools), settled=True,
        sources={"torch": "allocator", "process": "nvml"},
    )  # fmt: skip


def written(run: Path, page: Path) -> float:
    """Seconds of the whole command."""
    before = time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", "startup_fsm", "report", str(run), "-o", str(page)], check=True, capture_output=True
    )
    return time.perf_counter() - before


def chromium() -> str | None:
    """Where the browser is; None where there is none."""
    return shutil.which("chromium") or shutil.which("chromium-browser")


def drawn(pages: list[Path], runs: int) -> list[float]:
    """Median ms until each page can be used, in turns."""
    from playwright.sync_api import sync_playwright

    taken: dict[Path, list[float]] = {page: [] for page in pages}
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium(), args=["--no-sandbox"])
        for _ in range(runs + 1):
            for page in pages:
                taken[page].append(ready(browser, page))
        browser.close()
    return [statistics.median(each[1:]) for each in taken.values()]


def ready(browser: Any, page: Path) -> float:
    """Ms from navigation until a page says that it has drawn itself."""
    context = browser.new_context(viewport={"width": 1280, "height": 800}, offline=True)
    tab = context.new_page()
    tab.goto(page.as_uri())
    while (value := tab.evaluate("document.documentElement.dataset.ready ?? null")) is None:
        tab.wait_for_timeout(5)
    context.close()
    return float(value)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--events", type=int, default=2_000)
    parser.add_argument("--runs", type=int, default=7)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        run = written_start(Path(directory), ranks=asked.ranks, events=asked.events)
        page, empty = Path(directory) / "report.html", Path(directory) / "empty.html"
        empty.write_text(EMPTY)
        seconds = statistics.median([written(run, page) for _ in range(asked.runs)])
        sys.stdout.write(f"size     {page.stat().st_size:9,} bytes  (at most {LARGEST:,})\n")
        sys.stdout.write(f"written  {seconds:9.2f} s      (at most {SLOWEST_WRITING:g}, median of {asked.runs})\n")
        if chromium() is None:
            sys.stdout.write("no chromium: the page was not opened\n")
            return
        used, nothing = drawn([page, empty], asked.runs)
        sys.stdout.write(f"usable   {used:9.0f} ms     (at most {SLOWEST_DRAWING}, median of {asked.runs})\n")
        sys.stdout.write(f"empty    {nothing:9.0f} ms\nratio    {used / max(1.0, nothing):9.1f}\n")


if __name__ == "__main__":
    main()
