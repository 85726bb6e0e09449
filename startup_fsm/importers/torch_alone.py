"""
Exceptions that are no engine's own: what torch, the driver, NCCL and the host say, and frames of well-known names.

The words alone tell what went wrong, the frames where; without frames no state is proven. Engines ask here for whatever
is not theirs. The rows are lines that torch's C++ side prints without a Python exception.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Sequence
from typing import Final

import attrs

from startup_fsm.importers.facts import Death, Fact, Frame, Heard, Raised, Row, Stall
from startup_fsm.importers.torch_oom import parse_sentence

#: An exception's text is looked at that far.
_TEXT: Final = 8_192

_OUT_OF_MEMORY: Final = (
    r"\b(?:CUDA|HIP|NPU|XPU|HPU|MUSA|MLU|DCU|GPU|MPS backend) out of memory"
    r"|^(?:[\w.]{1,80}\.)?OutOfMemoryError\b|would exceed allowed memory\. \(out of memory\)"
)
_DRIVER: Final = (
    r"(?i:\b(?:cuda|hip|npu|musa|cuda driver|curesult|triton|cublas|cufft)(?: driver| runtime)? (?:error|failure)"
    r"[^\n]{0,60}?out of memory)"
    r"|(?:cuda|hip)Error(?:MemoryAllocation|OutOfMemory)|CUDA_ERROR_OUT_OF_MEMORY"
    r"|CU(?:BLAS|DNN|SPARSE|SOLVER)_STATUS_ALLOC_FAILED|UR_RESULT_ERROR_OUT_OF_(?:DEVICE|HOST)?_?(?:MEMORY|RESOURCES)"
    r"|NVML_SUCCESS == r INTERNAL ASSERT"
)
_HOST: Final = (
    r"DefaultCPUAllocator: (?:can't allocate|not enough) memory|\bCannot allocate memory\b|std::bad_alloc"
    r"|insufficient shared memory \(shm\)|^MemoryError\b|^(?:numpy\.[\w.]{1,60})?_ArrayMemoryError\b"
)
_NO_KERNEL: Final = (
    r"no kernel image is available|cudaErrorNoKernelImageForDevice|hipErrorNoBinaryForGpu|\binvalid device function\b"
)
_ILLEGAL: Final = (
    r"illegal memory access|(?:cuda|hip)ErrorIllegalAddress|CUDA_ERROR_ILLEGAL_ADDRESS|Memory access fault by GPU"
)
_NOT_CAPTURABLE: Final = (
    r"when (?:the )?stream is capturing|previous error during capture|unjoined work"
    r"|(?:cuda|hip)ErrorStreamCapture|CUDA_ERROR_STREAM_CAPTURE|during (?:CUDA |HIP )?graph capture"
    r"|outside graph capture|merge of separate capture sequences|dependency created on uncaptured work"
)
_TIMEOUT: Final = (
    r"\bTimed out (?:after|waiting)\b|collective operation timeout|\bwait timeout after\b|\b[Tt]imed out\b"
    r"|^(?:[\w.]{1,120}\.)?(?:\w{0,60}Timeout(?:Error|Expired)?|DistStoreError)\b"
)
_PEER: Final = (
    r"[Cc]onnection (?:was )?(?:closed|reset) by peer|remote process exited|ncclRemoteError|Broken pipe"
    r"|^(?:EOFError|BrokenPipeError|Connection(?:Reset|Aborted|Refused)Error)\b|recvValue failed"
)


@attrs.frozen(slots=True)
class _Meaning:
    """Words and what they mean; ``while_capturing`` is the category while graphs are captured."""

    pattern: str
    death: Death
    while_capturing: str | None = None


#: In the order in which they are tried: the host's and torch's own words name others in passing.
_MEANINGS: Final = (
    _Meaning(_HOST, Death(category="host_oom", reason="host_out_of_memory")),
    _Meaning(_OUT_OF_MEMORY, Death(category="oom", reason="out_of_memory")),
    _Meaning(_DRIVER, Death(category="oom", reason="driver_out_of_memory")),
    _Meaning(r"use_count (?:>|==) 0 INTERNAL ASSERT", Death(category="pool", reason="pool_use_count")),
    _Meaning(_NOT_CAPTURABLE, Death(category="capture", reason="not_capturable")),
    _Meaning(_NO_KERNEL, Death(reason="no_kernel_image"), "capture"),
    _Meaning(_ILLEGAL, Death(reason="illegal_access"), "capture"),
    _Meaning(r"graph_pool_id is not set", Death(category="capture", reason="graph_pool_id")),
    _Meaning(r"IpcGetMemHandle|IpcOpenMemHandle", Death(reason="ipc_handle"), "capture"),
    _Meaning(_PEER, Death(category="peer", reason="peer", is_echo=True)),
    _Meaning(_TIMEOUT, Death(reason="timeout")),
    _Meaning(r"^KeyboardInterrupt\b", Death(category="signal", reason="signal")),
)


def text_of(raised: Raised) -> str:
    """Type and message as printed, cut to what is looked at."""
    return f"{raised.type}: {raised.message}"[:_TEXT]


def death_by_words(text: str, *, is_capturing: bool = False) -> Death | None:
    """
    What a text means by its words alone; None where it is no known one.

    Args:
        text: ``Type: message``, or the message alone.
        is_capturing: Whether graphs are being captured, which makes some faults a failed capture.
    """
    if parse_sentence(text) is not None:
        return Death(category="oom", reason="out_of_memory")
    for meaning in _MEANINGS:
        if re.search(meaning.pattern, text) is not None:
            category = meaning.while_capturing if is_capturing else None
            return meaning.death if category is None else attrs.evolve(meaning.death, category=category)
    return None


_CAPTURE: Final = r"_?capture(?!_(?:output|exception|error|warn|log|stack|trace))\w*|make_graphed_callables"
_ALLOCATE: Final = (
    r"_?(?:allocate|alloc|create|build|init|initialize|reserve)_(?:\w{1,20}_)?(?:kv\w{0,40}|cache|cache_engine)"
)
_LOAD: Final = (
    r"_?load_(?:model|weight|state_dict|checkpoint|pretrained|shard|parameter)\w{0,40}|from_pretrained|create_weights"
    r"|process_weights_after_loading"
)

#: States by the names that loaders, runners and caches of many engines share, with the files that they count in.
_FRAMES: Final = (
    ("capture_graphs", r"torch/cuda/graphs\.py$", r"(?!replay\b)\w+"),
    ("capture_graphs", "", _CAPTURE),
    ("profile_activations", "", r"profile_run|profile_activations|warmup_model"),
    ("allocate_kv", "", _ALLOCATE),
    ("allocate_kv", r"(?:kv_cache|cache_engine|memory_pool)\w{0,20}\.py$", r"__init__|_?(?:allocate|create)\w{0,40}"),
    # Tokenizers and configurations come from_pretrained too.
    ("load_weights", r"^(?!.{0,400}(?:tokeni|configuration_|processing_))", _LOAD),
)


def state_by_frames(frames: Sequence[Frame]) -> str | None:
    """The state that the innermost frame with a well-known name proves; None where none has one."""
    return next((state for frame in reversed(frames) if (state := _state_in(frame)) is not None), None)


@functools.lru_cache(maxsize=1_024)
def _state_in(frame: Frame) -> str | None:
    """Ranks print the same frames, and so do exceptions that are raised from each other."""
    for state, file, function in _FRAMES:
        if re.fullmatch(function, frame.function) and (not file or re.search(file, frame.file)):
            return state
    return None


def _collective(found: re.Match[str], heard: Heard) -> Iterable[Fact]:
    waited = found[1]
    return (Stall(None if waited is None else int(waited) / 1000), Death(reason="timeout"))


def _stuck(found: re.Match[str], heard: Heard) -> Iterable[Fact]:
    return (Stall(float(found[1])), Death(reason="timeout"))


def _terminated(found: re.Match[str], heard: Heard) -> Iterable[Fact]:
    is_capturing = heard.state == "capture_graphs"
    return (death_by_words(found[1], is_capturing=is_capturing) or Death(),)


def _driver(found: re.Match[str], heard: Heard) -> Iterable[Fact]:
    return (Death(category="oom", reason="driver_out_of_memory"),)


_ROWS: Final = (
    Row(
        "torch.collective",
        "caught collective operation timeout",
        r"caught collective operation timeout(?:[^\n]{0,400}? ran for (\d{1,12}) milliseconds)?",
        _collective,
    ),
    Row("torch.stuck", "watchdog got stuck for", r"watchdog got stuck for (\d{1,9}) seconds", _stuck),
    Row("torch.terminate", "what():", r"^\s{0,8}what\(\):\s{1,4}(.{1,4096})", _terminated),
    Row("torch.memory_saver", "CUresult error", r"CUresult error:? {0,2}\d{0,4} {0,2}\(?out of memory", _driver),
)


@attrs.frozen(slots=True)
class _TorchAlone:
    """Judges exceptions where no engine is known."""

    source: str = "torch"
    rows: tuple[Row, ...] = _ROWS

    def death(self, raised: Raised, heard: Heard) -> Death:
        """By the words, and by frames of well-known names."""
        state = state_by_frames(raised.frames)
        is_capturing = (state or heard.state) == "capture_graphs"
        death = death_by_words(text_of(raised), is_capturing=is_capturing) or Death()
        return attrs.evolve(death, state=state)


#: The grammar of what is no engine.
TORCH: Final = _TorchAlone()
