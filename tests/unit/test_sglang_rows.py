"""What each line of SGLang says: old and new wordings, the target's pass and a draft model's."""

from __future__ import annotations

import re

import attrs
import pytest

from startup_fsm.findings import SETTINGS
from startup_fsm.importers.facts import Begin, Death, Figure, Ready, Setting, Sign, Stall, Step
from startup_fsm.importers.sglang import SGLANG
from startup_fsm.states import PARTS, VOCABULARY

DRAFT = "draft_worker_init"
ECHO = Death(category="peer", reason="peer", is_echo=True)
HOST = Death(category="host_oom", reason="host_out_of_memory")
#: Half of a hundredth of a GiB.
HALF = 5_368_709


@attrs.frozen
class Ears:
    """What the process said so far."""

    rows: tuple[str, ...] = ()
    state: str | None = None

    def has(self, row):
        return row in self.rows


def gb(name, value):
    """A figure that was printed in GB with two decimals."""
    return Figure(name, round(value * (1 << 30)), "GB", HALF)


def facts_of(text, *rows, state=None, form="sglang"):
    """What the grammar makes of a message."""
    ears = Ears(rows, state)
    found = [(row, row.search(text)) for row in SGLANG.rows if row.anchor in text and row.form in (None, form)]
    return [fact for row, match in found if match is not None for fact in row.facts(match, ears)]


def names_of(text, form="sglang"):
    """The rows that a message belongs to."""
    rows = [row for row in SGLANG.rows if row.anchor in text and row.form in (None, form)]
    return {row.name for row in rows if row.search(text) is not None}


LOADING = [
    ("init_old", "Init torch distributed begin.", (), [Step("init_device", None, "begins")]),
    ("init_new", "Init parallel begin.", (), [Step("init_device", None, "begins")]),
    ("init_oldest", "Init nccl begin.", (), [Step("init_device", None, "begins")]),
    ("init_draft", "Init torch distributed begin.", ("sgl.weights_end",), [Step("load_weights", DRAFT, "begins")]),
    ("ends_old", "Init torch distributed ends. mem usage=1.77 GB", (), [Step("init_device", None, "ends")]),
    (
        "ends_mid",
        "Init torch distributed ends. elapsed=3.20 s, mem usage=1.77 GB",
        (),
        [Step("init_device", None, "ends")],
    ),
    ("ends_new", "Init parallel ends. elapsed=1.23 s", (), [Step("init_device", None, "inside")]),
    (
        "ends_draft",
        "Init torch distributed ends. mem usage=0.00 GB",
        ("sgl.weights_end",),
        [Step("load_weights", DRAFT)],
    ),
    ("baseline", "Memory baseline taken. mem usage=0.62 GB", (), [Step("init_device", None, "ends")]),
    (
        "unbalanced_old",
        (
            "ValueError: The memory capacity is unbalanced. Some GPUs may be occupied by other processes. "
            "min_per_gpu_memory=8.5, local_gpu_memory=12.0009765625, local_gpu_memory * 0.9=10.80087890625"
        ),
        (),
        [Figure("min_per_gpu_bytes", 9_126_805_504, "GiB", 1), Figure("local_free_bytes", 12_885_950_464, "GiB", 1)],
    ),
    (
        "unbalanced_new",
        (
            "The memory capacity is unbalanced. Some GPUs may be occupied by other processes. "
            "pre_model_load_memory=1.25, local_gpu_memory=2.5, local_gpu_memory * 0.9=2.25"
        ),
        (),
        [Figure("min_per_gpu_bytes", 1_342_177_280, "GiB", 1), Figure("local_free_bytes", 2_684_354_560, "GiB", 1)],
    ),
    ("unbalanced_bare", "The memory capacity is unbalanced. Some GPUs may be occupied by other processes.", (), []),
    (
        "begin",
        "Load weight begin. avail mem=78.50 GB",
        (),
        [Step("load_weights", None, "begins"), gb("free_at_start_bytes", 78.5)],
    ),
    (
        "begin_draft",
        "Load weight begin. avail mem=9.10 GB",
        ("sgl.weights_end",),
        [Step("load_weights", DRAFT, "begins")],
    ),
    (
        "end_old",
        "Load weight end. type=LlamaForCausalLM, dtype=torch.bfloat16, avail mem=62.31 GB, mem usage=16.05 GB.",
        (),
        [Step("load_weights", None, "ends"), gb("weights_bytes", 16.05), gb("avail_after_load_bytes", 62.31)],
    ),
    (
        "end_new",
        "Load weight end. elapsed=12.68 s, type=LlamaForCausalLM, quant=fp8, fmt=e4m3, avail mem=70.25 GB, mem usage=8.10 GB.",
        (),
        [Step("load_weights", None, "ends"), gb("weights_bytes", 8.1), gb("avail_after_load_bytes", 70.25)],
    ),
    (
        "end_oldest",
        "Load weight end. type=LlamaForCausalLM, dtype=torch.float16, avail mem=20.62 GB",
        (),
        [Step("load_weights", None, "ends"), gb("avail_after_load_bytes", 20.62)],
    ),
    (
        "end_cut",
        "Load weight end. type=LlamaForCausalLM, dtype=torch.float16, avail mem=20.62 GB, mem usage=7.1",
        (),
        [Step("load_weights", None, "ends"), gb("avail_after_load_bytes", 20.62)],
    ),
    (
        "end_draft",
        "Load weight end. type=LlamaForCausalLMEagle, dtype=torch.bfloat16, avail mem=9.10 GB, mem usage=1.20 GB.",
        ("sgl.weights_end",),
        [Step("load_weights", DRAFT, "ends")],
    ),
    (
        "end_overlapped",
        (
            "Load weight end. Committed real weights after CUDA graph capture in 4.20 s (capture overlap window 30.00 s, "
            "startup overlap total 41.00 s)"
        ),
        (),
        [Step("load_weights", None, "ends")],
    ),
    ("format", "Using model weights format ['*.safetensors']", (), [Step("load_weights")]),
    (
        "no_custom_allreduce",
        "Custom allreduce is disabled because your platform lacks GPU P2P capability or P2P test failed.",
        (),
        [Sign("custom_allreduce_off")],
    ),
]

