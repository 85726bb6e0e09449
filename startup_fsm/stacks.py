"""
Stacks as text: one line a frame, outermost first, so that the line that is stuck stands last.

Reads what :mod:`faulthandler` wrote into the side file of a process; needs no import of the code it names.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from types import FrameType, TracebackType
from typing import Final

#: Frames kept of one stack, the innermost.
FRAME_LIMIT: Final = 100

#: Stands in a side file behind the dumps of a state that was left after all.
LEFT: Final = "startup-fsm: left "

_SOURCE_LIMIT: Final = 200
_READ_LIMIT: Final = 1 << 20
_THREAD: Final = re.compile(r"(?:Current t|T)hread 0x([0-9a-f]{1,16}) .*\(most recent call first\)")
_FRAME: Final = re.compile(r'  File "(.*)", line ([0-9?]{1,12}) in (.*)')


def side_file_name(process: str, attempt: int) -> str:
    """Name of the side file of one process and attempt, beside its journal."""
    return f"{process}.{attempt}.stacks"


def stack_lines(where: FrameType | TracebackType) -> tuple[str, ...]:
    """``file:line function: source`` for each frame of a running thread or of a traceback, outermost first."""
    import traceback

    entries = traceback.extract_stack(where) if isinstance(where, FrameType) else traceback.extract_tb(where)
    cut = len(entries) - FRAME_LIMIT
    lines = [f"... {cut} outer frames"] if cut > 0 else []
    for entry in entries[max(cut, 0) :]:
        source = (entry.line or "")[:_SOURCE_LIMIT]
        lines.append(f"{entry.filename}:{entry.lineno} {entry.name}" + (f": {source}" if source else ""))
    return tuple(lines)


def read_stacks(path: str | Path, *, thread: int | None = None) -> tuple[str, ...]:
    """
    The stack of the stuck thread in a side file, ``file:line function`` for each frame, outermost first.

    Empty where there is no file, no dump in it, or the state that was dumped was left after all.

    Args:
        path: The side file.
        thread: Identity of the thread (``threading.get_ident``); None takes the main thread, which faulthandler
            writes last.
    """
    try:
        with Path(path).open("rb") as file:
            # A process that stalls again and again writes at the end.
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - _READ_LIMIT))
            text = file.read(_READ_LIMIT).decode("utf-8", "replace")
    except OSError:
        return ()
    return parse_stacks(text, thread=thread)


def parse_stacks(text: str, *, thread: int | None = None) -> tuple[str, ...]:
    """The same of a text in hand."""
    frames: list[str] = []
    wanted = False
    found: list[str] = []
    for line in text.splitlines():
        if line.startswith(LEFT):
            found, wanted = [], False
        elif match := _THREAD.match(line):
            wanted = thread is None or int(match[1], 16) == thread
            if wanted:
                frames = found = []
        elif not wanted:
            continue
        elif (match := _FRAME.fullmatch(line)) and len(frames) < FRAME_LIMIT:
            frames.append(f"{match[1]}:{match[2]} {match[3]}")
        elif not line.strip():
            wanted = False
    return tuple(reversed(found))
