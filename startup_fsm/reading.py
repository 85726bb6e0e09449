"""
From what somebody names on the command line to starts: journals, run directories, mirrored lines, standard input.

A start is one attempt of one run with all its processes. What is wrong inside a file is a problem of its process; what
cannot be read at all is one error that says what, where, and what to do. Memory is bounded by one line and the events.
No torch, no structlog.
"""

from __future__ import annotations

import fcntl
import os
import re
import stat
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Final, cast

import attrs

from startup_fsm.diagnose import Source
from startup_fsm.errors import JournalError, UnknownSchema
from startup_fsm.events import RunStarted
from startup_fsm.fold import RunState, fold
from startup_fsm.journal import Journal, Problem, read_descriptor
from startup_fsm.stacks import read_stacks

#: Stands for standard input.
STDIN: Final = "-"

#: What is looked at to tell a journal from other text: two lines of a journal at their longest.
_HEAD: Final = 2 << 20
_BLOCK: Final = 1 << 20

_EVENT: Final = re.compile(rb'\s*\{[ \t]*"v"[ \t]*:[ \t]*\d')
_LATER_EVENT: Final = re.compile(rb'\n[ \t]*\{[ \t]*"v"[ \t]*:[ \t]*\d+[ \t]*,[ \t]*"run"[ \t]*:')
_NAME: Final = re.compile(r"(?P<process>.+)\.(?P<attempt>[1-9][0-9]{0,8})\.jsonl")
_STAMP: Final = re.compile(r"[0-9]{8}T[0-9]{6}Z")

_WHAT_TO_NAME: Final = "name a run directory, a journal file, a text file with mirrored lines, or - for standard input"


@attrs.frozen(kw_only=True)
class Process:
    """
    What is known of one process of a start.

    Attributes:
        journal: Its records and what is wrong with them.
        history: The fold of the records.
        is_alive: Whether a writer still holds the journal.
        stacks: What faulthandler left beside it, outermost line first.
    """

    journal: Journal
    history: RunState
    is_alive: bool = False
    stacks: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """``rank 3``, or the name of a process that is no rank."""
        return self.as_source().label

    def as_source(self) -> Source:
        """As the diagnosis takes it."""
        problems = tuple((each.kind, each.message, each.seq) for each in self.journal.problems)
        return Source(run=self.history, problems=problems, is_alive=self.is_alive, stacks=self.stacks)


@attrs.frozen(kw_only=True)
class Start:
    """
    One attempt of one run.

    Attributes:
        run, attempt: Which.
        source: ``journal`` or ``mirror``.
        origin: What was read: a run directory, a file, or ``-``.
        is_whole: Whether all that the origin has of this attempt was read; False for one file of a run directory.
        processes: At least one, in the order of their names.
    """

    run: str | None
    attempt: int
    source: str
    origin: str
    is_whole: bool
    processes: tuple[Process, ...]

    @property
    def sources(self) -> tuple[Source, ...]:
        """As the diagnosis takes them."""
        return tuple(process.as_source() for process in self.processes)

    @property
    def unseen(self) -> tuple[str, ...]:
        """What the source cannot tell, whatever is asked of it."""
        found: list[str] = []
        if self.source == "journal" and not self.is_whole:
            found.append("other processes of this run: one journal was read")
        for process in self.processes:
            history, label = process.history, process.label
            found += [f"{label}: {problem.message}" for problem in process.journal.problems]
            if history.finished is None:
                why = "it is still being written" if process.is_alive else "the journal has no end"
                found.append(f"{label}: what comes after seq {history.last_seq}: {why}")
            for kind, count in history.unknown.items():
                found.append(f"{label}: what {count} of an unknown kind mean: {kind}")
        return tuple(found)


@attrs.frozen(kw_only=True)
class _Found:
    """A journal and what belongs to it besides its lines."""

    journal: Journal
    is_alive: bool = False
    stacks: tuple[str, ...] = ()


def read_starts(path: str | Path) -> tuple[Start, ...]:
    """
    The starts that a path holds, oldest first: all attempts of one run, of several only where the path is one stream.

    Of a directory of runs the newest run is read.

    Raises:
        JournalError: Nothing can be read: no such path, no event, no mirrored line, no permission.
        UnknownSchema: A newer version wrote it.
    """
    name = str(path)
    if name == STDIN:
        return _from_file(0, "standard input", name)
    descriptor = _opened(name)
    try:
        if not stat.S_ISDIR(os.fstat(descriptor).st_mode):
            return _from_file(descriptor, name, name)
    finally:
        os.close(descriptor)
    return _from_directory(Path(name))


