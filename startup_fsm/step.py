"""The open state, as the body of a state sees it. It records and measures; it decides nothing."""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from startup_fsm.devices.host import host_available_bytes
from startup_fsm.engine import Graph, Pool
from startup_fsm.events import (
    ArenaMapped,
    DecisionMade,
    GraphCaptured,
    NoteAdded,
    PartEntered,
    ProbeRecorded,
)
from startup_fsm.identity import without_secrets
from startup_fsm.measurement import PURPOSES, Measurement
from startup_fsm.memory import format_bytes

#: States whose KV buffers lie in an arena.
_ON_ARENA = frozenset({"reserve_kv", "commit_kv"})
_THROWAWAY_CAPTURE = "capture_throwaway"
#: Seconds between two notes of how far a state is.
_NOTE_S = 1.0


class LiveStep:
    """
    Implements :class:`startup_fsm.engine.Step` on a device.

    Args:
        state, visit: The open state.
        measurement: Readings and pools of this start.
        show: Gets ``(state, done, total, unit)`` where progress can be seen; None where it cannot.
        boundary: Raises where another rank failed; called where a long state comes to a new part of its work.
    """

    def __init__(
        self,
        state: str,
        visit: int,
        measurement: Measurement,
        *,
        show: Callable[[str, int, int, str], None] | None = None,
        boundary: Callable[[], None] = lambda: None,
    ) -> None:
        self.state = state
        self.visit = visit
        self._measurement = measurement
        self._recorder = measurement.recorder
        self._show = show
        self._boundary = boundary
        self._noted = time.monotonic()
        self._warned = False

    def note(self, **facts: Any) -> None:
        """Record facts that exist only inside this state; names that say secret are withheld."""
        self._recorder.record(NoteAdded(state=self.state, visit=self.visit, note=without_secrets(facts)))

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """A named part of this state; what fails inside carries its name."""
        self._boundary()
        self._recorder.record(PartEntered(state=self.state, part=name, visit=self.visit))
        yield

    def pool(self, purpose: str | None = None) -> Pool:
        """
        The pool of this state, or another of its own by purpose.

        Raises:
            ValueError: In a state whose KV cache lies in an arena.
        """
        if purpose is None and self.state in _ON_ARENA:
            text = f"in {self.state} the KV cache lies in an arena, not in a pool"
            raise ValueError(f"{text}\nhint: make it of step.kv_buffers, or choose the plan throwaway")
        if purpose is None and self.state == "allocate_kv":
            self._warn_of_host()
        return self._pool(purpose)

    def _pool(self, purpose: str | None = None) -> Pool:
        chosen = purpose or PURPOSES.get(self.state, self.state)
        return self._measurement.open_pool(chosen, self.state, self.visit)

    def _warn_of_host(self) -> None:
        """Tensors of a simulated device are memory of this machine, which may not have what the budget gives."""
        device, budgets = self._measurement.device, self._recorder.state.budgets
        room = host_available_bytes()
        if self._warned or device.kind != "simulated" or not device.has_values or not budgets or room is None:
            return
        self._warned = True
        kv_bytes = budgets[-1][1].kv_bytes
        if kv_bytes > room:
            text = f"the KV cache may have {format_bytes(kv_bytes)} of {device.name}; this machine has"
            text = f"{text} {format_bytes(room)} for tensors of your own"
            self.decide("warned_of_host", text, kv_bytes=kv_bytes, available_bytes=room)
            hint = "ask for less, as with Knobs(requested_bytes=1 << 30), or make the cache of step.kv_buffers"
            warnings.warn(f"startup-fsm: {text}; {hint}", RuntimeWarning, stacklevel=3)

    def kv_buffers(self, count: int, block_bytes: int, blocks: int) -> list[Any]:
        """KV memory as ``count`` byte buffers; see :class:`startup_fsm.engine.Step`."""
        if self.state in _ON_ARENA:
            return self._arena_buffers(count, block_bytes, blocks)
        with self._pool():
            return self._measurement.device.buffers(count, block_bytes * blocks)

    def _arena_buffers(self, count: int, block_bytes: int, blocks: int) -> list[Any]:
        if self._measurement.arena is not None:
            text = f"kv_buffers was called twice in {self.state}: an arena has one layout"
            raise ValueError(f"{text}\nhint: ask for all sub-ranges in one call")
        arena = self._measurement.device.reserve(count, block_bytes, blocks)
        self._measurement.arena = arena
        arena.map_blocks(min(blocks, max(1, self._measurement.prefix_blocks)))
        self.arena_mapped()
        return arena.buffers()

    def arena_mapped(self) -> None:
        """Record what the arena holds now."""
        arena = self._measurement.arena
        if arena is not None:
            self._recorder.record(
                ArenaMapped(
                    base=arena.base,
                    mapped_bytes=arena.mapped_bytes,
                    reserved_bytes=arena.reserved_bytes,
                    granule_bytes=arena.granule_bytes,
                    state=self.state,
                    visit=self.visit,
                )
            )

    def capture(self, size: int, body: Callable[[], Any], *, warmups: int = 1, part: str | None = None) -> Graph:
        """Warm up and capture ``body`` into this state's graph pool; one ``graph_captured`` event."""
        self._boundary()
        measurement, device = self._measurement, self._measurement.device
        pool = self._pool()
        if self.state != _THROWAWAY_CAPTURE:
            # Whatever the state is called: these graphs stay, and with them the workspaces that they hold.
            measurement.has_real_graphs = True
        before = device.snapshot()
        began = time.perf_counter_ns()
        graph = device.capture(body, pool, size=size, warmups=warmups)
        duration = time.perf_counter_ns() - began
        after = device.snapshot()
        self._recorder.measuring_ns += before.cost_ns + after.cost_ns
        held, holds = before.pool(pool.id), after.pool(pool.id)
        self._recorder.record(
            GraphCaptured(
                state=self.state,
                visit=self.visit,
                size=size,
                part=part,
                pool=pool.id,
                duration_ns=getattr(graph, "duration_ns", duration),
                pool_delta_bytes=(holds.reserved_bytes if holds else 0) - (held.reserved_bytes if held else 0),
                outside_delta_bytes=after.outside_bytes - before.outside_bytes,
                kept_bytes=(holds.active_bytes if holds else 0) - (held.active_bytes if held else 0),
                nodes=graph.nodes,
                instantiate_bytes=getattr(graph, "instantiate_bytes", None),
                upload_bytes=getattr(graph, "upload_bytes", None),
            )
        )
        return graph

    def probe(self, name: str, result: Mapping[str, Any], **inputs: Any) -> None:
        """Record a raw result that checks will judge."""
        self._recorder.record(
            ProbeRecorded(probe=name, state=self.state, visit=self.visit, inputs=inputs, result=dict(result))
        )

    def skip(self, name: str, reason: str) -> None:
        """Record that a probe did not run, and why."""
        self._recorder.record(ProbeRecorded(probe=name, state=self.state, visit=self.visit, skipped=reason))

    def decide(self, decision: str, reason: str, **inputs: Any) -> None:
        """Record a choice, so that nothing is left out silently."""
        self._recorder.record(DecisionMade(decision=decision, reason=reason, state=self.state, inputs=inputs))

    def workspace(self, name: str, size: int) -> None:
        """Name a persistent workspace and its bytes."""
        self.probe("workspace", {"name": name, "bytes": size})
        self._measurement.workspaces[name] = size

    def progress(self, done: int, total: int, unit: str = "B") -> None:
        """Show progress where there is a terminal; in the journal, at most one note a second."""
        self._boundary()
        if self._show is not None:
            self._show(self.state, done, total, unit)
        now = time.monotonic()
        if now - self._noted >= _NOTE_S:
            # A state that takes less leaves none: nobody is there to see it.
            self._noted = now
            self.note(progress={"done": done, "total": total, "unit": unit})


def terminal_progress() -> Callable[[str, int, int, str], None] | None:
    """Progress on stderr by rich, or None where stderr is no terminal."""
    if sys.stderr is None or not sys.stderr.isatty():
        return None
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    shown: dict[str, Any] = {}

    def show(state: str, done: int, total: int, unit: str) -> None:
        if state not in shown:
            columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"))
            bar = Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True), transient=True)
            bar.start()
            shown[state] = (bar, bar.add_task(state, total=total))
        bar, task = shown[state]
        bar.update(task, completed=done, total=total)
        if done >= total:
            bar.stop()
            del shown[state]

    return show
