"""What SGLang's exceptions mean: its own sentences, captures that failed, frames and whose pass they prove."""

from __future__ import annotations

import attrs
import pytest

from startup_fsm.importers.facts import Death, Frame, Raised
from startup_fsm.importers.sglang import SGLANG
from startup_fsm.importers.sglang.frames import Place, place_of
from startup_fsm.states import PARTS, VOCABULARY

ROOT = "/opt/venv/lib/python3.12/site-packages/sglang/srt/"
OOM = (
    "CUDA out of memory. Tried to allocate 96.00 MiB. GPU 0 has a total capacity of 23.52 GiB of which 21.00 MiB is free. "
    "Including non-PyTorch memory, this process has 23.40 GiB memory in use. Of the allocated memory 22.10 GiB is allocated "
    "by PyTorch, and 310.00 MiB is reserved by PyTorch but unallocated."
)
TIPS = (
    "\nPossible solutions:\n1. set --mem-fraction-static to a smaller value (e.g., 0.8 or 0.7)\n"
    "2. set --cuda-graph-max-bs to a smaller value (e.g., 16)\nCUDA out of memory"
)
ECHO = Death(category="peer", reason="peer", is_echo=True)


@attrs.frozen
class Ears:
    """What the process said so far."""

    rows: tuple[str, ...] = ()
    state: str | None = None

    def has(self, row):
        return row in self.rows


def frames(*names):
    """Frames from ``file:function``, outermost first."""
    return tuple(Frame(ROOT + name.partition(":")[0], name.partition(":")[2]) for name in names)


def death(type_, message, *names, rows=(), state=None):
    """What an exception means."""
    return SGLANG.death(Raised(9, type_, message, frames(*names)), Ears(rows, state))


RUNNER = "model_executor/model_runner.py"
GRAPHS = "model_executor/cuda_graph_runner.py"
EAGLE = "speculative/eagle_worker.py"

