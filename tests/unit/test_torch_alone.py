"""Exceptions that are no engine's own: what their words mean, and which state frames of well-known names prove."""

from __future__ import annotations

import attrs
import pytest

from startup_fsm.importers.facts import Death, Frame, Raised, Stall
from startup_fsm.importers.torch_alone import TORCH, death_by_words, state_by_frames, text_of

HOST = Death("host_oom", "host_out_of_memory")
OOM = Death("oom", "out_of_memory")
DRIVER = Death("oom", "driver_out_of_memory")
NOT_CAPTURABLE = Death("capture", "not_capturable")
ECHO = Death("peer", "peer", is_echo=True)
LATE = Death("raised", "timeout")
SENTENCE = "Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 15.58 GiB of which 71.25 MiB is free."


@attrs.frozen
class Ears:
    """A process that said nothing."""

    state: str | None = None

    def has(self, row):
        return False


WORDS = [
    ("torch.OutOfMemoryError: CUDA out of memory. " + SENTENCE, OOM),
    ("torch.cuda.OutOfMemoryError: HIP out of memory. " + SENTENCE, OOM),
    ("RuntimeError: NPU out of memory. Tried to allocate 2.57 GiB (NPU 0; 60.96 GiB total capacity", OOM),
    ("RuntimeError: XPU out of memory, please use `empty_cache`", OOM),
    ("RuntimeError: MPS backend out of memory (MPS allocated: 17.50 GB, max allowed: 18.13 GB).", OOM),
    ("torch.OutOfMemoryError: Allocation on device ", OOM),
    ("torch.OutOfMemoryError: CUDA out of memory. Tried to allo", OOM),
    ("RuntimeError: CUDA error: out of memory", DRIVER),
    ("RuntimeError: CUDA driver error: out of memory", DRIVER),
    ("torch.AcceleratorError: CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation' in the manual", DRIVER),
    ("RuntimeError: HIP error: out of memory", DRIVER),
    ("RuntimeError: Triton Error [CUDA]: out of memory", DRIVER),
    ("RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", DRIVER),
    ("RuntimeError: NCCL Error 1: unhandled cuda error, Cuda failure 2 'out of memory'", DRIVER),
    ("RuntimeError: NVML_SUCCESS == r INTERNAL ASSERT FAILED at CUDACachingAllocator.cpp", DRIVER),
    ("RuntimeError: level_zero backend failed with error: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)", DRIVER),
    ("MemoryError: ", HOST),
    ("numpy._core._exceptions._ArrayMemoryError: Unable to allocate 3.0 GiB", HOST),
    (
        "RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 4294967296 bytes.",
        HOST,
    ),
    ("RuntimeError: DefaultCPUAllocator: not enough memory: you tried to allocate 4294967296 bytes.", HOST),
    ("OSError: [Errno 12] Cannot allocate memory", HOST),
    ("RuntimeError: std::bad_alloc", HOST),
    ("RuntimeError: unable to allocate: insufficient shared memory (shm)", HOST),
    (
        "RuntimeError: CUDA error: no kernel image is available for execution on the device",
        Death(reason="no_kernel_image"),
    ),
    ("RuntimeError: HIP error: invalid device function", Death(reason="no_kernel_image")),
    ("RuntimeError: CUDA error: an illegal memory access was encountered", Death(reason="illegal_access")),
    ("RuntimeError: CUDA error: operation not permitted when stream is capturing", NOT_CAPTURABLE),
    ("RuntimeError: CUDA error: operation failed due to a previous error during capture", NOT_CAPTURABLE),
    ("RuntimeError: Cannot copy between CPU and CUDA tensors during CUDA graph capture", NOT_CAPTURABLE),
    ("RuntimeError: Offset increment outside graph capture encountered unexpectedly.", NOT_CAPTURABLE),
    ('RuntimeError: it->second->use_count > 0 INTERNAL ASSERT FAILED at "x.cpp":2630', Death("pool", "pool_use_count")),
    ("AssertionError: graph_pool_id is not set under graph capture", Death("capture", "graph_pool_id")),
    ("RuntimeError: cudaIpcGetMemHandle failed: invalid argument", Death(reason="ipc_handle")),
    ("torch.distributed.DistStoreError: Timed out after 601 seconds waiting for clients.", LATE),
    ("TimeoutError: ", LATE),
    ("requests.exceptions.ReadTimeout: HTTPConnectionPool", LATE),
    ("RuntimeError: wait timeout after 600000ms, keys: /store/0", LATE),
    ("EOFError: ", ECHO),
    ("ConnectionResetError: [Errno 104] Connection reset by peer", ECHO),
    ("RuntimeError: ncclRemoteError: A call failed possibly due to a network error or a remote process exited", ECHO),
    ("KeyboardInterrupt: ", Death("signal", "signal")),
    ("RuntimeError: shapes cannot be multiplied", None),
    (
        "triton.runtime.errors.OutOfResources: out of resource: shared memory, Required: 131072, Hardware limit: 101376",
        None,
    ),
    ("", None),
]

