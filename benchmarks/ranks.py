"""
What agreement over many ranks costs: traffic of a meeting and of an edge, time to hear of a death, time to merge.

    python benchmarks/ranks.py [--tcp] [SIZE ...]

All ranks are threads of this process, so times are an upper bound: they share one interpreter. Counts are exact. With
``--tcp`` they meet in torch's TCPStore, otherwise in memory.
"""

from __future__ import annotations

import argparse
import resource
import tempfile
import threading
import time
from pathlib import Path
from statistics import median

from startup_fsm.agreement import StoreAgreement
from startup_fsm.bootstrap import Bootstrap
from startup_fsm.chain import chain
from startup_fsm.devices.base import Settled
from startup_fsm.devices.simulated import SimulatedDevice
from startup_fsm.diagnose import diagnose
from startup_fsm.engines.counting import CountingEngine
from startup_fsm.errors import PeerFailed
from startup_fsm.memory import GIB
from startup_fsm.ranks import neighbours
from startup_fsm.reading import read_starts
from startup_fsm.testing import MemoryStore

MEETINGS = 20


class QuickDevice(SimulatedDevice):
    """Settles without collecting garbage: all ranks share one heap here, and each would look at all of it."""

    def settle(self, *, clear_workspaces: bool = False) -> Settled:
        if clear_workspaces:
            self.clear_workspaces()
        self.allocator.empty_cache()
        return Settled(polls=1, late_return_bytes=0, duration_ns=0, workspaces_cleared=clear_workspaces)


class Counting:
    """A store that counts what goes over it."""

    def __init__(self, store: object) -> None:
        self.store = store
        self.calls = self.written = self.read = 0

    def set(self, key: str, value: str) -> None:
        self.calls += 1
        self.written += len(key) + len(value)
        self.store.set(key, value)

    def get(self, key: str) -> bytes:
        value = self.store.get(key)
        self.calls += 1
        self.read += len(key) + len(value)
        return value

    def add(self, key: str, amount: int) -> int:
        self.calls += 1
        self.written += len(key) + 8
        return self.store.add(key, amount)

    def check(self, keys: list[str]) -> bool:
        self.calls += 1
        self.read += sum(map(len, keys))
        return self.store.check(keys)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        values = self.store.multi_get(keys)
        self.calls += 1
        self.read += sum(map(len, keys)) + sum(map(len, values))
        return values


def opened(size: int, *, tcp: bool) -> list[Counting]:
    """One client of the store for each rank."""
    if not tcp:
        shared = MemoryStore()
        return [Counting(shared) for _ in range(size)]
    from torch.distributed import TCPStore

    first = TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    rest = [TCPStore("127.0.0.1", first.port, None, is_master=False) for _ in range(size - 1)]
    return [Counting(store) for store in (first, *rest)]


