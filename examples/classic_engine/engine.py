"""
The engine: it loads, profiles, sizes its KV cache, captures its graphs, and generates.

In that order, as many do: the KV cache takes all that weights and activations leave of the request, and only then are
the graphs captured. What they need was promised to nobody.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from classic_engine.model import Config, Model


class ClassicEngine:
    """
    Decodes up to `config.max_rows` prompts together.

    Attributes:
        kv: The KV cache, `[2, layers, blocks, tokens, heads, dim]`; every layer has its views. Block 0 is padding's.
        graphs: By rows: something to replay, and the logits that it leaves.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.place = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.kv: Tensor | None = None
        self.graphs: dict[int, tuple[Any, Tensor]] = {}
        self.pool: Any = None

    def start(self) -> None:
        self.load_weights()
        self.allocate_kv(self.kv_blocks(self.profile()))
        if self.place.type == "cuda":
            self.capture_graphs()

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights, from the shapes alone."""
        with torch.device("meta"):
            return sum(each.numel() for each in Model(self.config).parameters()) * self.config.dtype.itemsize

    @property
    def block_bytes(self) -> int:
        """Bytes of one KV block over all layers."""
        config = self.config
        one = config.block_tokens * config.kv_heads * config.head_dim * config.dtype.itemsize
        return 2 * config.layers * one

    def load_weights(self) -> None:
        """Random weights, and the inputs that graphs read."""
        config = self.config
        with torch.device("meta"):
            model = Model(config).to(config.dtype).requires_grad_(False)
        self.model = model.to_empty(device=self.place)
        generator = torch.Generator(self.place).manual_seed(0)
        for name, parameter in self.model.named_parameters():
            if "norm" in name:
                parameter.fill_(1)
            else:
                parameter.normal_(std=0.05, generator=generator)
        rows = config.max_rows
        self.tokens, self.positions = (torch.zeros(rows, 1, dtype=torch.long, device=self.place) for _ in range(2))
        self.tables = torch.zeros(rows, config.blocks_per_row, dtype=torch.long, device=self.place)

    def profile(self) -> int:
        """Run the largest prefill with its sampler, and give what it needs at its peak beyond what stays, in bytes."""
        config, is_cuda = self.config, self.place.type == "cuda"
        if is_cuda:
            torch.cuda.reset_peak_memory_stats()
        rows = config.max_batch_tokens // config.max_length
        tokens = torch.zeros(rows, config.max_length, dtype=torch.long, device=self.place)
        positions = torch.arange(config.max_length, device=self.place).expand(rows, -1)
        self.sample(self.model(tokens, positions, torch.zeros_like(self.tables[:1]).expand(rows, -1)), temperature=1)
        if not is_cuda:
            return 0
        return torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()

    def kv_blocks(self, activations: int) -> int:
        """Blocks that the request leaves room for, after weights and activations."""
        if self.place.type == "cpu":
            return self.config.cpu_blocks
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        left = int(total * self.config.utilization) - (total - free) - activations
        if left < self.block_bytes:
            raise RuntimeError(f"no room for a KV cache: {left} bytes are left")
        return left // self.block_bytes

    def allocate_kv(self, blocks: int) -> None:
        """One tensor for all, and views of it for every layer."""
        config = self.config
        size = (2, config.layers, blocks, config.block_tokens, config.kv_heads, config.head_dim)
        self.kv = torch.zeros(size, dtype=config.dtype, device=self.place)
        for index, layer in enumerate(self.model.layers):
            layer.attention.keys, layer.attention.values = self.kv[0, index], self.kv[1, index]

    def capture_graphs(self) -> None:
        """A graph for every size, the largest first, in one pool."""
        for size in sorted(self.config.capture_sizes, reverse=True):
            graph = torch.cuda.CUDAGraph()
            self.decode(size)
            torch.cuda.synchronize()
            with torch.cuda.graph(graph, pool=self.pool):
                logits = self.decode(size)
            self.pool = self.pool or graph.pool()
            self.graphs[size] = graph, logits

    def decode(self, rows: int) -> Tensor:
        """Logits of the next token of the first rows of the inputs."""
        return self.model(self.tokens[:rows], self.positions[:rows], self.tables[:rows])

    def sample(self, logits: Tensor, temperature: float = 0) -> Tensor:
        if not temperature:
            return logits.argmax(-1)
        return torch.multinomial((logits.float() / temperature).softmax(-1), 1).squeeze(1)

    def generate(self, prompts: Sequence[Sequence[int]], count: int = 8, *, graphs: bool = True) -> list[list[int]]:
        """`count` new tokens of each prompt; without `graphs`, or where none was captured, step by step."""
        config, rows = self.config, len(prompts)
        blocks = iter(range(1, self.kv.shape[2]))
        self.tables.zero_()
        lasts = []
        for row, prompt in enumerate(prompts):
            needed = -(-(len(prompt) + count) // config.block_tokens)
            self.tables[row, :needed] = torch.tensor([next(blocks) for _ in range(needed)])
            tokens = torch.tensor([list(prompt)], device=self.place)
            positions = torch.arange(len(prompt), device=self.place)[None]
            lasts.append(self.sample(self.model(tokens, positions, self.tables[row : row + 1])))
        made = [torch.cat(lasts)]
        lengths = torch.tensor([[len(prompt)] for prompt in prompts], device=self.place)
        size = next(each for each in sorted(config.capture_sizes) if each >= rows)
        self.tokens.zero_()
        self.positions.zero_()
        for step in range(count - 1):
            self.tokens[:rows] = made[-1][:, None]
            self.positions[:rows] = lengths + step
            made.append(self.sample(self._step(size, graphs=graphs)[:rows]))
        return torch.stack(made, 1).tolist()

    def _step(self, size: int, *, graphs: bool) -> Tensor:
        if not graphs or size not in self.graphs:
            return self.decode(size)
        graph, logits = self.graphs[size]
        graph.replay()
        return logits
