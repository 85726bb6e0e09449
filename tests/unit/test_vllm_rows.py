"""What the lines of vLLM say, wording by wording; all figures are made up."""

from __future__ import annotations

import json

import attrs
import pytest

from startup_fsm.importers.facts import UNITS, Begin, Figure, Ready, Setting, Sign, Stall, Step, Version
from startup_fsm.importers.vllm import VLLM, VLLM_ASCEND
from startup_fsm.memory import GIB

#: Two lines a sample: row, what was said before and the message; then what it says. A state may have a part and be
#: entered or left (``begins:``, ``ends:``), ``name=value`` is a figure, ``name:value`` a setting, ``!name`` a sign.
LINES = r"""
L00 |  | non-default args: {'model': 'models/tiny', 'max_model_len': 16384, 'gpu_memory_utilization': 0.87, 'enforce_eager': True, 'quantization': 'awq', 'kv_cache_dtype': 'fp8', 'data_parallel_size': 4, 'max_num_seqs': 96, 'max_num_batched_tokens': 4096, 'kv_cache_memory_bytes': 21474836480, 'enable_lora': True, 'speculative_config': {'method': 'eagle3', 'num_speculative_tokens': 3, 'max_model_len': 2048}, 'compilation_config': {'level': 3, 'cudagraph_capture_sizes': [1, 2, 4]}}
    = banner:arguments max_model_len:16384 gpu_memory_utilization:0.87 enforce_eager:true quantization:"awq" kv_cache_dtype:"fp8" !parallel{"data_parallel_size": 4} max_num_seqs:96 max_num_batched_tokens:4096 kv_cache_memory_bytes:21474836480 lora:true speculative:"{'method': 'eagle3', 'num_speculative_tokens': 3, 'max_model_len': 2048}" capture_sizes:[1, 2, 4]
L00 |  | args: Namespace(host=None, port=8000, max_model_len=None, gpu_memory_utilization=0.95, tensor_parallel_size=2, enforce_eager=False, max_seq_len_to_capture=8192, quantization=None, speculative_model='models/draft')
    = banner:arguments gpu_memory_utilization:0.95 tensor_parallel_size:2 enforce_eager:false speculative:"models/draft"
L01 |  | vLLM API server version 0.9.2
    = banner:api version:vllm:0.9.2
L01 |  | vLLM server version 0.33.0, serving model models/tiny
    = banner:api version:vllm:0.33.0
L01 |  |  ▄▄ ▄█ █     █     █ ▀▄▀ █  version 0.26.0
    = banner:api version:vllm:0.26.0
L02 |  | Initializing an LLM engine (v0.6.2) with config: model='models/tiny', speculative_config=None, max_seq_len=4096, tensor_parallel_size=1, pipeline_parallel_size=2, quantization=gptq_marlin, enforce_eager=False, kv_cache_dtype=auto
    = banner:engine version:vllm:0.6.2 max_model_len:4096 tensor_parallel_size:1 pipeline_parallel_size:2 quantization:"gptq_marlin" enforce_eager:false kv_cache_dtype:"auto"
L03 |  | Initializing a V0 LLM engine (v0.8.3) with config: model='models/tiny', max_seq_len=2048
    = banner:engine version:vllm:0.8.3 !runner{"runner": "V0"} max_model_len:2048
L04 |  | Initializing a V1 LLM engine (v0.10.1.1) with config: model='models/tiny', data_parallel_size=1, speculative_config=SpeculativeConfig(method='ngram', num_spec_tokens=2), compilation_config={"level":3,"cudagraph_capture_sizes":[512,256,1],"max_capture_size":512}
    = banner:engine version:vllm:0.10.1.1 !runner{"runner": "V1"} speculative:"SpeculativeConfig(method='ngram', num_spec_tokens=2)" capture_sizes:[512, 256, 1]
L04 |  | Initializing a V1 LLM engine (v0.26.0) with config: model='models/tiny', kv_cache_dtype=fp8_e4m3
    = banner:engine version:vllm:0.26.0 kv_cache_dtype:"fp8_e4m3"
L05 |  | Using max model len 40960
    = max_model_len=40960
command |  | $ vllm serve models/tiny --gpu-memory-utilization 0.93 --max-model-len=32k -tp 4 -dp 2 --enforce-eager --kv_cache_dtype fp8 --max-num-seqs 128 --cudagraph-capture-sizes 1 2 4 8
    = capture_sizes:[1, 2, 4, 8] gpu_memory_utilization:0.93 max_model_len:32000 tensor_parallel_size:4 !parallel{"data_parallel_size": 2} enforce_eager:true kv_cache_dtype:"fp8" max_num_seqs:128
command |  | python -m vllm.entrypoints.openai.api_server --model models/tiny --max-model-len 32K --enable-lora
    = max_model_len:32768 lora:true
L06 |  | world_size=4 rank=2 local_rank=2 distributed_init_method=tcp://127.0.0.1:1 backend=nccl
    = init_device
L07 |  | vLLM is using nccl==2.27.3
    = init_device
L08 |  | Custom allreduce is disabled because your platform lacks GPU P2P capability or P2P test failed.
    = init_device !custom_allreduce_off
L09 |  | Using V2 Model Runner
    = init_device !runner{"runner": "V2"}
L09b |  | Model Runner V2 does not yet support logprobs; using the V1 model runner instead.
    = !runner{"runner": "V1"}
L10 |  | worker init memory snapshot: torch_peak=0.0GiB, torch_allocated=0.0GiB, free_memory=78.61GiB, total_memory=79.25GiB, cuda_memory=0.64GiB, torch_memory=0.0GiB, non_torch_memory=0.64GiB, timestamp=1.5, auto_measure=True
    = ends:init_device free_at_start_bytes=78.61GiB total_bytes=79.25GiB
L11 |  | worker requested memory: 71.33GiB
    = ends:init_device requested_bytes=71.33GiB
L12 |  | Weights are held outside this process: of the 71.33 GiB utilization budget, 15.0 GiB is externally held and 56.33 GiB remains for the engine's own allocations.
    = init_device !weights_external
L13 |  | Using 'pin_memory=False' as WSL is detected. This may slow down the performance.
    = !pin_memory_off !wsl
device | init_device |     Found GPU0 NVIDIA GB10 which is of cuda capability 12.1.
    = !unified_memory
device | load_weights |     Found GPU0 NVIDIA GH200 480GB which is of cuda capability 9.0.
    = !unified_memory
device |  |     Found GPU0 NVIDIA GB10 which is of cuda capability 12.1.
    =
device | init_device |     Found GPU0 Orin which is of cuda capability 8.7.
    = !unified_memory
device | init_device | NVIDIA Jetson AGX Thor
    = !unified_memory
device | load_weights | Using default MoE config. Config file not found at configs/E=8,N=14336,device_name=NVIDIA_GB200.json
    = !unified_memory
device | load_weights | Using default MoE config. Config file not found at configs/E=8,N=14336,device_name=NVIDIA_Thor.json
    = !unified_memory
C01 |  | ValueError: Free memory on device (3.1/23.65 GiB) on startup is less than desired GPU memory utilization (0.9, 21.28 GiB). Decrease GPU memory utilization or reduce GPU memory used by other processes.
    = free_at_start_bytes=3.1GiB total_bytes=23.65GiB gpu_memory_utilization=0.9 requested_bytes=21.28GiB
C01 |  | ValueError: Free memory on device cuda:3 (70.02/79.25 GiB) on startup is less than desired GPU memory utilization (0.92, 72.91 GiB).
    = free_at_start_bytes=70.02GiB total_bytes=79.25GiB gpu_memory_utilization=0.92 requested_bytes=72.91GiB
C01 |  | ValueError: Available memory on node 0 (11.5/62.7 GiB) on startup is less than desired CPU memory utilization (0.9, 56.43 GiB).
    = free_at_start_bytes=11.5GiB total_bytes=62.7GiB gpu_memory_utilization=0.9 requested_bytes=56.43GiB
C02 |  | ValueError: Externally held weights on device cuda:0 (75.0/79.25 GiB) exceed the desired GPU memory utilization (0.9, 71.33 GiB).
    = !weights_external total_bytes=79.25GiB gpu_memory_utilization=0.9 requested_bytes=71.33GiB
C03 |  | ValueError: Free memory on device cuda:0 (40.0/79.25 GiB) on startup is less than the engine's budget after excluding external process's weights (0.9, 56.33 GiB).
    = !weights_external free_at_start_bytes=40GiB total_bytes=79.25GiB gpu_memory_utilization=0.9 requested_bytes=56.33GiB
L20 |  | Starting to load model models/tiny...
    = begins:load_weights
L20b |  | Loading model from scratch...
    = load_weights
L21 |  | Loading safetensors checkpoint shards:  25% Completed | 1/4 [00:01<00:03,  1.02s/it]
    = load_weights
L21 |  | Multi-thread loading shards: 100% Completed | 4/4
    = load_weights
L21 |  | Loading safetensors using Fastsafetensor loader:  50%|
    = load_weights
L22 |  | Time spent downloading weights for models/tiny: 12.500000 seconds
    = load_weights
L23 |  | Filesystem type for checkpoints: EXT4. Checkpoint size: 14.96 GiB. Available RAM: 201.10 GiB.
    = load_weights
L24 |  | Loading weights took 4.31 seconds
    = load_weights
L25 |  | Loading drafter model...
    = load_weights/draft_worker_init
L26 |  | Peak GPU memory after loading weights: 15.2 GiB
    = load_weights
L27 |  | Released 3.50 GiB of checkpoint page cache in 0.2s
    = load_weights
L28 |  | Loading model weights took 7.5100 GB
    = ends:load_weights weights_bytes=7.51GB
drafts |  | Configuring SpecDecodeWorker with proposer=<class 'vllm.spec_decode.multi_step_worker.MultiStepWorker'>
    =
L28 | load_weights L28 | Loading model weights took 7.5100 GB
    = ends:load_weights weights_bytes=7.51GB
L28 | load_weights L28 drafts | Loading model weights took 1.2500 GB
    = ends:load_weights
L28 |  | Loading model weights took 0.0000 GB
    = ends:load_weights weights_bytes=0GB !weights_not_measured
L29 |  | Model loading took 7.5100 GB and 3.250000 seconds
    = ends:load_weights weights_bytes=7.51GB
L30 |  | Model loading took 7.5123 GiB and 3.250000 seconds
    = ends:load_weights weights_bytes=7.5123GiB
L31 |  | Model loading took 7.5123 GiB memory and 3.250000 seconds
    = ends:load_weights weights_bytes=7.5123GiB
L32 |  | Model loading took 7.5 GiB memory and 3.250000 seconds
    = ends:load_weights weights_bytes=7.5GiB
L33 |  | Model loading took 7.51 GiB and 3.250000 seconds
    = ends:load_weights weights_bytes=7.51GiB
L34 |  | Online quantization as part of model loading took 2.25 seconds
    = load_weights
L34 |  | Initializing model took 1.50 seconds
    = load_weights
L35 |  | Weight cache target daemon rank 0 loaded model (15.0 GiB allocated, 15.2 GiB reserved)
    = load_weights
L36 |  | Released 1.75GiB of cached device memory under memory pressure
    = load_weights !unified_memory
L37 |  | Failed to load model - not enough GPU memory. Try lowering --gpu-memory-utilization
    = load_weights !loader_failed_oom
L38 |  | [PrefetchOffloader] Initialized 8 modules. Total GPU memory saved: 4.10 GB, Static buffer pool: 0.52 GB
    = load_weights
L39 |  | Allocated 4194304 bytes for 0 with address 1 from cumem allocator
    =
L40 |  | Encoder cache will be initialized with a budget of 16384 tokens, and profiled with 1 image items of the maximum feature size.
    = profile_activations/encoder
L41 |  | [decoder] Starting torch.compile
    = profile_activations/compile
L41 | sized | [decoder] Starting torch.compile
    = warmup
L41 |  | Using cache directory: cache/torch_compile for vLLM's torch.compile
    = profile_activations/compile
L41 | sized | Using cache directory: cache/torch_compile for vLLM's torch.compile
    = warmup
L41 |  | Dynamo bytecode transform time: 5.12 s
    = profile_activations/compile
L41 | sized | Dynamo bytecode transform time: 5.12 s
    = warmup
L42 |  | Compiling a graph for general shape takes 18.02 s
    = profile_activations/compile
L42 | sized | Compiling a graph for general shape takes 18.02 s
    = warmup
L42 |  | Compiling a graph for dynamic shape takes 9.5 s
    = profile_activations/compile
L42 | sized | Compiling a graph for dynamic shape takes 9.5 s
    = warmup
L42 |  | [decoder] Compiling a graph for compile range (1, 8192) takes 11.25 s
    = profile_activations/compile
L42 | sized | [decoder] Compiling a graph for compile range (1, 8192) takes 11.25 s
    = warmup
L43 |  | Directly load the compiled graph for shape 4 from the cache
    = profile_activations/compile
L43 | sized | Directly load the compiled graph for shape 4 from the cache
    = warmup
L43 |  | Directly load the compiled graph(s) for dynamic shape from the cache, took 0.512 s
    = profile_activations/compile
L43 | sized | Directly load the compiled graph(s) for dynamic shape from the cache, took 0.512 s
    = warmup
L44 |  | Directly load AOT compilation from path cache/aot
    = profile_activations/compile
L44 | sized | Directly load AOT compilation from path cache/aot
    = warmup
L44 |  | [decoder] saved AOT compiled function to cache/aot
    = profile_activations/compile
L44 | sized | [decoder] saved AOT compiled function to cache/aot
    = warmup
compile |  | Warming up model for the compilation...
    = profile_activations/compile
compile | sized | Warming up model for the compilation...
    = warmup
L45 |  | torch.compile takes 23.10 s in total
    = profile_activations
L45 | sized | torch.compile takes 23.10 s in total
    = warmup
L46 |  | torch.compile took 23.10 s in total
    = profile_activations
L46 | sized | torch.compile took 23.10 s in total
    = warmup
L47 |  | [decoder] Initial profiling/warmup run took 0.71 s
    = profile_activations
L47 | sized | [decoder] Initial profiling/warmup run took 0.71 s
    = warmup
L48 |  | Memory profiling results: total_gpu_memory=23.64GiB initial_memory_usage=14.20GiB peak_torch_memory=15.60GiB memory_usage_post_profile=14.22GiB non_torch_memory=0.12GiB kv_cache_size=5.56GiB gpu_memory_utilization=0.90
    = !runner{"runner": "V0"} size_kv total_bytes=23.64GiB initial_used_bytes=14.2GiB peak_torch_bytes=15.6GiB engine_outside_torch_bytes=0.12GiB kv_available_bytes=5.56GiB gpu_memory_utilization=0.9
L49 |  | Memory profiling results:
    = !runner{"runner": "V0"} ends:profile_activations
L49 |  | total_gpu_memory 	79.22GiB
    = ends:profile_activations total_bytes=79.22GiB
L49 |  | gpu_memory_utilization 	0.90
    = ends:profile_activations gpu_memory_utilization=0.9
L49 |  | non_torch_memory 	1.79GiB
    = engine_outside_torch_bytes=1.79GiB
L50 |  | the current vLLM instance can use 	71.29GiB
    = !runner{"runner": "V0"} ends:profile_activations requested_bytes=71.29GiB
L50 |  | model weights take 	14.96GiB
    = ends:profile_activations weights_bytes=14.96GiB
L50 |  | PyTorch activation peak memory 	1.26GiB
    = ends:profile_activations engine_activation_bytes=1.26GiB
L49 |  | available_kv_cache_memory 	53.29GiB
    = size_kv kv_available_bytes=53.29GiB
L50 |  | Memory profiling takes 3.10 seconds
    = !runner{"runner": "V0"} ends:profile_activations
L50 |  | the current vLLM instance can use total_gpu_memory (47.50GiB) x gpu_memory_utilization (0.85) = 40.38GiB
    = !runner{"runner": "V0"} ends:profile_activations total_bytes=47.5GiB gpu_memory_utilization=0.85 requested_bytes=40.38GiB
L50 |  | model weights take 14.93GiB; non_torch_memory takes 0.11GiB; PyTorch activation peak memory takes 1.27GiB; the rest of the memory reserved for KV Cache is 24.07GiB.
    = ends:profile_activations weights_bytes=14.93GiB ends:profile_activations engine_outside_torch_bytes=0.11GiB ends:profile_activations engine_activation_bytes=1.27GiB size_kv kv_available_bytes=24.07GiB
L50 |  | PyTorch activation peak memory takes 6.10GiB; the rest of the memory reserved for KV Cache is -2.31GiB.
    = ends:profile_activations engine_activation_bytes=6.1GiB size_kv kv_available_bytes=-2.31GiB
L51 |  | Memory profiling takes 12.10 seconds. Total non KV cache memory: 18.2GiB; torch peak memory increase: 2.1GiB; non-torch forward increase memory: 0.6GiB; weights memory: 15.5GiB.
    = ends:profile_activations engine_activation_bytes=2.1GiB engine_outside_torch_bytes=0.6GiB weights_bytes=15.5GiB
L51 |  | Memory profiling takes 12.10 seconds. Total non KV cache memory: 18.2GiB; torch peak memory increase: 2.1GiB; total consumed (from mem_get_info): 16.1GiB; weights memory: 15.5GiB.
    = ends:profile_activations engine_activation_bytes=2.1GiB weights_and_non_torch_bytes=16.1GiB weights_bytes=15.5GiB
L53 |  | Initial free memory: 78.61 GiB, free memory: 60.02 GiB, requested GPU memory: 71.33 GiB
    = ends:profile_activations free_at_start_bytes=78.61GiB requested_bytes=71.33GiB
L54 |  | Initial free memory: 78.61 GiB; Requested memory: 0.925000 (util), 73.31 GiB
    = ends:profile_activations free_at_start_bytes=78.61GiB gpu_memory_utilization=0.925 requested_bytes=73.31GiB
L55 |  | Free memory after profiling: 60.02 GiB (total), 54.72 GiB (within requested)
    = ends:profile_activations
L56 |  | Available KV cache memory: 53.10 GiB
    = size_kv kv_available_bytes=53.1GiB
L56 |  | Available KV cache memory: -1.4 GiB
    = size_kv kv_available_bytes=-1.4GiB
L57 |  | Initial free memory 78.61 GiB, reserved 40.00GiB memory for KV Cache as specified by kv_cache_memory_bytes config and skipped memory profiling. This does does not respect the gpu_memory_utilization config.
    = size_kv !kv_pinned free_at_start_bytes=78.61GiB kv_cache_bytes=40GiB
L57 |  | Initial free memory 78.61 GiB, reserved 40.0 GiB memory for KV Cache as specified by kv_cache_memory_bytes config and skipped memory profiling. This does not respect the gpu_memory_utilization config.
    = size_kv !kv_pinned free_at_start_bytes=78.61GiB kv_cache_bytes=40GiB
L57 |  | Initial free memory 78.61 GiB, reserved 40.00 GiB for KV Cache as specified by kv_cache_memory_bytes, skipping memory profiling.
    = size_kv !kv_pinned free_at_start_bytes=78.61GiB kv_cache_bytes=40GiB
L58 |  | Free memory grew by 1.5 GiB during profiling (initial 180.1 GiB, current 181.6 GiB). Sizing the KV cache from the 16.0 GiB torch reserved instead of the profiling difference.
    = profile_activations !free_grew_tolerated initial_free_bytes=180.1GiB current_free_bytes=181.6GiB
L59 |  | Before memory profiling run, total GPU memory: 30768.00 MB, model load takes 14336.50 MB, free gpu memory is 15000.00 MB.
    = profile_activations total_bytes=30768MB weights_bytes=14336.5MB
L59 |  | After memory profiling run, peak memory usage is 15800.25 MB,torch mem is 14336.50 MB, non-torch mem is 512.00 MB, free gpu memory is 14000.00 MB.
    = ends:profile_activations peak_torch_bytes=15800.2MB engine_outside_torch_bytes=512MB
L60 |  | Reserving 2.25 GiB of GPU memory for frontend multimodal decoding (1.0 GiB raw-frame semaphore budget, 1.25 GiB decoder+CUDA-context across 1 API server(s) @ 1.25 GiB/server); KV cache memory reduced to 50.85 GiB.
    = size_kv kv_available_bytes=50.85GiB
L61 |  | Applying persisted startup plan (fingerprint 0123456789abcdef): kv_cache_memory_bytes=57847316480 (53.87 GiB), recorded free-memory baseline 78.50 GiB, current 78.61 GiB. Memory profiling will be skipped.
    = profile_activations !startup_plan_applied{"kv_cache_memory_bytes": 57847316480} kv_cache_bytes=57847316480
L62 |  | Startup plan not applied: current free memory (70.10 GiB) is below the recorded baseline (78.50 GiB); falling back to full memory profiling.
    = profile_activations !startup_plan_refused
L63 | capture_graphs | Saved startup plan to cache/startup_plan/plan.json
    = ends:capture_graphs
C11 |  | AssertionError: Error in memory profiling. Initial free memory 60.5 GiB, current free memory 61.75 GiB. This happens when other processes sharing the same container release GPU memory
    = initial_free_bytes=60.5GiB current_free_bytes=61.75GiB
C11 |  | AssertionError: Error in memory profiling. Initial free memory 24000000000, current free memory 24100000000. This happens when the GPU memory was not properly cleaned up
    = initial_free_bytes=24000000000 current_free_bytes=24100000000
C11 |  | AssertionError: Error in memory profiling. Initial used memory 9000000000, currently used memory 8900000000.
    = initial_used_bytes=9000000000
C14 |  | RuntimeError: CUDA out of memory occurred when warming up sampler with 256 dummy requests. Please try lowering
    = sampler_dummy_requests=256
C14 |  | RuntimeError: CUDA out of memory occurred when warming up pooler (task=embed) with 64 dummy requests.
    = sampler_dummy_requests=64
L65 | profiled | Initialized minimal KV cache for CUDA graph profiling
    = ends:bootstrap_kv
L66 | profiled | Profiling CUDA graph memory: FULL=35 (largest=256), PIECEWISE=51 (largest=512), ENCODER=4 (largest=8)
    = begins:capture_throwaway !runner{"runner": "V1"} !graphs_planned{"full": 35, "largest": 512, "piecewise": 51, "encoder": 4} full_graphs=35 piecewise_graphs=51
L67 | profiled | Estimated FULL CUDA graph memory: 212.00 MiB first-capture + (35-1) × 2.00 MiB per-graph
    = capture_throwaway
L68 | profiled | Estimated encoder CUDA graph memory: 64.00 MiB for 4 graphs
    = capture_throwaway/encoder
L69 | capture_throwaway | Cleaned up profiling KV cache and CUDA graphs
    = ends:teardown
L69 | profile_activations | Cleaned up profiling KV cache and CUDA graphs
    =
L70 | profiled | Estimated CUDA graph memory: -0.25 GiB total
    = ends:teardown !runner{"runner": "V1"} graph_estimate_bytes=-0.25GiB
L71 | sized | CUDA graph memory profiling is enabled (VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS=1). This will become the default in v0.19. The current --gpu-memory-utilization=0.9000 is equivalent to --gpu-memory-utilization=0.8880 without CUDA graph memory profiling. To maintain the same effective KV cache size as before, increase --gpu-memory-utilization to 0.9120.
    = size_kv !graph_profile_enabled gpu_memory_utilization=0.9 equivalent_utilization=0.888 suggested_utilization=0.912
L71 | sized | The current --gpu-memory-utilization=0.9000 is equivalent to --gpu-memory-utilization=0.8880
    = size_kv !graph_profile_enabled gpu_memory_utilization=0.9 equivalent_utilization=0.888
L72 | sized | In v0.19, CUDA graph memory profiling will be enabled by default (VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS=1), which more accurately accounts for CUDA graph memory. To try it now, set it and increase --gpu-memory-utilization from 0.9000 to 0.9120 to maintain the same effective KV cache size.
    = size_kv !graph_profile_optional gpu_memory_utilization=0.9 suggested_utilization=0.912
L73 | sized | CUDA graph memory profiling is disabled (VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS=0). Without it, CUDA graph memory is not accounted for during KV cache allocation. Consider re-enabling it (the default as of v0.21.0) and increasing --gpu-memory-utilization from 0.9000 to 0.9120.
    = size_kv !graph_profile_disabled gpu_memory_utilization=0.9 suggested_utilization=0.912
L75 | sized | # GPU blocks: 7281, # CPU blocks: 2048
    = size_kv gpu_blocks=7281 cpu_blocks=2048
L75 | sized | # cuda blocks: 0, # CPU blocks: 9362
    = size_kv gpu_blocks=0 cpu_blocks=9362
L75 | sized | # GPU blocks: 7281
    = size_kv gpu_blocks=7281
L78 | sized | Maximum concurrency for 131072 tokens per request: 3.41x
    = size_kv max_model_len=131072
L79 | sized | GPU KV cache size: 447,232 tokens
    = size_kv kv_tokens=447232
L79 | sized | GPU KV cache size: 447,232 tokens, Maximum concurrency for 131,072 tokens per request: 3.41x
    = size_kv kv_tokens=447232 size_kv max_model_len=131072
L79 | sized | XPU KV cache size: 447,232 tokens, Maximum concurrency for 131,072 tokens per request: 3.41x
    = size_kv kv_tokens=447232 size_kv max_model_len=131072
L79 | sized | CPU KV cache size: 447,232 tokens, Maximum concurrency for 131,072 tokens per request: 3.41x
    = size_kv kv_tokens=447232 size_kv max_model_len=131072
L79 | sized | GPU + host KV cache size: 447,232 tokens, Maximum concurrency for 131,072 tokens per request: 3.41x
    = size_kv kv_tokens=447232 size_kv max_model_len=131072
L82 | sized | Overriding num_gpu_blocks=7281 with num_gpu_blocks_override=512
    = size_kv !blocks_overridden{"from": 7281, "to": 512} gpu_blocks=512
L82 | profiled | Overriding num_gpu_blocks=0 with num_gpu_blocks_override=16
    = begins:bootstrap_kv !blocks_overridden{"from": 0, "to": 16}
L82 |  | Overriding num_gpu_blocks=0 with num_gpu_blocks_override=16
    = begins:bootstrap_kv !blocks_overridden{"from": 0, "to": 16}
L83 |  | Add 2 padding layers, may waste at most 6.25% KV cache memory
    =
L83 | profiled | Add 2 padding layers, may waste at most 6.25% KV cache memory
    = bootstrap_kv
L83 | sized | Add 2 padding layers, may waste at most 6.25% KV cache memory
    = size_kv
corrected | sized | startup_fsm: KV cache corrected from 116886614016 to 115326849024 bytes: run-1 stood at most at 129.10 GiB of 125.82 GiB
    = size_kv !kv_corrected{"available_bytes": 116886614016, "wanted_bytes": 115326849024}
L84 | sized | Auto-fit max_model_len: reduced from 262144 to 180224 to fit in available GPU memory (12.5 GiB available for KV cache)
    = size_kv !max_model_len_reduced{"from": 262144, "to": 180224} max_model_len=180224 kv_available_bytes=12.5GiB
L84 | sized | Auto-fit max_model_len: reduced from 262144 to 180224 to fit in available KV cache memory (12.5 GiB GPU)
    = size_kv !max_model_len_reduced{"from": 262144, "to": 180224} max_model_len=180224 kv_available_bytes=12.5GiB
L84b | sized | Auto-fit max_model_len: full model context length 8192 fits in available GPU memory
    = size_kv
L85 | sized | Multiplying the GPU KV cache size by the dcp_world_size 4.
    = size_kv
L85 | sized | Multiplying the GPU KV cache size by the cp_world_size 4 (pcp_world_size 2 * dcp_world_size 2).
    = size_kv
L86 | sized | Capping cudagraph capture sizes from max 512 to 184 to fit Mamba cache blocks (190 blocks available). This limits
    = size_kv !capture_sizes_capped{"from": 512, "to": 184} mamba_blocks=190
L87 | sized | HiSparse HMA: 64.0 GiB host source (4096 blocks), 12.5 GiB shared GPU indexer/resident/hot pool (800 blocks).
    = allocate_kv
L88 |  | Explicitly set (8.0/62.7) GiB for KV cache on node 0.
    = size_kv !kv_pinned kv_cache_bytes=8GiB total_bytes=62.7GiB
L88 |  | Auto set (40.1/62.7) GiB for KV cache on node 0, with 56.43 GiB requested memory for the worker. 16.33 GiB memory was consumed by non-kv usages.
    = size_kv kv_available_bytes=40.1GiB total_bytes=62.7GiB requested_bytes=56.43GiB
C18 |  | ValueError: To serve at least one request with the models's max seq len (65536), (8.00 GB KV cache is needed, which is larger than the available KV cache memory (5.25 GB). Try increasing
    = max_model_len=65536 kv_needed_bytes=8GB kv_available_bytes=5.25GB
C18 |  | ValueError: To serve at least one request with the model's max seq len (65536), (8.0 GiB KV cache is needed, which is larger than the available KV cache memory (5.25 GiB). Based on the available memory, the estimated maximum model length is 43008. Try increasing
    = max_model_len=65536 kv_needed_bytes=8GiB kv_available_bytes=5.25GiB estimated_max_model_len=43008
C19 |  | ValueError: The model's max seq len (65536) is larger than the maximum number of tokens that can be stored in KV cache (43008). Try increasing
    = max_model_len=65536 kv_tokens=43008
C21 |  | ValueError: max_num_seqs (512) exceeds available Mamba cache blocks (188). Each decode sequence
    = max_num_seqs=512 mamba_blocks=188
C16 |  | ValueError: frontend multimodal GPU decoding reserves 9.0 GiB (8.0 GiB raw-frame budget, 1.0 GiB decoder cache budget), but only 6.5 GiB is available for the KV cache.
    = kv_available_bytes=6.5GiB
C52 |  | ValueError: The worker already uses 60.1 GiB (model weights and runtime), more than the 56.43 GiB of CPU memory reserved for it on node 0
    = weights_and_non_torch_bytes=60.1GiB requested_bytes=56.43GiB
C52 |  | ValueError: Available memory on node 0 (3.1/62.7 GiB) on kv cache allocation is less than requested memory for kv (40.1/56.43 GiB).
    = total_bytes=62.7GiB kv_available_bytes=40.1GiB requested_bytes=56.43GiB
C52 |  | ValueError: Available memory on node 0 (3.1/62.7 GiB) on kv cache allocation is less than requested memory for kv (8.0 GiB).
    = !kv_pinned total_bytes=62.7GiB kv_cache_bytes=8GiB
L90 | sized | Compile and warming up model for size 8
    = warmup
L91 | sized | Warming up FlashInfer attention.
    = warmup
L92 | sized | JIT kernel warmup starting.
    = warmup
L92 | sized | JIT kernel warmup finished in 3.10s.
    = warmup
L92 | sized | JIT kernel warmup failed after 3.10s.
    = warmup
L93 | sized | [Autotuner]: Autotuning process starts ...
    = warmup
L93 | profiled | [Autotuner]: Autotuning process ends
    = profile_activations/autotune
L93 | sized | Running FlashInfer autotune with 8192 tokens and token buckets [1, 2].
    = warmup
L93 | sized | [Autotuner]: OOM detected, falling back to default tactic
    = warmup !autotuner_fell_back
L94 | profiled | [WORKSPACE DEBUG] Resized workspace from 'model.py:10:forward': 0.00 MB -> 512.00 MB (ubatch 0, lane 0)
    =
L94 | sized | [WORKSPACE DEBUG] Workspace locked. Current sizes: [512.0]
    = capture_graphs
L95 | sized | Capturing the model for CUDA graphs. This may lead to unexpected consequences if the model is not static.
    = begins:capture_graphs !runner{"runner": "V0"}
L95 | sized | Capturing cudagraphs for decoding. This may lead to unexpected consequences if the model is not static.
    = begins:capture_graphs !runner{"runner": "V0"}
L96 | sized | CUDA graphs can take additional 1~3 GiB memory per GPU.
    = capture_graphs
L97 |  | Capturing CUDA graph shapes:  11%|#         | 4/35
    = capture_graphs
L97 |  | Capturing CUDA graphs (decode, FULL):   0%|          | 0/35
    = capture_graphs/full
L97 | sized | Capturing CUDA graphs (mixed prefill-decode, PIECEWISE):  50%|#####     | 25/51
    = capture_graphs/piecewise
L97 | profiled | Capturing CUDA graphs (FULL):  50%|#####     | 1/2
    = capture_throwaway/full
L97 | sized | Capturing CUDA graphs (PIECEWISE):  50%|##
    = capture_graphs/piecewise
L97 | capture_throwaway L66 | Capturing a cudagraph on (PIECEWISE,BatchDescriptor(num_tokens=512, num_reqs=None))
    = capture_throwaway/piecewise
L97 | sized | CG Capture: mode=FULL, batch_desc=BatchExecutionDescriptor(num_tokens=8)
    = capture_graphs/full
L97d | profiled | Capturing prefill CUDA graphs (PIECEWISE):   2%|
    = capture_throwaway/draft
L97d | sized | Capturing model for Eagle speculator...
    = capture_graphs/draft
L98 | capture_throwaway L47 L66 | Registering 0 cuda graph addresses
    = capture_throwaway !addresses_registered{"n": 0}
L98 | L46 | Registering 2310 cuda graph addresses
    = capture_graphs
L74 |  | Graph capturing finished in 14 secs.
    = ends:capture_graphs
L74 |  | Graph capturing finished in 14 secs, took 0.54 GiB
    = ends:capture_graphs graph_actual_bytes=0.54GiB
L74 | profiled | Graph capturing finished in 2 secs, took 1.20 GiB
    = ends:capture_throwaway graph_estimate_bytes=1.2GiB
L74 | sized | Graph capturing finished in 6 secs, took -0.19 GiB
    = ends:capture_graphs graph_actual_bytes=-0.19GiB
L101 | sized | Encoder CUDA graph capture complete. Captured 6 graphs across 2 paths.
    = capture_graphs/encoder
L102 | sized | Encoder graph capturing finished in 3 secs, took 0.31 GiB (6 graphs)
    = ends:capture_graphs/encoder graph_actual_bytes=0.31GiB
L103 | sized | Skipping CUDA graph capture. To turn on CUDA graph capture, ensure `cudagraph_mode` was not manually set to `NONE`
    = ends:warmup !graphs_skipped
L103 | sized | Skipping encoder and decoder CUDA graph capture. To enable encoder capture, ensure
    = ends:warmup !graphs_skipped
L104 | sized | CUDA graph pool memory: 0.75 GiB (actual), 0.6 GiB (estimated), difference: 0.15 GiB (20.0%).
    = ends:capture_graphs graph_actual_bytes=0.75GiB graph_estimate_bytes=0.6GiB
L105 | capture_graphs L56 | Free memory on device (78.5/79.25 GiB) on startup. Desired GPU memory utilization is (0.92, 72.91 GiB). Actual usage is 15.5 GiB for weight, 2.25 GiB for peak activation, 0.31 GiB for non-torch memory, and 0.75 GiB for CUDAGraph memory. Replace gpu_memory_utilization config with `--kv-cache-memory=57847316480` (53.87 GiB) to fit into requested memory, or `--kv-cache-memory=63849365504` (59.46 GiB) to fully utilize gpu memory. Current kv cache memory in use is 54.35 GiB.
    = ends:capture_graphs free_at_start_bytes=78.5GiB total_bytes=79.25GiB gpu_memory_utilization=0.92 requested_bytes=72.91GiB weights_bytes=15.5GiB engine_outside_torch_bytes=0.31GiB graph_actual_bytes=0.75GiB suggested_kv_bytes_requested=57847316480 suggested_kv_bytes_full=63849365504 engine_activation_bytes=2.25GiB kv_cache_bytes=54.35GiB
L105 | capture_graphs L51 L56 | Free memory on device (78.5/79.25 GiB) on startup. Desired GPU memory utilization is (0.92, 72.91 GiB). Actual usage is 15.5 GiB for weight, 2.25 GiB for peak activation, 0.31 GiB for non-torch memory, and 0.75 GiB for CUDAGraph memory. Replace gpu_memory_utilization config with `--kv-cache-memory=57847316480` (53.87 GiB) to fit into requested memory, or `--kv-cache-memory=63849365504` (59.46 GiB) to fully utilize gpu memory. Current kv cache memory in use is 54.35 GiB.
    = ends:capture_graphs free_at_start_bytes=78.5GiB total_bytes=79.25GiB gpu_memory_utilization=0.92 requested_bytes=72.91GiB weights_bytes=15.5GiB engine_outside_torch_bytes=0.31GiB graph_actual_bytes=0.75GiB suggested_kv_bytes_requested=57847316480 suggested_kv_bytes_full=63849365504 kv_cache_bytes=54.35GiB
L105 | warmup L56 | Free memory on device (22.9/23.56 GiB) on startup. Desired GPU memory utilization is (0.9, 21.2 GiB). Actual usage is 14.93 GiB for weight, 1.27 GiB for peak activation, 0.11 GiB for non-torch memory, and 0.0 GiB for CUDAGraph memory. Replace gpu_memory_utilization config with `--kv-cache-memory=-157286400` to fit into requested memory, or `--kv-cache-memory=1073741824` to fully utilize gpu memory. Current kv cache memory in use is 5261334937 bytes.
    = ends:warmup free_at_start_bytes=22.9GiB total_bytes=23.56GiB gpu_memory_utilization=0.9 requested_bytes=21.2GiB weights_bytes=14.93GiB engine_outside_torch_bytes=0.11GiB graph_actual_bytes=0GiB suggested_kv_bytes_requested=-157286400 suggested_kv_bytes_full=1073741824 engine_activation_bytes=1.27GiB kv_cache_bytes=5261334937
L105 | capture_graphs L56 | Free memory on device (78.5/79.25 GiB) on startup. Desired GPU memory utilization is (0.92, 72.91 GiB). Actual usage is 16.1 GiB for consumed memory (weights + non-torch), 2.85 GiB for peak activation, and 0.75 GiB for CUDAGraph memory. Replace gpu_memory_utilization config with `--kv-cache-memory=57000000000` (53.09 GiB) to fit into requested memory, or `--kv-cache-memory=63000000000` (58.67 GiB) to fully utilize gpu memory. Current kv cache memory in use is 53.9 GiB.
    = ends:capture_graphs free_at_start_bytes=78.5GiB total_bytes=79.25GiB gpu_memory_utilization=0.92 requested_bytes=72.91GiB weights_and_non_torch_bytes=16.1GiB graph_actual_bytes=0.75GiB suggested_kv_bytes_requested=57000000000 suggested_kv_bytes_full=63000000000 engine_activation_bytes=2.85GiB kv_cache_bytes=53.9GiB
ascend | capture_graphs L56 | Free memory on device (60.1/60.96 GiB) on startup. Desired GPU memory utilization is (0.9, 54.86 GiB). Actual usage: 15.2 GiB for weights, 2.1 GiB for peak activation, 0.4 GiB for non-torch memory, 0.9 GiB for NPU graph memory. Replace gpu_memory_utilization with `--kv-cache-memory=38000000000` (35.39 GiB) to fit into requested memory, or `--kv-cache-memory=43000000000` (40.05 GiB) to fully utilize NPU free memory. Current KV cache memory: 37.16 GiB. After warmup: torch reserved memory 55.2 GiB, torch allocated memory 54.9 GiB.
    = ends:capture_graphs version:vllm-ascend free_at_start_bytes=60.1GiB total_bytes=60.96GiB gpu_memory_utilization=0.9 requested_bytes=54.86GiB weights_bytes=15.2GiB engine_outside_torch_bytes=0.4GiB graph_actual_bytes=0.9GiB suggested_kv_bytes_requested=38000000000 suggested_kv_bytes_full=43000000000 torch_reserved_bytes=55.2GiB torch_allocated_bytes=54.9GiB engine_activation_bytes=2.1GiB kv_cache_bytes=37.16GiB version:vllm-ascend
ascend |  | RuntimeError: NPU out of memory. Tried to allocate 1.50 GiB (NPU 0; 60.96 GiB total capacity)
    = version:vllm-ascend
L107 | sized | init engine (profile, create kv cache, warmup model) took 31.25 seconds
    = READY
L107 | sized | init engine (profile, create kv cache, warmup model) took 31.25 s
    = READY
L107 | sized | init engine (profile, create kv cache, warmup model) took 31.25 s (compilation: 9.50 s — language_model: 9.00 s, encoder: 0.50 s)
    = READY
ready | sized | Starting vLLM API server on http://0.0.0.0:8000
    = READY
ready | sized | Starting vLLM API server 0 on http://0.0.0.0:8000
    = READY
ready | sized | Starting vLLM server on http://0.0.0.0:8000
    = READY
ready | sized | Application startup complete.
    = READY
ready | sized | Uvicorn running on http://0.0.0.0:8000 (Press CTRL+C to quit)
    = READY
L110 | sized | Sleep mode freed 60.50 GiB memory, 1.25 GiB memory is still in use.
    = serving !sleep_freed{"freed_bytes": 64961380352, "used_bytes": 1342177280}
L110 | sized | Sleep mode freed 60.5 GiB memory, 1.25 GiB memory is still in use.
    = serving !sleep_freed{"freed_bytes": 64961380352, "used_bytes": 1342177280}
L111 | sized | It took 1.500000 seconds to fall asleep.
    = serving
L112 | sized | It took 0.500000 seconds to wake up tags {'weights'}.
    = serving
L113 | sized | It took 0.100000 seconds to discard tags ('kv_cache',).
    = serving
L114 | sized | CuMemAllocator: sleep freed 60.50 GiB memory in total, of which 15.00 GiB is backed up in CPU and the rest 45.50 GiB is discarded directly.
    = serving
L115 | sized | No available shared memory broadcast block found in 60 seconds. This typically happens when some processes are hanging
    = STALL:60.0
L115 | sized | No available block found in 60 second.
    = STALL:60.0
placement |  | Waiting for creating a placement group of specs for 150 seconds. specs=[{'GPU': 1.0}]. Check `ray status`
    = STALL:150.0
watchdog | sized | [Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE, NumelIn=1, Timeout(ms)=600000) ran for 600021 milliseconds before timing out.
    = STALL:600.021
L116 | sized | WorkerProc was terminated
    =
L117 | sized | Worker proc VllmWorker-1 died unexpectedly, shutting down executor.
    = !worker_died{"name": "VllmWorker-1", "code": null} DEATH:peer:peer:echo
L117 | sized | Worker proc VllmWorker-1 died unexpectedly (exit code: -9), shutting down executor.
    = !worker_died{"name": "VllmWorker-1", "code": -9} DEATH:host_oom:host_out_of_memory
L117 | sized | Worker proc VllmWorker-1 died unexpectedly (exit code: -11), shutting down executor.
    = !worker_died{"name": "VllmWorker-1", "code": -11} DEATH:signal:signal
L117 | sized | RayWorkerProc rank=[3] died unexpectedly, shutting down executor.
    = !worker_died{"name": "rank=[3]", "code": null} DEATH:peer:peer:echo
L117 | sized | Worker VllmWorkerProcess pid 4012 died, exit code: -15
    = !worker_died{"name": "VllmWorkerProcess pid 4012", "code": -15}
L117 | sized | Worker VllmWorkerProcess pid 4012 died, exit code: 1
    = !worker_died{"name": "VllmWorkerProcess pid 4012", "code": 1} DEATH:peer:peer:echo
L118 | sized | WorkerProc hit an exception.
    =
L118 | sized | WorkerProc failed to start.
    = DEATH:peer:peer:echo
L118 | sized | EngineCore failed to start.
    = DEATH:peer:peer:echo
L119 |  | RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {'EngineCore': 1}
    = DEATH:peer:peer:echo
what | capture_graphs |   what():  CUDA error: an illegal memory access was encountered
    = DEATH:capture:illegal_access:final
ipc | sized | Failed: Cuda error /workspace/csrc/custom_all_reduce.cuh:455 'invalid argument'
    = DEATH:capture:ipc_handle:final
fault | sized | Memory access fault by GPU node-2 (Agent handle: 0x1) on address 0x2. Reason: Unknown.
    = DEATH:raised:illegal_access:final
"""  # noqa: RUF001


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
PROFILED = heard("profile_activations", "L09", "L32", "L46", "L47")
SIZED = heard("size_kv", "L09", "L32", "L46", "L47", "L56")