POOLS = [
    ("dtype", "Using KV cache dtype: torch.bfloat16", (), [Step("size_kv")]),
    (
        "fewer_tokens",
        "max_total_tokens=65536 is larger than the profiled value -1204. Use the profiled value instead.",
        (),
        [Step("size_kv"), Figure("max_total_tokens_requested", 65_536), Figure("kv_tokens", -1_204)],
    ),
    (
        "fewer_tokens_draft",
        "max_total_tokens=65536 is larger than the profiled value 900. Use the profiled value instead.",
        ("sgl.pool_end",),
        [Step("size_kv", DRAFT)],
    ),
    ("no_memory_old", "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.", (), []),
    (
        "no_memory_new",
        (
            "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static. "
            "Current value: self.server_args.mem_fraction_static=0.87"
        ),
        (),
        [Setting("mem_fraction_static", 0.87), Figure("mem_fraction_static", 0.87)],
    ),
    (
        "weights_leave_nothing",
        (
            "ValueError: Loaded weights leave no GPU memory for the KV cache under --mem-fraction-static=0.8. Raise "
            "--mem-fraction-static above 0.913 (minimum viable = 1 - available/pre = 0.9121)."
        ),
        (),
        [
            Setting("mem_fraction_static", 0.8),
            Figure("mem_fraction_static", 0.8),
            Figure("suggested_utilization", 0.913),
        ],
    ),
    (
        "fewer_than_a_request",
        "KV pool holds 90112 tokens, fewer than --context-length 131072. One full-length request cannot fit.",
        (),
        [Figure("kv_tokens", 90_112), Figure("max_model_len", 131_072)],
    ),
    (
        "windows_sized",
        "Use sliding window memory pool. full_layer_tokens=500000, swa_layer_tokens=400000",
        (),
        [Step("size_kv"), Figure("kv_tokens", 500_000)],
    ),
    (
        "windows_sized_all",
        "Use Sliding window memory pool (all SWA). swa_layer_tokens=400000",
        (),
        [Step("size_kv"), Figure("kv_tokens", 400_000)],
    ),
    (
        "windows_sized_draft",
        "Use sliding window memory pool. full_layer_tokens=5, swa_layer_tokens=4",
        ("sgl.pool_end",),
        [Step("size_kv", DRAFT)],
    ),
    (
        "kv_old",
        "KV Cache is allocated. #tokens: 120000, K size: 7.33 GB, V size: 7.32 GB",
        (),
        [
            Step("allocate_kv"),
            Figure("kv_tokens", 120_000),
            gb("k_bytes", 7.33),
            gb("v_bytes", 7.32),
            Figure("kv_cache_bytes", round(7.33 * (1 << 30)) + round(7.32 * (1 << 30)), "GB", 2 * HALF),
        ],
    ),
    (
        "kv_new",
        "KV Cache is allocated. dtype: torch.float8_e4m3fn, #tokens: 98304, KV size: 6.75 GB",
        (),
        [Step("allocate_kv"), Figure("kv_tokens", 98_304), gb("kv_cache_bytes", 6.75)],
    ),
    (
        "kv_oldest",
        "KV Cache is allocated. K size: 2.00 GB, V size: 2.00 GB.",
        (),
        [
            Step("allocate_kv"),
            gb("k_bytes", 2),
            gb("v_bytes", 2),
            Figure("kv_cache_bytes", 4 << 30, "GB", 2 * HALF),
        ],
    ),
    (
        "kv_draft",
        "KV Cache is allocated. #tokens: 9, K size: 0.10 GB, V size: 0.10 GB",
        ("sgl.pool_end",),
        [Step("allocate_kv", DRAFT)],
    ),
    (
        "kv_labelled",
        "Sparse index KV Cache is allocated. dtype: torch.uint8, #tokens: 9, KV size: 0.10 GB",
        (),
        [Step("allocate_kv")],
    ),
    (
        "kv_reserved",
        "KV Cache VA upper bound. dtype: torch.bfloat16, #tokens: 900000, K size: 60.00 GB, V size: 60.00 GB",
        (),
        [Step("reserve_kv"), Sign("reserved_address_space")],
    ),
    (
        "windows",
        "SWAKVPool mem usage: 12.50 GB, swa size: 300000, full size: 400000",
        (),
        [Step("allocate_kv"), gb("kv_cache_bytes", 12.5), Figure("kv_tokens", 400_000)],
    ),
    (
        "windows_draft",
        "SWAKVPool mem usage: 0.50 GB, swa size: 3, full size: 4",
        ("sgl.pool_end",),
        [Step("allocate_kv", DRAFT)],
    ),
    (
        "windows_reserved",
        "SWAKVPool VA upper bound: 80.00 GB, swa size: 300000, full size: 400000",
        (),
        [Step("reserve_kv"), Sign("reserved_address_space")],
    ),
    (
        "unified",
        "[unified-memory-pool] UnifiedKVPool allocated: total_bytes=2.00 GB (=2147483777 B), 2 sub-pool(s)",
        (),
        [Step("allocate_kv"), Figure("kv_cache_bytes", 2_147_483_777, "B", 0)],
    ),
    (
        "unified_reserved",
        "[unified-memory-pool] UnifiedKVPool reserved VA upper bound: total_bytes=2.00 GB (=2147483777 B), 2 sub-pool(s)",
        (),
        [Step("reserve_kv"), Sign("reserved_address_space")],
    ),
    (
        "mamba_old",
        "Mamba Cache is allocated. conv_state size: 0.12GB, ssm_state size: 3.40GB ",
        (),
        [Step("allocate_kv", "mamba_pool")],
    ),
    (
        "mamba_new",
        "Mamba Cache is allocated. max_mamba_cache_size: 384, conv_state size: 0.12GB, ssm_state size: 3.40GB ",
        (),
        [Step("allocate_kv", "mamba_pool"), Figure("mamba_blocks", 384)],
    ),
    ("host_old", "Allocating 64.00 GB host memory for hierarchical KV cache.", (), [Step("allocate_kv", "host_pool")]),
    (
        "host_new",
        "Allocating MHA hierarchical KV host pool: 900000 tokens, 64.00 GB host memory.",
        (),
        [Step("allocate_kv", "host_pool")],
    ),
    (
        "end",
        "Memory pool end. avail mem=11.05 GB",
        (),
        [Step("allocate_kv", None, "ends"), gb("avail_after_pool_bytes", 11.05)],
    ),
    ("end_draft", "Memory pool end. avail mem=10.90 GB", ("sgl.pool_end",), [Step("allocate_kv", DRAFT, "ends")]),
    (
        "arena",
        "KvVmmArena[0] ready: device=0 reserved_va=256.0 GiB granularity=2048 KiB handle_type=posix_fd",
        (),
        [Step("reserve_kv"), Sign("reserved_address_space")],
    ),
    (
        "committed",
        "Post-capture KV sizing: KV cache allocated. dtype: torch.bfloat16, #tokens: 700000, KV size: 42.75 GB, avail mem=6.10 GB",
        (),
        [Step("commit_kv"), Sign("post_capture_resized"), Figure("kv_tokens", 700_000), gb("kv_cache_bytes", 42.75)],
    ),
    (
        "committed_draft",
        "Post-capture KV sizing: draft KV cache allocated. dtype: torch.bfloat16, #tokens: 700000, KV size: 1.05 GB",
        (),
        [Step("commit_kv", DRAFT)],
    ),
    (
        "resized",
        "Post-capture KV sizing: full_layer_tokens=700000, swa_layer_tokens=0",
        (),
        [Step("size_kv", None, "begins")],
    ),
    (
        "resized_requests",
        "Post-capture KV sizing: max_running_requests 512 -> 288",
        (),
        [Step("size_kv", None, "begins"), Figure("max_running_requests", 288)],
    ),
    (
        "resized_headroom",
        "Post-capture KV sizing: decode CUDA graph max_bs=64 < max_running_requests=288; reserving activation headroom",
        (),
        [Step("size_kv", None, "begins")],
    ),
]