def _opened(name: str) -> int:
    with _said(name):
        try:
            return os.open(name, os.O_RDONLY | os.O_CLOEXEC)
        except ValueError:
            raise JournalError(f"{name!r} cannot be a path", path=name, hint=_WHAT_TO_NAME) from None


@contextmanager
def _said(shown: str) -> Iterator[None]:
    """What the operating system and the codec say becomes one sentence with the place."""
    try:
        yield
    except UnknownSchema as error:
        if error.path is not None:
            raise
        raise UnknownSchema(f"{shown}: {error.message}", path=shown, hint=error.hint) from None
    except JournalError:
        raise
    except OSError as error:
        hint = "let this user read it" if isinstance(error, PermissionError) else _WHAT_TO_NAME
        raise JournalError(f"{shown}: {error.strerror or error}", path=shown, hint=hint) from None


def _from_file(descriptor: int, shown: str, name: str) -> tuple[Start, ...]:
    found, source = _read(descriptor, shown, name)
    return tuple(_starts(found, source=source, origin=name, is_whole=source == "mirror"))


def _from_directory(root: Path) -> tuple[Start, ...]:
    directory = root
    with _said(str(root)):
        files = _journals_in(root)
        if not files:
            directory, files = _newest_run(root)
    found: list[_Found] = []
    empty: list[JournalError] = []
    for file in files:
        try:
            descriptor = _opened(str(file))
            try:
                found += _read(descriptor, str(file), str(file))[0]
            finally:
                os.close(descriptor)
        except UnknownSchema:
            raise
        except JournalError as error:
            empty.append(error)
    if not found:
        raise empty[0]
    starts = list(_starts(found, source="journal", origin=str(directory), is_whole=True))
    for one in empty:
        # The others of its run can be read: what is wrong with this one is said with them.
        starts[-1] = _with_problem(starts[-1], Problem(kind="broken", offset=0, line=1, message=one.message))
    return tuple(starts)


def _journals_in(directory: Path) -> list[Path]:
    return sorted(each for each in directory.iterdir() if each.suffix == ".jsonl")


