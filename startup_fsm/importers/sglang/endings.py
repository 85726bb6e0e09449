"""How starts of SGLang end in its own lines: the closing ones, watchdogs, and parents that tell of their children."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from startup_fsm.importers.facts import Death, Fact, Heard, Ready, Row, Setting, Sign, Stall
from startup_fsm.importers.sglang.words import COUNT, NUMBER, behind, count, memory

#: Exit codes of a process that was killed, mostly by the kernel for memory of the host.
_KILLED: Final = frozenset({-9, 137})

_ECHO: Final = Death(category="peer", reason="peer", is_echo=True)
_HOST: Final = Death(category="host_oom", reason="host_out_of_memory")


def death_of_child(code: int) -> Death:
    """What a parent knows of a child that ended with this exit code: an echo, unless it was killed."""
    return _HOST if code in _KILLED else _ECHO


def _summary(found: re.Match[str], heard: Heard) -> Iterable[Fact]:
    text = behind(found)
    chunk = re.search(rf"\bchunked_prefill_size={COUNT}\b", text)
    return (
        *count("kv_tokens", "max_total_num_tokens", text),
        *count("max_running_requests", "max_running_requests", text),
        *count("max_model_len", "context_len", text),
        *memory("avail_final_bytes", "available_gpu_mem", text),
        *(() if chunk is None else (Setting("chunked_prefill_size", int(chunk[1])),)),
        Ready(),
    )


def _ready(found: re.Match[str], heard: Heard) -> Iterable[Fact]:
    return (Ready(),)


def _watchdog(found: re.Match[str], heard: Heard) -> Iterable[Fact]:
    text = behind(found)
    waited = re.search(rf"watchdog_timeout={NUMBER}", text)
    stall = Stall(None if waited is None else float(waited[1]))
    # A soft one only writes down what it saw.
    return (stall,) if re.search(r"\bself\.soft=True\b", text) else (stall, Death(reason="timeout"))


def _echo(found: re.Match[str], heard: Heard) -> Iterable[Fact]:
    return (_ECHO,)


def _exited(found: re.Match[str], heard: Heard) -> Iterable[Fact]:
    return (death_of_child(int(found[1])),)


def _died(found: re.Match[str], heard: Heard) -> Iterable[Fact]:
    code = int(found[2])
    return (Sign("worker_died", {"name": found[1], "code": code}), death_of_child(code))


def _warmup(found: re.Match[str], heard: Heard) -> Iterable[Fact]:
    # The first request, sent by the server to itself.
    said = found[1] or ""
    if re.search(r"[Cc]onnection refused|Max retries exceeded|[Cc]onnection (?:aborted|reset)", said):
        return (_ECHO,)
    is_late = re.search(r"[Tt]imed out|Timeout", said) is not None
    return (Death(reason="timeout" if is_late else "", state="serving"),)


ROWS: Final = (
    Row(
        "sgl.summary",
        "max_total_num_tokens=",
        rf"\bmax_total_num_tokens={COUNT}, (?:chunked_prefill_size|max_prefill_tokens|max_running_requests)=",
        _summary,
    ),
    Row("sgl.timings", "Engine startup timings", r"\bEngine startup timings \(s\): ", _ready),
    Row("sgl.fired_up", "server is fired up", r"\bThe server is fired up\b", _ready),
    Row("sgl.watchdog", "atchdog ", r"\b[Ww]atchdog timeout \(self\.|\bWatchdog TIMEOUT\b", _watchdog),
    Row("sgl.sigquit", "Received sigquit", r"\bReceived sigquit from a child process", _echo),
    Row("sgl.sigquit_serving", "SIGQUIT received", r"\bSIGQUIT received\. signum=", _echo),
    Row("sgl.dead_rank", "scheduler is dead", r"\bRank \d{1,6} scheduler is dead\b", _echo),
    Row("sgl.exit_code", "Exit code: ", r"^Exit code: (-?\d{1,5})\b", _exited, "sglang"),
    Row(
        "sgl.died",
        "died during initialization",
        r"\b(Rank \d{1,6} scheduler) died during initialization \(exit code: (-?\d{1,5})\)",
        _died,
    ),
    Row(
        "sgl.crashed",
        "Triggering SIGQUIT",
        r"\bSubprocess (\w{1,80}) \(pid=\d{1,10}\) crashed with exit code (-?\d{1,5})\b",
        _died,
    ),
    Row(
        "sgl.warmup",
        "Initialization failed. warmup error",
        r"Initialization failed\. warmup error:? ?(.{0,2000})",
        _warmup,
    ),
)