def samples():
    """Row, what was said before, message and meaning of each sample."""
    known = {"": NOTHING, "profiled": PROFILED, "sized": SIZED}
    lines = LINES.strip("\n").splitlines()
    for header, meaning in zip(lines[::2], lines[1::2], strict=True):
        row, before, message = header.split(" | ", 2)
        yield row, known.get(before) or heard(*before.split(" ")), message, meaning.strip().removeprefix("=").strip()


def matches(message, form="vllm"):
    """Rows that a message is a line of, with their matches."""
    rows = [row for row in VLLM.rows if row.anchor in message and row.form in (None, form)]
    return [(row, found) for row in rows if (found := row.search(message)) is not None]


def facts(message, before=NOTHING, form="vllm"):
    """All that a message says."""
    return [fact for row, found in matches(message, form) for fact in row.facts(found, before)]


def written(fact):  # noqa: PLR0911
    """A fact in the notation of the table; bytes in the unit that they were printed in."""
    match fact:
        case Step(state, part, moment):
            place = state if part is None else f"{state}/{part}"
            return place if moment == "inside" else f"{moment}:{place}"
        case Figure(name, value, unit):
            return f"{name}={value}" if unit in (None, "bytes") else f"{name}={round(value / UNITS[unit], 6):g}{unit}"
        case Sign(name, inputs):
            return f"!{name}" + (json.dumps(inputs) if inputs else "")
        case Setting(name, value):
            return f"{name}:{json.dumps(value)}"
        case Begin(kind):
            return f"banner:{kind}"
        case Version(engine, version):
            return f"version:{engine}" + (f":{version}" if version else "")
        case Ready():
            return "READY"
        case Stall(seconds):
            return f"STALL:{seconds}"
    flags = "".join(f":{name}" for name in ("echo", "final") if getattr(fact, f"is_{name}"))
    return f"DEATH:{fact.category}:{fact.reason}{flags}"