_BEGUN, _ENDED = "avail_before_capture_bytes", "avail_after_capture_bytes"

CAPTURE = [
    (
        "begin_old",
        "Capture cuda graph begin. This can take up to several minutes. avail mem=9.75 GB",
        (),
        [Step("capture_graphs", "full", "begins"), gb(_BEGUN, 9.75)],
    ),
    (
        "begin_new",
        "Capture target decode CUDA graph begin. backend=full, num_tokens_per_req=1, avail mem=9.75 GB",
        (),
        [Step("capture_graphs", "full", "begins"), gb(_BEGUN, 9.75)],
    ),
    (
        "begin_verify",
        "Capture target verify CUDA graph begin. backend=full, num_tokens_per_req=4, avail mem=9.75 GB",
        ("sgl.prefill_begin",),
        [Step("capture_graphs", "full", "begins"), gb(_BEGUN, 9.75)],
    ),
    (
        "begin_oldest",
        "Capture cuda graph begin. This can take up to several minutes.",
        (),
        [Step("capture_graphs", "full", "begins")],
    ),
    (
        "begin_npu",
        "Capture npu graph begin. This can take up to several minutes. avail mem=9.75 GB",
        (),
        [Step("capture_graphs", "full", "begins"), gb(_BEGUN, 9.75)],
    ),
    (
        "begin_again",
        "Capture cuda graph begin. avail mem=9.00 GB",
        ("sgl.decode_begin",),
        [Step("capture_graphs", "full", "begins")],
    ),
    (
        "sizes",
        "Capture cuda graph bs [1, 2, 4, 8]",
        (),
        [Step("capture_graphs", "full"), Sign("graphs_planned", {"full": 4, "largest": 8})],
    ),
    (
        "first_tick",
        "Capturing batches (bs=8 avail_mem=9.50 GB):   0%|          | 0/4 [00:00<?, ?it/s]",
        ("sgl.prefill_tick",),
        [Step("capture_graphs"), gb("avail_first_batch_bytes", 9.5), gb("avail_last_batch_bytes", 9.5)],
    ),
    (
        "later_tick",
        "Capturing batches (bs=1 avail_mem=9.10 GB): 100%|##########| 4/4 [00:04<00:00, 1.00it/s]",
        ("sgl.decode_tick",),
        [Step("capture_graphs"), gb("avail_last_batch_bytes", 9.1)],
    ),
    (
        "old_tick",
        "Capturing batches (avail_mem=9.50 GB):   0%|          | 0/4 [00:00<?, ?it/s]",
        (),
        [Step("capture_graphs"), gb("avail_first_batch_bytes", 9.5), gb("avail_last_batch_bytes", 9.5)],
    ),
    (
        "draft_tick",
        "Capturing batches (bs=1 avail_mem=8.00 GB): 25%|#",
        ("sgl.decode_tick", "sgl.draft_begin"),
        [Step("capture_graphs")],
    ),
    (
        "end_old",
        "Capture cuda graph end. Time elapsed: 4.20 s. mem usage=0.75 GB. avail mem=9.00 GB.",
        (),
        [Step("capture_graphs", "full", "ends"), gb("graph_actual_bytes", 0.75), gb(_ENDED, 9)],
    ),
    (
        "end_other_order",
        "Capture cuda graph end. Time elapsed: 4.20 s. avail mem=9.00 GB. mem usage=0.75 GB.",
        (),
        [Step("capture_graphs", "full", "ends"), gb("graph_actual_bytes", 0.75), gb(_ENDED, 9)],
    ),
    (
        "end_new",
        "Capture target decode CUDA graph end. bs=[1, 2, 4], elapsed=4.20 s, mem usage=0.75 GB, avail mem=9.00 GB.",
        (),
        [
            Step("capture_graphs", "full", "ends"),
            Sign("graphs_planned", {"full": 3, "largest": 4}),
            gb("graph_actual_bytes", 0.75),
            gb(_ENDED, 9),
        ],
    ),
    ("end_oldest", "Capture cuda graph end. Time elapsed: 4.20 s", (), [Step("capture_graphs", "full", "ends")]),
    (
        "end_again",
        "Capture cuda graph end. mem usage=0.10 GB. avail mem=8.00 GB.",
        ("sgl.decode_end",),
        [Step("capture_graphs", "full", "ends")],
    ),
    (
        "pieces_begin",
        "Capture target prefill CUDA graph begin. backend=tc_piecewise, num_tokens=[4, 8], avail mem=12.00 GB",
        (),
        [Step("capture_graphs", "piecewise", "begins"), gb(_BEGUN, 12)],
    ),
    (
        "pieces_begin_after_decode",
        "Capture piecewise CUDA graph begin. avail mem=8.00 GB",
        ("sgl.decode_begin", "sgl.decode_end"),
        [Step("capture_graphs", "piecewise", "begins")],
    ),
    (
        "pieces_sizes",
        "Capture cuda graph num tokens [4, 8, 12]",
        (),
        [Step("capture_graphs", "piecewise"), Sign("graphs_planned", {"piecewise": 3})],
    ),
    (
        "pieces_tick",
        "Capturing num tokens (num_tokens=8192 avail_mem=7.50 GB):   0%|",
        (),
        [Step("capture_graphs"), gb("avail_first_batch_bytes", 7.5), gb("avail_last_batch_bytes", 7.5)],
    ),
    (
        "pieces_tick_new",
        "Capturing prefill shape (num_tokens=8192 avail_mem=7.50 GB):   0%|",
        ("sgl.prefill_tick",),
        [Step("capture_graphs"), gb("avail_last_batch_bytes", 7.5)],
    ),
    (
        "pieces_tick_after_decode",
        "Capturing num tokens (num_tokens=4 avail_mem=7.00 GB): 5%|",
        ("sgl.decode_tick",),
        [Step("capture_graphs")],
    ),
    (
        "pieces_end",
        "Capture target prefill CUDA graph end. elapsed=9.00 s, mem usage=1.50 GB, avail mem=10.50 GB.",
        (),
        [Step("capture_graphs", "piecewise", "ends"), gb("graph_actual_bytes", 1.5), gb(_ENDED, 10.5)],
    ),
    (
        "pieces_end_after_decode",
        "Capture piecewise CUDA graph end. Time elapsed: 9.00 s. mem usage=1.50 GB. avail mem=7.00 GB.",
        ("sgl.decode_end",),
        [Step("capture_graphs", "piecewise", "ends")],
    ),
    (
        "draft_begin",
        "Capture draft cuda graph begin. This can take up to several minutes. avail mem=8.50 GB",
        ("sgl.decode_end",),
        [Step("capture_graphs", "draft", "begins")],
    ),
    (
        "draft_begin_alone",
        "Capture draft extend CUDA graph begin. backend=full, num_tokens_per_req=4, bs=[1, 2], avail mem=8.50 GB",
        (),
        [Step("capture_graphs", "draft", "begins"), gb(_BEGUN, 8.5)],
    ),
    (
        "draft_prefill",
        "Capture draft prefill CUDA graph begin. backend=b, num_tokens=[4], avail mem=8.50 GB",
        ("sgl.decode_end",),
        [Step("capture_graphs", "draft", "begins")],
    ),
    (
        "draft_single",
        "Capture single-CG draft extend begin. This can take several minutes. avail mem=8.50 GB",
        ("sgl.decode_end",),
        [Step("capture_graphs", "draft", "begins")],
    ),
    (
        "draft_end",
        "Capture draft verify CUDA graph end. elapsed=2.00 s, mem usage=0.25 GB, avail mem=8.25 GB.",
        ("sgl.decode_begin", "sgl.decode_end"),
        [Step("capture_graphs", "draft", "ends")],
    ),
    (
        "addresses",
        "Registering 0 cuda graph addresses",
        (),
        [Step("capture_graphs"), Sign("addresses_registered", {"n": 0})],
    ),
    ("carved", "Graph pool pre-carved: 1.25 GB", (), [Step("capture_graphs")]),
]

