"""
The guard table: the only module that imports ``transitions``.

The library refuses undeclared edges and draws graphs; nothing more. Bodies of states run between transitions, never
inside one, because the library sets the new state before ``on_enter`` and does not roll back. The table is built from
the plan and placed from the fold, so nothing is said twice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transitions import Machine, MachineError

from startup_fsm.errors import EdgeRefused
from startup_fsm.fold import RunState, allowed_targets
from startup_fsm.plan import Edge, Plan
from startup_fsm.states import FAILED, READY


class _Cursor:
    """The model: one attribute, which the library sets."""

    state: str
    trigger: Callable[[str], bool]


class GuardTable:
    """
    The edges of one plan as a machine without callbacks.

    Args:
        plan: Not free; a free plan has nothing to guard.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._taken: Callable[[str, str], int] = lambda *_: 0
        self._cursor = _Cursor()
        self._machine = Machine(
            model=self._cursor,
            states=[state.name for state in plan.states] + [READY, FAILED],
            initial=plan.start,
            transitions=[
                {
                    "trigger": edge.name,
                    "source": edge.source,
                    "dest": edge.target,
                    "conditions": [self._within_bound(edge)],
                }
                for edge in plan.edges
            ],
            auto_transitions=False,
            send_event=True,
            queued=False,
            ignore_invalid_triggers=False,
        )

    def _within_bound(self, edge: Edge) -> Callable[[Any], bool]:
        def within_bound(_: Any) -> bool:
            return edge.bound is None or self._taken(edge.source, edge.name) < edge.bound

        return within_bound

    def allows(self, source: str, name: str, *, taken: int = 0) -> bool:
        """Whether the library would move along an edge; equal to ``plan.allows`` (a test says so)."""
        self._taken = lambda *_: taken
        try:
            self._machine.set_state(source)
            return bool(self._cursor.trigger(name))
        except (MachineError, AttributeError, ValueError):
            return False

    def move(self, run: RunState, edge: Edge) -> None:
        """
        Move along an edge from where the fold says the start stands.

        Raises:
            EdgeRefused: The plan does not declare it, or its bound is used up.
        """
        self._taken = lambda source, name: run.edges_taken[source, name]
        self._machine.set_state(edge.source)
        try:
            moved = self._cursor.trigger(edge.name)
        except (MachineError, AttributeError):
            moved = False
        if not moved:
            raise refused(run, edge.target, f"edge {edge.name!r} may not be taken again")


def refused(run: RunState, target: str, reason: str) -> EdgeRefused:
    """The error for a move that may not be made, with what may."""
    allowed = allowed_targets(run)
    here = run.state
    text = f"{here or 'the start'} -> {target}: {reason}; allowed: {', '.join(allowed) or 'nothing'}"
    return EdgeRefused(
        text, source=here, target=target, allowed=allowed, hint="follow the plan, or make one that has this edge"
    )
