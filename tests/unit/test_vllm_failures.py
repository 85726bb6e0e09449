"""What vLLM's exceptions mean: category, reason, state and part, by text, by frames and by what was said before."""

from __future__ import annotations

import attrs
import pytest

from startup_fsm.importers.facts import Death, Frame, Raised
from startup_fsm.importers.vllm import VLLM, VLLM_ASCEND, quoted
from startup_fsm.importers.vllm.frames import _RULES
from startup_fsm.importers.vllm.known_texts import KINDS, KNOWN
from startup_fsm.states import PARTS, VOCABULARY

WORKER = "/usr/lib/python3/site-packages/vllm/v1/worker/gpu_worker.py"
RUNNER = "/usr/lib/python3/site-packages/vllm/v1/worker/gpu_model_runner.py"
V2_GRAPHS = "/usr/lib/python3/site-packages/vllm/v1/worker/gpu/cudagraph_utils.py"
V0_WORKER = "/usr/lib/python3/site-packages/vllm/worker/worker.py"
ENGINE = "/usr/lib/python3/site-packages/vllm/v1/engine/core.py"
GRAPHS = "/usr/lib/python3/site-packages/torch/cuda/graphs.py"
MODEL = "/usr/lib/python3/site-packages/vllm/model_executor/models/tiny.py"

OOM = (
    "CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has a total capacity of 23.65 GiB of which 0.50 GiB is free."
)


@attrs.frozen
class Heard:
    """What a process said before."""

    state: str | None = None
    rows: frozenset[str] = frozenset()

    def has(self, row):
        return row in self.rows


def heard(state=None, *rows):
    """A process in ``state`` that said ``rows``."""
    return Heard(state, frozenset(rows))


NOTHING = heard()


def stack(*frames):
    """Frames, outermost first: names of functions, those of other files with the file in front."""
    pairs = [frame if isinstance(frame, tuple) else (WORKER, frame) for frame in frames]
    return tuple(Frame(file, function) for file, function in pairs)


def death(text, *frames, before=NOTHING):
    """What an exception means, printed as ``text``."""
    kind, _, message = text.partition(": ")
    return VLLM.death(Raised(7, kind, message, stack(*frames)), before)


def found(text, *frames, before=NOTHING):
    """The same: category, reason, state, part."""
    said = death(text, *frames, before=before)
    return said.category, said.reason, said.state, said.part


PEER = ("peer", "peer", None, None)