ENDINGS = [
    (
        "summary",
        (
            "max_total_num_tokens=812345, chunked_prefill_size=8192, max_prefill_tokens=16384, max_running_requests=96, "
            "context_len=131072, available_gpu_mem=6.25 GB"
        ),
        (),
        [
            Figure("kv_tokens", 812_345),
            Figure("max_running_requests", 96),
            Figure("max_model_len", 131_072),
            gb("avail_final_bytes", 6.25),
            Setting("chunked_prefill_size", 8_192),
            Ready(),
        ],
    ),
    (
        "summary_old",
        "max_total_num_tokens=812345, max_prefill_tokens=16384, max_running_requests=2049, context_len=32768",
        (),
        [Figure("kv_tokens", 812_345), Figure("max_running_requests", 2_049), Figure("max_model_len", 32_768), Ready()],
    ),
    (
        "summary_cpu",
        "max_total_num_tokens=5, chunked_prefill_size=-1, max_running_requests=2, context_len=8, available_cpu_mem=99.00 GB",
        (),
        [
            Figure("kv_tokens", 5),
            Figure("max_running_requests", 2),
            Figure("max_model_len", 8),
            Setting("chunked_prefill_size", -1),
            Ready(),
        ],
    ),
    (
        "timings",
        (
            "Engine startup timings (s): load_weight=9.10, kv_cache_allocation=0.20, scheduler_e2e=31.00, "
            "cuda_graph={decode=5.00}, tokenizer_e2e=33.00"
        ),
        (),
        [Ready()],
    ),
    ("fired_up", "The server is fired up and ready to roll!", (), [Ready()]),
    ("watchdog_old", "Watchdog timeout (self.watchdog_timeout=300)", (), [Stall(300.0), Death(reason="timeout")]),
    (
        "watchdog_new",
        "Scheduler watchdog timeout (self.watchdog_timeout=600.5, self.soft=False)",
        (),
        [Stall(600.5), Death(reason="timeout")],
    ),
    ("watchdog_soft", "Scheduler watchdog timeout (self.watchdog_timeout=300, self.soft=True)", (), [Stall(300.0)]),
    ("watchdog_bare", "watchdog timeout (self.watchdog_last_time=1.5)", (), [Stall(None), Death(reason="timeout")]),
    ("sigquit", "Received sigquit from a child process. It usually means the child failed.", (), [ECHO]),
    ("sigquit_serving", "SIGQUIT received. signum=None, frame=None. It usually means one child failed.", (), [ECHO]),
    ("dead_rank", "Rank 3 scheduler is dead. Please check if there are relevant logs.", (), [ECHO]),
    ("exit_code", "Exit code: 1", (), [ECHO]),
    ("exit_code_killed", "Exit code: -9", (), [HOST]),
    (
        "died",
        (
            "RuntimeError: Rank 1 scheduler died during initialization (exit code: -9). If exit code is -9 (SIGKILL), a common "
            "cause is the OS OOM killer."
        ),
        (),
        [Sign("worker_died", {"name": "Rank 1 scheduler", "code": -9}), HOST],
    ),
    (
        "died_otherwise",
        (
            "RuntimeError: Rank 1 scheduler died during initialization (exit code: 1). If exit code is -9 (SIGKILL), a common "
            "cause is the OS OOM killer."
        ),
        (),
        [Sign("worker_died", {"name": "Rank 1 scheduler", "code": 1}), ECHO],
    ),
    (
        "crashed",
        "Subprocess scheduler_0 (pid=4411) crashed with exit code 137. Triggering SIGQUIT for cleanup...",
        (),
        [Sign("worker_died", {"name": "scheduler_0", "code": 137}), HOST],
    ),
    (
        "warmup",
        "Initialization failed. warmup error: Traceback (most recent call last):",
        (),
        [Death(state="serving")],
    ),
    (
        "warmup_late",
        "Initialization failed. warmup error: HTTPConnectionPool(host='0.0.0.0', port=30000): Read timed out.",
        (),
        [Death(reason="timeout", state="serving")],
    ),
    (
        "warmup_echo",
        "Initialization failed. warmup error: HTTPConnectionPool(host='0.0.0.0', port=30000): Max retries exceeded with url",
        (),
        [ECHO],
    ),
]

