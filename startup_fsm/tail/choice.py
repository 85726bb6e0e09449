"""From what somebody names to what is followed; what is not there yet is waited for."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Final

from startup_fsm.errors import JournalError
from startup_fsm.reading import STDIN, is_journal, journals_in, newest_run
from startup_fsm.starts import Start
from startup_fsm.tail.base import Sight, Tail
from startup_fsm.tail.journals import RunTail
from startup_fsm.tail.streams import GrowingFile, GrowingPipe, TextTail

#: What is looked at to tell a journal from other text.
_HEAD: Final = 64 << 10
#: Of standard input.
STDIN_DESCRIPTOR: Final = 0


def tail_of(name: str, *, is_next: bool = False) -> Tail:
    """
    What is followed under a name.

    Args:
        name: A run directory, a directory of runs, a journal, a text log, or ``-``; it need not exist yet.
        is_next: Whether starts that are there by now do not count.

    Raises:
        JournalError: It is there and cannot be read.
    """
    return _Awaited(name, is_next=is_next)


class _Awaited:
    """Waits until there is something, then follows it to its end."""

    def __init__(self, name: str, *, is_next: bool) -> None:
        self._name = name
        self._path = Path(name)
        self._tail: Tail | None = None
        self._besides: frozenset[str] = frozenset()
        self._begin = 0
        if is_next:
            self._pass_over()

    def _pass_over(self) -> None:
        """Remember what is there: it does not count."""
        if self._name == STDIN:
            return
        if self._path.is_dir():
            self._besides = frozenset(each.name for each in self._path.iterdir())
        elif self._path.is_file():
            self._begin = self._path.stat().st_size

    def poll(self) -> bool:
        """Look for it, then read what has come."""
        if self._tail is None:
            try:
                self._tail = self._found()
            except FileNotFoundError:
                return False
            except (OSError, ValueError) as error:
                if isinstance(error, JournalError):
                    raise
                text = f"{self._name}: {getattr(error, 'strerror', None) or error}"
                raise JournalError(text, path=self._name, hint="name what this user may read") from None
        return self._tail is not None and self._tail.poll()

    def _found(self) -> Tail | None:
        if self._name == STDIN:
            return TextTail(GrowingPipe(STDIN_DESCRIPTOR), STDIN)
        mode = self._path.stat().st_mode
        if stat.S_ISDIR(mode):
            return self._in_directory()
        if not stat.S_ISREG(mode):
            return TextTail(GrowingPipe(os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)), self._name)
        with self._path.open("rb") as file:
            head = file.read(_HEAD)
        if not head:
            return None
        if is_journal(head, self._name):
            return RunTail(self._path.parent, only=self._path.name)
        return TextTail(GrowingFile(self._path, self._begin), self._name)

    def _in_directory(self) -> Tail | None:
        if journals_in(self._path):
            return RunTail(self._path, besides=self._besides)
        try:
            return RunTail(newest_run(self._path, besides=self._besides)[0])
        except JournalError:
            return None

    @property
    def is_over(self) -> bool:
        """Never while there is nothing."""
        return self._tail is not None and self._tail.is_over

    def sight(self) -> Sight | None:
        """Nothing, while there is nothing."""
        return None if self._tail is None else self._tail.sight()

    def final(self) -> Start:
        """Of what was found."""
        if self._tail is None:
            raise JournalError(f"{self._name}: there is nothing", path=self._name, hint="wait until there is")
        return self._tail.final()

    def drain(self) -> None:
        """Of what was found."""
        if self._tail is not None:
            self._tail.drain()

    def close(self) -> None:
        """Of what was found."""
        if self._tail is not None:
            self._tail.close()