#: Exception as printed, without any frame, and what it means.
TEXTS = [
    (
        (
            "ValueError: Free memory on device cuda:0 (3.1/23.65 GiB) on startup is less than desired GPU memory utilization "
            "(0.9, 21.28 GiB)."
        ),
        ("budget", "not_enough_free", "init_device", "pre_load_check"),
    ),
    (
        (
            "ValueError: Available memory on node 0 (11.5/62.7 GiB) on startup is less than desired CPU memory utilization "
            "(0.9, 56.43 GiB)."
        ),
        ("budget", "not_enough_free", "init_device", "pre_load_check"),
    ),
    (
        "ValueError: Externally held weights on device cuda:0 (75.0/79.25 GiB) exceed the desired GPU memory utilization",
        ("budget", "external_weights", "init_device", "pre_load_check"),
    ),
    (
        (
            "ValueError: Free memory on device cuda:0 (40.0/79.25 GiB) on startup is less than the engine's budget after "
            "excluding external process's weights (0.9, 56.33 GiB)."
        ),
        ("budget", "not_enough_free", "init_device", "pre_load_check"),
    ),
    ("AssertionError: DP adjusted local rank 4 is out of bounds for 4 devices.", ("raised", "", "init_device", None)),
    (
        "AssertionError: local rank 4 is out of bounds for assigned_physical_gpu_ids",
        ("raised", "", "init_device", None),
    ),
    ("IndexError: index 16 is out of bounds for dimension 0 with size 16", ("raised", "", None, None)),
    (
        "AssertionError: local_world_size (4) exceeds assigned_physical_gpu_ids count (2)",
        ("raised", "", "init_device", None),
    ),
    ("RuntimeError: Unsupported device type: abc", ("raised", "", "init_device", None)),
    ("RuntimeError: Not support device type: abc", ("raised", "", "init_device", None)),
    (
        "ValueError: Bfloat16 is only supported on GPUs with compute capability of at least 8.0.",
        ("raised", "", "init_device", None),
    ),
    ("ValueError: The two snapshots should be from the same device!", ("raised", "", "init_device", None)),
    (
        "AssertionError: Sleep mode can only be used for one instance per process.",
        ("raised", "", "load_weights", None),
    ),
    (
        "AssertionError: Expandable segments are not compatible with memory pool.",
        ("raised", "", "load_weights", None),
    ),
    (
        "RuntimeError: Failed to load model - not enough GPU memory. Try lowering (original error: none)",
        ("oom", "out_of_memory", "load_weights", None),
    ),
    (
        (
            "RuntimeError: Failed to create unquantized linear weights. This may be caused by insufficient memory to allocate "
            "the weight."
        ),
        ("oom", "out_of_memory", "load_weights", None),
    ),
    (
        "AssertionError: Error in memory profiling. Initial free memory 60.5 GiB, current free memory 61.75 GiB.",
        ("raised", "free_grew", "profile_activations", None),
    ),
    (
        "AssertionError: Error in memory profiling. Initial free memory 60.5 GiB, current free memory 60.5 GiB.",
        ("raised", "free_grew", "profile_activations", None),
    ),
    (
        "AssertionError: Error in memory profiling. Initial free memory 24100000000, current free memory 24000000000.",
        ("raised", "free_fell", "profile_activations", None),
    ),
    (
        "AssertionError: Error in memory profiling. Initial used memory 9000000000, currently used memory 8900000000.",
        ("raised", "free_grew", "profile_activations", None),
    ),
    (
        "AssertionError: backend compilation occurred during the initial profiling run",
        ("raised", "", "profile_activations", "compile"),
    ),
    (
        "RuntimeError: CUDA out of memory occurred when warming up sampler with 256 dummy requests.",
        ("oom", "sampler_out_of_memory", "verify", "sampler_warmup"),
    ),
    (
        "RuntimeError: CUDA out of memory occurred when warming up pooler (task=embed) with 64 dummy requests.",
        ("oom", "sampler_out_of_memory", "verify", "sampler_warmup"),
    ),
    ("ValueError: No available memory for the cache blocks. Try increasing", ("budget", "no_blocks", "size_kv", None)),
    (
        "ValueError: frontend multimodal GPU decoding reserves 9.0 GiB, but only 6.5 GiB is available",
        ("budget", "no_blocks", "size_kv", None),
    ),
    (
        "ValueError: The worker already uses 60.1 GiB (model weights and runtime), more than the 56.43 GiB",
        ("budget", "no_blocks", "size_kv", None),
    ),
    (
        (
            "ValueError: Available memory on node 0 (3.1/62.7 GiB) on kv cache allocation is less than requested memory for kv "
            "(40.1/56.43 GiB)."
        ),
        ("budget", "not_enough_free", "size_kv", None),
    ),
    (
        (
            "ValueError: Available memory on node 0 (3.1/62.7 GiB) on kv cache allocation is less than requested memory for kv "
            "(-3.67/56.43 GiB)."
        ),
        ("budget", "no_blocks", "size_kv", None),
    ),
    (
        "ValueError: To serve at least one request with the model's max seq len (65536), (8.0 GiB KV cache is needed",
        ("budget", "request_does_not_fit", "size_kv", "request_fits"),
    ),
    (
        (
            "ValueError: The model's max seq len (65536) is larger than the maximum number of tokens that can be stored in KV "
            "cache (43008)."
        ),
        ("budget", "request_does_not_fit", "size_kv", "request_fits"),
    ),
    (
        "ValueError: Cannot auto-fit max_model_len: not enough GPU memory available to serve even a single token.",
        ("budget", "request_does_not_fit", "size_kv", "request_fits"),
    ),
    (
        "ValueError: max_num_seqs (512) exceeds available Mamba cache blocks (188).",
        ("budget", "sequences_do_not_fit", "size_kv", None),
    ),
    (
        "AssertionError: num_gpu_blocks need to be the same across workers, but they are different: {1, 2}",
        ("raised", "ranks_differ", "size_kv", None),
    ),
    (
        "AssertionError: The KV cache specs for the same layer are different across workers. This is not supported yet.",
        ("raised", "ranks_differ", "size_kv", None),
    ),
    (
        "AssertionError: Workers disagree on supported KV cache layouts: [].",
        ("raised", "ranks_differ", "size_kv", None),
    ),
    ("AssertionError: Some layers are not assigned to any group.", ("raised", "", "size_kv", None)),
    ("AssertionError: KV cache groups miss layers: ['a'].", ("raised", "", "size_kv", None)),
    (
        "ValueError: KV cache layout LBHNC cannot express this model's mixed page sizes ([1, 2])",
        ("raised", "", "size_kv", None),
    ),
    (
        "ValueError: KV cache tensors must share one device backing allocation, but got sizes [1, 2].",
        ("raised", "", "size_kv", None),
    ),
    (
        'RuntimeError: it->second->use_count > 0 INTERNAL ASSERT FAILED at "CUDACachingAllocator.cpp":2630, please report',
        ("pool", "pool_use_count", "capture_graphs", None),
    ),
    (
        'RuntimeError: it->second->use_count == 0 INTERNAL ASSERT FAILED at "CachingHostAllocator.h":1',
        ("pool", "pool_use_count", "capture_graphs", None),
    ),
    (
        "AssertionError: graph_pool_id is not set under graph capture",
        ("capture", "graph_pool_id", "capture_graphs", None),
    ),
    (
        "AssertionError: Workspace is locked but allocation from 'a.py:1:f' requires 12.00 MB, current size is 8.00 MB.",
        ("capture", "workspace_locked", None, None),
    ),
    (
        "RuntimeError: cudaIpcGetMemHandle failed: invalid argument",
        ("capture", "ipc_handle", "capture_graphs", None),
    ),
    ("RuntimeError: hipIpcGetMemHandle: invalid argument", ("capture", "ipc_handle", "capture_graphs", None)),
    ("RuntimeError: cudaIpcOpenMemHandle: invalid argument", ("capture", "ipc_handle", "capture_graphs", None)),
    *(
        (f"torch.AcceleratorError: CUDA error: {text}", ("capture", "not_capturable", "capture_graphs", None))
        for text in (
            "operation not permitted when stream is capturing",
            "operation failed due to a previous error during capture",
            "operation would make the legacy stream depend on a capturing blocking stream",
            "dependency created on uncaptured work in another stream",
            "operation not permitted on an event last recorded in a capturing stream",
            "capturing stream has unjoined work",
            "cudaErrorStreamCaptureInvalidated",
        )
    ),
    (
        "RuntimeError: Cannot copy between CPU and CUDA tensors during CUDA graph capture unless the CPU tensor is pinned",
        ("capture", "not_capturable", "capture_graphs", None),
    ),
    (
        "RuntimeError: CUDA graphs must be captured on a non-default stream.",
        ("capture", "not_capturable", "capture_graphs", None),
    ),
    (
        "RuntimeError: CUDA graph capturing detected at an inappropriate time. This operation is currently disabled.",
        ("capture", "not_capturable", None, None),
    ),
    ("AssertionError: Graph already captured for desc", ("raised", "", "capture_graphs", None)),
    (
        "RuntimeError: model is not torch-compiled and breakable CUDA graph is off. Enable one",
        ("raised", "", "capture_graphs", None),
    ),
    ("AssertionError: No cudagraph for desc", ("raised", "", None, None)),
    ("AssertionError: Expected FULL mode, got NONE", ("raised", "", None, None)),
    (
        "AssertionError: Input addresses for cudagraphs are different during replay.",
        ("raised", "", None, None),
    ),
    ("AssertionError: Memory usage increased after sleeping.", ("raised", "", "serving", None)),
    (
        'RuntimeError: NVML_SUCCESS == r INTERNAL ASSERT FAILED at "CUDACachingAllocator.cpp":1',
        ("oom", "out_of_memory", None, None),
    ),
    (
        "RuntimeError: CUDA error: no kernel image is available for execution on the device",
        ("raised", "no_kernel_image", None, None),
    ),
    ("RuntimeError: cudaErrorNoKernelImageForDevice", ("raised", "no_kernel_image", None, None)),
    (
        "RuntimeError: CUDA error: an illegal memory access was encountered",
        ("raised", "illegal_access", None, None),
    ),
    ("RuntimeError: cudaErrorIllegalAddress", ("raised", "illegal_access", None, None)),
    ("RuntimeError: hipErrorIllegalAddress", ("raised", "illegal_access", None, None)),
    *(
        (text, ("oom", "out_of_memory", None, None))
        for text in (
            f"torch.OutOfMemoryError: {OOM}",
            f"torch.cuda.OutOfMemoryError: {OOM}",
            f"RuntimeError: {OOM}",
            "torch.OutOfMemoryError: HIP out of memory. Tried to allocate 1.50 GiB.",
            "torch.OutOfMemoryError: XPU out of memory. Tried to allocate 1.50 GiB.",
            "RuntimeError: NPU out of memory. Tried to allocate 1.50 GiB (NPU 0; 60.96 GiB total capacity)",
            "torch.OutOfMemoryError: Allocation on device 0 would exceed allowed memory. (out of memory)",
            "RuntimeError: CUDA out of memory. Tried to allocate more than 1EB memory.",
        )
    ),
    *(
        (text, ("oom", "driver_out_of_memory", None, None))
        for text in (
            "RuntimeError: CUDA error: out of memory",
            "torch.AcceleratorError: HIP error: out of memory",
            "RuntimeError: CUDA Error: out of memory at csrc/cumem_allocator.cpp:62",
            "RuntimeError: CUDA driver error: out of memory",
            "RuntimeError: Triton Error [CUDA]: out of memory",
            "RuntimeError: CUDA_ERROR_OUT_OF_MEMORY",
            "RuntimeError: cudaErrorMemoryAllocation",
            "RuntimeError: hipErrorOutOfMemory",
            "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
            "torch.distributed.DistBackendError: NCCL error: unhandled cuda error. Last error: Cuda failure 2 'out of memory'",
            "RuntimeError: level_zero backend failed with error: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)",
            "RuntimeError: level_zero backend failed with error: 40 (UR_RESULT_ERROR_OUT_OF_RESOURCES)",
            "RuntimeError: NPU function error: aclrtMalloc, error code is 207001",
        )
    ),
    *(
        (text, ("host_oom", "host_out_of_memory", None, None))
        for text in (
            "MemoryError: ",
            "numpy._core._exceptions._ArrayMemoryError: Unable to allocate 5.00 GiB for an array",
            "RuntimeError: [enforce fail at alloc_cpu.cpp:1] . DefaultCPUAllocator: can't allocate memory",
            "RuntimeError: unable to mmap 5000000000 bytes from file <a>: Cannot allocate memory (12)",
            "RuntimeError: std::bad_alloc",
            "ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory.",
            "ray.exceptions.OutOfMemoryError: killed",
        )
    ),
    *(
        (text, ("raised", "timeout", state, None))
        for text, state in (
            ("TimeoutError: Timed out waiting for engine core processes to start.", None),
            ("TimeoutError: Timed out waiting for new engine core processes to start", None),
            ("TimeoutError: MQLLMEngine didn't reply within 10000ms", None),
            ("TimeoutError: anything", None),
            (
                "torch.distributed.DistStoreError: Timed out after 601 seconds waiting for clients. 1/2 joined.",
                "init_device",
            ),
            ("torch.distributed.DistNetworkError: The client socket has timed out after 600s", "init_device"),
            ("torch.distributed.DistStoreError: wait timeout after 600000ms, keys: /default_pg/0//cuda//0", None),
            ("torch.distributed.DistBackendError: but store->get('0') got error: Socket Timeout", None),
            ("RuntimeError: Timed out initializing process group in store based barrier", None),
            ("torch.distributed.DistBackendError: Watchdog caught collective operation timeout", None),
        )
    ),
    ("torch.distributed.DistBackendError: NCCL error in: a.cpp:1, unhandled system error", ("raised", "", None, None)),
    ("requests.exceptions.ConnectionError: Connection reset by peer", ("raised", "", None, None)),
    ("triton.runtime.errors.OutOfResources: out of resource: shared memory", ("raised", "", None, None)),
    ("OSError: models/tiny is not a local folder", ("raised", "", None, None)),
    ("KeyboardInterrupt: MQLLMEngine terminated", ("signal", "signal", None, None)),
]

