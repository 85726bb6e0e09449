"""The verb that follows a start while it runs, and ends with its verdict."""

from __future__ import annotations

import gc
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from types import FrameType
from typing import Annotated, Final

from cyclopts import Parameter
from rich.console import Console

from startup_fsm.errors import StartupError
from startup_fsm.reading import STDIN
from startup_fsm.reports.live import Screen, Show, Ticker
from startup_fsm.reports.output import emit_json, emit_pages
from startup_fsm.reports.text import verdict_view
from startup_fsm.starts import Start
from startup_fsm.tail import Tail, tail_of
from startup_fsm.verbs.arguments import SWITCH, Json, Path
from startup_fsm.verdict import report
from startup_fsm.verdicts import judge

#: Seconds between two looks.
_POLL_S: Final = 0.1

Next = Annotated[bool, SWITCH, Parameter(help="Wait for a start that is not there yet.")]


def watch(path: Path, /, *, next: Next = False, json: Json = False) -> int:  # noqa: A002 - the option's name
    """Follow a start that is running until every process has finished or is gone, then say its verdict."""
    if path.startswith("-") and path != "-":
        raise StartupError(f"no such option: {path}", hint=f"a path that begins with a dash is written ./{path}")
    # The command line leaves it off for verbs that are short.
    gc.enable()
    with closing(tail_of(path, is_next=next)) as tail:
        with _ended_by_signal(), _show(path, json=json) as show:
            _follow(tail, show)
        code = _tell(tail.final(), json=json)
        tail.drain()
    return code


def _follow(tail: Tail, show: Show) -> None:
    while True:
        changed = tail.poll()
        show.show(tail.sight, changed=changed)
        if tail.is_over:
            return
        time.sleep(_POLL_S)


def _show(path: str, *, json: bool) -> Show:
    """A screen where there is a terminal; with ``--json`` stdout is for the verdict alone."""
    stream = sys.stderr if json else sys.stdout
    console = Console(file=stream, highlight=False, markup=False, emoji=False)
    awaited = "standard input" if path == STDIN else path
    if stream.isatty() and not console.is_dumb_terminal:
        return Screen(console, awaited)

    def write(line: str) -> None:
        stream.write(line)
        stream.flush()

    return Ticker(write, awaited)


def _tell(start: Start, *, json: bool) -> int:
    verdict = judge(start.sources, source=start.source, origin=start.origin)
    if json:
        emit_json(report([verdict]))
    else:
        emit_pages([verdict_view(verdict)])
    return verdict.exit_code


@contextmanager
def _ended_by_signal() -> Iterator[None]:
    """A signal that ends the process gives the terminal back first."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, _: FrameType | None) -> None:
        sys.exit(128 + number)

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)
