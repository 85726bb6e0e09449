"""
What shells, containers, schedulers and the kernel print of a process: how it ended when it could not say so itself.

Nobody's lines: a shell's ``Killed`` names no rank. Exit code 137 and signal 9 are mostly the kernel's for memory of the
host, and a text log has nothing better; other signals are signals.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Final

from startup_fsm.importers.facts import Death, Fact, Heard, Row, Sign, Step, bytes_figure

_HOST: Final = Death(category="host_oom", reason="host_out_of_memory", is_final=True)
_SIGNAL: Final = Death(category="signal", reason="signal", is_final=True)


def _killed(found: re.Match[str], heard: Heard) -> Iterable[Fact]:
    return (_HOST,)


def _signalled(found: re.Match[str], heard: Heard) -> Iterable[Fact]:
    return (_SIGNAL,)


def _crashed(found: re.Match[str], heard: Heard) -> Iterable[Fact]:
    return (Death(is_final=True),)


def _code(found: re.Match[str], heard: Heard) -> Iterable[Fact]:
    code = int(found[1])
    sign = Sign("exited", {"code": code})
    if code in (137, -9):
        return (sign, _HOST)
    return (sign, _SIGNAL) if code in (143, -15, 130, -2) else (sign,)


def _shards(found: re.Match[str], heard: Heard) -> Iterable[Fact]:
    return (Step("load_weights"),)


def _sentence(found: re.Match[str], heard: Heard) -> Iterable[Fact]:
    return (Death(category="oom", reason="out_of_memory"),)


def _table(name: str) -> Callable[[re.Match[str], Heard], Iterable[Fact]]:
    return lambda found, _: bytes_figure(name, found[1], found[2])


def _fatal(found: re.Match[str], heard: Heard) -> Iterable[Fact]:
    return (Sign("fatal_error"),)


#: An engine's own process is about to end, though its server may live on.
FATAL: Final = "fatal"

_SIZE: Final = r"(\d{1,12}(?:\.\d{1,6})?) (bytes|[KMGT]iB)"

#: A shell's word, alone or behind the bar that it cut off.
_KILLED: Final = (
    r"(?:it/s|s/it|[\]|]) {0,4}Killed\Z"
    r"|^(?:\S{1,40}: (?:line \d{1,6}: )?)? {0,20}(?:\d{1,9} )?Killed(?:\Z| {2,}|: 9)"
)
#: Ray advises about one that it did not get.
_SIGTERM: Final = r"(?:[Rr]eceived|[Gg]ot|caught) (?:signal )?SIGTERM|\bSIGTERM received(?!, please ignore)"

#: Lines that stand for themselves.
GENERAL: Final = (
    Row("shards", "checkpoint shards:", r"^Loading \w{1,20} checkpoint shards:", _shards),
    Row("sentence", "Tried to allocate", r"(?:out of memory|OutOfMemory).{0,80}Tried to allocate \d", _sentence),
    Row(FATAL, "encountered a fatal error", r"encountered a fatal error", _fatal),
    # What cudaMallocAsync has instead of a sentence: a line for each figure.
    Row(
        "allocated", "Currently allocated", rf"^Currently allocated {{0,24}}: {_SIZE}", _table("torch_allocated_bytes")
    ),
    Row("asked", "Requested", rf"^Requested {{0,24}}: {_SIZE}", _table("oom_tried_bytes")),
    Row("limit", "Device limit", rf"^Device limit {{0,24}}: {_SIZE}", _table("total_bytes")),
    Row("free", "Free (according", rf"^Free \(according to CUDA\) {{0,24}}: {_SIZE}", _table("oom_free_bytes")),
    Row("killed", "Killed", _KILLED, _killed),
    Row("oom_killed", "OOMKilled", r"OOMKilled", _killed),
    Row("kernel", "Out of memory: Kill", r"Out of memory: Kill(?:ed)? process \d{1,9}", _killed),
    Row("cgroup", "Memory cgroup out of memory", r"Memory cgroup out of memory", _killed),
    Row("slurm", "oom", r"Detected \d{1,9} oom[-_]kill", _killed),
    Row("code", "exited with code", r"exited with code (-?\d{1,5})\b", _code),
    Row("term", "SIGTERM", _SIGTERM, _signalled),
    Row("terminated", "Terminated", r"^(?:\S{1,40}: (?:line \d{1,6}: )?)? {0,20}(?:\d{1,9} )?Terminated\Z", _signalled),
    Row("interrupt", "KeyboardInterrupt", r"^KeyboardInterrupt\Z", _signalled),
    Row("segfault", "Segmentation fault", r"Segmentation fault", _crashed),
    Row("bus", "Bus error", r"Bus error", _killed),
)