#: Reports of somebody else's failure.
ECHOES = [
    "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}",
    "RuntimeError: Frontend process failed during engine core initialization. See root cause above.",
    "RuntimeError: Engine process failed to start. See stack trace for the root cause.",
    "Exception: WorkerProc initialization failed due to an exception in a background process.",
    "RuntimeError: Worker failed with error '', please check the stack trace above for the root cause",
    "RuntimeError: Worker failed with KV connector output",
    "Exception: Call to collective_rpc method failed: ''",
    "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue. See stack trace (above)",
    "RuntimeError: EngineCore encountered an issue.",
    "vllm.engine.multiprocessing.MQEngineDeadError: Engine loop is not running. Inspect the stacktrace",
    "RuntimeError: Engine loop is dead",
    "vllm.engine.async_llm_engine.AsyncEngineDeadError: Background loop has errored already.",
    "RuntimeError: Background loop is not running.",
    "RuntimeError: Background loop is stopped.",
    "RuntimeError: Task finished unexpectedly. This should never happen!",
    "RuntimeError: Engine core process EngineCore died unexpectedly.",
    "RuntimeError: The actor died because of an error raised in its creation task",
    "RuntimeError: The actor is dead because its worker process has died.",
    "RuntimeError: Engine process (pid 77) died.",
    "RuntimeError: Executor failed.",
    "ChildProcessError: worker died",
    "RuntimeError: [a/pair.cc:1] Connection closed by peer [127.0.0.1]:1",
    "RuntimeError: [a/pair.cc:1] Read error [127.0.0.1]:1: Connection reset by peer",
    "torch.distributed.DistBackendError: NCCL error: socketProgress: Connection closed by remote peer",
    "torch.distributed.DistBackendError: store->get('0') got error: Connection reset by peer",
    "torch.distributed.DistBackendError: store->get('0') got error: Broken pipe",
    *(
        f"{kind}: "
        for kind in (
            *("asyncio.exceptions.CancelledError", "BrokenPipeError", "concurrent.futures.process.BrokenProcessPool"),
            *(
                "EOFError",
                "ConnectionResetError",
                "asyncio.exceptions.IncompleteReadError",
                "zmq.error.ContextTerminated",
            ),
            *("SystemExit", "GeneratorExit", "ray.exceptions.ActorDiedError", "ray.exceptions.ActorUnavailableError"),
            *("ray.exceptions.RayActorError", "ray.exceptions.WorkerCrashedError"),
            *("torch.distributed.elastic.multiprocessing.errors.ChildFailedError", "vllm.EngineDeadError"),
            *("vllm.MQEngineDeadError", "vllm.AsyncEngineDeadError", "ChildProcessError"),
        )
    ),
]