SAMPLES = list(samples())
#: Command lines that somebody pasted.
PASTED = [
    (
        "  --gpu-memory-utilization 0.9 --max-model-len 16384 \\",
        {"gpu_memory_utilization": 0.9, "max_model_len": 16384},
    ),
    ("      - --max-num-seqs=64", {"max_num_seqs": 64}),
    (
        "docker run --gpus all vllm/vllm-openai:v0.9.1 --model models/tiny --kv-cache-memory-bytes 8G -q fp8",
        {"kv_cache_memory_bytes": 8 * GIB, "quantization": "fp8"},
    ),
]


class TestLines:
    @pytest.mark.parametrize(
        ("row", "before", "message", "meaning"),
        SAMPLES,
        ids=[f"{index}-{sample[0]}" for index, sample in enumerate(SAMPLES)],
    )
    def test_line(self, row, before, message, meaning):
        """Each line is one of its row, and says exactly this."""
        assert row in {found.name for found, _ in matches(message)}
        assert " ".join(map(written, facts(message, before))) == meaning

    @pytest.mark.parametrize(("message", "settings"), PASTED)
    def test_pasted(self, message, settings):
        """A pasted command line gives settings and nothing else."""
        said = facts(message, form="plain")
        assert all(isinstance(fact, Setting) for fact in said)
        assert {fact.name: fact.value for fact in said} == settings

    def test_every_row(self):
        """No row is without a sample."""
        messages = [(message, "vllm") for _, _, message, _ in SAMPLES] + [(message, "plain") for message, _ in PASTED]
        seen = {id(row) for message, form in messages for row, _ in matches(message, form)}
        assert [row.name for row in VLLM.rows if id(row) not in seen] == []

    def test_catalogue(self):
        """Every line of the catalogue has a row; L80 and L81 are L79 and L78 in one, L99 and L106 wordings, L108 a tail."""
        numbers = {f"L{number:02}" for number in (*range(14), *range(20, 64), *range(65, 120))} | {"L09b"}
        merged = {"L52", "L76", "L77", "L80", "L81", "L89", "L99", "L100", "L106", "L108", "L109"}
        assert numbers - {row.name for row in VLLM.rows} == merged

    def test_source(self):
        """The grammars are called as a verdict calls them."""
        assert (VLLM.source, VLLM_ASCEND.source) == ("vllm", "vllm-ascend")


