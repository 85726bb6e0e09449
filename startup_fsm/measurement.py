"""
What is measured at the edges of a live start: F0, F1, F1b and F2, peaks, the proof of teardown, the budget's inputs.

    F0   settled, nothing captured                                   end of profile_activations
    F1   throwaway graphs and profiling KV alive, cache emptied      end of capture_throwaway
    F1b  graphs released and proven gone, settled                    recurring = F1 - F1b, in bytes of ours
    F2   KV released and proven gone, settled                        one_time = F2 - F0

Bytes of this process are compared, not free memory, wherever the device tells them apart: a neighbour that moves
meanwhile is then nobody's graph.
"""

from __future__ import annotations

from typing import Final

import attrs

from startup_fsm import budget, estimators, probes
from startup_fsm.checks.readings import GRAPH_POOLS, graph_pools_of_engine, pools_of_graphs_grew, reserved_in
from startup_fsm.devices.base import Arena, Device, Settled
from startup_fsm.engine import Pool
from startup_fsm.events import (
    BudgetComputed,
    EstimateMade,
    PoolOpened,
    PoolReleased,
    ProbeRecorded,
    SnapshotTaken,
)
from startup_fsm.memory import MIB, Snapshot
from startup_fsm.recorder import Recorder

#: Purposes of pools, by the state that opens them.
PURPOSES = {
    "bootstrap_kv": "profiling_kv",
    "capture_throwaway": "throwaway_graphs",
    "allocate_kv": "kv",
    "capture_graphs": "graphs",
}
#: The driver moves in 2 MiB pages and there are two readings.
_ERROR_OF_ALL: Final = 4 * MIB
#: What the better rules were off by over 27 workloads, most of the time.
_ERROR_OF_SOME: Final = 64 * MIB
CAPTURED_ALREADY: Final = "captured already"
#: What asking takes beyond what was asked for: the allocator's segments are of 20 MiB, the driver's pages of 2.
_SEGMENT: Final = 24 * MIB
_KV = ("profiling_kv", "kv")