STATES = [
    ("load_weights", [("modeling_utils.py", "from_pretrained"), ("modeling_utils.py", "_load_pretrained_model")]),
    ("load_weights", [("main.py", "main"), ("torch/nn/modules/module.py", "load_state_dict")]),
    ("load_weights", [("layers/linear.py", "create_weights"), ("torch/nn/parameter.py", "__new__")]),
    (None, [("tokenization_utils_base.py", "from_pretrained")]),
    ("profile_activations", [("runner.py", "profile_run"), ("model.py", "forward")]),
    ("capture_graphs", [("runner.py", "run"), ("torch/cuda/graphs.py", "__exit__")]),
    (None, [("runner.py", "run"), ("torch/cuda/graphs.py", "replay")]),
    ("capture_graphs", [("runner.py", "capture_cudagraph"), ("model.py", "forward")]),
    (None, [("logs.py", "capture_exception")]),
    ("allocate_kv", [("runner.py", "allocate_kv_cache")]),
    ("allocate_kv", [("engine/cache_engine.py", "__init__"), ("engine/cache_engine.py", "_allocate")]),
    ("allocate_kv", [("main.py", "load_model"), ("cache.py", "init_kv_cache")]),
    (None, [("main.py", "main")]),
    (None, []),
]

LINES = [
    (
        (
            "[Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=4, OpType=ALLREDUCE, Timeout(ms)=600000) ran "
            "for 600060 milliseconds before timing out."
        ),
        [Stall(600.06), LATE],
    ),
    ("[Rank 3] Watchdog caught collective operation timeout: WorkNCCL(", [Stall(None), LATE]),
    ("ProcessGroupNCCL's watchdog got stuck for 480 seconds without making progress", [Stall(480.0), LATE]),
    ("  what():  CUDA error: out of memory", [DRIVER]),
    ("  what():  something else", [Death()]),
    ("[core.cpp] CUresult error: 2 (out of memory)  file=x.cpp func=cu_mem_create line=56", [DRIVER]),
]


class TestWords:
    @pytest.mark.parametrize(("text", "wanted"), WORDS)
    def test_meaning(self, text, wanted):
        """Words alone mean this, and prove no state."""
        assert death_by_words(text) == wanted

    @pytest.mark.parametrize(
        ("text", "reason"),
        [
            ("CUDA error: no kernel image is available for execution on the device", "no_kernel_image"),
            ("CUDA error: an illegal memory access was encountered", "illegal_access"),
            ("cudaIpcGetMemHandle failed: invalid argument", "ipc_handle"),
        ],
    )
    def test_while_capturing(self, text, reason):
        """Some faults are a failed capture while graphs are captured."""
        assert death_by_words(text, is_capturing=True) == Death("capture", reason)

    def test_cut(self):
        """A text is looked at only so far."""
        assert len(text_of(Raised(1, "RuntimeError", "x" * 1_000_000))) == 8_192


class TestFrames:
    @pytest.mark.parametrize(("state", "names"), STATES)
    def test_state(self, state, names):
        """The innermost frame with a well-known name proves the state; without one none is proven."""
        assert state_by_frames([Frame(f"/site-packages/{file}", function) for file, function in names]) == state


class TestDeath:
    def test_with_frames(self):
        """Words tell what, frames where."""
        raised = Raised(1, "torch.OutOfMemoryError", f"CUDA out of memory. {SENTENCE}", (Frame("m.py", "load_model"),))
        assert TORCH.death(raised, Ears()) == Death("oom", "out_of_memory", "load_weights")

    def test_without_frames(self):
        """A sentence alone proves no state, whatever was heard."""
        raised = Raised(1, "torch.OutOfMemoryError", f"CUDA out of memory. {SENTENCE}")
        assert TORCH.death(raised, Ears("load_weights")) == OOM

    def test_while_capturing(self):
        """The category follows the frames, or what was heard last."""
        raised = Raised(1, "RuntimeError", "CUDA error: an illegal memory access was encountered")
        assert TORCH.death(raised, Ears("capture_graphs")) == Death("capture", "illegal_access")
        frames = (Frame("m.py", "capture"),)
        assert TORCH.death(attrs.evolve(raised, frames=frames), Ears()) == Death(
            "capture", "illegal_access", "capture_graphs"
        )

    def test_unknown(self):
        """What is no known fault was raised by somebody."""
        assert TORCH.death(Raised(1, "KeyError", "'x'"), Ears()) == Death()


class TestRows:
    @pytest.mark.parametrize(("text", "wanted"), LINES)
    def test_line(self, text, wanted):
        """Lines of torch's C++ side tell without a Python exception."""
        found = [fact for row in TORCH.rows if row.anchor in text for fact in row.facts(row.search(text), Ears())]
        assert found == wanted

    def test_every_row(self):
        """No row stands without a sample here."""
        seen = {row.name for row in TORCH.rows for text, _ in LINES if row.anchor in text and row.search(text)}
        assert seen == {row.name for row in TORCH.rows}

    def test_source(self):
        """A verdict calls it so."""
        assert TORCH.source == "torch"