PLACES = [
    ("groups", (f"{RUNNER}:__init__", f"{RUNNER}:init_torch_distributed"), Place("init_device")),
    (
        "groups_new",
        ("distributed/bootstrap.py:init_parallel_runtime", "distributed/bootstrap.py:_init_parallel_groups"),
        Place("init_device"),
    ),
    ("prewarm_nccl", ("distributed/bootstrap.py:_prewarm_nccl",), Place("init_device")),
    (
        "balance",
        ("distributed/bootstrap.py:measure_pre_model_load_memory", "distributed/bootstrap.py:_check_tp_memory_balance"),
        Place("init_device"),
    ),
    (
        "load",
        (f"{RUNNER}:load_model", "model_loader/loader.py:load_model", "models/llama.py:__init__"),
        Place("load_weights"),
    ),
    ("load_weights", ("models/qwen3.py:load_weights",), Place("load_weights")),
    (
        "create_weights",
        ("layers/linear.py:__init__", "layers/quantization/fp8.py:create_weights"),
        Place("load_weights"),
    ),
    ("loader", ("model_loader/weight_utils.py:safetensors_weights_iterator",), Place("load_weights")),
    ("size", (f"{RUNNER}:init_memory_pool", f"{RUNNER}:profile_max_num_token"), Place("size_kv")),
    ("size_bare", (f"{RUNNER}:initialize", f"{RUNNER}:init_memory_pool"), Place("size_kv")),
    (
        "size_new",
        ("mem_cache/kv_cache_configurator.py:configure", "mem_cache/kv_cache_configurator.py:_profile_available_bytes"),
        Place("size_kv"),
    ),
    ("size_config", ("model_executor/pool_configurator.py:__post_init__",), Place("size_kv")),
    ("size_mamba", ("model_executor/model_runner_kv_cache_mixin.py:handle_max_mamba_cache",), Place("size_kv")),
    (
        "pool",
        (f"{RUNNER}:init_memory_pool", "mem_cache/memory_pool.py:__init__", "mem_cache/memory_pool.py:_create_buffers"),
        Place("allocate_kv"),
    ),
    (
        "pool_new",
        (
            "mem_cache/kv_cache_configurator.py:configure",
            "mem_cache/kv_cache_configurator.py:_build_mha_kv_pool",
            "mem_cache/memory_pool.py:__init__",
        ),
        Place("allocate_kv"),
    ),
    (
        "pool_mamba",
        (
            f"{RUNNER}:init_memory_pool",
            "mem_cache/memory_pool.py:_init_mamba_pool",
            "mem_cache/memory_pool.py:__init__",
        ),
        Place("allocate_kv", "mamba_pool"),
    ),
    (
        "pool_host",
        (
            "managers/scheduler.py:init_memory_pool_and_cache",
            "mem_cache/hiradix_cache.py:__init__",
            "mem_cache/memory_pool_host.py:init_kv_buffer",
        ),
        Place("allocate_kv", "host_pool"),
    ),
    (
        "addresses",
        ("mem_cache/memory_pool.py:_create_buffers", "mem_cache/kv_vmm_backing.py:__init__"),
        Place("reserve_kv"),
    ),
    (
        "commit",
        (f"{RUNNER}:post_capture_resize_kv_pool", "mem_cache/kv_vmm_backing.py:commit_range"),
        Place("commit_kv"),
    ),
    ("resize", (f"{RUNNER}:post_capture_resize_kv_pool",), Place("size_kv")),
    (
        "attention",
        (f"{RUNNER}:init_attention_backend", "layers/attention/flashinfer_backend.py:__init__"),
        Place("warmup"),
    ),
    (
        "autotune",
        (f"{RUNNER}:kernel_warmup", f"{RUNNER}:_flashinfer_autotune", f"{RUNNER}:_dummy_run"),
        Place("warmup"),
    ),
    (
        "capture",
        (
            f"{RUNNER}:init_cuda_graphs",
            f"{GRAPHS}:__init__",
            f"{GRAPHS}:capture",
            f"{GRAPHS}:capture_one_batch_size",
            "models/llama.py:forward",
        ),
        Place("capture_graphs", "full"),
    ),
    (
        "capture_new",
        (
            "model_executor/model_runner_components/cuda_graph_setup.py:capture_decode_graph",
            "model_executor/runner/decode_cuda_graph_runner.py:__init__",
        ),
        Place("capture_graphs", "full"),
    ),
    (
        "capture_pieces",
        (f"{RUNNER}:init_piecewise_cuda_graphs", "model_executor/piecewise_cuda_graph_runner.py:__init__"),
        Place("capture_graphs", "piecewise"),
    ),
    (
        "capture_prefill",
        ("model_executor/runner/prefill_cuda_graph_runner.py:capture_one_shape",),
        Place("capture_graphs", "piecewise"),
    ),
    ("capture_bare", (f"{RUNNER}:init_device_graphs",), Place("capture_graphs")),
    (
        "capture_draft",
        ("speculative/eagle_draft_cuda_graph_runner.py:capture",),
        Place("capture_graphs", "draft_worker_init"),
    ),
    ("prewarm_sampler", (f"{RUNNER}:prewarm_sampling",), Place("verify", "sampler_warmup")),
    ("prewarm_pool", ("model_executor/runner_utils/pool.py:prewarm_graph_pool_borrow",), Place("verify")),
    (
        "draft",
        ("managers/scheduler.py:__init__", f"{EAGLE}:__init__", f"{RUNNER}:init_torch_distributed"),
        Place("load_weights", "draft_worker_init"),
    ),
    ("draft_load", (f"{EAGLE}:__init__", f"{RUNNER}:load_model"), Place("load_weights", "draft_worker_init")),
    (
        "draft_pool",
        (f"{EAGLE}:__init__", f"{RUNNER}:init_memory_pool", "mem_cache/memory_pool.py:_create_buffers"),
        Place("allocate_kv", "draft_worker_init"),
    ),
    (
        "draft_capture",
        (f"{EAGLE}:init_cuda_graphs", "speculative/eagle_draft_cuda_graph_runner.py:capture"),
        Place("capture_graphs", "draft_worker_init"),
    ),
    ("draft_bare", ("managers/scheduler.py:maybe_init_draft_worker",), Place("load_weights", "draft_worker_init")),
    (
        "serving",
        ("managers/scheduler.py:event_loop_overlap", f"{RUNNER}:forward", f"{GRAPHS}:replay"),
        Place("serving"),
    ),
    (
        "serving_draft",
        ("managers/scheduler.py:event_loop_normal", f"{EAGLE}:forward_batch_generation"),
        Place("serving"),
    ),
    (
        "serving_thread",
        ("managers/tp_worker_overlap_thread.py:forward_thread_func_", f"{RUNNER}:forward"),
        Place("serving"),
    ),
    ("serving_warmup", ("entrypoints/http_server.py:_execute_server_warmup",), Place("serving")),
    ("unknown", ("managers/scheduler.py:run_scheduler_process", "managers/scheduler.py:__init__"), None),
    ("nothing", (), None),
]

