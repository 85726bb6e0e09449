"""
Two starts side by side: which of them is worse, what made it so, and everything that differs. Pure.

What made it worse comes first: the first finding of the worse start that the other lacks, tied to the setting, version,
plan or device that differs, where the numbers of both show that it matters.
"""

from startup_fsm.diff.compare import Difference, difference
from startup_fsm.diff.states import AccountDifference, StateDifference, StateSide
from startup_fsm.diff.ties import Tie

__all__ = ["AccountDifference", "Difference", "StateDifference", "StateSide", "Tie", "difference"]
