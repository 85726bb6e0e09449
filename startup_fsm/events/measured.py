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
        label: ``enter``, ``leave``, ``fail``, or a name such as ``F1b``.
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
        inputs, result: Plain data.
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
    """A figure of the shared list, as the engine said it."""

    kind: ClassVar[str] = "figure_read"

    figure: str
    value: int | float
    state: str | None = None
    unit: str | None = None


@attrs.frozen(kw_only=True)
class NoteAdded(Event):
    """Facts that exist only inside a state, by name."""

    kind: ClassVar[str] = "note_added"

    state: str | None = None
    visit: int = 1
    note: Mapping[str, Any] = attrs.field(factory=dict)


@attrs.frozen(kw_only=True)
class PoolOpened(Event):
    """A pool of the allocator was opened."""

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
        use_count: References just before; 1 proves that no graph holds it. None where nobody tells.
        held_bytes: What it still held just before.
        left_bytes: What it still holds just after.
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
    """Pages were mapped into (or out of) the KV arena; the totals after it."""

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
        size: Batch size in rows.
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
    """Memory ran out: what was asked for, what there was, and the largest live blocks by pool."""

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