def _newest_run(root: Path) -> tuple[Path, list[Path]]:
    def began(directory: Path) -> tuple[str, int, str]:
        # Run ids of our own begin with their time; the clock of a directory does not survive its copying.
        stamp, changed = _STAMP.match(directory.name), directory.stat().st_mtime_ns
        seconds = time.gmtime(changed // 1_000_000_000)
        return stamp[0] if stamp else time.strftime("%Y%m%dT%H%M%SZ", seconds), changed, directory.name

    for directory in sorted((each for each in root.iterdir() if each.is_dir()), key=began, reverse=True):
        if files := _journals_in(directory):
            return directory, files
    hint = "journals are files named <process>.<attempt>.jsonl in a run directory"
    raise JournalError(f"{root}: no journal in this directory", path=str(root), hint=hint)


def _read(descriptor: int, shown: str, name: str) -> tuple[list[_Found], str]:
    """
    What an open file holds, as a journal or as mirrored lines, and which of the two.

    Raises:
        JournalError: Not a single event.
    """
    with _said(shown):
        found, source, head = _found(descriptor, shown)
    if not any(each.journal.records for each in found):
        raise _nothing_in(shown, name, found, source, head)
    return found, source


def _found(descriptor: int, shown: str) -> tuple[list[_Found], str, bytes]:
    status = os.fstat(descriptor)
    # Before the reading: a writer that ends in between has written its end by then. An empty file is left alone, since
    # its writer may be about to ask for the lock.
    is_held = status.st_size > 0 and _is_held(descriptor)
    head = b""
    while len(head) < _HEAD and (block := os.read(descriptor, _BLOCK)):
        head += block
    if _is_journal(head, shown):
        if stat.S_ISREG(status.st_mode):
            os.lseek(descriptor, -len(head), os.SEEK_CUR)
            return [_whole(read_descriptor(descriptor, shown), is_held=is_held)], "journal", head
        from tempfile import TemporaryFile

        # A journal is read by descriptor; its first bytes have left the pipe already.
        with TemporaryFile() as copy:
            copy.write(head)
            while block := os.read(descriptor, _BLOCK):
                copy.write(block)
            copy.seek(0)
            return [_Found(journal=read_descriptor(copy.fileno(), shown))], "journal", head
    from startup_fsm.fishing import fish

    catch = fish(cast("BinaryIO", _Stream(head, descriptor)), shown)
    found = [_Found(journal=journal) for journal in catch.journals]
    if catch.problems:
        # Torn texts that are nobody's go with the last start, or stand alone.
        last = found.pop().journal if found else Journal(shown, ())
        found.append(_Found(journal=attrs.evolve(last, problems=(*last.problems, *catch.problems))))
    return found, "mirror", head


def _is_journal(head: bytes, name: str) -> bool:
    if _EVENT.match(head):
        return True
    from startup_fsm.mirror import holds_mirror

    if holds_mirror(head):
        return False
    # The first line may be broken, or torn before it says what it is.
    return bool(_LATER_EVENT.search(head)) or (_NAME.fullmatch(Path(name).name) is not None and head[:1] in b"{")


class _Stream:
    """A descriptor as a file of which the first bytes were read already."""

    def __init__(self, head: bytes, descriptor: int) -> None:
        self._head = head
        self._descriptor = descriptor

    def read(self, size: int) -> bytes:
        """The next bytes; empty at the end."""
        if self._head:
            block, self._head = self._head[:size], self._head[size:]
            return block
        return os.read(self._descriptor, size)


def _whole(journal: Journal, *, is_held: bool) -> _Found:
    """A journal file with its writer and its side file."""
    first = journal.records[0].event if journal.records else None
    is_alive = is_held and not _is_gone(first if isinstance(first, RunStarted) else None)
    if is_alive and journal.problems and journal.problems[-1].kind == "torn":
        # The line is being written right now.
        journal = attrs.evolve(journal, problems=journal.problems[:-1])
    return _Found(journal=journal, is_alive=is_alive, stacks=read_stacks(Path(journal.path).with_suffix(".stacks")))


def _is_held(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    return False


def _is_gone(started: RunStarted | None) -> bool:
    """Whether the process that began the journal is dead for certain: a child of it may still hold the lock."""
    if started is None or started.pid is None or started.host != os.uname().nodename:
        return False
    try:
        same_boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip() == started.boot_id
        if same_boot:
            os.kill(started.pid, 0)
    except (ProcessLookupError, OverflowError):
        return True
    except OSError:
        return False
    return False


def _starts(found: Iterable[_Found], *, source: str, origin: str, is_whole: bool) -> Iterator[Start]:
    groups: dict[tuple[str | None, int, int], list[Process]] = {}
    seen: dict[tuple[str | None, int, str | None], int] = {}
    for each in found:
        process = Process(
            journal=each.journal, history=_history(each.journal), is_alive=each.is_alive, stacks=each.stacks
        )
        history = process.history
        # A container that restarts without its journal mirrors the same names again: that is another start.
        key = (history.run, history.attempt, history.process)
        seen[key] = seen.get(key, -1) + 1
        groups.setdefault((history.run, history.attempt, seen[key]), []).append(process)
    for run, attempt, again in sorted(groups, key=lambda key: (key[0] or "", *key[1:])):
        processes = tuple(groups[run, attempt, again])
        yield Start(run=run, attempt=attempt, source=source, origin=origin, is_whole=is_whole, processes=processes)


def _history(journal: Journal) -> RunState:
    history = fold(journal.records)
    if history.started is None and journal.records:
        # The beginning is lost; every line says whose it is.
        first = journal.records[0]
        history.run, history.process, history.rank = first.run, first.process, first.rank
        history.attempt = first.attempt
    return history


def _with_problem(start: Start, problem: Problem) -> Start:
    first, *others = start.processes
    journal = attrs.evolve(first.journal, problems=(*first.journal.problems, problem))
    return attrs.evolve(start, processes=(attrs.evolve(first, journal=journal), *others))


def _nothing_in(shown: str, name: str, found: list[_Found], source: str, head: bytes) -> JournalError:
    """The error for a file without a single event."""
    problems = [problem for each in found for problem in each.journal.problems]
    where = problems[0] if problems else None
    if not head:
        text, hint = "the file is empty", "its process ended before its first event, or has only just begun"
        if _NAME.fullmatch(Path(name).name) is None:
            hint = _WHAT_TO_NAME
    elif where is not None:
        what = "journal" if source == "journal" else "text"
        text, hint = (
            f"no whole event in this {what}: {where.message}",
            "its process was killed while it wrote the first event, or this is another kind of file",
        )
    elif b"\0" in head:
        text, hint = "neither a journal nor text: it has binary bytes", _WHAT_TO_NAME
    else:
        text = "no mirrored lines in this text; text logs of engines are planned, not read yet"
        hint = "start with the mirror on (--mirror), or name the run directory"
    return JournalError(f"{shown}: {text}", path=name, offset=None if where is None else where.offset, hint=hint)