ALL = LOADING + POOLS + CAPTURE + ENDINGS

REPR = (
    "server_args=ServerArgs(model_path='a, mem_fraction_static=0.1, b', tokenizer_path=\"it's\", mem_fraction_static=0.875, "
    "max_running_requests=None, max_total_tokens=65536, chunked_prefill_size=8192, cuda_graph_max_bs=160, "
    "cuda_graph_bs=[1, 2, 4], tp_size=4, pp_size=1, context_length=32768, kv_cache_dtype='auto', quantization='fp8', "
    "speculative_algorithm='EAGLE', disable_cuda_graph=False, watchdog_timeout=300)"
)
SETTINGS_OF_REPR = {
    "mem_fraction_static": 0.875,
    "chunked_prefill_size": 8_192,
    "capture_sizes": 160,
    "tensor_parallel_size": 4,
    "pipeline_parallel_size": 1,
    "max_model_len": 32_768,
    "kv_cache_dtype": "auto",
    "quantization": "fp8",
    "speculative": "EAGLE",
    "enforce_eager": False,
}


def settings(facts):
    """Name and value of each setting."""
    return {fact.name: fact.value for fact in facts if isinstance(fact, Setting)}


class TestRows:
    @pytest.mark.parametrize(("text", "heard", "facts"), [row[1:] for row in ALL], ids=[row[0] for row in ALL])
    def test_row(self, text, heard, facts):
        """A line says exactly this."""
        assert facts_of(text, *heard) == facts

    def test_every_row(self):
        """No row of the grammar stands without a sample here."""
        seen = {name for row in ALL for name in names_of(row[1])}
        seen |= names_of(REPR) | names_of("python -m sglang.launch_server") | names_of("--tp 4", form="plain")
        assert seen == {row.name for row in SGLANG.rows}

    def test_names(self):
        """Names are the catalogue's ids, each once."""
        names = [row.name for row in SGLANG.rows]
        assert len(names) == len(set(names))

    def test_vocabulary(self):
        """States, parts and settings are those of the shared vocabulary."""
        facts = [fact for row in ALL for fact in row[3]]
        steps = [fact for fact in facts if isinstance(fact, Step)]
        assert {step.state for step in steps} <= set(VOCABULARY)
        assert {(step.state, step.part) for step in steps if step.part not in (None, DRAFT)} <= {
            (state, part) for state, parts in PARTS.items() for part in parts
        }
        assert {fact.name for fact in facts if isinstance(fact, Setting)} | set(SETTINGS_OF_REPR) <= set(SETTINGS)

    def test_resized_goes_on(self):
        """The second line of sizing after capture begins nothing again."""
        text = "Post-capture KV sizing: full_layer_tokens=7, swa_layer_tokens=0"
        assert facts_of(text, state="size_kv") == [Step("size_kv", None, "inside")]

    @pytest.mark.parametrize(
        "text",
        [
            "Registering 12 cuda graph addresses",
            "Using model weights format ['*.safetensors']",
            "Custom allreduce is disabled because it is not supported on more than two PCIe-only GPUs.",
            "Exit code: -9",
        ],
    )
    def test_shared_words(self, text):
        """What other engines print with the same words counts behind SGLang's own prefix only."""
        assert names_of(text, form="vllm") == set()
        assert names_of(text, form="sglang") != set()

    @pytest.mark.parametrize(
        "text",
        [
            "1. set --mem-fraction-static to a smaller value (e.g., 0.8 or 0.7)",
            "Scheduler hit an exception: Traceback (most recent call last):",
            "memory leak detected! max_total_num_tokens=5, available_size=3",
            "Prefill batch, #new-seq: 1, #new-token: 6, #cached-token: 0, token usage: 0.00",
            "Capture cuda graph failed: something",
            "x" * 100_000,
        ],
    )
    def test_no_row(self, text):
        """Tips, beginnings of tracebacks and serving lines say nothing of a start."""
        assert facts_of(text) == []

    @pytest.mark.parametrize("word", ["Capture ", "server_args=ServerArgs(", "SWAKVPool ", "--", "Load weight end. "])
    def test_long_lines(self, word):
        """Hostile lines are read in one pass."""
        text = word + "a=" * 200_000
        assert all(row.search(text) is None or row.name for row in SGLANG.rows)


