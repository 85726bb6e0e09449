"""The reference engine as it is started: the decoder, its KV cache and its graphs behind `startup_fsm.engine.Engine`.

Knows no device: it allocates with torch, and whoever opened the state counts. With fake tensors it goes through the
same code, and whatever needs values is skipped and said so. Bytes are ints in bytes, lengths are tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import attrs
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from startup_fsm.engine import Graph, LongestRequest, Step
from startup_fsm.engines.reference.checkpoint import checkpoint_bytes, load_checkpoint, random_weights
from startup_fsm.engines.reference.generate import generate
from startup_fsm.engines.reference.model import Decoder, Span
from startup_fsm.engines.reference.options import Options
from startup_fsm.engines.reference.paging import DecodeInputs, KVCache, blocks_for
from startup_fsm.engines.reference.sampler import Sampling, sample
from startup_fsm.errors import StartupError

#: The sampler that takes the most memory: a full sort. Any request may ask for it, so it is what is profiled.
HEAVIEST: Final = Sampling(temperature=1.0, top_p=0.9)

#: Name of the persistent buffers that decode attention reads: block tables, lengths, slots.
WORKSPACE: Final = "attention"

# Weights up to this many bytes are hashed whole; of larger ones so many evenly spaced bytes of every parameter.
_HASHED_WHOLE: Final = 64 << 20
_HASHED_SAMPLE: Final = 16 << 10


class ReferenceEngine:
    """
    Implements `startup_fsm.engine.Engine`; after the start, `generate` runs through the captured graphs.

    Args:
        options: What to start.
        place: Where torch puts tensors: ``cpu``, also for a simulated device, or ``cuda``.
        address: Gives the device address of a tensor, for the record; by default torch's own.

    Attributes:
        model, kv, inputs: The decoder, its KV cache, and the persistent buffers that decode reads; None until made.
        graphs: Captured decode steps, by rows.
    """

    name = "reference"

    def __init__(
        self,
        options: Options,
        *,
        place: torch.device | str = "cpu",
        address: Callable[[Tensor], int] | None = None,
    ) -> None:
        self.options = options
        self.place = place
        self.model: Decoder | None = None
        self.kv: KVCache | None = None
        self.inputs: DecodeInputs | None = None
        self.graphs: dict[int, Graph] = {}
        self._logits: Tensor | None = None
        self._address = address or Tensor.data_ptr

    def knobs(self) -> dict[str, Any]:
        """Settings for the journal."""
        options = self.options
        settings: dict[str, Any] = {
            "shape": options.shape.name,
            "dtype": options.shape.dtype,
            "max_model_len": options.max_model_len,
            "max_num_seqs": options.max_num_seqs,
            "max_num_batched_tokens": options.max_num_batched_tokens,
            "block_size": options.block_size,
            "capture_sizes": sorted(options.sizes),
            "seed": options.seed,
        }
        return settings if options.checkpoint is None else settings | {"checkpoint": str(options.checkpoint)}

    def load_weights(self, step: Step) -> None:
        """All parameters are allocated, then filled from the checkpoint or at random."""
        options = self.options
        folder = options.checkpoint
        total = options.shape.weight_bytes if folder is None else checkpoint_bytes(folder)
        step.note(checkpoint_bytes=total)
        self.model = Decoder(options.shape, self.place)
        if folder is None:
            random_weights(self.model, options.seed)
            step.progress(total, total)
            return
        loaded = load_checkpoint(self.model, folder, step.progress)
        if not loaded.values:
            step.skip("checkpoint_values", "tensors are fakes: the files were checked and not read")

    def weights_digest(self) -> str:
        """Of every byte of the weights, or of evenly spaced bytes of every parameter where they are many."""
        model = self._model()
        whole = sum(parameter.nbytes for parameter in model.parameters()) <= _HASHED_WHOLE
        digest = hashlib.blake2b(digest_size=16)
        for name, parameter in model.named_parameters():
            flat = parameter.detach().reshape(-1).view(torch.uint8)
            # An odd stride: an even one would look at the same byte of every number.
            stride = 1 if whole else max(1, flat.numel() // _HASHED_SAMPLE) | 1
            digest.update(name.encode())
            digest.update(flat[::stride].contiguous().cpu().numpy().tobytes())
        return digest.hexdigest()

    def warmup(self, step: Step) -> None:
        """Every size once, eagerly: kernels are loaded and libraries have chosen before anything is measured."""
        self.provide_inputs(step, self.options.max_num_seqs)
        cache = self.profiling_cache()
        self._prefill(cache)
        for size in sorted(self.options.sizes, reverse=True):
            self._decode(size, cache)

    def profile_activations(self, step: Step) -> None:
        """The largest prefill, the largest decode and the sampler on its logits, as `verify` runs them again."""
        self.provide_inputs(step, self.options.max_num_seqs)
        self.largest_step(step, self.profiling_cache(), sampler="sampler")

    def provide_inputs(self, step: Step, rows: int) -> None:
        """Persistent decode inputs for at least `rows` rows: the workspace that graphs hold the addresses of."""
        if self.inputs is not None and self.inputs.size >= rows:
            return
        self.inputs = DecodeInputs.allocate(rows, self.options.width, self.place)
        if not self.options.keep_logits:
            shape = self.options.shape
            dtype = self._model().embedding.dtype
            self._logits = torch.empty(rows, shape.vocabulary, dtype=dtype, device=self.place)
            step.workspace("logits", self._logits.nbytes)
        step.workspace(WORKSPACE, sum(buffer.nbytes for buffer in attrs.astuple(self.inputs, recurse=False)))

    def profiling_cache(self) -> KVCache:
        """One block that all layers share: attention gathers copies of it, as large as those of a real cache."""
        one = KVCache.allocate(attrs.evolve(self.options.shape, layers=1), 1, self.options.block_size, self.place)
        layers = self.options.shape.layers
        return KVCache(one.keys * layers, one.values * layers, usable=1)

    def longest_request(self) -> LongestRequest:
        """One request of `max_model_len` tokens."""
        return LongestRequest(self.options.max_model_len, self.options.block_size)

    def profiling_blocks(self) -> int:
        """One block for every row of the largest graph, and the one that padding writes to."""
        return 1 + max(self.options.sizes, default=1)

    def kv_block_bytes(self) -> int:
        """Keys and values of one block, over all layers."""
        return self.options.shape.kv_block_bytes(self.options.block_size)

    def allocate_kv(self, step: Step, blocks: int) -> None:
        """Keys and values of every layer, block-major; while address space is reserved, a prefix of it is usable."""
        self._pad_inputs()
        shape, size = self.options.shape, self.options.block_size
        one, count = KVCache.buffer_block_bytes(shape, size), 2 * shape.layers
        if step.state == "reserve_kv":
            # A sub-range for each, so that all of them grow at their ends and none of them moves.
            usable = min(blocks, self.profiling_blocks())
            self.kv = KVCache.over(shape, step.kv_buffers(count, one, blocks), size, usable)
            return
        # One buffer for all: the allocator would round each of many up to its own page.
        [whole] = step.kv_buffers(1, count * one, blocks)
        self.kv = KVCache.over(shape, whole.view(count, -1).unbind(0), size, blocks)

    def _pad_inputs(self) -> None:
        # Block tables of an earlier cache may point behind the end of the next one.
        if self.inputs is not None:
            for buffer in attrs.astuple(self.inputs, recurse=False):
                buffer.zero_()
            self.inputs.lengths.fill_(1)

    def commit_kv(self, step: Step, blocks: int) -> None:
        """The first `blocks` blocks have memory behind them now."""
        self.kv = attrs.evolve(self._cache(), usable=blocks)

    def kv_addresses(self) -> list[int]:
        """Device addresses of keys and values, layer by layer."""
        cache = self._cache()
        return [self._address(part) for layer in zip(cache.keys, cache.values, strict=True) for part in layer]

    def release_kv(self) -> None:
        """Drop keys, values and every view of them."""
        self.kv = None

    def capture_sizes(self) -> Sequence[int]:
        """Rows that get a graph."""
        return self.options.sizes

    def capture(self, step: Step, size: int) -> None:
        """One decode step of `size` rows; the graph keeps its logits."""
        self.provide_inputs(step, size)
        warmups = 1
        if self.graphs and isinstance(self._model().embedding, FakeTensor):
            # Half of the time of a start without values, and the largest step took all that a smaller one would.
            warmups = 0
            if len(self.graphs) == 1:
                step.skip("warmup", "tensors are fakes: only the largest step is warmed up")
        self.graphs[size] = step.capture(size, partial(self.captured, size), warmups=warmups)

    def captured(self, rows: int) -> Tensor:
        """What a graph records: the step, and where its logits stay."""
        logits = self.decode(rows)
        if self._logits is None:
            return logits
        shared = self._logits[:rows]
        shared.copy_(logits)
        return shared

    def decode(self, rows: int) -> Tensor:
        """Logits of the first `rows` rows of the inputs; this is what graphs are captured of."""
        return self._model().decode(self._inputs().rows(rows), _alike(self._cache()))

    def release_graphs(self) -> None:
        """Destroy every graph with its logits."""
        for graph in self.graphs.values():
            graph.reset()
        self.graphs.clear()

    def verify(self, step: Step) -> None:
        """The largest step again, with the real KV cache to its last block, and by replay: both must be equal."""
        self.largest_step(step, self._cache(), sampler="sampler_warmup", compare=True)

    def largest_step(self, step: Step, kv: KVCache, *, sampler: str | None, compare: bool = False) -> None:
        """
        The largest prefill, then the largest decode steps, then the sampler as a part of that name (None: without).

        Profiling and `verify` run the same operations in the same order, so that what was measured is what is taken.
        """
        self._prefill(kv)
        most, captured = self.options.max_num_seqs, max(self.options.sizes, default=self.options.max_num_seqs)
        if captured < most:
            logits = self._decode(captured, kv)
            if compare:
                self._compare(step, captured, logits)
            del logits
        logits = self._decode(most, kv)
        if compare and captured == most:
            self._compare(step, captured, logits)
        if sampler is not None:
            with step.part(sampler):
                self.sample(logits)

    def sample(self, logits: Tensor) -> Tensor:
        """Tokens by the sampler that takes the most memory."""
        return sample(logits, HEAVIEST, HEAVIEST.generator(logits.device))

    def _prefill(self, kv: KVCache) -> None:
        options = self.options
        count, length = options.max_num_batched_tokens, options.max_model_len
        spans: list[Span] = [(first, min(first + length, count)) for first in range(0, count, length)]
        places = torch.arange(count, device=self.place)
        # From the last slot of the cache downwards: what is written is what must be mapped and ours.
        capacity = kv.usable * kv.block_size
        slots = (capacity - 1 - places) % capacity
        tokens = places % options.shape.vocabulary
        rows = places[: min(options.max_num_seqs, count)]
        self._model().prefill(tokens, places % length, spans, kv=kv, slots=slots, rows=rows)

    def _decode(self, rows: int, kv: KVCache) -> Tensor:
        """An eager step in which as many rows as there are blocks for read contexts of their own; row 0 the last."""
        options, inputs = self.options, self._inputs().rows(rows)
        live = min(rows, kv.usable - 1)
        each = min(inputs.width, (kv.usable - 1) // live) if live else 0
        most = min(each * kv.block_size, options.max_model_len)
        tables = [[kv.usable - 1 - row * each - place for place in range(each)] for row in range(live)]
        lengths = [max(1, most - row % kv.block_size) for row in range(live)]
        tokens = [(7 * row + 1) % options.shape.vocabulary for row in range(live)]
        needed = [table[: blocks_for(count, kv.block_size)] for table, count in zip(tables, lengths, strict=True)]
        inputs.fill(tokens, lengths, needed, kv.block_size)
        return self._model().decode(inputs, _alike(kv))

    def _compare(self, step: Step, size: int, eager: Tensor) -> None:
        """Replay the same rows and compare them bit by bit."""
        graph = self.graphs.get(size)
        if graph is None:
            step.skip("replay", "no graphs were captured")
            return
        graph.replay()
        if isinstance(eager, FakeTensor):
            step.skip("replay", "tensors are fakes: there are no values to compare")
            return
        replayed: Tensor = graph.output
        equal = torch.equal(eager, replayed)
        # Row by row: a difference of all of them at once would be memory that nobody budgeted.
        rows = () if equal else zip(eager, replayed, strict=True)
        largest = max((float((one.float() - two.float()).abs().max()) for one, two in rows), default=0.0)
        step.probe("replay", {"equal": equal, "largest_difference": largest}, size=size)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int = 16,
        sampling: Sampling | None = None,
        end_tokens: Sequence[int] = (),
    ) -> list[list[int]]:
        """
        New tokens of each prompt, through the captured graphs where there are some.

        Raises:
            StartupError: The engine was not started, or its tensors are fakes.
            ValueError: A prompt that can never run.
        """
        model, cache, inputs = self._model(), self._cache(), self._inputs()
        if isinstance(model.embedding, FakeTensor):
            raise StartupError("nothing to generate from: tensors are fakes", hint="start without fakes")
        return generate(
            model,
            cache,
            inputs.rows(self.options.max_num_seqs),
            prompts,
            max_new_tokens=max_new_tokens,
            sampling=sampling or self.options.sampling,
            end_tokens=end_tokens,
            max_batch_tokens=self.options.max_num_batched_tokens,
            replays={size: partial(_replayed, graph) for size, graph in self.graphs.items()},
        )

    def _model(self) -> Decoder:
        if self.model is None:
            raise StartupError("the engine has no weights yet", hint="start it first: Bootstrap.run(engine)")
        return self.model

    def _cache(self) -> KVCache:
        if self.kv is None:
            raise StartupError("the engine has no KV cache", hint="start it first: Bootstrap.run(engine)")
        return self.kv

    def _inputs(self) -> DecodeInputs:
        if self.inputs is None:
            raise StartupError("the engine has no decode inputs", hint="start it first: Bootstrap.run(engine)")
        return self.inputs


def _alike(kv: KVCache) -> KVCache:
    """
    The same cache; of fakes in one buffer, one whose layers all lie where the first does.

    What torch found out about a fake it remembers by its offset too. This takes a third off a start without values.
    """
    if not isinstance(kv.keys[0], FakeTensor) or not kv.values[-1].storage_offset():
        return kv
    return attrs.evolve(kv, keys=kv.keys[:1] * len(kv.keys), values=kv.keys[:1] * len(kv.keys))


def _replayed(graph: Graph) -> Tensor:
    graph.replay()
    output: Tensor = graph.output
    return output