@attrs.define
class Measurement:
    """
    The readings and pools of one live start.

    Attributes:
        device: The door to memory.
        recorder: Where readings go.
        pools: Open pools by purpose.
        readings: Settled snapshots by label.
        profile_peak: Reserved peak in bytes of the largest eager step; None until it was profiled.
        late_return: Most bytes that came back late while settling.
        recurring: Measured bytes of the throwaway graphs; None until they were torn down.
        shortfall: What a failed try of this start lacked, in bytes.
        learned_graphs: What the graphs turned out to take in a failed try, in bytes.
        has_real_graphs: From the first real capture on nothing clears workspaces: they are baked into the graphs.
        has_trial: Whether throwaway graphs were captured that no teardown has measured yet.
        sizes: All sizes that will have a graph, largest first; empty where nobody said.
        method: How an estimate goes on from the sizes that were captured.
        sample: How many of the largest sizes are captured for it; None for all.
        arena: The KV arena, where the plan has one.
        prefix_blocks: KV blocks that are mapped before capture.
        workspaces: Bytes of persistent workspaces that the engine named.
    """

    device: Device
    recorder: Recorder
    pools: dict[str, Pool] = attrs.field(factory=dict)
    readings: dict[str, Snapshot] = attrs.field(factory=dict)
    profile_peak: int | None = None
    late_return: int = 0
    recurring: int | None = None
    shortfall: int = 0
    learned_graphs: int = 0
    has_real_graphs: bool = False
    has_trial: bool = False
    sizes: tuple[int, ...] = ()
    method: estimators.Method = "all"
    sample: int | None = None
    arena: Arena | None = None
    prefix_blocks: int = 1
    workspaces: dict[str, int] = attrs.field(factory=dict)

    def snapshot(self, state: str, visit: int, label: str, *, settled: bool = False) -> Snapshot:
        """Take and record one snapshot."""
        snapshot = self.device.snapshot(settled=settled)
        self.recorder.measuring_ns += snapshot.cost_ns
        self.recorder.record(SnapshotTaken(state=state, visit=visit, label=label, snapshot=snapshot))
        return snapshot

    def settle(self, state: str, visit: int, label: str, *, clear_workspaces: bool) -> Snapshot:
        """Settle, then take the reading that a decision rests on."""
        settled = self.device.settle(clear_workspaces=clear_workspaces and self._may_clear())
        self.recorder.measuring_ns += settled.duration_ns
        self.late_return = max(self.late_return, settled.late_return_bytes)
        self._record_settled(state, visit, label, settled)
        self.readings[label] = self.snapshot(state, visit, label, settled=True)
        return self.readings[label]

    def _may_clear(self) -> bool:
        """Whether no graph can be alive that has a workspace baked in: none of ours, none in an engine's own pools."""
        if self.has_real_graphs:
            return False
        if not self._has_foreign_graphs():
            return True
        # A graph that only a cycle still holds is nobody's.
        self.recorder.measuring_ns += self.device.settle(clear_workspaces=False).duration_ns
        return not self._has_foreign_graphs()

    def _has_foreign_graphs(self) -> bool:
        return any(self.device.has_graphs(pool) for pool in self.device.snapshot().foreign_pools)

    def _record_settled(self, state: str, visit: int, label: str, settled: Settled) -> None:
        self.recorder.record(
            ProbeRecorded(
                probe="settle",
                state=state,
                visit=visit,
                inputs={"label": label},
                result=attrs.asdict(settled),
                cost_ns=settled.duration_ns,
            )
        )

    def open_pool(self, purpose: str, state: str, visit: int) -> Pool:
        """The open pool of that purpose, or a new one."""
        if purpose not in self.pools:
            pool = self.device.open_pool(purpose)
            self.pools[purpose] = pool
            self.recorder.record(PoolOpened(pool=pool.id, purpose=purpose, state=state, visit=visit))
        return self.pools[purpose]

    def entering(self, state: str, visit: int) -> None:
        """Peaks begin with the state; then the ``enter`` snapshot is taken."""
        self.device.reset_peaks()
        self.readings["enter"] = self.snapshot(state, visit, "enter")

    def leaving(self, state: str, visit: int) -> None:
        """What is read when a state ends well; the ``leave`` snapshot comes after it."""
        if state == "profile_activations":
            peak = self.snapshot(state, visit, "peak")
            self.profile_peak = max(self.profile_peak or 0, peak.reserved_peak_bytes)
            self.settle(state, visit, "F0", clear_workspaces=True)
        elif state == "capture_throwaway":
            alive = self.settle(state, visit, "F1", clear_workspaces=False)
            self.has_trial |= self._has_captured(state, alive)
        elif state == "teardown":
            self.tear_down(state, visit)
        elif state == "capture_graphs":
            alive = self.settle(state, visit, "F3", clear_workspaces=False)
            self.has_real_graphs |= self._has_captured(state, alive)
            self._compare(alive.own_bytes - self.readings["enter"].own_bytes, state, visit)

    def _has_captured(self, state: str, alive: Snapshot) -> bool:
        """Whether graphs were captured in this state, by us or by the engine itself."""
        return bool(self._captures(state)) or pools_of_graphs_grew(self.readings["enter"], alive)

    def tear_down(self, state: str, visit: int) -> None:
        """Release graphs, then KV, each with its proof; and make the estimate where the readings allow it."""
        after_graphs = self._release(GRAPH_POOLS, "F1b", state, visit)
        # Before the reading that the next budget takes for what is free.
        self._close_arena(state, visit)
        after_kv = self._release(_KV, "F2", state, visit)
        if self.has_trial:
            self._estimate(self.readings["F1"], after_graphs, after_kv, state)
        self.has_trial = False

    def _close_arena(self, state: str, visit: int) -> None:
        """Give the arena back, unless something still points into it: then it stays, and a check will say so."""
        if self.arena is None:
            return
        found = probes.holders(self.device.holder_test(None))
        if found:
            self._record_holders("kv", state, visit, {"pool": "arena"}, self.arena.mapped_bytes, found)
            return
        self.arena.close()
        self.arena = None

    def gone(self, purpose: str, state: str, visit: int) -> None:
        """A graph pool that a repair ended: it is not ours any more, and no graph of it lives."""
        pool = self.pools.pop(purpose)
        self.has_real_graphs = False
        left = reserved_in(self.device.snapshot(), pool.id)
        self.recorder.record(PoolReleased(pool=pool.id, purpose=purpose, state=state, visit=visit, left_bytes=left))

    def _release(self, purposes: tuple[str, ...], label: str, state: str, visit: int) -> Snapshot:
        """Release the pools of these purposes, settle once, and record what each of them still holds."""
        pools = {purpose: self.pools.pop(purpose) for purpose in purposes if purpose in self.pools}
        tests = {purpose: self.device.holder_test(pool.id) for purpose, pool in pools.items()}
        if any(pool.use_count() > 1 for pool in pools.values()):
            # Graphs that only a cycle still holds are nobody's.
            self.recorder.measuring_ns += self.device.settle(clear_workspaces=False).duration_ns
        before = self.device.snapshot()
        counts = {purpose: pool.use_count() for purpose, pool in pools.items()}
        if purposes == GRAPH_POOLS and all(count <= 1 for count in counts.values()):
            # Real graphs are gone too, from here on nothing is baked in any more; what an engine captured into pools
            # of its own is looked for before anything is cleared.
            self.has_real_graphs = False
        for pool in pools.values():
            pool.release()
        after = self.settle(state, visit, label, clear_workspaces=True)
        if purposes == GRAPH_POOLS:
            self._find_engine_pools(after, state, visit)
        for purpose, pool in pools.items():
            held, left = reserved_in(before, pool.id), reserved_in(after, pool.id)
            self.recorder.record(
                PoolReleased(
                    pool=pool.id,
                    purpose=purpose,
                    state=state,
                    visit=visit,
                    use_count=counts[purpose],
                    held_bytes=held,
                    left_bytes=left,
                )
            )
            if left or counts[purpose] > 1:
                found = probes.holders(tests[purpose])
                self._record_holders(
                    purpose, state, visit, {"pool": pool.id, "use_count": counts[purpose]}, left, found
                )
        return after

    def _find_engine_pools(self, after: Snapshot, state: str, visit: int) -> None:
        """Who holds pools that the engine opened itself for its graphs, and whether a graph of it is alive."""
        for name, had in sorted(graph_pools_of_engine(self.recorder.state).items()):
            if (left := reserved_in(after, name) - had) <= 0:
                continue
            has_graphs = self.device.has_graphs(name)
            found = probes.holders(self.device.holder_test(name))
            self._record_holders(name, state, visit, {"pool": name}, left, found, has_graphs=has_graphs)

    def _record_holders(
        self,
        purpose: str,
        state: str,
        visit: int,
        inputs: dict[str, object],
        left: int,
        found: list[probes.Holder],
        **more: object,
    ) -> None:
        self.recorder.record(
            ProbeRecorded(
                probe=f"holders_{purpose}",
                state=state,
                visit=visit,
                inputs=inputs,
                result={"left_bytes": left, "holders": [attrs.asdict(holder) for holder in found], **more},
            )
        )

    def _estimate(self, alive: Snapshot, after_graphs: Snapshot, after_kv: Snapshot, state: str) -> None:
        """What the graphs take, from what came back; a profiling KV cache outside our pools comes back with them."""
        baseline = self.readings.get("F0")
        returned = alive.own_bytes - after_graphs.own_bytes
        seen = self._captures("capture_throwaway")
        sizes = self.sizes or tuple(each.size for each in seen)
        # An engine that captures by itself does not say what; we asked for the largest of them.
        count = len(seen) or len(sizes[: self.sample])
        is_whole = count >= len(sizes)
        if seen:
            self.recurring = estimators.total(self.method, seen, sizes, returned)
        else:
            # Each of the others takes no more than the larger ones did.
            self.recurring = returned if is_whole else returned * len(sizes) // count
        self.recorder.record(
            EstimateMade(
                estimate="graphs",
                method="release" if is_whole else self.method,
                recurring_bytes=self.recurring,
                one_time_bytes=0 if baseline is None else after_kv.own_bytes - baseline.own_bytes,
                kv_bytes=after_graphs.own_bytes - after_kv.own_bytes,
                seen=count,
                of=len(sizes),
                error_bytes=_ERROR_OF_ALL if is_whole else _ERROR_OF_SOME,
                readings={
                    label: self.readings[label].own_bytes
                    for label in ("F0", "F1", "F1b", "F2")
                    if label in self.readings
                },
                state=state,
            )
        )

    def _captures(self, state: str) -> tuple[estimators.Captured, ...]:
        visit = self.recorder.state.last(state)
        return () if visit is None else estimators.captured([event for _, event in visit.captures])

    def _compare(self, actual: int, state: str, visit: int) -> None:
        """How far off the estimate was, and what the other rules would have said from the same first graphs."""
        if self.has_real_graphs:
            # Should this start go back to sizing, it knows what its graphs take.
            self.learned_graphs = max(self.learned_graphs, actual)
        seen = self._captures(state)
        if not seen:
            return
        said = estimators.every_rule(seen, [each.size for each in seen], actual)
        result: dict[str, int | None] = {"actual_bytes": actual, "estimated_bytes": self.recurring}
        result |= {f"{rule}_bytes": value for rule, value in said.items() if rule != "all"}
        self.recorder.record(ProbeRecorded(probe="estimators", state=state, visit=visit, result=result))

    def learn(self, state: str, tried: int, free: int) -> None:
        """After ``tried`` bytes were asked for and ``free`` were free: what the next try of this start must leave."""
        if state == "capture_graphs":
            seen = self.device.snapshot().own_bytes - self.readings["enter"].own_bytes + tried
            self.learned_graphs = max(self.recurring or 0, seen, 2 * self.learned_graphs)
        elif state in ("allocate_kv", "commit_kv"):
            # What somebody else took meanwhile the next budget sees as memory that is not free.
            self.shortfall = max(2 * self.shortfall, budget.LEAST_MARGIN)
        elif state == "verify":
            self.shortfall = max(2 * self.shortfall, tried - free + _SEGMENT, budget.LEAST_MARGIN)

    def lacking(self, computed: BudgetComputed) -> int:
        """Bytes that a budget with these lessons would miss, given the one that failed; not positive when it fits."""
        more = max(0, self.shortfall + budget.term(computed, "shortfall"))
        if not self._captures_first(computed):
            more += max(0, self.learned_graphs + budget.term(computed, "graphs"))
        return more + (computed.needed_bytes or computed.block_bytes) - computed.available_bytes

    @staticmethod
    def _captures_first(computed: BudgetComputed) -> bool:
        """Whether the graphs were captured before sizing, so that they are in what we use and not in a term."""
        return budget.source_of(computed, "graphs") == CAPTURED_ALREADY

    def lessons(self) -> dict[str, int]:
        """What failed tries taught, in bytes, for the journal."""
        return {"learned_graph_bytes": self.learned_graphs, "shortfall_bytes": self.shortfall}