class TestTexts:
    @pytest.mark.parametrize(("text", "meaning"), TEXTS, ids=[text[:60] for text, _ in TEXTS])
    def test_text(self, text, meaning):
        """Without any frame the text alone says what it can."""
        assert found(text) == meaning
        assert not death(text).is_echo

    @pytest.mark.parametrize("text", ECHOES)
    def test_echo(self, text):
        """What only reports another process is nobody's cause, whatever it quotes."""
        said = death(text)
        assert said.is_echo
        assert (said.category, said.reason) == ("peer", "peer")

    @pytest.mark.parametrize(
        ("text", "reason", "state"),
        [
            (f"RuntimeError: Worker failed with error '{OOM}', please check the stack trace", "out_of_memory", None),
            ("Exception: Call to collective_rpc method failed: CUDA out of memory.", "out_of_memory", None),
            (
                "RuntimeError: Worker failed with error 'No available memory for the cache blocks'",
                "no_blocks",
                "size_kv",
            ),
            (
                "RuntimeError: Worker failed with error 'index 16 is out of bounds for dimension 0', please check",
                "",
                None,
            ),
        ],
    )
    def test_echo_that_quotes(self, text, reason, state):
        """It stays an echo, and says why the other one failed; where, only as far as the other's text proves it."""
        said = death(text)
        assert said.is_echo
        assert (said.category, said.reason, said.state) == ("peer", reason, state)

    def test_every_text(self):
        """No text and no kind of the tables is without a sample."""
        texts = [text for text, _ in TEXTS] + ECHOES + ["TimeoutError: RPC call to sample_tokens timed out."]
        first = {next((known for known in KNOWN if known.text in text), None) for text in texts}
        assert [known.text for known in KNOWN if known not in first] == []
        assert set(KINDS) <= {text.partition(": ")[0].rpartition(".")[2] for text in texts}

    def test_vocabulary(self):
        """States and parts are those of the shared vocabulary."""
        deaths = [known.death for known in KNOWN]
        places = [(each.state, each.part) for each in deaths if each.state is not None]
        places += [(rule.state, rule.part) for rule in _RULES]
        for state, part in places:
            assert state in VOCABULARY
            assert part is None or part in PARTS[state]

    def test_quoted(self):
        """Where the failure's own lines are cut off, its echo holds what is known of it."""
        said = quoted(Raised(1, "RuntimeError", f"Worker failed with error '{OOM}', please check", stack("load_model")))
        assert said is not None
        assert VLLM.death(said, NOTHING) == Death("oom", "out_of_memory")
        assert quoted(Raised(1, "RuntimeError", "Engine core initialization failed.")) is None

    def test_bare_assertion(self):
        """Ranks that planned different numbers of blocks fail in an assertion without a text."""
        frames = (
            (ENGINE, "_initialize_kv_caches"),
            ("vllm/v1/core/kv_cache_utils.py", "generate_scheduler_kv_cache_config"),
        )
        assert found("AssertionError: ", *frames) == ("raised", "ranks_differ", "size_kv", None)


