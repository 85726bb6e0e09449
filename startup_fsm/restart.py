"""
A new process that goes on with a run: the command puts itself in its own place.

The process keeps its number, its terminal and whoever waits for it; memory of the device, allocator and libraries are
new. What the tries before have taught is read from their journal.
"""

from __future__ import annotations

import contextlib
import os
import sys

from startup_fsm.bootstrap import Bootstrap
from startup_fsm.identity import Continued, export_continued


def again(boot: Bootstrap, reason: str, *, most: int) -> None:
    """
    Start this command again, as the next attempt of the run of ``boot``, which is over; return where it may not.

    It may be called on any thread: the others end with the program that this one was.

    Args:
        boot: The start that needs a new process.
        reason: Why, for the journal of the next attempt.
        most: How often the command may do so.
    """
    done = 0 if boot.continued is None else boot.continued.restarts
    if done >= most:
        return
    recorder = boot.recorder
    sys.stderr.write(f"startup-fsm: starting again, attempt {recorder.attempt + 1}: {reason}\n")
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    export_continued(
        Continued(
            run=recorder.run,
            process=recorder.process,
            rank=recorder.rank,
            attempt=recorder.attempt + 1,
            restarts=done + 1,
            reason=reason,
        )
    )
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])  # noqa: S606 - the very command that runs now