DEATHS = [
    (
        "no_blocks",
        death(
            "RuntimeError",
            "Not enough memory. Please try to increase --mem-fraction-static.",
            f"{RUNNER}:init_memory_pool",
        ),
        Death("budget", "no_blocks", "size_kv"),
    ),
    (
        "no_blocks_bare",
        death(
            "RuntimeError",
            "Not enough memory. Please try to increase --mem-fraction-static. Current value: mem_fraction_static=0.8",
        ),
        Death("budget", "no_blocks", "size_kv"),
    ),
    (
        "no_blocks_draft",
        death(
            "RuntimeError",
            "Not enough memory. Please try to increase --mem-fraction-static.",
            f"{EAGLE}:__init__",
            f"{RUNNER}:init_memory_pool",
        ),
        Death("budget", "no_blocks", "size_kv", "draft_worker_init"),
    ),
    (
        "weights_leave_nothing",
        death(
            "ValueError",
            "Loaded weights leave no GPU memory for the KV cache under --mem-fraction-static=0.8. Raise it.",
        ),
        Death("budget", "no_blocks", "size_kv"),
    ),
    (
        "pool_too_small",
        death("AssertionError", "Memory pool size is too small"),
        Death("budget", "no_blocks", "size_kv"),
    ),
    (
        "states_too_few",
        death(
            "RuntimeError",
            "Hybrid (mamba/linear-attention) state cache is too small to serve any requests. max_mamba_cache_size=2",
        ),
        Death("budget", "sequences_do_not_fit", "size_kv"),
    ),
    (
        "host_pool",
        death("ValueError", "Not enough host memory available. Requesting 300.00 GB but only have 200.00 GB free."),
        Death("host_oom", "host_out_of_memory", "allocate_kv", "host_pool"),
    ),
    (
        "host_pool_pinned",
        death("RuntimeError", "CUDA error: out of memory", "mem_cache/memory_pool_host.py:init_kv_buffer"),
        Death("host_oom", "host_out_of_memory", "allocate_kv", "host_pool"),
    ),
    (
        "unbalanced",
        death(
            "RuntimeError", "The memory capacity is unbalanced. x", "distributed/bootstrap.py:_check_tp_memory_balance"
        ),
        Death("raised", "unbalanced", "init_device"),
    ),
    (
        "unbalanced_bare",
        death("ValueError", "The memory capacity is unbalanced."),
        Death("raised", "unbalanced", "init_device"),
    ),
    (
        "unbalanced_draft",
        death(
            "ValueError", "The memory capacity is unbalanced.", f"{EAGLE}:__init__", f"{RUNNER}:init_torch_distributed"
        ),
        Death("raised", "unbalanced", "load_weights", "draft_worker_init"),
    ),
    (
        "unbalanced_draft_heard",
        death("ValueError", "The memory capacity is unbalanced.", rows=("sgl.weights_end",)),
        Death("raised", "unbalanced", "load_weights", "draft_worker_init"),
    ),
    (
        "capture_oom",
        death("Exception", f"Capture cuda graph failed: {OOM}{TIPS}"),
        Death("oom", "out_of_memory", "capture_graphs"),
    ),
    (
        "capture_oom_frames",
        death("Exception", f"Capture cuda graph failed: {OOM}", f"{RUNNER}:init_cuda_graphs", f"{GRAPHS}:__init__"),
        Death("oom", "out_of_memory", "capture_graphs", "full"),
    ),
    (
        "capture_kernel",
        death(
            "Exception",
            "Capture cuda graph failed: RMSNorm failed with error code no kernel image is available for execution on the device"
            + TIPS,
        ),
        Death("capture", "no_kernel_image", "capture_graphs"),
    ),
    (
        "capture_illegal",
        death("Exception", "Capture cuda graph failed: CUDA error: an illegal memory access was encountered"),
        Death("capture", "illegal_access", "capture_graphs"),
    ),
    (
        "capture_forbidden",
        death("Exception", "Capture cuda graph failed: CUDA error: operation not permitted when stream is capturing"),
        Death("capture", "not_capturable", "capture_graphs"),
    ),
    (
        "capture_unjoined",
        death("Exception", "Capture cuda graph failed: CUDA error: capturing stream has unjoined work"),
        Death("capture", "not_capturable", "capture_graphs"),
    ),
    (
        "capture_other",
        death("Exception", f"Capture cuda graph failed: Ninja build failed.{TIPS}"),
        Death("capture", "", "capture_graphs"),
    ),
    (
        "capture_pieces",
        death(
            "RuntimeError",
            "Capture prefill CUDA graph failed: CUDA error: out of memory\nFail when using backend: tc_piecewise",
        ),
        Death("oom", "driver_out_of_memory", "capture_graphs", "piecewise"),
    ),
    (
        "capture_drafts",
        death("Exception", "Capture single-CG draft extend failed: CUDA error: out of memory"),
        Death("oom", "driver_out_of_memory", "capture_graphs", "draft_worker_init"),
    ),
    ("oom_bare", death("torch.OutOfMemoryError", OOM), Death("oom", "out_of_memory")),
    (
        "oom_loading",
        death("torch.OutOfMemoryError", OOM, f"{RUNNER}:load_model"),
        Death("oom", "out_of_memory", "load_weights"),
    ),
    (
        "oom_serving",
        death("torch.OutOfMemoryError", OOM, "managers/scheduler.py:event_loop_overlap", f"{RUNNER}:forward"),
        Death("oom", "out_of_memory", "serving", is_final=True),
    ),
    (
        "kernel_loading",
        death(
            "RuntimeError",
            "CUDA error: no kernel image is available for execution on the device",
            f"{RUNNER}:load_model",
        ),
        Death("raised", "no_kernel_image", "load_weights"),
    ),
    (
        "illegal_heard",
        death("RuntimeError", "CUDA error: an illegal memory access was encountered", state="capture_graphs"),
        Death("capture", "illegal_access"),
    ),
    (
        "late",
        death(
            "torch.distributed.DistStoreError", "Timed out after 601 seconds waiting for clients. 1/2 clients joined."
        ),
        Death("raised", "timeout"),
    ),
    (
        "nccl_memory",
        death(
            "torch.distributed.DistBackendError",
            "NCCL error in: x.cpp:1, unhandled cuda error\nLast error:\nCuda failure 2 'out of memory'",
            f"{RUNNER}:init_torch_distributed",
        ),
        Death("oom", "driver_out_of_memory", "init_device"),
    ),
    (
        "nccl",
        death(
            "torch.distributed.DistBackendError",
            "NCCL error in: x.cpp:1, invalid usage",
            f"{RUNNER}:init_torch_distributed",
        ),
        Death("raised", "", "init_device"),
    ),
    (
        "child_killed",
        death(
            "RuntimeError",
            "Rank 0 scheduler died during initialization (exit code: -9). If exit code is -9 (SIGKILL), a common cause is",
        ),
        Death("host_oom", "host_out_of_memory"),
    ),
    (
        "child_died",
        death(
            "RuntimeError",
            "Rank 0 scheduler died during initialization (exit code: 1). If exit code is -9 (SIGKILL), a common cause is",
        ),
        ECHO,
    ),
    ("parent", death("RuntimeError", "Initialization failed. Please see the error messages above."), ECHO),
    ("end_of_pipe", death("EOFError", "", "entrypoints/engine.py:_launch_subprocesses"), ECHO),
    ("peer", death("RuntimeError", "[../gloo/pair.cc:553] Connection closed by peer [10.1.2.3]:4411"), ECHO),
    ("unknown", death("KeyError", "'model.layers.0'", f"{RUNNER}:load_model"), Death("raised", "", "load_weights")),
]