class TestRpc:
    @pytest.mark.parametrize(
        ("method", "state"),
        [
            ("init_device", "init_device"),
            ("load_model", "load_weights"),
            ("determine_available_memory", "profile_activations"),
            ("initialize_from_config", "allocate_kv"),
            ("compile_or_warm_up_model", "warmup"),
            ("execute_model", "serving"),
        ],
    )
    def test_method(self, method, state):
        """The method that did not answer says where the others wait."""
        said = death(f"TimeoutError: RPC call to {method} timed out.", (ENGINE, "_initialize_kv_caches"))
        assert said == Death("raised", "timeout", state, is_echo=True)


SPEC = "vllm/v1/spec_decode/eagle.py"
LOAD = (
    "_init_executor",
    "load_model",
    (RUNNER, "load_model"),
    ("vllm/model_executor/model_loader/__init__.py", "get_model"),
)
PROFILE = ((ENGINE, "_initialize_kv_caches"), "determine_available_memory", (RUNNER, "profile_run"))
GRAPH_PROFILE = ((ENGINE, "_initialize_kv_caches"), "determine_available_memory", (RUNNER, "profile_cudagraph_memory"))
V2_PROFILE = (*GRAPH_PROFILE, (V2_GRAPHS, "profile_cudagraph_memory"))
WARMUP = ((ENGINE, "_initialize_kv_caches"), (ENGINE, "initialize_from_config"), "compile_or_warm_up_model")
V0_CACHE = ((V0_WORKER, "execute_method"), (V0_WORKER, "initialize_cache"))
ASCEND = "/usr/lib/python3/site-packages/vllm_ascend/worker/model_runner_v1.py"

