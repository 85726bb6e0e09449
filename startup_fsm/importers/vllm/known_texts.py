"""
Texts of exceptions that vLLM, torch and the drivers raise while an engine starts, and what each means (C01 to C52).

In the order in which they are looked for: reports of somebody else's failure quote it, so they come first.
"""

from __future__ import annotations

import enum
from typing import Final

import attrs

from startup_fsm.importers.facts import Death


class Place(enum.Enum):
    """What a text says of where it was raised."""

    NOWHERE = enum.auto()
    #: In the state of its ``Death``, whatever the frames say.
    ITS_OWN = enum.auto()
    #: In the state of its ``Death``, unless frames say another.
    USUAL = enum.auto()
    #: While something was captured.
    CAPTURE = enum.auto()
    #: In a dummy run of the sampler, of which there are two.
    SAMPLER = enum.auto()


@attrs.frozen(slots=True)
class Known:
    """A piece of text that stands in every exception of one kind."""

    text: str
    death: Death
    place: Place = Place.NOWHERE


def _echo(*texts: str) -> tuple[Known, ...]:
    return tuple(Known(text, Death("peer", "peer", is_echo=True)) for text in texts)


def _budget(reason: str, state: str, part: str | None, *texts: str) -> tuple[Known, ...]:
    return tuple(Known(text, Death("budget", reason, state, part), Place.ITS_OWN) for text in texts)


def _raised(reason: str, state: str | None, *texts: str) -> tuple[Known, ...]:
    place = Place.NOWHERE if state is None else Place.USUAL
    return tuple(Known(text, Death("raised", reason, state), place) for text in texts)


def _capture(category: str, reason: str, *texts: str) -> tuple[Known, ...]:
    return tuple(Known(text, Death(category, reason), Place.CAPTURE) for text in texts)


def _plain(category: str, reason: str, *texts: str) -> tuple[Known, ...]:
    return tuple(Known(text, Death(category, reason)) for text in texts)


_SOMEBODY_ELSE: Final = (
    *_echo(
        "Engine core initialization failed",
        "Frontend process failed during engine core initialization",
        "Engine process failed to start",
        "WorkerProc initialization failed",
        "Worker failed with error",
        "Worker failed with KV connector output",
        " method failed: ",
        "EngineCore encountered an issue",
        "Engine loop is not running",
        "Engine loop is dead",
        "Background loop has errored already",
        "Background loop is not running",
        "Background loop is stopped",
        "Task finished unexpectedly",
        "died unexpectedly",
        "The actor died",
        "The actor is dead",
        "Engine process (pid",
        "Executor failed",
        "worker died",
        # Of gloo, of NCCL and of the store that ranks meet at; a download may lose its connection too.
        "Connection closed by peer [",
        "Connection closed by remote peer",
        "Read error [",
        "got error: Connection reset by peer",
        "got error: Broken pipe",
    ),
    Known("RPC call to ", Death("raised", "timeout", is_echo=True)),
)

_BASELINE: Final = (
    *_budget("external_weights", "init_device", "pre_load_check", "Externally held weights on device"),
    *_budget(
        "not_enough_free",
        "init_device",
        "pre_load_check",
        "is less than desired GPU memory utilization",
        "is less than desired CPU memory utilization",
        "budget after excluding external process's weights",
    ),
    *_raised(
        "",
        "init_device",
        "adjusted local rank",
        "out of bounds for assigned_physical_gpu_ids",
        "exceeds assigned_physical_gpu_ids count",
        "Unsupported device type",
        "Not support device type",
        "Bfloat16 is only supported on",
        "two snapshots should be from the same device",
    ),
)

_WEIGHTS: Final = (
    *_raised("", "load_weights", "can only be used for one instance per process"),
    *_raised("", "load_weights", "Expandable segments are not compatible with memory pool"),
    *(
        Known(text, Death("oom", "out_of_memory", "load_weights"), Place.USUAL)
        for text in ("Failed to load model - not enough GPU memory", "insufficient memory to allocate the weight")
    ),
)

_PROFILE: Final = (
    Known("Error in memory profiling", Death("raised", "free_grew", "profile_activations"), Place.ITS_OWN),
    Known(
        "backend compilation occurred during the initial profiling run",
        Death("raised", "", "profile_activations", "compile"),
        Place.ITS_OWN,
    ),
    Known("out of memory occurred when warming up", Death("oom", "sampler_out_of_memory"), Place.SAMPLER),
)

