"""
The closed set of events: what a journal can say.

    Record = envelope (v, run, process, rank, attempt, seq, t, kind, origin) + one event

An event is a frozen attrs class; its ``kind`` is a stable string in the past tense, never an import path. Facts
only: judgements are recomputable. Bytes are ints in bytes, times ints in nanoseconds.
"""

from startup_fsm.events.around import HookFailed, HookRan, PeerFailed, SignalReceived, StateStalled
from startup_fsm.events.course import (
    AttemptStarted,
    PartEntered,
    RecoveryChosen,
    RunFinished,
    RunStarted,
    StateEntered,
    StateFailed,
    StateLeft,
)
from startup_fsm.events.envelope import EVENT_TYPES, SCHEMA_VERSION, Event, Origin, Record, UnknownEvent
from startup_fsm.events.judged import BudgetComputed, BudgetTerm, CheckJudged, DecisionMade, EstimateMade, RanksAgreed
from startup_fsm.events.measured import (
    ArenaMapped,
    FigureRead,
    GraphCaptured,
    NoteAdded,
    OomObserved,
    PoolOpened,
    PoolReleased,
    ProbeRecorded,
    SnapshotTaken,
)

__all__ = [
    "EVENT_TYPES",
    "SCHEMA_VERSION",
    "ArenaMapped",
    "AttemptStarted",
    "BudgetComputed",
    "BudgetTerm",
    "CheckJudged",
    "DecisionMade",
    "EstimateMade",
    "Event",
    "FigureRead",
    "GraphCaptured",
    "HookFailed",
    "HookRan",
    "NoteAdded",
    "OomObserved",
    "Origin",
    "PartEntered",
    "PeerFailed",
    "PoolOpened",
    "PoolReleased",
    "ProbeRecorded",
    "RanksAgreed",
    "Record",
    "RecoveryChosen",
    "RunFinished",
    "RunStarted",
    "SignalReceived",
    "SnapshotTaken",
    "StateEntered",
    "StateFailed",
    "StateLeft",
    "StateStalled",
    "UnknownEvent",
]
