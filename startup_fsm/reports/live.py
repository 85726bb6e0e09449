"""
A start while it runs: a screen where there is a terminal, one line per change where there is none.

Both are fed with what :class:`startup_fsm.tail.Tail` sees.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Final, Protocol, Self

from rich.console import Console, RenderableType
from rich.live import Live

from startup_fsm.reports.news import News, Newsreader
from startup_fsm.reports.progress import standpoint
from startup_fsm.reports.screen import clock, news_line, screen
from startup_fsm.reports.terminal import clean, plain
from startup_fsm.tail import Sight

#: Seconds between two drawings: when something has changed, and when only time has passed.
_CHANGED_S: Final = 0.25
_PASSED_S: Final = 1.0
_NEWS_KEPT: Final = 200

#: What is seen of a start now; None while there is nothing to see.
Look = Callable[[], Sight | None]


class Show(Protocol):
    """Where a running start is shown; open while it is."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def show(self, look: Look, *, changed: bool) -> None:
        """Whether anything has changed since the last time; the start is looked at where it is to be shown."""


class Ticker:
    """
    One line per change.

    Args:
        write: Takes each line with its newline.
        awaited: What is waited for, should there be nothing yet.
    """

    def __init__(self, write: Callable[[str], None], awaited: str) -> None:
        self._write = write
        self._awaited = awaited
        self._reader = Newsreader()
        self._has_waited = False
        self._gone: set[str] = set()
        self._looked = -_PASSED_S

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return

    def show(self, look: Look, *, changed: bool) -> None:
        """Write what is new."""
        now = time.monotonic()
        if not changed and now - self._looked < _PASSED_S:
            return
        self._looked = now
        sight = look()
        if sight is None:
            if not self._has_waited:
                self._write(f"waiting for {clean(self._awaited)}\n")
            self._has_waited = True
            return
        for news in (*self._reader.read(sight), *self._lost(sight)):
            self._write(f"{news_line(news).plain}\n")

    def _lost(self, sight: Sight) -> Iterator[News]:
        """Processes that are gone without an end, once each."""
        for process in sight.start.processes:
            point = standpoint(process, quiet_s=0)
            if point.standing == "gone" and point.label not in self._gone:
                self._gone.add(point.label)
                where = f" in {point.state}" if point.state else ""
                text = f"gone{where}: nobody writes its journal any more"
                yield News(at_s=None, label=point.label, severity="error", text=text)


class Screen:
    """
    The whole terminal, drawn when something has changed and once a second; what was on it before comes back.

    Args:
        console: The terminal.
        awaited: What is waited for, should there be nothing yet.
    """

    def __init__(self, console: Console, awaited: str) -> None:
        self._console = console
        self._awaited = awaited
        self._reader = Newsreader()
        self._news: deque[News] = deque(maxlen=_NEWS_KEPT)
        self._live = Live(
            console=console,
            screen=True,
            auto_refresh=False,
            vertical_overflow="crop",
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._drawn = -_PASSED_S
        self._is_due = True
        self._began = time.monotonic()

    def __enter__(self) -> Self:
        self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.__exit__(kind, error, trace)

    def show(self, look: Look, *, changed: bool) -> None:
        """Draw, where it is time to."""
        self._is_due = self._is_due or changed
        now = time.monotonic()
        if now - self._drawn < (_CHANGED_S if self._is_due else _PASSED_S):
            return
        self._drawn, self._is_due = now, False
        sight = look()
        if sight is None:
            waited = clock((now - self._began) * 1e9)
            content: RenderableType = plain(f"waiting for {self._awaited}, for {waited}")
        else:
            # Shards and captures have bars here.
            self._news.extend(each for each in self._reader.read(sight) if each.severity)
            width, height = self._console.size
            is_ascii = self._console.options.ascii_only
            content = screen(sight, tuple(self._news), width=width, height=height, is_ascii=is_ascii)
        self._live.update(content, refresh=True)
