"""
The size of vLLM's KV cache, corrected by what a start really took: a closed loop over journals.

    kv = KV bytes of the last ready start + requested - its peak - margin

for the last ready start of the same fingerprint and rank; whatever nobody can explain is in its peak, so it is taken
off too. A start without such a journal takes a bound, which is what vLLM's own sum is known to lack:

    kv = available - context - graphs - sampler - margin

``context`` is what the process held before vLLM's first reading, and nobody charges; ``graphs`` what its estimate may
be short of, or all of them where it has none; ``sampler`` two blocks of logits for the first full step after capture.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, Final

import attrs

from startup_fsm.errors import StartupError
from startup_fsm.fold import RunState, fold
from startup_fsm.integrations.vllm import facts
from startup_fsm.integrations.vllm.recording import Start
from startup_fsm.journal import read_journal
from startup_fsm.memory import MIB, Snapshot, format_bytes

#: Below vLLM's own logger, which its configuration prints.
_log: Final = logging.getLogger("vllm.startup_fsm")

#: Bytes that are left between the peak and the request: what two starts of one engine were seen to differ by, twice.
MARGIN: Final = 128 * MIB
#: A graph of one batch size, where nothing estimates them, in bytes: measured for 32 layers, 19 to 22 MiB.
_GRAPH: Final = 24 * MIB
#: What an estimate of vLLM's was seen to be short of: 0.15 of 0.50 GiB.
_SHORT: Final = 0.35
#: Journals that are looked through for an earlier start, newest first.
_LOOKED_AT: Final = 200
#: Bytes of one logit.
_LOGIT: Final = 4


@attrs.frozen(kw_only=True)
class Before:
    """
    The last ready start of this fingerprint and rank.

    Attributes:
        run: Its id.
        kv_bytes, used_peak_bytes, requested_bytes: What it allocated, stood at most at, and was asked for.
    """

    run: str
    kv_bytes: int
    used_peak_bytes: int
    requested_bytes: int


def last_ready(start: Start) -> Before | None:
    """The newest journal of another run that is ready, has this fingerprint, and knows its peak."""
    name = f"{start.recorder.process}.*.jsonl"
    files = sorted(start.runs.glob(f"*/{name}"), key=_changed, reverse=True)
    for file in files[:_LOOKED_AT]:
        if file.parent.name == start.recorder.run:
            continue
        found = _before(file, start.fingerprint)
        if found is not None:
            return found
    return None


def _changed(file: Path) -> int:
    try:
        return file.stat().st_mtime_ns
    except OSError:
        return 0


def _before(file: Path, fingerprint: str) -> Before | None:
    try:
        run = fold(read_journal(file).records)
    except (StartupError, OSError):
        return None
    is_ready = run.finished is not None and run.finished[1].end == "ready"
    if not is_ready or run.started is None or run.started.fingerprint != fingerprint:
        return None
    kv_bytes, peak, requested = (
        _figure(run, each) for each in ("kv_cache_bytes", "used_peak_bytes", "requested_bytes")
    )
    if kv_bytes is None or peak is None or requested is None:
        return None
    return Before(run=run.run or "", kv_bytes=kv_bytes, used_peak_bytes=peak, requested_bytes=requested)


def _figure(run: RunState, name: str) -> int | None:
    read = run.figures.get(name)
    return read[1].value if read is not None and isinstance(read[1].value, int) else None


def corrected(start: Start, worker: Any, available: int) -> int:
    """
    What vLLM is told instead of ``available`` bytes; the same where nothing can be said.

    Args:
        start: The journal, which says why.
        worker: vLLM's.
        available: What it would give its KV cache.
    """
    requested = facts.attribute(worker, "requested_memory")
    shot = start.snapshot("sizing")
    if not isinstance(requested, int | float) or shot is None:
        start.decide("kv_not_corrected", "this version does not say what was requested")
        return available
    asked = int(requested)
    before = last_ready(start)
    if before is not None and before.requested_bytes == asked:
        wanted = before.kv_bytes + asked - before.used_peak_bytes - MARGIN
        # The device may have less for us than at that start.
        rest = before.used_peak_bytes - before.kv_bytes
        wanted = min(wanted, shot.own_bytes + shot.free_bytes - rest - MARGIN)
        reason = f"{before.run} stood at most at {format_bytes(before.used_peak_bytes)} of {format_bytes(asked)}"
        inputs: dict[str, Any] = {
            "run": before.run,
            "kv_bytes": before.kv_bytes,
            "used_peak_bytes": before.used_peak_bytes,
        }
    else:
        lacking = _bound(worker, shot, start.config)
        wanted = available - sum(lacking.values()) - MARGIN
        inputs = dict(lacking)
        reason = "no ready start of this fingerprint: what vLLM's own sum lacks is bounded"
    inputs |= {"available_bytes": available, "requested_bytes": asked, "margin_bytes": MARGIN}
    if wanted <= 0:
        start.decide("kv_not_corrected", f"{reason}; nothing would be left", **inputs)
        return available
    start.decide("kv_corrected", reason, **inputs, wanted_bytes=wanted)
    # In the engine's own log too, so that whoever has only that knows why the cache is smaller than it says.
    _log.info("startup_fsm: KV cache corrected from %d to %d bytes: %s", available, wanted, reason)
    return wanted


def _bound(worker: Any, shot: Snapshot, config: Any) -> dict[str, int]:
    total, free = (facts.attribute(worker, "init_snapshot", name) for name in ("total_memory", "free_memory"))
    known = isinstance(total, int | float) and isinstance(free, int | float)
    context = max(0, int(total - free) - shot.other_bytes) if known else 0
    return {"context_bytes": context, "graphs_bytes": _graphs(worker, config), "sampler_bytes": _sampler(config)}


def _graphs(worker: Any, config: Any) -> int:
    sizes = facts.capture_sizes(config)
    if not sizes:
        return 0
    estimate = facts.attribute(worker, "cudagraph_memory_estimate")
    if isinstance(estimate, int | float) and estimate > 0 and facts.is_estimate_applied() is not False:
        return int(estimate * _SHORT) + MARGIN
    mode = str(facts.plain(facts.attribute(config, "compilation_config", "cudagraph_mode")))
    return len(sizes) * (2 if "FULL_AND_PIECEWISE" in mode else 1) * _GRAPH


def _sampler(config: Any) -> int:
    rows = facts.attribute(config, "scheduler_config", "max_num_seqs")
    tokens = facts.attribute(config, "scheduler_config", "max_num_batched_tokens")
    words = facts.attribute(config, "model_config", "hf_text_config", "vocab_size")
    known = [each for each in (rows, tokens) if isinstance(each, int)]
    return 2 * min(known) * words * _LOGIT if known and isinstance(words, int) else 0