#: Frames, outermost first, and where they are.
STACKS = [
    (("init_device",), ("init_device", None)),
    (("init_device", "init_worker_distributed_environment"), ("init_device", None)),
    ((("vllm/distributed/device_communicators/pynccl.py", "__init__"),), ("init_device", None)),
    ((("vllm/v1/worker/utils.py", "request_memory"),), ("init_device", None)),
    (LOAD, ("load_weights", None)),
    ((*LOAD, (MODEL, "__init__"), (MODEL, "create_weights")), ("load_weights", None)),
    (((MODEL, "__init__"), ("vllm/model_executor/layers/linear.py", "create_weights")), ("load_weights", None)),
    ((("vllm/model_executor/layers/quantization/fp8.py", "process_weights_after_loading"),), ("load_weights", None)),
    ((*LOAD, (SPEC, "load_model")), ("load_weights", "draft_worker_init")),
    (("init_device", (V0_WORKER, "load_model")), ("load_weights", None)),
    (PROFILE, ("profile_activations", None)),
    ((*PROFILE, (RUNNER, "_dummy_run"), (MODEL, "forward")), ("profile_activations", None)),
    ((*PROFILE, (RUNNER, "_dummy_sampler_run")), ("profile_activations", "sampler")),
    ((*PROFILE, (RUNNER, "_dummy_pooler_run")), ("profile_activations", "sampler")),
    ((*PROFILE, (MODEL, "embed_multimodal"), (MODEL, "forward")), ("profile_activations", "encoder")),
    (
        (*PROFILE, (MODEL, "forward"), ("torch/_inductor/compile_fx.py", "compile_fx")),
        ("profile_activations", "compile"),
    ),
    (
        (*PROFILE, ("triton/runtime/autotuner.py", "run"), ("triton/runtime/autotuner.py", "_bench")),
        ("profile_activations", "autotune"),
    ),
    (
        ((V0_WORKER, "determine_num_available_blocks"), ("vllm/worker/model_runner.py", "execute_model")),
        ("profile_activations", None),
    ),
    (GRAPH_PROFILE, ("capture_throwaway", None)),
    ((*GRAPH_PROFILE, (RUNNER, "_init_minimal_kv_cache_for_profiling")), ("bootstrap_kv", None)),
    (
        (*GRAPH_PROFILE, (RUNNER, "_init_minimal_kv_cache_for_profiling"), (RUNNER, "initialize_kv_cache")),
        ("bootstrap_kv", None),
    ),
    ((*GRAPH_PROFILE, (RUNNER, "initialize_kv_cache"), (RUNNER, "_allocate_kv_cache_tensors")), ("bootstrap_kv", None)),
    ((*GRAPH_PROFILE, (RUNNER, "_warmup_and_capture"), (GRAPHS, "capture_end")), ("capture_throwaway", None)),
    ((*V2_PROFILE, ("vllm/v1/worker/gpu/model_runner.py", "capture_model")), ("capture_throwaway", None)),
    (
        (*V2_PROFILE, ("vllm/v1/worker/gpu/spec_decode/speculator.py", "capture")),
        ("capture_throwaway", "draft"),
    ),
    ((*V2_PROFILE, ("vllm/v1/worker/encoder_cudagraph.py", "capture")), ("capture_throwaway", "encoder")),
    ((*GRAPH_PROFILE, (RUNNER, "_cleanup_profiling_kv_cache")), ("teardown", None)),
    ((*V2_PROFILE, (V2_GRAPHS, "_teardown_profiling_state")), ("teardown", None)),
    (((ENGINE, "_initialize_kv_caches"),), ("size_kv", None)),
    (((ENGINE, "_initialize_kv_caches"), (ENGINE, "get_kv_cache_configs")), ("size_kv", None)),
    (
        ((ENGINE, "_initialize_kv_caches"), "determine_available_memory", "_reserve_mm_ipc_gpu_memory"),
        ("size_kv", None),
    ),
    ((*V0_CACHE, (V0_WORKER, "raise_if_cache_size_invalid")), ("size_kv", None)),
    (("initialize_from_config", (RUNNER, "initialize_kv_cache")), ("allocate_kv", None)),
    (
        (*V0_CACHE, (V0_WORKER, "_init_cache_engine"), ("vllm/worker/cache_engine.py", "_allocate_kv_cache")),
        ("allocate_kv", None),
    ),
    (((ASCEND, "_allocate_kv_cache_tensors"),), ("allocate_kv", None)),
    (WARMUP, ("warmup", None)),
    ((*WARMUP, (RUNNER, "_dummy_run"), ("torch/_inductor/compile_fx.py", "compile_fx")), ("warmup", None)),
    ((*WARMUP, ("vllm/model_executor/warmup/kernel_warmup.py", "kernel_warmup")), ("warmup", None)),
    ((*WARMUP, ("vllm/v1/worker/gpu/warmup.py", "warmup_kernels"), "execute_model"), ("verify", "kernel_warmup")),
    ((*WARMUP, (RUNNER, "capture_model"), (RUNNER, "_dummy_run"), (GRAPHS, "__exit__")), ("capture_graphs", None)),
    ((*WARMUP, (GRAPHS, "capture_end")), ("capture_graphs", None)),
    ((*WARMUP, ("vllm/v1/worker/gpu/spec_decode/speculator.py", "capture")), ("capture_graphs", "draft")),
    ((*WARMUP, (RUNNER, "_dummy_sampler_run"), (MODEL, "forward")), ("verify", "sampler_warmup")),
    ((*WARMUP, (RUNNER, "_dummy_pooler_run")), ("verify", "sampler_warmup")),
    ((*V0_CACHE, (V0_WORKER, "_warm_up_model")), ("capture_graphs", None)),
    (
        (*V0_CACHE, (V0_WORKER, "_warm_up_model"), ("vllm/worker/model_runner.py", "capture_model")),
        ("capture_graphs", None),
    ),
    (
        (("vllm/compilation/cuda_graph.py", "__call__"), (GRAPHS, "__exit__"), (GRAPHS, "capture_end")),
        ("capture_graphs", None),
    ),
    (((ASCEND, "capture_model"),), ("capture_graphs", None)),
    (((RUNNER, "_dummy_sampler_run"),), (None, None)),
    (((ENGINE, "run_busy_loop"), (ENGINE, "step"), "execute_model"), ("serving", None)),
    (("execute_model", (RUNNER, "execute_model"), (MODEL, "forward")), ("serving", None)),
    (("wake_up",), ("serving", None)),
    (("sleep",), ("serving", None)),
    ((("/home/user/start.py", "<module>"),), (None, None)),
    ((("/home/user/start.py", "capture"), ("/home/user/start.py", "sleep")), (None, None)),
    ((), (None, None)),
]