class TestArguments:
    def test_repr(self):
        """Arguments as printed: a start begins, with our names for its knobs; quoted values hide what they hold."""
        facts = facts_of(REPR)
        assert facts[0] == Begin("arguments")
        assert settings(facts) == SETTINGS_OF_REPR
        assert [fact for fact in facts if isinstance(fact, Figure)] == [
            Figure("mem_fraction_static", 0.875),
            Figure("max_total_tokens_requested", 65_536),
        ]

    def test_dict(self):
        """Newer releases print a dict."""
        text = "server_args={'model_path': 'm', 'mem_fraction_static': 0.9, 'tp_size': 8, 'disable_cuda_graph': True}"
        assert settings(facts_of(text)) == {
            "mem_fraction_static": 0.9,
            "tensor_parallel_size": 8,
            "enforce_eager": True,
        }

    def test_command(self):
        """A pasted command line: flags in either spelling, quotes and line ends aside."""
        text = (
            "$ python3 -m sglang.launch_server --model-path org/model --tp 2 --mem-fraction-static=0.9 --context-length 4096 "
            "--disable-cuda-graph --kv-cache-dtype 'fp8_e5m2' --chunked-prefill-size -1 --trust-remote-code \\"
        )
        facts = facts_of(text, form="plain")
        assert settings(facts) == {
            "tensor_parallel_size": 2,
            "mem_fraction_static": 0.9,
            "max_model_len": 4_096,
            "enforce_eager": True,
            "kv_cache_dtype": "fp8_e5m2",
            "chunked_prefill_size": -1,
        }
        assert Begin("arguments") not in facts

    def test_command_goes_on(self):
        """Its next lines count once the command was seen, and begin with flags that no other engine has."""
        text = "    --mem-fraction-static 0.7 --quantization fp8 \\"
        assert settings(facts_of(text, "sgl.command", form="plain")) == {
            "mem_fraction_static": 0.7,
            "quantization": "fp8",
        }
        assert facts_of(text, form="plain") == []
        assert names_of("    --gpu-memory-utilization 0.7 --quantization fp8", form="plain") == set()

    @pytest.mark.parametrize("value", ["__import__('os')", "9" * 400, "1e999", "[" * 5_000])
    def test_untrusted(self, value):
        """Values are words: nothing is evaluated, no number grows without bound."""
        found = settings(facts_of(f"server_args=ServerArgs(mem_fraction_static={value}, tp_size=2)"))
        assert found.get("tensor_parallel_size", 2) == 2
        assert all(isinstance(each, str | int | float | bool) and len(str(each)) <= 64 for each in found.values())


def test_patterns_are_bounded():
    """Every repetition in a pattern has an end."""
    for row in SGLANG.rows:
        assert re.search(r"(?<!\\)[\])\w.][*+](?!\+)", re.sub(r"\[(?:\\.|[^\]\\])*\]", "[]", row.pattern)) is None, (
            row.name
        )
