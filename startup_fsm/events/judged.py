"""What was concluded while starting: estimates, checks, budgets, agreements, decisions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import attrs

from startup_fsm.events.envelope import Event
from startup_fsm.findings import Finding


@attrs.frozen(kw_only=True)
class EstimateMade(Event):
    """
    A number with an error: what something will take.

    Attributes:
        estimate: What is estimated, such as ``graphs``.
        method: How, such as ``release`` (by what came back).
        recurring_bytes: Comes again with the real thing.
        one_time_bytes: Stays and does not come again.
        kv_bytes: What the profiling KV cache gave back.
        seen, of: How many of how many sizes were captured.
        error_bytes: Half the width of what it may be off by.
        readings: What it rests on, by label (``F0``, ``F1``, ``F1b``, ``F2``): bytes of this process at each reading.
        state: The state in which it was made.
    """

    kind: ClassVar[str] = "estimate_made"

    estimate: str
    method: str
    recurring_bytes: int
    one_time_bytes: int = 0
    kv_bytes: int | None = None
    seen: int = 0
    of: int = 0
    error_bytes: int = 0
    readings: Mapping[str, int] = attrs.field(factory=dict)
    state: str | None = None


@attrs.frozen(kw_only=True)
class CheckJudged(Event):
    """
    A check looked at an edge.

    Attributes:
        check: Its name.
        state, visit: The state that was judged at its end, and which visit of it, from 1.
        findings: What it found; none means that it held.
        failed: Whether that fails the state.
    """

    kind: ClassVar[str] = "check_judged"

    check: str
    state: str
    visit: int = 1
    findings: tuple[Finding, ...] = ()
    failed: bool = False


@attrs.frozen(kw_only=True)
class BudgetTerm:
    """
    One signed term of a budget.

    Attributes:
        term: Its name, such as ``headroom``.
        bytes: As it is added up: negative for what is taken off.
        source: The meter or the knob that gave it.
    """

    term: str
    bytes: int
    source: str


@attrs.frozen(kw_only=True)
class BudgetComputed(Event):
    """
    How the KV cache was sized; the terms add up to ``available_bytes``.

    Attributes:
        state, visit: The state that sized, and which visit of it, from 1.
        terms: Each counted once, signed.
        available_bytes: What is left for the KV cache before flooring; negative when nothing is.
        block_bytes, blocks, kv_bytes: ``kv_bytes = blocks * block_bytes <= available_bytes``.
        requested_bytes: The request on the device; the ceiling of everything.
        total_bytes: The device, as CUDA gives it.
        reachable_bytes: The largest request that the device could honour: used by us, and free.
        needed_bytes: What one longest request takes; None where nobody said.
        missing_bytes: What is short; 0 when it fits.
    """

    kind: ClassVar[str] = "budget_computed"

    state: str = "size_kv"
    visit: int = 1
    terms: tuple[BudgetTerm, ...] = ()
    available_bytes: int
    block_bytes: int
    blocks: int
    kv_bytes: int
    requested_bytes: int
    total_bytes: int
    reachable_bytes: int
    needed_bytes: int | None = None
    missing_bytes: int = 0


@attrs.frozen(kw_only=True)
class RanksAgreed(Event):
    """
    What all ranks agreed on; or that they did not.

    Attributes:
        topic: What it is about, such as ``blocks``.
        agreed: The value that all ranks use; None where they came to none.
        offers: What each rank could have had, by its label; left out where all said the same of something that must be.
        decided_by: Label of the rank whose offer it is; None where all were equal.
        missing: Labels of the ranks that did not come in time.
        waited_ns: How long this rank waited for the others, ns.
    """

    kind: ClassVar[str] = "ranks_agreed"

    topic: str
    agreed: Any = None
    offers: Mapping[str, Any] = attrs.field(factory=dict)
    decided_by: str | None = None
    missing: tuple[str, ...] = ()
    waited_ns: int = 0


@attrs.frozen(kw_only=True)
class DecisionMade(Event):
    """
    Something was chosen or left out.

    Attributes:
        decision: What, such as ``reserve_for_graphs`` or ``without_graphs``.
        reason: Why.
        state: The state in which it was chosen; None outside every state.
        inputs: What it was chosen from, by name; bytes where the name says so.
    """

    kind: ClassVar[str] = "decision_made"

    decision: str
    reason: str
    state: str | None = None
    inputs: Mapping[str, Any] = attrs.field(factory=dict)
