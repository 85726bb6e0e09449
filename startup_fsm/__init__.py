"""
The start of an LLM engine as an explicit state machine: journaled, measured, judged, replayable.

Names are loaded when they are first used, so that reading a journal needs neither torch nor transitions. The functions
``fold`` and ``diagnose`` are imported from the modules of their names.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from startup_fsm.bootstrap import Bootstrap
    from startup_fsm.budget import Knobs
    from startup_fsm.engine import Engine, Graph, LongestRequest, Pool, Step
    from startup_fsm.events import BudgetComputed, Record
    from startup_fsm.findings import Advice, Change, Finding
    from startup_fsm.fold import RunState
    from startup_fsm.journal import Journal, read_journal
    from startup_fsm.memory import Snapshot, format_bytes
    from startup_fsm.plan import Edge, Plan, eager, observed, single_capture, throwaway
    from startup_fsm.sources import Source
    from startup_fsm.states import State
    from startup_fsm.verdict import Verdict

__all__ = [
    "Advice",
    "Bootstrap",
    "BudgetComputed",
    "Change",
    "Edge",
    "Engine",
    "Finding",
    "Graph",
    "Journal",
    "Knobs",
    "LongestRequest",
    "Plan",
    "Pool",
    "Record",
    "RunState",
    "Snapshot",
    "Source",
    "State",
    "Step",
    "Verdict",
    "eager",
    "format_bytes",
    "observed",
    "read_journal",
    "single_capture",
    "throwaway",
]

_HOMES = {
    "bootstrap": ("Bootstrap",),
    "budget": ("Knobs",),
    "engine": ("Engine", "Graph", "LongestRequest", "Pool", "Step"),
    "events": ("BudgetComputed", "Record"),
    "findings": ("Advice", "Change", "Finding"),
    "fold": ("RunState",),
    "journal": ("Journal", "read_journal"),
    "memory": ("Snapshot", "format_bytes"),
    "plan": ("Edge", "Plan", "eager", "observed", "single_capture", "throwaway"),
    "sources": ("Source",),
    "states": ("State",),
    "verdict": ("Verdict",),
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("startup-fsm")
    for home, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f"startup_fsm.{home}"), name)
    msg = f"module {__name__!r} has no attribute {name!r}"
    raise AttributeError(msg)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
