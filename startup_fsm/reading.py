"""
From what somebody names on the command line to starts: journals, run directories, text logs, standard input.

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
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Final, cast

import attrs

from startup_fsm.errors import JournalError, UnknownSchema
from startup_fsm.events import RunStarted
from startup_fsm.journal import Journal, Problem, file_name, read_descriptor
from startup_fsm.stacks import read_stacks
from startup_fsm.starts import TEXT_LOG, Found, Start, grouped, with_problem

#: Stands for standard input.
STDIN: Final = "-"

#: What is looked at to tell a journal from other text: two lines of a journal at their longest.
_HEAD: Final = 2 << 20
_BLOCK: Final = 1 << 20

_EVENT: Final = re.compile(rb'\s*\{[ \t]*"v"[ \t]*:[ \t]*\d')
_LATER_EVENT: Final = re.compile(rb'\n[ \t]*\{[ \t]*"v"[ \t]*:[ \t]*\d+[ \t]*,[ \t]*"run"[ \t]*:')
_NAME: Final = re.compile(r"(?P<process>.+)\.(?P<attempt>[1-9][0-9]{0,8})\.jsonl")
_STAMP: Final = re.compile(r"[0-9]{8}T[0-9]{6}Z")

_WHAT_TO_NAME: Final = "name a run directory, a journal file, the text log of a start, or - for standard input"


def read_starts(path: str | Path) -> tuple[Start, ...]:
    """
    The starts that a path holds, oldest first: all attempts of one run, of several only where the path is one stream.

    Of a directory of runs the newest run is read.

    Raises:
        JournalError: Nothing can be read: no such path, no event, no line that says anything of a start, no permission.
        UnknownSchema: A newer version wrote it.
    """
    name = str(path)
    if name == STDIN:
        return starts_in(0, "standard input", name)
    descriptor = _opened(name)
    try:
        if not stat.S_ISDIR(os.fstat(descriptor).st_mode):
            return starts_in(descriptor, name, name)
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


def starts_in(descriptor: int, shown: str, name: str) -> tuple[Start, ...]:
    """
    The starts that an open file or pipe holds from where it stands, oldest first.

    Args:
        descriptor: What is read; it stays open.
        shown: What errors call it.
        name: What it is to the starts: their origin.

    Raises:
        JournalError: Not a single event.
        UnknownSchema: A newer version wrote it.
    """
    found, source = _read(descriptor, shown, name)
    return tuple(grouped(found, source=source, origin=name, is_whole=source != "journal"))


def _from_directory(root: Path) -> tuple[Start, ...]:
    directory = root
    with _said(str(root)):
        files = journals_in(root)
        if not files:
            directory, files = newest_run(root)
    found: list[Found] = []
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
    starts = list(grouped(found, source="journal", origin=str(directory), is_whole=True))
    for one in empty:
        # The others of its run can be read: what is wrong with this one is said with them.
        starts[-1] = with_problem(starts[-1], Problem(kind="broken", offset=0, line=1, message=one.message))
    return tuple(starts)


def journals_in(directory: Path) -> list[Path]:
    """The journals of a run directory, by name."""
    return sorted(each for each in directory.iterdir() if each.suffix == ".jsonl")


def newest_run(root: Path, *, besides: Collection[str] = ()) -> tuple[Path, list[Path]]:
    """
    The newest of a directory of runs, and its journals.

    Args:
        root: The directory.
        besides: Names of run directories that do not count.

    Raises:
        JournalError: There is none.
    """

    def began(directory: Path) -> tuple[str, int, str]:
        # Run ids of our own begin with their time; the clock of a directory does not survive its copying.
        stamp, changed = _STAMP.match(directory.name), directory.stat().st_mtime_ns
        seconds = time.gmtime(changed // 1_000_000_000)
        return stamp[0] if stamp else time.strftime("%Y%m%dT%H%M%SZ", seconds), changed, directory.name

    runs = (each for each in root.iterdir() if each.name not in besides and each.is_dir())
    for directory in sorted(runs, key=began, reverse=True):
        if files := journals_in(directory):
            return directory, files
    hint = "journals are files named <process>.<attempt>.jsonl in a run directory"
    raise JournalError(f"{root}: no journal in this directory", path=str(root), hint=hint)


def _read(descriptor: int, shown: str, name: str) -> tuple[list[Found], str]:
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


def _found(descriptor: int, shown: str) -> tuple[list[Found], str, bytes]:
    status = os.fstat(descriptor)
    # Before the reading: a writer that ends in between has written its end by then. An empty file is left alone, since
    # its writer may be about to ask for the lock.
    has_writer = status.st_size > 0 and is_held(descriptor)
    head = b""
    while len(head) < _HEAD and (block := os.read(descriptor, _BLOCK)):
        head += block
    if is_journal(head, shown):
        if stat.S_ISREG(status.st_mode):
            os.lseek(descriptor, -len(head), os.SEEK_CUR)
            return [_whole(read_descriptor(descriptor, shown), is_held=has_writer)], "journal", head
        from tempfile import TemporaryFile

        # A journal is read by descriptor; its first bytes have left the pipe already.
        with TemporaryFile() as copy:
            copy.write(head)
            while block := os.read(descriptor, _BLOCK):
                copy.write(block)
            copy.seek(0)
            return [Found(journal=read_descriptor(copy.fileno(), shown))], "journal", head
    if not _holds_mirror(head):
        is_file = stat.S_ISREG(status.st_mode)
        here = os.lseek(descriptor, 0, os.SEEK_CUR) if is_file else 0
        found, is_mirror = _from_log(_Stream(head, descriptor), shown)
        if not is_mirror or not is_file:
            return found, TEXT_LOG, head
        # Mirrored lines further down tell more than the words of the engine do.
        os.lseek(descriptor, here, os.SEEK_SET)
    return _fished(_Stream(head, descriptor), shown), "mirror", head


def _holds_mirror(head: bytes) -> bool:
    from startup_fsm.mirror import holds_mirror

    return holds_mirror(head)


def _from_log(stream: _Stream, shown: str) -> tuple[list[Found], bool]:
    """The starts that a text log tells, and whether there are mirrored lines in it."""
    from startup_fsm.importers.textlog import read_log

    log = read_log(stream)
    found: list[Found] = []
    for start in log.starts:
        for process in start.processes:
            name = f"{shown}#{start.run}/{file_name(process.name, 1)}"
            problems = tuple(
                Problem(kind="gap", offset=0, line=start.last_line, message=f"{process.unlisted} events were left out")
                for _ in range(min(1, process.unlisted))
            )
            found.append(Found(journal=Journal(name, process.records, problems)))
    if log.left_out and found:
        text = f"{log.left_out} earlier starts in this log were left out"
        lost = Problem(kind="gap", offset=0, line=1, message=text)
        journal = found[0].journal
        found[0] = Found(journal=attrs.evolve(journal, problems=(*journal.problems, lost)))
    return found, log.holds_mirror


def _fished(stream: _Stream, shown: str) -> list[Found]:
    from startup_fsm.fishing import fish

    catch = fish(cast("BinaryIO", stream), shown)
    found = [Found(journal=journal) for journal in catch.journals]
    if catch.problems:
        # Torn texts that are nobody's go with the last start, or stand alone.
        last = found.pop().journal if found else Journal(shown, ())
        found.append(Found(journal=attrs.evolve(last, problems=(*last.problems, *catch.problems))))
    return found


def is_journal(head: bytes, name: str) -> bool:
    """Whether a file that begins so, and is called so, is a journal."""
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


def _whole(journal: Journal, *, is_held: bool) -> Found:
    """A journal file with its writer and its side file."""
    first = journal.records[0].event if journal.records else None
    is_alive = is_held and not is_gone(first if isinstance(first, RunStarted) else None)
    if is_alive and journal.problems and journal.problems[-1].kind == "torn":
        # The line is being written right now.
        journal = attrs.evolve(journal, problems=journal.problems[:-1])
    return Found(journal=journal, is_alive=is_alive, stacks=read_stacks(Path(journal.path).with_suffix(".stacks")))


def is_held(descriptor: int) -> bool:
    """
    Whether a writer holds a journal.

    Never ask an empty file: its writer may be about to take the lock, which this takes for an instant.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    return False


def is_gone(started: RunStarted | None) -> bool:
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


def _nothing_in(shown: str, name: str, found: list[Found], source: str, head: bytes) -> JournalError:
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
        text = "no line of this text says anything of the start of an engine"
        hint = "name the log from its first line on, or the run directory"
    return JournalError(f"{shown}: {text}", path=name, offset=None if where is None else where.offset, hint=hint)