class TestDevices:
    WARNING = "    Found GPU0 NVIDIA GB10 which is of cuda capability 12.1."

    @pytest.mark.parametrize(("before", "is_said"), [(NOTHING, False), (heard(None, "L04"), True), (SIZED, True)])
    def test_whose(self, before, is_said):
        """A device in a log that said nothing of the engine yet may be another program's."""
        assert facts(self.WARNING, before) == [Sign("unified_memory")] * is_said

    @pytest.mark.parametrize("name", ["NVIDIA H200", "NVIDIA GB102", "NVIDIA GeForce RTX 4090", "Thorium", "GH2000"])
    def test_others(self, name):
        """Other devices have memory of their own."""
        assert facts(self.WARNING.replace("NVIDIA GB10", name), SIZED) == []


class TestFigures:
    @pytest.mark.parametrize(
        ("message", "value", "resolution"),
        [
            ("Available KV cache memory: 53.10 GiB", round(53.1 * 2**30), round(2**30 / 200)),
            ("Available KV cache memory: 53.1 GiB", round(53.1 * 2**30), round(2**30 / 200)),
            ("Loading model weights took 7.5100 GB", round(7.51 * 2**30), round(2**30 / 20_000)),
            ("Estimated CUDA graph memory: -0.25 GiB total", -(2**28), round(2**30 / 200)),
            (
                "Before memory profiling run, total GPU memory: 30768.25 MB, model load takes 14336.50 MB",
                round(30768.25 * 2**20),
                5243,
            ),
        ],
    )
    def test_bytes(self, message, value, resolution):
        """GB is 2^30 and MB 2^20; bare floats had two decimals, whatever zeros the print dropped."""
        figure = next(fact for fact in facts(message) if isinstance(fact, Figure))
        assert (figure.value, figure.resolution) == (value, resolution)

    def test_whole_bytes(self):
        """Bytes are exact, also without a unit."""
        message = "Error in memory profiling. Initial free memory 24000000000, current free memory 24100000000."
        assert [(fact.value, fact.resolution) for fact in facts(message)] == [(24000000000, 0), (24100000000, 0)]

    def test_unknown_bytes(self):
        """A driver that does not know prints 2^64 - 1: no figure."""
        assert facts("worker requested memory: 17179869184.0GiB") == [Step("init_device", moment="ends")]


