"""
A start that is still being written, read as it grows: a run directory, a journal, a text log, a pipe.

Everything is polled, nothing is asked that a writer waits for, and what is not there yet is waited for. The verdict at
the end is that of the ordinary reader, so it is what ``doctor`` says. No torch, no structlog.
"""

from startup_fsm.tail.base import Bar, Sight, Tail
from startup_fsm.tail.choice import tail_of

__all__ = ["Bar", "Sight", "Tail", "tail_of"]
