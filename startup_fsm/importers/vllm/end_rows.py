"""
How a start ends: what is suggested after the capture (L63, L105, L106, and Ascend's), the closing lines (L107, L108),
sleep, stalls and deaths (L110 to L119).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

import attrs

from startup_fsm.importers.facts import Death, Fact, Heard, Ready, Row, Sign, Stall, Step, Version, size
from startup_fsm.importers.vllm.failures import of_text
from startup_fsm.importers.vllm.wording import (
    NUMBER,
    amount,
    gib,
    phrase,
    say,
    search_clauses,
    share,
)

_CAPTURED: Final = Step("capture_graphs", moment="ends")
_SERVING: Final = Step("serving")
_ASCEND: Final = Version("vllm-ascend")

#: The clauses of the suggestion, whose order and company change with the version.
_SUGGESTION: Final = (
    rf"on device \({gib('free_at_start_bytes')}/{gib('total_bytes')} GiB\) on startup",
    rf"utilization is \({share('gpu_memory_utilization')}, {gib('requested_bytes')} GiB\)",
    rf"{amount('weights_bytes')} for weights?\b",
    rf"{amount('weights_and_non_torch_bytes')} for consumed memory",
    rf"{amount('engine_outside_torch_bytes')} for non-torch memory",
    rf"{amount('graph_actual_bytes')} for (?:CUDAGraph|NPU graph) memory",
    r"--kv-cache-memory=(?P<suggested_kv_bytes_requested>-?\d{1,20})`?[^`,;]{0,60}? to fit into requested",
    r"--kv-cache-memory=(?P<suggested_kv_bytes_full>-?\d{1,20})`?[^`,;]{0,60}? to fully utilize",
    rf"torch reserved memory {amount('torch_reserved_bytes')}",
    rf"torch allocated memory {amount('torch_allocated_bytes')}",
)
_ACTIVATION: Final = (rf"{amount('engine_activation_bytes')} for peak activation",)
#: What was left for the KV cache, which is also what it has.
_IN_USE: Final = (
    rf"[Cc]urrent (?:kv|KV) cache memory(?: in use is|:) {amount('kv_available_bytes')}",
    rf"[Cc]urrent (?:kv|KV) cache memory(?: in use is|:) {amount('kv_cache_bytes')}",
)
_GRAPHS: Final = rf"({NUMBER}) GiB for (?:CUDAGraph|NPU graph) memory"


def _suggested(found: re.Match[str], heard: Heard) -> Iterator[Fact]:
    text = found.string
    graphs = re.search(_GRAPHS, text)
    # An eager start prints the line too.
    is_eager = graphs is not None and float(graphs[1]) == 0 and heard.state != "capture_graphs"
    yield Step("warmup", moment="ends") if is_eager else _CAPTURED
    if "NPU graph" in text:
        yield _ASCEND
    yield from search_clauses(_SUGGESTION, text)
    # Some versions add the graph estimate to the activations here; the profile's own line does not.
    if not heard.has("L51"):
        yield from search_clauses(_ACTIVATION, text)
    # What this rank could have had was said before; over several ranks all use what the poorest has.
    yield from search_clauses(_IN_USE[1:] if heard.has("L56") else _IN_USE, text)


def _saved(found: re.Match[str], heard: Heard) -> Iterator[Fact]:
    if heard.state == "capture_graphs":
        yield _CAPTURED


def _slept(found: re.Match[str], heard: Heard) -> Iterator[Fact]:
    yield _SERVING
    freed, used = (size(number, "GiB")[0] for number in found.group(1, 2))
    yield Sign("sleep_freed", {"freed_bytes": freed, "used_bytes": used})


def _waits(found: re.Match[str], heard: Heard) -> Iterator[Fact]:
    yield Stall(float(found[1]))


def _watchdog(found: re.Match[str], heard: Heard) -> Iterator[Fact]:
    yield Stall(int(found[1]) / 1_000)


def _worker_died(found: re.Match[str], heard: Heard) -> Iterator[Fact]:
    code = int(found[2]) if found[2] else None
    yield Sign("worker_died", {"name": found[1], "code": code})
    if code not in _ASKED_TO_END:
        yield _end_of(code)


def _end_of(code: int | None) -> Death:
    """What the exit code of another process says; most say nothing that it did not say itself."""
    if code in (-9, 137):
        return Death("host_oom", "host_out_of_memory")
    if code is not None and code < 0:
        return Death("signal", "signal")
    return Death("peer", "peer", is_echo=True)


def _aborted(found: re.Match[str], heard: Heard) -> Iterator[Fact]:
    yield attrs.evolve(of_text("", found[1], heard), is_final=True)


#: Exit codes of a worker that was told to stop, as every worker is when an engine shuts down.
_ASKED_TO_END: Final = (0, -2, -15)

_ECHO: Final = say(Death("peer", "peer", is_echo=True))
_READY: Final = say(Ready())

_CLOSING: Final = (
    Row("L105", " on startup. Desired ", r"on device \(.{1,40}? GiB\) on startup\. Desired GPU", _suggested),
    phrase("L63", "Saved startup plan to ", _saved),
    Row("ascend", "After warmup: torch reserved memory ", r"After warmup: torch reserved", say(_ASCEND)),
    Row("ascend", "NPU out of memory", r"NPU out of memory", say(_ASCEND)),
    phrase("L107", "init engine (profile, create kv cache, warmup model) took ", _READY),
    Row("ready", "Starting vLLM API server", r"Starting vLLM API server(?: \d{1,6})? on ", _READY),
    phrase("ready", "Starting vLLM server on ", _READY),
    Row("ready", "Application startup complete", r"Application startup complete", _READY),
    Row("ready", "Uvicorn running on ", r"Uvicorn running on ", _READY),
)

_SLEEP: Final = (
    Row(
        "L110",
        "Sleep mode freed ",
        rf"Sleep mode freed ({NUMBER}) GiB memory, ({NUMBER}) GiB memory is still in use",
        _slept,
    ),
    Row("L111", " to fall asleep", rf"It took {NUMBER} seconds to fall asleep", say(_SERVING)),
    Row("L112", " to wake up", rf"It took {NUMBER} seconds to wake up", say(_SERVING)),
    Row("L113", " to discard tags ", rf"It took {NUMBER} seconds to discard tags", say(_SERVING)),
    phrase("L114", "CuMemAllocator: sleep freed ", say(_SERVING)),
)

_STALLS: Final = (
    Row(
        "L115",
        "broadcast block found in ",
        rf"No available (?:shared memory )?broadcast block found in ({NUMBER}) sec",
        _waits,
    ),
    Row("L115", "No available block found in ", rf"No available block found in ({NUMBER}) sec", _waits),
    Row(
        "placement",
        "Waiting for creating a placement group ",
        rf"Waiting for creating a placement group of specs for ({NUMBER}) seconds",
        _waits,
    ),
    Row(
        "watchdog",
        "collective operation timeout",
        r"Watchdog caught collective operation timeout.{0,600}?ran for (\d{1,12}) milliseconds",
        _watchdog,
    ),
)

_DEATHS: Final = (
    phrase("L116", "WorkerProc was terminated", say()),
    Row(
        "L117",
        "died unexpectedly",
        r"Worker proc (\S{1,80}) died unexpectedly(?: \(exit code: (-?\d{1,6})\))?",
        _worker_died,
    ),
    Row("L117", "RayWorkerProc rank=", r"RayWorkerProc (rank=.{1,200}?) died unexpectedly()?", _worker_died),
    Row("L117", " died, exit code: ", r"Worker (\S{1,80} pid \d{1,9}) died, exit code: (-?\d{1,6})", _worker_died),
    # While serving an engine may get over the first of these; its traceback follows.
    phrase("L118", "WorkerProc hit an exception", say()),
    phrase("L118", "WorkerProc failed to start", _ECHO),
    phrase("L118", "EngineCore failed to start", _ECHO),
    phrase("L119", "Engine core initialization failed", _ECHO),
    Row("what", "what():  ", r"^\s{0,8}what\(\):\s{1,4}(.{1,2000})", _aborted),
    Row(
        "ipc",
        "custom_all_reduce.cuh",
        r"Failed: (?:Cuda|HIP) error \S{1,200}custom_all_reduce\.cuh:\d{1,6}",
        say(Death("capture", "ipc_handle", is_final=True)),
    ),
    phrase("fault", "Memory access fault by GPU node", say(Death("raised", "illegal_access", is_final=True))),
)

ROWS: Final = (*_CLOSING, *_SLEEP, *_STALLS, *_DEATHS)