class TestCaptures:
    """Graphs that are captured before the KV cache is sized are thrown away."""

    LINE = "Graph capturing finished in 5 secs, took 1.00 GiB"
    BAR = "Capturing CUDA graphs (FULL):   0%|          | 0/2"

    def state(self, message, before):
        """The state that a message proves."""
        return next(fact.state for fact in facts(message, before) if isinstance(fact, Step))

    @pytest.mark.parametrize(
        ("before", "state"),
        [
            (NOTHING, "capture_graphs"),
            (PROFILED, "capture_throwaway"),
            (SIZED, "capture_graphs"),
            (heard("load_weights", "L32"), "capture_throwaway"),
            (heard("load_weights", "L33"), "capture_graphs"),
            (heard("load_weights", "L28"), "capture_graphs"),
            (heard("profile_activations", "L20", "L32", "L47"), "capture_graphs"),
            (heard("capture_throwaway", "L32", "L74"), "capture_graphs"),
            (heard("teardown", "L32"), "capture_graphs"),
            (heard("capture_throwaway"), "capture_throwaway"),
            (heard("capture_throwaway", "L47", "L66"), "capture_throwaway"),
            (heard("teardown", "L47", "L66", "L70"), "capture_graphs"),
            (heard(None, "L66", "L70"), "capture_graphs"),
            (heard("profile_activations", "L50"), "capture_graphs"),
            (heard("profile_activations", "L47", "L57"), "capture_graphs"),
        ],
    )
    def test_where(self, before, state):
        """Which it is depends on what the process said before; a log that begins later shows the real one."""
        assert self.state(self.LINE, before) == self.state(self.BAR, before) == state

    def test_runner_without_bars(self):
        """The V1 runner shows no bar while it profiles, so its bar is of a real capture though no sizing was logged."""
        message = "Capturing CUDA graphs (decode, FULL):   0%|          | 0/35"
        assert self.state(message, heard("profile_activations", "L46", "L47")) == "capture_graphs"

    def test_second_rank(self):
        """A rank of the V2 runner that logs no sizing throws its first graphs away and keeps the second."""
        first = heard("load_weights", "L32")
        second = heard("capture_throwaway", "L32", "L74")
        assert [self.state(self.LINE, before) for before in (first, second)] == ["capture_throwaway", "capture_graphs"]


