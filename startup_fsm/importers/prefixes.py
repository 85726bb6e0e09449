"""
Who says a line, and what: an engine's prefix, or a foreign logger's, taken off its message.

A line may hold two messages where two writers were cut into each other, or where a progress bar had no end; a prefix in
the middle begins the second one. Patterns are linear; what repeats from line to line is parsed once.
"""

from __future__ import annotations

import datetime as dt
import functools
import re
from typing import Final, Literal, NamedTuple

from startup_fsm.importers.facts import NOBODY, Said, Speaker
from startup_fsm.importers.physical import Line

Form = Literal["vllm", "sglang", "other", "plain"]

_LEVEL: Final = "DEBUG|INFO|WARNING|ERROR|CRITICAL"
_ANY_LEVEL: Final = f"{_LEVEL}|TRACE|WARN|FATAL"
#: Other loggers' words and letters for the five levels.
_LEVELS: Final = {
    "TRACE": "DEBUG",
    "WARN": "WARNING",
    "FATAL": "CRITICAL",
    "V": "DEBUG",
    **{level[0]: level for level in ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")},
    "F": "CRITICAL",
}
_DAY_CLOCK: Final = r"(?:\d{4}-)?\d\d-\d\d[ T]\d\d:\d\d:\d\d(?:[.,]\d{1,9})?"
_FULL_CLOCK: Final = r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d(?:[.,]\d{1,9})?"

#: Process, level, date, and file with or without its opening bracket; one space behind it is the prefix's.
_VLLM: Final = re.compile(
    rf" {{0,2}}(?:(\([^)]{{1,200}}\)) )?({_LEVEL}) ({_DAY_CLOCK}) \[?([^\s\]\[]{{1,200}})\] ?", re.ASCII
)
_RANK: Final = r"(?: (?:rank=|[A-Z]{2,4})\d{1,6}){0,8}"
_ADDRESS: Final = r"(?:, ip=(?P<address>[\w.:-]{1,64}))?"
#: What stands before a message, one behind the other: processes, Ray's daemons and bare pids, a launcher's task, ranks.
_TAG: Final = re.compile(
    rf"\((?:(?P<name>[A-Za-z_][\w:.<>()/-]{{0,120}}+)(?P<ranks>{_RANK}) pid=(?P<pid>\d{{1,12}}){_ADDRESS}"
    r"|(?P<daemon>raylet|autoscaler|gcs_server)(?:[ ,][^)]{0,64})?|pid=(?P<bare>\d{1,12})(?:,[^)]{0,64})?"
    r"|[^(),]{1,100}, (?:rank=\d{1,6}, )?pid=\d{1,12}[^)]{0,80})\)(?: |\Z)"
    r"|\[rank(?P<rank>\d{1,6})\]:(?: |(?=\[)|\Z)|\[default(?P<local>\d{1,6})\]:",
    re.ASCII,
)
_SGLANG: Final = re.compile(rf"\[({_FULL_CLOCK})((?: [A-Za-z_]{{2,20}}\d{{0,5}}){{0,8}})\](?: |\Z)", re.ASCII)
_PART: Final = re.compile(r"([A-Z][A-Z_]{0,20})(\d{1,6})", re.ASCII)
_WORKER: Final = re.compile(r"(\w{0,20}Worker)((?:_(?:DP|PP|PCP|TP|DCP|EP)\d{1,6}){1,8})", re.ASCII)
_NUMBERED: Final = re.compile(r"(\w{0,20}Worker)-(\d{1,6})", re.ASCII)
#: Parts of a rank that divide no world: with them alone the tensor parallel number is the rank.
_INNER: Final = frozenset({"TP", "EP", "DCP"})

#: A second message: of processes that are known to print, for in a message any name may stand in brackets.
_SECOND: Final = re.compile(
    r"\((?:\w{0,16}Worker\w{0,60}|\w{0,16}EngineCore\w{0,40}|APIServer\w{0,10}|DPCoordinator|DPSupervisor|MainProcess)"
    rf"{_RANK} pid=\d{{1,12}}{_ADDRESS}\) "
    rf"|(?:{_LEVEL}) {_DAY_CLOCK} \[?[^\s\]\[]{{1,200}}\]"
    rf"|\[{_FULL_CLOCK}(?: [A-Z_]{{2,20}}\d{{1,5}}){{0,8}}\] "
    r"|(?<=\S)\[rank\d{1,6}\]:[ \[]",
    re.ASCII,
)
_REPEATED: Final = re.compile(r"\[repeated (\d{1,9})x across [a-z ]{1,20}\](?: \(Ray deduplicates .{0,400})?\Z")

_GLOG: Final = re.compile(
    r"\[?([VDIWECF])(\d\d)(\d\d) (\d\d:\d\d:\d\d(?:\.\d{1,9})?) {1,4}(?:\d{1,12} )?([\w./<>-]{1,200}:\d{1,6})\] ?",
    re.ASCII,
)
_NCCL: Final = re.compile(
    r"[^\s:]{1,255}:\d{1,12}:\d{1,12} \[\d{1,4}\] (?:\S{1,200} )?(?=NCCL (TRACE|INFO|WARN|ERROR) )", re.ASCII
)
_DATED: Final = re.compile(rf"({_FULL_CLOCK})(?:Z|[+-]\d\d:?\d\d)?(?=[\s|-])", re.ASCII)
#: Behind the date of a foreign logger: level, and file where there is one.
_FIELDS: Final = (
    re.compile(rf" - ({_ANY_LEVEL}) - (?:([\w.-]{{1,100}}\.py):\d{{1,6}} - (?:[\w.]{{1,100}}: )?)?", re.ASCII),
    re.compile(rf" - [\w.]{{1,100}} - ({_ANY_LEVEL})(?: - |: ?)", re.ASCII),
    re.compile(rf" \| ({_ANY_LEVEL}) {{0,8}}\| (?:([\w.]{{1,100}}):[\w<>.]{{1,100}}:\d{{1,6}} - )?", re.ASCII),
    re.compile(rf"\s{{1,3}}\[?({_ANY_LEVEL}) {{0,4}}\]?:?\s{{1,8}}", re.ASCII),
)
_FILE: Final = re.compile(r"\[?([\w./-]{1,100}\.py):\d{1,6}(?:\]:? ?|: ?| -- | - )", re.ASCII)
#: Behind SGLang's brackets: its main process's level and file, or a library's name and level.
_SGLANG_LEVEL: Final = re.compile(rf"({_LEVEL})(?:: {{1,10}}| (?=[\w./-]{{1,100}}\.py:\d{{1,6}}[: ]))", re.ASCII)
_LIBRARY: Final = re.compile(rf"\w{{1,40}} ({_ANY_LEVEL}): ", re.ASCII)
#: uvicorn's, and that of Python's logging without any configuration.
_BARE: Final = re.compile(rf"({_LEVEL}):(?: {{1,10}}|[A-Za-z_][\w.]{{0,100}}:)", re.ASCII)

_DAYS_BEFORE: Final = (0, 31, 60, 91, 121, 152, 182, 213, 244, 274, 305, 335)
_DAY: Final = 86_400


class _Prefix(NamedTuple):
    """What stands before a message, and where that begins."""

    end: int = 0
    speaker: Speaker = NOBODY
    form: Form = "plain"
    level: str | None = None
    t: float | None = None
    file: str | None = None


_PLAIN: Final = _Prefix()


def said(line: Line) -> tuple[Said, ...]:
    """The messages of a line, mostly one; of a line without any text one that is empty."""
    text = line.text
    prefix = _prefix(text)
    message = text[prefix.end :]
    at = _second(message, prefix)
    return (_message(line.number, message, prefix),) if at < 0 else _several(line.number, prefix, message, at)


def _several(number: int, prefix: _Prefix, message: str, at: int) -> tuple[Said, ...]:
    heard = []
    while at >= 0:
        if piece := message[:at].rstrip():
            heard.append(_message(number, piece, prefix))
        before, message = prefix, message[at:]
        prefix = _prefix(message)
        if prefix.speaker is NOBODY and prefix.form != "sglang" and before.form == "plain":
            # A bar has no end; what the same process says next stands behind it.
            prefix = prefix._replace(speaker=before.speaker)
        message = message[prefix.end :]
        at = _second(message, prefix)
    if message or not heard:
        heard.append(_message(number, message, prefix))
    return tuple(heard)


def _message(number: int, text: str, prefix: _Prefix) -> Said:
    repeated = 1
    if text.endswith(("]", ")")) and (found := _REPEATED.match(text, max(0, text.rfind("[repeated ")))):
        repeated, text = int(found[1]), text[: found.start()].rstrip()
    _, speaker, form, level, t, file = prefix
    return Said(number, text, speaker, form, level, t, file, repeated)


def _second(message: str, prefix: _Prefix) -> int:
    """Where a second prefix begins; -1 where none does."""
    if (
        " pid=" in message
        or "INFO " in message
        or "[20" in message
        or "WARNING " in message
        or "ERROR " in message
        or "DEBUG " in message
        or "[rank" in message
    ):
        # A prefix that was not taken off is not tried again.
        found = _SECOND.search(message, 0 if prefix.end else 1)
        if found is not None:
            return found.start()
    return -1


def _prefix(text: str) -> _Prefix:
    found = _VLLM.match(text)
    if found is not None:
        return _of_vllm(found, NOBODY)
    first = text[:1]
    if first in {"", " "}:
        return _PLAIN
    at, speaker = 0, NOBODY
    while first in {"(", "["} and (tag := _TAG.match(text, at)) is not None:
        at, speaker = tag.end(), _tagged(tag, speaker)
        found = _VLLM.match(text, at)
        if found is not None:
            return _of_vllm(found, speaker)
        first = text[at : at + 1]
    return _foreign(text, at, first, speaker) or _Prefix(at, speaker)


def _of_vllm(found: re.Match[str], speaker: Speaker) -> _Prefix:
    process, level, clock, file = found.groups()
    if process is not None:
        speaker = _speaker(process)
    return _Prefix(found.end(), speaker, "vllm", level, _of_day(clock), _base(file))


def _foreign(text: str, at: int, first: str, speaker: Speaker) -> _Prefix | None:
    if first == "[" and (found := _SGLANG.match(text, at)) is not None:
        return _of_sglang(text, found, speaker)
    if (found := _GLOG.match(text, at)) is not None:
        letter, month, day, clock, file = found.groups()
        t = _of_day(f"{month}-{day} {clock}")
        return _Prefix(found.end(), speaker, "other", _LEVELS[letter], t, _base(file))
    if first.isdigit() and (found := _DATED.match(text, at)) is not None:
        return _of_logger(text, found, speaker)
    if (found := _BARE.match(text, at)) is not None:
        return _Prefix(found.end(), speaker, "other", found[1])
    if "NCCL " in text and (found := _NCCL.match(text, at)) is not None:
        return _Prefix(found.end(), speaker, "other", _level(found[1]))
    return None


def _of_sglang(text: str, date: re.Match[str], speaker: Speaker) -> _Prefix:
    end, t = date.end(), _since_epoch(date[1])
    if (library := _LIBRARY.match(text, end)) is not None:
        return _Prefix(library.end(), speaker, "other", _level(library[1]), t)
    if (nccl := _NCCL.match(text, end)) is not None:
        return _Prefix(nccl.end(), speaker, "other", _level(nccl[1]), t)
    speaker = _ranked(date[2]) if date[2] else speaker
    level = _SGLANG_LEVEL.match(text, end)
    if level is None:
        return _Prefix(end, speaker, "sglang", None, t)
    file = _FILE.match(text, level.end())
    if file is None:
        return _Prefix(level.end(), speaker, "sglang", level[1], t)
    return _Prefix(file.end(), speaker, "sglang", level[1], t, _base(file[1]))


def _of_logger(text: str, date: re.Match[str], speaker: Speaker) -> _Prefix | None:
    """Of a foreign logger with a full date; None where no level follows."""
    for fields in _FIELDS:
        found = fields.match(text, date.end())
        if found is None:
            continue
        end, file = found.end(), found[2] if fields.groups > 1 else None
        if file is None and (named := _FILE.match(text, end)) is not None:
            end, file = named.end(), named[1]
        return _Prefix(end, speaker, "other", _level(found[1]), _since_epoch(date[1]), file and _base(file))
    return None


def _level(word: str) -> str:
    return _LEVELS.get(word, word)


def _tagged(tag: re.Match[str], speaker: Speaker) -> Speaker:
    """Whose a tag is, behind that of ``speaker``: the innermost process speaks, and a rank names who has no name."""
    if tag["name"]:
        return _process(tag["name"], tag["ranks"], int(tag["pid"]), tag["address"])
    if tag["daemon"]:
        return Speaker(name=tag["daemon"])
    if tag["bare"]:
        return Speaker(pid=int(tag["bare"]))
    if speaker is NOBODY and tag["rank"]:
        return Speaker(label=f"rank {int(tag['rank'])}", rank=int(tag["rank"]))
    if speaker is NOBODY and tag["local"]:
        return Speaker(label=f"rank {int(tag['local'])}")
    return speaker


@functools.lru_cache(maxsize=4_096)
def _speaker(process: str) -> Speaker:
    tag = _TAG.fullmatch(process)
    return NOBODY if tag is None else _tagged(tag, NOBODY)


@functools.lru_cache(maxsize=4_096)
def _process(name: str, ranks: str, pid: int, address: str | None) -> Speaker:
    if ranks.startswith(" rank="):
        rank = int(ranks[6:].partition(" ")[0])
        return Speaker(name, f"rank {rank}", rank, pid)
    if (worker := _WORKER.fullmatch(name)) is not None:
        name, ranks = worker[1], worker[2].replace("_", " ")
    if ranks:
        return _ranked(ranks, name, pid)
    if (numbered := _NUMBERED.fullmatch(name)) is not None:
        return Speaker(numbered[1], f"rank {int(numbered[2])}", int(numbered[2]), pid)
    if "RayWorker" in name or name == "VllmWorkerProcess" or (name == "Worker" and address):
        return Speaker(name, f"pid {pid} {address}" if address else f"pid {pid}", None, pid)
    return Speaker(name, None, None, pid)


@functools.lru_cache(maxsize=4_096)
def _ranked(ranks: str, name: str = "", pid: int | None = None) -> Speaker:
    """Of parts such as `` DP0 TP3``."""
    parts = [part for word in ranks.split() if (part := _PART.fullmatch(word))]
    if not parts:
        return Speaker(name, None, None, pid) if name else NOBODY
    numbers = {part[1]: int(part[2]) for part in parts}
    rank = numbers.get("TP") if numbers.keys() <= _INNER else None
    return Speaker(name, " ".join(part[0] for part in parts), rank, pid)


@functools.lru_cache(maxsize=4_096)
def _base(file: str) -> str | None:
    """The file's own name out of ``v1/worker/gpu_worker.py:508``, or of a module's dotted name."""
    name = file.rpartition("/")[2].partition(":")[0]
    if "/" in file or ":" in file or name.endswith(".py"):
        return name
    return f"{name.rpartition('.')[2]}.py" if "." in name else None


@functools.lru_cache(maxsize=1_024)
def _of_day(clock: str) -> float | None:
    """Seconds since the year began, every year with its 29th of February."""
    if clock[4] == "-":
        clock = clock[5:]
    month, day = int(clock[:2]), int(clock[3:5])
    return (_DAYS_BEFORE[month - 1] + day - 1) * _DAY + _seconds(clock[6:]) if 1 <= month <= 12 else None


@functools.lru_cache(maxsize=1_024)
def _since_epoch(clock: str) -> float | None:
    try:
        date = dt.date.fromisoformat(clock[:10])
    except ValueError:
        return None
    return (date.toordinal() - 719_163) * _DAY + _seconds(clock[11:])


def _seconds(clock: str) -> float:
    hours, minutes, seconds = clock.split(":")
    return int(hours) * 3_600 + int(minutes) * 60 + float(seconds.replace(",", "."))