def over(size: int, work: object) -> None:
    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def measured(size: int, *, tcp: bool) -> dict[str, object]:
    """Joining, meetings, edges and a death, for ranks that do nothing else."""
    stores = opened(size, tcp=tcp)
    agreements: list[StoreAgreement] = [None] * size  # type: ignore[list-item]
    line = threading.Barrier(size)
    met: list[list[float]] = [[] for _ in range(size)]
    heard: list[float] = [0.0] * size
    counts: dict[str, float] = {}
    began = time.perf_counter()

    def work(rank: int) -> None:
        agreement = StoreAgreement(rank, size, lambda _: stores[rank], boot="this host", deadline_s=600)
        agreements[rank] = agreement
        agreement.exchange("attempt", 1)
        if line.wait() == 0:
            counts["join_s"] = time.perf_counter() - began
            for store in stores:
                store.calls = store.written = store.read = 0
        line.wait()
        for turn in range(MEETINGS):
            line.wait()
            start = time.perf_counter()
            agreement.exchange("blocks", 100_000 + rank)
            met[rank].append(time.perf_counter() - start)
            if turn == 0 and line.wait() == 0:
                counts["written"] = sum(store.written for store in stores)
                counts["read"] = sum(store.read for store in stores)
                counts["calls"] = sum(store.calls for store in stores)
                for each in agreements:
                    each.links.sent_bytes = each.links.sent_messages = 0
        line.wait()
        agreement.say("capture_throwaway")
        if line.wait() == 0:
            counts["edge_messages"] = sum(each.links.sent_messages for each in agreements) / size
            counts["edge_bytes"] = sum(each.links.sent_bytes for each in agreements) / size
        line.wait()
        if rank == size // 2:
            time.sleep(0.5)
            heard[rank] = time.perf_counter()
            agreement.links.close(well=False)
            return
        try:
            agreement.exchange("never", None)
        except PeerFailed:
            heard[rank] = time.perf_counter()

    over(size, work)
    died = heard.pop(size // 2)
    for agreement in agreements:
        agreement.close(well=False)
    slowest = [max(each[turn] for each in met) for turn in range(MEETINGS)]
    return {
        "ranks": size,
        "neighbours": len(neighbours(0, size)),
        "connections": sum(len(neighbours(rank, size)) for rank in range(size)) // 2,
        "join s": f"{counts['join_s']:.2f}",
        "meeting ms": f"{median(slowest) * 1e3:.1f}",
        "calls a rank": f"{counts['calls'] / size:.1f}",
        "written a rank B": f"{counts['written'] / size:.0f}",
        "read a rank B": f"{counts['read'] / size:.0f}",
        "edge messages a rank": f"{counts['edge_messages']:.0f}",
        "edge B a rank": f"{counts['edge_bytes']:.0f}",
        "death heard by all ms": f"{(max(heard) - died) * 1e3:.0f}",
    }


def journals(size: int) -> dict[str, object]:
    """Whole starts on simulated devices, and what reading all their journals takes."""
    store = MemoryStore()
    with tempfile.TemporaryDirectory() as directory:

        def work(rank: int) -> None:
            device = QuickDevice(4 * GIB + (rank % 7) * (GIB // 64))
            agreement = StoreAgreement(rank, size, lambda _: store, boot="this host", deadline_s=600)
            boot = Bootstrap(journal=directory, device=device, agreement=agreement, discover=False, progress=False)
            boot.run(CountingEngine(device=device))

        began = time.perf_counter()
        over(size, work)
        started = time.perf_counter() - began
        paths = sorted(Path(directory).glob("*/*.jsonl"))
        written = sum(path.stat().st_size for path in paths)
        began = time.perf_counter()
        (start,) = read_starts(directory)
        sources = start.sources
        read = time.perf_counter() - began
        count = sum(len(process.journal.records) for process in start.processes)
        began = time.perf_counter()
        chain(sources)
        merging = time.perf_counter() - began
        began = time.perf_counter()
        verdict = diagnose(sources)
        judged = time.perf_counter() - began
    assert verdict.outcome == "ready"
    return {
        "ranks": size,
        "all ready s": f"{started:.1f}",
        "journal KiB a rank": f"{written / size / 1024:.1f}",
        "records": count,
        "read and fold s": f"{read:.2f}",
        "one clock and chain s": f"{merging:.3f}",
        "diagnose s": f"{judged:.2f}",
    }


def table(rows: list[dict[str, object]]) -> None:
    """As Markdown."""
    print("| " + " | ".join(rows[0]) + " |")
    print("|" + " --- |" * len(rows[0]))
    for row in rows:
        print("| " + " | ".join(str(value) for value in row.values()) + " |")
    print()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sizes", nargs="*", type=int, default=[2, 4, 8, 16, 64, 256])
    parser.add_argument("--tcp", action="store_true")
    given = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    table([measured(size, tcp=given.tcp) for size in given.sizes])
    table([journals(size) for size in given.sizes])


if __name__ == "__main__":
    main()
