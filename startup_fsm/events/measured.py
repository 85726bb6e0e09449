"""What was measured or seen: memory, probes, pools, graphs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import attrs

from startup_fsm.events.envelope import Event
from startup_fsm.memory import Snapshot


@attrs.frozen(kw_only=True)
class SnapshotTaken(Event):
    """
    Memory at one instant.

    Attributes:
        state, visit: The open state, and which visit of it, from 1.
        label: ``enter``, ``leave``, ``fail``, or a name such as ``F1b``.
        snapshot: The readings.
    """

    kind: ClassVar[str] = "snapshot_taken"

    state: str | None
    visit: int = 1
    label: str
    snapshot: Snapshot


@attrs.frozen(kw_only=True)
class ProbeRecorded(Event):
    """
    A look at the live process that only it could take; the raw result, never a judgement.

    Attributes:
        probe: Its name.
        state, visit: The open state, and which visit of it, from 1.
        inputs: What it was asked, as plain data.
        result: What it saw, as plain data.
        cost_ns: What it cost.
        skipped: Why it did not run; None where it did.
    """

    kind: ClassVar[str] = "probe_recorded"

    probe: str
    state: str | None = None
    visit: int = 1
    inputs: Mapping[str, Any] = attrs.field(factory=dict)
    result: Mapping[str, Any] = attrs.field(factory=dict)
    cost_ns: int = 0
    skipped: str | None = None


@attrs.frozen(kw_only=True)
class FigureRead(Event):
    """
    A figure of the shared list, as the engine said it.

    Attributes:
        figure: Its name in the list.
        value: In bytes where its name ends so, else a count or a share.
        state: The state in which it was said; None where that is not known.
        unit: How it was printed, such as ``GiB``; None for bytes and counts.
    """

    kind: ClassVar[str] = "figure_read"

    figure: str
    value: int | float
    state: str | None = None
    unit: str | None = None


@attrs.frozen(kw_only=True)
class NoteAdded(Event):
    """
    Facts that exist only inside a state.

    Attributes:
        state, visit: The open state, and which visit of it, from 1.
        note: Name to plain value; bytes where the name says so. Values whose names say secret are withheld.
    """

    kind: ClassVar[str] = "note_added"

    state: str | None = None
    visit: int = 1
    note: Mapping[str, Any] = attrs.field(factory=dict)


@attrs.frozen(kw_only=True)
class PoolOpened(Event):
    """
    A pool of the allocator was opened.

    Attributes:
        pool: Its identity, such as ``0.3``.
        purpose: What for, such as ``throwaway_graphs``.
        state, visit: The open state, and which visit of it, from 1.
    """

    kind: ClassVar[str] = "pool_opened"

    pool: str
    purpose: str
    state: str | None = None
    visit: int = 1


@attrs.frozen(kw_only=True)
class PoolReleased(Event):
    """
    A pool was given up.

    Attributes:
        pool: Its identity, such as ``0.3``.
        purpose: What it was opened for.
        state, visit: The open state, and which visit of it, from 1.
        use_count: References just before; 1 proves that no graph holds it. None where nobody tells.
        held_bytes: Reserved bytes that it still held just before.
        left_bytes: Reserved bytes that it still holds just after; 0 where all of it came back.
    """

    kind: ClassVar[str] = "pool_released"

    pool: str
    purpose: str
    state: str | None = None
    visit: int = 1
    use_count: int | None = None
    held_bytes: int = 0
    left_bytes: int = 0


@attrs.frozen(kw_only=True)
class ArenaMapped(Event):
    """
    Pages were mapped into (or out of) the KV arena; the totals after it.

    Attributes:
        base: Address of the range.
        mapped_bytes: Bytes with memory behind them.
        reserved_bytes: Size of the range.
        granule_bytes: Smallest growth, over all sub-ranges together.
        state, visit: The open state, and which visit of it, from 1.
    """

    kind: ClassVar[str] = "arena_mapped"

    base: int
    mapped_bytes: int
    reserved_bytes: int
    granule_bytes: int
    state: str | None = None
    visit: int = 1


@attrs.frozen(kw_only=True)
class GraphCaptured(Event):
    """
    One graph.

    Attributes:
        state, visit: The open state, and which visit of it, from 1.
        size: Batch size in rows.
        part: Which set of graphs it belongs to, such as ``draft``; None where there is one set.
        pool: Where its tensors live.
        duration_ns: Warm-up not included.
        pool_delta_bytes: Growth of that pool's reserved bytes.
        outside_delta_bytes: Growth outside torch.
        kept_bytes: Output bytes that stay alive.
        nodes: Nodes of the graph; None where nobody tells.
        instantiate_bytes, upload_bytes: Device memory outside torch that making the graph executable took, and
            uploading it; the driver gives out 2 MiB at a time, so most are 0. None where they were not told apart.
    """

    kind: ClassVar[str] = "graph_captured"

    state: str
    visit: int = 1
    size: int
    part: str | None = None
    pool: str
    duration_ns: int = 0
    pool_delta_bytes: int = 0
    outside_delta_bytes: int = 0
    kept_bytes: int = 0
    nodes: int | None = None
    instantiate_bytes: int | None = None
    upload_bytes: int | None = None


@attrs.frozen(kw_only=True)
class OomObserved(Event):
    """
    Memory ran out; a figure that the error does not tell is None.

    Attributes:
        state, visit: The open state, and which visit of it, from 1.
        part: The part that was entered last; None where none was.
        tried_bytes: What was asked for at once.
        free_bytes: What the device had free.
        allocated_bytes: What torch had given out.
        reserved_unallocated_bytes: What torch held and had not given out.
        private_pool_bytes: What torch had given out in private pools, such as those of graphs.
        message: The text of the error.
        blocks: The largest live blocks by pool, each with its ``bytes``.
    """

    kind: ClassVar[str] = "oom_observed"

    state: str | None = None
    visit: int = 1
    part: str | None = None
    tried_bytes: int | None = None
    free_bytes: int | None = None
    allocated_bytes: int | None = None
    reserved_unallocated_bytes: int | None = None
    private_pool_bytes: int | None = None
    message: str = ""
    blocks: tuple[Mapping[str, Any], ...] = ()