_PLANNING: Final = (
    *_budget(
        "no_blocks",
        "size_kv",
        None,
        "No available memory for the cache blocks",
        "frontend multimodal GPU decoding reserves",
        "The worker already uses",
    ),
    *_budget("not_enough_free", "size_kv", None, "on kv cache allocation is less than requested memory for kv"),
    *_budget(
        "request_does_not_fit",
        "size_kv",
        "request_fits",
        "To serve at least one request with the model",
        "is larger than the maximum number of tokens that can be stored in KV cache",
        "Cannot auto-fit max_model_len",
    ),
    *_budget("sequences_do_not_fit", "size_kv", None, "exceeds available Mamba cache blocks"),
    *_raised(
        "ranks_differ",
        "size_kv",
        "num_gpu_blocks need to be the same across workers",
        "for the same layer are different across workers",
        "Workers disagree on supported KV cache layouts",
    ),
    *_raised(
        "",
        "size_kv",
        "are not assigned to any group",
        "KV cache groups miss layers",
        "mixed page sizes",
        "must share one device backing allocation",
    ),
)

_GRAPHS: Final = (
    *_capture("pool", "pool_use_count", "use_count > 0 INTERNAL ASSERT", "use_count == 0 INTERNAL ASSERT"),
    *_capture("capture", "graph_pool_id", "graph_pool_id is not set"),
    *_plain("capture", "workspace_locked", "Workspace is locked"),
    *_capture("capture", "ipc_handle", "cudaIpcGetMemHandle", "hipIpcGetMemHandle", "cudaIpcOpenMemHandle"),
    *_capture(
        "capture",
        "not_capturable",
        "when stream is capturing",
        "StreamCapture",
        "due to a previous error during capture",
        "on a capturing blocking stream",
        "uncaptured work in another stream",
        "last recorded in a capturing stream",
        "unjoined work",
        "during CUDA graph capture",
        "CUDA graphs must be captured on a non-default stream",
    ),
    *_plain("capture", "not_capturable", "CUDA graph capturing detected at an inappropriate time"),
    *_capture("raised", "", "Graph already captured for", "not torch-compiled and breakable CUDA graph is off"),
    *_raised("", None, "No cudagraph for", "Expected FULL mode", "Input addresses for cudagraphs are different"),
    *_raised("", "serving", "Memory usage increased after sleeping"),
)

_DEVICE: Final = (
    # The allocator asks NVML about a failed allocation, and under MIG NVML answers with an error of its own.
    *_plain("oom", "out_of_memory", "NVML_SUCCESS == r INTERNAL ASSERT FAILED"),
    *_plain("raised", "no_kernel_image", "no kernel image is available", "NoKernelImageForDevice"),
    *_plain("raised", "illegal_access", "illegal memory access", "cudaErrorIllegalAddress", "hipErrorIllegalAddress"),
)

_HOST: Final = (
    *_plain(
        "host_oom",
        "host_out_of_memory",
        "node running low on memory",
        "DefaultCPUAllocator",
        "Cannot allocate memory",
        "std::bad_alloc",
    ),
)

_TIME: Final = (
    *_raised("timeout", None, "Timed out waiting for engine core", "Timed out waiting for new engine core"),
    *_raised("timeout", "init_device", "waiting for clients", "client socket has timed out"),
    *_raised("timeout", None, "wait timeout after", "Socket Timeout", "collective operation timeout"),
    *_raised("timeout", None, "Timed out initializing process group", "didn't reply within"),
)

KNOWN: Final = (
    *_SOMEBODY_ELSE,
    *_BASELINE,
    *_WEIGHTS,
    *_PROFILE,
    *_PLANNING,
    *_GRAPHS,
    *_DEVICE,
    *_HOST,
    *_TIME,
)

#: Exceptions that a process gets because another one ended.
_ECHO_TYPES: Final = (
    "EngineDeadError",
    "MQEngineDeadError",
    "AsyncEngineDeadError",
    "CancelledError",
    "BrokenPipeError",
    "BrokenProcessPool",
    "EOFError",
    "ConnectionResetError",
    "ChildProcessError",
    "ChildFailedError",
    "IncompleteReadError",
    "ContextTerminated",
    "SystemExit",
    "GeneratorExit",
    "ActorDiedError",
    "ActorUnavailableError",
    "RayActorError",
    "WorkerCrashedError",
)

#: Exceptions whose name alone says what they are.
KINDS: Final = {
    **dict.fromkeys(_ECHO_TYPES, Death("peer", "peer", is_echo=True)),
    **dict.fromkeys(("MemoryError", "_ArrayMemoryError"), Death("host_oom", "host_out_of_memory")),
    "KeyboardInterrupt": Death("signal", "signal"),
}

#: torch's own sentence, in the words of each backend.
SENTENCE: Final = (
    r"\b(?:CUDA|HIP|XPU|NPU|MUSA|MLU|HPU) out of memory\b|would exceed allowed memory|Tried to allocate more than 1EB"
)
#: A driver, or a library on top of it, that has no memory left and tells no figures.
DRIVER: Final = (
    r"\bout of memory\b|ErrorOutOfMemory|ErrorMemoryAllocation|_ALLOC_FAILED\b|ERROR_OUT_OF_(?:DEVICE_)?MEMORY"
    r"|ERROR_OUT_OF_RESOURCES|error code is 207001|Failed to (?:apply for|allocate) memory"
)