class TestFrames:
    @pytest.mark.parametrize(("frames", "place"), STACKS, ids=[str(index) for index in range(len(STACKS))])
    def test_place(self, frames, place):
        """The outermost phase counts, refined by what it called."""
        assert found("OSError: x", *frames) == ("raised", "", *place)

    def test_every_rule(self):
        """No rule of the table is without a stack."""
        used = set()
        for frames, _ in STACKS:
            state = "-"
            for frame in stack(*frames):
                rule = next((rule for rule in _RULES if rule.is_of(frame) and state in rule.inside), None)
                used.add(rule)
                state = state if rule is None else rule.state
        assert [(sorted(rule.functions)[:1], rule.state) for rule in _RULES if rule not in used] == []

    def test_text_of_one_state(self):
        """A check that one state makes stays there, whatever called it."""
        text = "ValueError: max_num_seqs (512) exceeds available Mamba cache blocks (188)."
        frames = ("initialize_from_config", (RUNNER, "initialize_kv_cache"))
        assert found(text, *frames) == ("budget", "sequences_do_not_fit", "size_kv", None)

    def test_usual_place(self):
        """Elsewhere frames are better than a usual place."""
        text = "RuntimeError: Failed to load model - not enough GPU memory."
        assert found(text, (ENGINE, "run_busy_loop"))[2] == "serving"

    @pytest.mark.parametrize("text", ["an illegal memory access was encountered", "no kernel image is available"])
    def test_kernels_in_capture(self, text):
        """A kernel that fails while graphs are captured is the capture's fault; anywhere else it is only raised."""
        error = f"RuntimeError: CUDA error: {text}"
        assert found(error, *WARMUP, (RUNNER, "capture_model"))[0] == "capture"
        assert found(error, before=heard("capture_throwaway"))[0] == "capture"
        assert found(error, *PROFILE)[0] == "raised"

    def test_ascend(self):
        """Ascend's exceptions mean the same."""
        raised = Raised(
            1, "RuntimeError", "NPU out of memory. Tried to allocate 1 GiB", stack((ASCEND, "capture_model"))
        )
        assert VLLM_ASCEND.death(raised, NOTHING) == Death("oom", "out_of_memory", "capture_graphs")


