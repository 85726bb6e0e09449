"""The course of a start: runs, attempts, states, and the edges between them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import attrs

from startup_fsm.events.envelope import Event


@attrs.frozen(kw_only=True)
class RunStarted(Event):
    """
    The first event of every file.

    Attributes:
        wall_ns: Wall clock at ``t = 0``, ns since the epoch.
        host: Name of the machine.
        pid: Process number on it.
        boot_id: Changes with every boot of the machine; None where the kernel does not tell.
        engine: Name of what is being started.
        engine_version: Its version, in its own words.
        device: Name and kind of the device.
        plan: The whole plan as data.
        knobs: Settings by our names; secrets never.
        versions: Packages by name.
        environment: An allow-list of variables.
        fingerprint: Digest of engine, plan and knobs; equal on all ranks of a run.
        mode: ``default``, ``observe`` or ``strict``.
        source: ``journal`` for a live or simulated start, else the importer.
        label: What the source calls this process, such as ``DP0 TP3``; None for our own, which have their names.
    """

    kind: ClassVar[str] = "run_started"

    wall_ns: int | None = None
    host: str | None = None
    pid: int | None = None
    boot_id: str | None = None
    engine: str | None = None
    engine_version: str | None = None
    device: str | None = None
    plan: Mapping[str, Any] = attrs.field(factory=dict)
    knobs: Mapping[str, Any] = attrs.field(factory=dict)
    versions: Mapping[str, str] = attrs.field(factory=dict)
    environment: Mapping[str, str] = attrs.field(factory=dict)
    fingerprint: str | None = None
    mode: str = "default"
    source: str = "journal"
    label: str | None = None


@attrs.frozen(kw_only=True)
class AttemptStarted(Event):
    """
    A new process goes on with a run.

    Attributes:
        attempt: Which attempt of the run this is, from 1.
        reason: Why there is one more.
        previous: How the attempt before it ended; None where nobody knows.
    """

    kind: ClassVar[str] = "attempt_started"

    attempt: int
    reason: str
    previous: str | None = None


@attrs.frozen(kw_only=True)
class StateEntered(Event):
    """
    A state begins; written before its body runs.

    Attributes:
        state: Its name.
        visit: From 1, rising with every visit of this state.
        edge: Name of the edge that was taken; None for the first state.
        source: The state that was left.
    """

    kind: ClassVar[str] = "state_entered"

    state: str
    visit: int = 1
    edge: str | None = None
    source: str | None = None


@attrs.frozen(kw_only=True)
class PartEntered(Event):
    """
    A named part of a state begins; it lasts until the next part, or to the end of the state.

    Attributes:
        state, visit: The open state, and which visit of it, from 1.
        part: Name of the part, such as ``sampler``.
    """

    kind: ClassVar[str] = "part_entered"

    state: str
    part: str
    visit: int = 1


@attrs.frozen(kw_only=True)
class StateLeft(Event):
    """
    A state ended well.

    Attributes:
        state, visit: The state, and which visit of it, from 1.
        duration_ns: From entry to here, ours included.
        cpu_ns: Processor time of this process meanwhile.
        bookkeeping_ns, syncing_ns, measuring_ns: Our own part: events, fdatasync, snapshots and settling.
    """

    kind: ClassVar[str] = "state_left"

    state: str
    visit: int = 1
    duration_ns: int = 0
    cpu_ns: int = 0
    bookkeeping_ns: int = 0
    syncing_ns: int = 0
    measuring_ns: int = 0


@attrs.frozen(kw_only=True)
class StateFailed(Event):
    """
    A state ended by an exception.

    Attributes:
        state, visit: The state, and which visit of it, from 1.
        part: The part that was entered last; None where none was.
        error_type: Qualified name of the exception.
        category: ``oom``, ``capture``, ``pool``, ``check``, ``budget``, ``hook``, ``host_oom``, ``peer``, ``signal``,
            ``restart`` (the allocator could not be repaired), ``unsupported`` (no virtual memory) or ``raised``.
        reason: One word for what an engine said in its log, such as ``no_blocks``; empty for our own starts.
        message: Its text.
        where: Innermost frames, outermost first.
        duration_ns: From entry to here, ours included.
        cpu_ns: Processor time of this process meanwhile.
        bookkeeping_ns, syncing_ns, measuring_ns: Our own part: events, fdatasync, snapshots and settling.
    """

    kind: ClassVar[str] = "state_failed"

    state: str
    visit: int = 1
    part: str | None = None
    error_type: str
    category: str
    reason: str = ""
    message: str
    where: tuple[str, ...] = ()
    duration_ns: int = 0
    cpu_ns: int = 0
    bookkeeping_ns: int = 0
    syncing_ns: int = 0
    measuring_ns: int = 0


@attrs.frozen(kw_only=True)
class RecoveryChosen(Event):
    """
    The edge of the plan that a failed state takes.

    Attributes:
        state: The state that failed.
        edge: Name of the edge, such as ``shrink``.
        target: The state that it leads to.
        reason: Category of the failure, and the first line of its message.
        taken: How often this edge was taken in this attempt, this time included.
        bound: How often it may be taken in one attempt; None for any number.
        inputs: What the failed tries taught, by name, in bytes.
    """

    kind: ClassVar[str] = "recovery_chosen"

    state: str
    edge: str
    target: str
    reason: str
    taken: int
    bound: int | None = None
    inputs: Mapping[str, Any] = attrs.field(factory=dict)


@attrs.frozen(kw_only=True)
class RunFinished(Event):
    """
    The start is over.

    Attributes:
        end: ``ready`` or ``failed``.
        state: The last state that was entered; None where none was.
        reason: Why it failed; empty at ``ready``.
        duration_ns: From the first event of this file to here.
        bookkeeping_ns, syncing_ns, measuring_ns: Our own part of it: events, fdatasync, snapshots and settling.
    """

    kind: ClassVar[str] = "run_finished"

    end: str
    state: str | None = None
    reason: str = ""
    duration_ns: int = 0
    bookkeeping_ns: int = 0
    syncing_ns: int = 0
    measuring_ns: int = 0