@pytest.mark.parametrize(("names", "place"), [row[1:] for row in PLACES], ids=[row[0] for row in PLACES])
def test_place(names, place):
    """Frames prove this state and part."""
    assert place_of(frames(*names)) == place


@pytest.mark.parametrize(("found", "wanted"), [row[1:] for row in DEATHS], ids=[row[0] for row in DEATHS])
def test_death(found, wanted):
    """An exception means this."""
    assert found == wanted


def test_vocabulary():
    """States and parts are those of the shared vocabulary; a draft model's part goes with any state."""
    known = {(state, part) for state, parts in PARTS.items() for part in parts}
    for _, _, place in PLACES:
        if place is not None:
            assert place.state in VOCABULARY
            assert place.part in (None, "draft_worker_init") or (place.state, place.part) in known


def test_tips_mean_nothing():
    """The tips behind a failed capture name memory whatever it failed of."""
    assert death("Exception", f"Capture cuda graph failed: x{TIPS}") == Death("capture", "", "capture_graphs")
    assert death("RuntimeError", f"x{TIPS}") == Death()


def test_torch_graphs():
    """Torch's own file of graphs captures, but for a replay."""
    inner = Frame("/opt/venv/torch/cuda/graphs.py", "capture_end")
    assert place_of((inner,)) == Place("capture_graphs")
    assert place_of((attrs.evolve(inner, function="replay"),)) is None


def test_hostile():
    """A message of any length is read in one pass."""
    message = "Capture cuda graph failed: " + "Not enough memory (exit code: " * 100_000
    assert death("RuntimeError", message).state == "capture_graphs"