class TestCourse:
    """What frames leave open is told by what the process said before."""

    CAPTURED = "torch.AcceleratorError: CUDA error: operation not permitted when stream is capturing"

    @pytest.mark.parametrize(
        ("before", "state"),
        [
            (NOTHING, "capture_graphs"),
            (heard("profile_activations", "L32", "L47"), "capture_throwaway"),
            (heard("capture_throwaway", "L66"), "capture_throwaway"),
            (heard("size_kv", "L56", "L66"), "capture_graphs"),
            (heard("serving"), None),
        ],
    )
    def test_capture(self, before, state):
        """A capture before sizing is the throwaway one; while serving there are lazy ones."""
        assert found(self.CAPTURED, before=before)[2] == state

    def test_capture_frames(self):
        """The same holds for frames that are cut off above the capture."""
        frames = ((RUNNER, "_capture_cudagraphs"), (GRAPHS, "capture_end"))
        text = "RuntimeError: CUDA error: out of memory"
        before = heard("profile_activations", "L32", "L47")
        assert found(text, *frames, before=before) == ("oom", "driver_out_of_memory", "capture_throwaway", None)

    @pytest.mark.parametrize(
        ("before", "place"),
        [
            (heard("load_weights", "loaded"), ("profile_activations", "sampler")),
            (heard("profile_activations"), ("profile_activations", "sampler")),
            (heard("size_kv", "L56"), ("verify", "sampler_warmup")),
            (heard("capture_graphs", "L97"), ("verify", "sampler_warmup")),
        ],
    )
    def test_sampler(self, before, place):
        """The sampler runs dry twice: in the profile and after the capture."""
        text = "RuntimeError: CUDA out of memory occurred when warming up sampler with 256 dummy requests."
        assert found(text, before=before)[2:] == place
        assert found(f"torch.OutOfMemoryError: {OOM}", (RUNNER, "_dummy_sampler_run"), before=before)[2:] == place

    def test_sampler_by_frames(self):
        """Frames decide before the course does."""
        text = "RuntimeError: CUDA out of memory occurred when warming up sampler with 256 dummy requests."
        assert found(text, *PROFILE, (RUNNER, "_dummy_sampler_run"))[2:] == ("profile_activations", "sampler")
        before = heard("profile_activations")
        assert found(text, *WARMUP, (RUNNER, "_dummy_sampler_run"), before=before)[2:] == ("verify", "sampler_warmup")

    @pytest.mark.parametrize(
        ("function", "before", "place"),
        [
            ("warmup_kernels", heard("allocate_kv", "L56"), ("warmup", None)),
            ("warmup_kernels", heard("capture_graphs", "L56", "L74"), ("verify", "kernel_warmup")),
            ("warmup_kernels", heard("warmup", "L56", "L103"), ("verify", "kernel_warmup")),
            ("kernel_warmup", heard("capture_graphs", "L56", "L104"), ("verify", "kernel_warmup")),
        ],
    )
    def test_kernels(self, function, before, place):
        """Kernels are warmed before the capture or after it, as the version has it."""
        assert found("OSError: x", *WARMUP, function, before=before)[2:] == place

    def test_early_step(self):
        """V0 profiles with the function that serves."""
        frames = (("vllm/worker/model_runner.py", "execute_model"),)
        assert found("OSError: x", *frames, before=heard("load_weights", "L28"))[2] == "profile_activations"

    @pytest.mark.parametrize(
        ("before", "state"),
        [
            (NOTHING, None),
            (heard("init_device"), None),
            (heard("init_device", "L11"), "load_weights"),
            (heard("load_weights"), None),
            (heard("load_weights", "L28"), "profile_activations"),
            (heard("load_weights", "L32", "loaded"), "profile_activations"),
            (heard("profile_activations"), None),
            (heard("size_kv"), "allocate_kv"),
            (heard("capture_graphs"), None),
            (heard("capture_graphs", "L74", "L97"), None),
            (heard("capture_graphs", "L28", "L74"), "verify"),
            (heard("capture_graphs", "L105"), "verify"),
            (heard("capture_graphs", "L105", "L107"), None),
        ],
    )
    def test_memory_after(self, before, state):
        """Memory does not run out in planning, nor in what has ended: it does in what comes next."""
        assert found(f"torch.OutOfMemoryError: {OOM}", before=before)[2] == state
        assert found("OSError: x", before=before)[2] is None