class TestUntrusted:
    def test_only_data(self):
        """Values are numbers, words and pieces of text; what looks like code stays text or is left out."""
        message = (
            "non-default args: {'max_model_len': __import__('os').system('x'), 'kv_cache_dtype': eval('1'), "
            "'quantization': 'a' * 10**9, 'max_num_seqs': 9999999999999999999999}"
        )
        settings = {fact.name: fact.value for fact in facts(message) if isinstance(fact, Setting)}
        assert settings == {"kv_cache_dtype": "eval('1')", "quantization": "a"}

    def test_automatic_length(self):
        """-1 is no length."""
        assert facts("non-default args: {'max_model_len': -1}") == [
            Begin("arguments"),
            Setting("max_model_len", "auto"),
        ]

    def test_long_lines(self):
        """Lines of many anchors are read in linear time."""
        for row in VLLM.rows:
            found = row.search((row.anchor + " ") * 4_000)
            if found is not None:
                list(row.facts(found, NOTHING))


@pytest.mark.parametrize(
    ("before", "names"), [(SIZED, {"kv_cache_bytes"}), (NOTHING, {"kv_cache_bytes", "kv_available_bytes"})]
)
def test_what_is_in_use(before, names):
    """What the KV cache has is also what was available, unless the rank said that itself: others may have had less."""
    message = (
        "Free memory on device (47.05/47.38 GiB) on startup. Desired GPU memory utilization is (0.92, 43.59 GiB)."
        " Actual usage is 18.26 GiB for consumed memory (weights + non-torch). Current kv cache memory in use is 23.2 GiB."
    )
    read = {fact.name: fact.value for fact in facts(message, before) if isinstance(fact, Figure)}
    assert {name for name in read if name.startswith("kv_")} == names
    assert read["kv_cache_bytes"] == round(23.2 * 2**30)
