"""KV memory in blocks, and the fixed buffers that a captured decode step reads its input from.

A block holds the keys and values of `block_size` tokens. Block 0 belongs to nobody: rows that only pad a batch write
there, so a graph captured for eight rows can run with five. Bytes are ints in bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import attrs
import torch
from torch import Tensor

from startup_fsm.engines.reference.shapes import DTYPE_BYTES, Shape
from startup_fsm.errors import StartupError

PADDING_BLOCK = 0
"""The block that padding rows write to; never given to a sequence."""


class OutOfBlocks(StartupError, RuntimeError):
    """More KV blocks were asked for than are free. `wanted` and `free` are counts of blocks."""

    def __init__(self, wanted: int, free: int) -> None:
        hint = "run fewer sequences at once, or enlarge the KV cache"
        super().__init__(f"KV cache: {wanted} blocks wanted, {free} free", hint=hint)
        self.wanted = wanted
        self.free = free


@attrs.frozen
class KVCache:
    """One key and one value buffer a layer, each `[blocks, block_size, kv_heads, head_dim]`.

    Block-major: block i lies at the same offset of its buffer whatever the number of blocks, so a buffer can grow at
    its end under a captured graph. `usable` is how many blocks have memory behind them; the buffers may be larger. The
    memory must hold finite numbers (`allocate` zeroes it): masked positions get weight 0, and 0 times NaN is NaN.
    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    usable: int

    @property
    def block_size(self) -> int:
        """Tokens a block."""
        return self.keys[0].shape[1]

    @staticmethod
    def buffer_block_bytes(shape: Shape, block_size: int) -> int:
        """Bytes of one block in one of the `2 * layers` buffers."""
        return block_size * shape.kv_heads * shape.head_dim * DTYPE_BYTES[shape.dtype]

    @classmethod
    def over(cls, shape: Shape, buffers: Sequence[Tensor], block_size: int, usable: int) -> KVCache:
        """A cache on `2 * layers` zeroed `uint8` buffers, which may reach beyond the `usable` blocks."""
        size = (-1, block_size, shape.kv_heads, shape.head_dim)
        views = [buffer.view(getattr(torch, shape.dtype)).view(size) for buffer in buffers]
        return cls(tuple(views[0::2]), tuple(views[1::2]), usable)

    @classmethod
    def allocate(cls, shape: Shape, blocks: int, block_size: int, device: torch.device | str = "cpu") -> KVCache:
        """Zeroed buffers: `2 * layers` allocations, `blocks * shape.kv_block_bytes(block_size)` bytes together."""
        size = blocks * cls.buffer_block_bytes(shape, block_size)
        buffers = [torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2 * shape.layers)]
        return cls.over(shape, buffers, block_size, blocks)

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Puts `[rows, kv_heads, head_dim]` keys and values into `slots` (`[rows]`, block * block_size + offset)."""
        self.keys[layer].flatten(0, 1).index_copy_(0, slots, keys)
        self.values[layer].flatten(0, 1).index_copy_(0, slots, values)

    def gather(self, layer: int, tables: Tensor) -> tuple[Tensor, Tensor]:
        """Copies of the keys and values in `tables` (`[rows, width]` blocks).

        Each is `[rows, kv_heads, width * block_size, head_dim]`: as many bytes as `rows * width` blocks of one layer.
        """
        return self._context(self.keys[layer], tables), self._context(self.values[layer], tables)

    @staticmethod
    def _context(buffer: Tensor, tables: Tensor) -> Tensor:
        return buffer[tables].flatten(1, 2).transpose(1, 2)


@attrs.frozen
class DecodeInputs:
    """The input of a decode step in buffers that never move: int64, one row a sequence.

    `tokens`, `positions`, `slots` (where the token's keys and values go) and `lengths` (tokens of context, this one
    included, at least 1) are `[rows]`; `tables` is `[rows, width]`, the blocks of each sequence in order, padded with
    block 0. A graph captured on `inputs.rows(8)` reads the first eight rows of the same buffers.
    """

    tokens: Tensor
    positions: Tensor
    slots: Tensor
    lengths: Tensor
    tables: Tensor

    @classmethod
    def allocate(cls, rows: int, width: int, device: torch.device | str = "cpu") -> DecodeInputs:
        """Buffers for `rows` sequences of at most `width` blocks each, all rows padding."""
        token, position, slot = (torch.zeros(rows, dtype=torch.int64, device=device) for _ in range(3))
        lengths = torch.ones(rows, dtype=torch.int64, device=device)
        return cls(token, position, slot, lengths, torch.zeros(rows, width, dtype=torch.int64, device=device))

    @property
    def size(self) -> int:
        """How many rows there are."""
        return self.tokens.shape[0]

    @property
    def width(self) -> int:
        """How many blocks a row's table has."""
        return self.tables.shape[1]

    def rows(self, count: int) -> DecodeInputs:
        """The first `count` rows, as views of the same buffers."""
        return DecodeInputs(*(buffer[:count] for buffer in attrs.astuple(self, recurse=False)))

    def fill(
        self, tokens: Sequence[int], lengths: Sequence[int], tables: Sequence[Sequence[int]], block_size: int
    ) -> None:
        """Sets the first rows to these sequences, the others to padding.

        `tokens` are the tokens to be read now, `lengths` the tokens of context with them, `tables` the blocks of each
        sequence. Raises `ValueError` where there are more sequences than rows or a table is too short or too wide.
        """
        spare = self.size - len(tokens)
        if spare < 0:
            raise ValueError(f"{len(tokens)} sequences do not fit in {self.size} rows\nhint: use a larger batch size")
        padded: list[list[int]] = []
        slots: list[int] = []
        for length, table in zip(lengths, tables, strict=True):
            if not length <= len(table) * block_size <= self.width * block_size:
                raise ValueError(
                    f"{len(table)} blocks of {block_size} for {length} tokens in tables of width {self.width}\n"
                    "hint: a table covers its tokens and is no wider than the buffers"
                )
            padded.append([*table, *[PADDING_BLOCK] * (self.width - len(table))])
            slots.append(table[(length - 1) // block_size] * block_size + (length - 1) % block_size)
        padded += [[PADDING_BLOCK] * self.width] * spare
        for buffer, values in (
            (self.tokens, [*tokens, *[0] * spare]),
            (self.positions, [*(length - 1 for length in lengths), *[0] * spare]),
            (self.slots, [*slots, *[0] * spare]),
            (self.lengths, [*lengths, *[1] * spare]),
        ):
            buffer.copy_(torch.tensor(values, dtype=torch.int64))
        self.tables.copy_(torch.tensor(padded, dtype=torch.int64))


class BlockAllocator:
    """Gives out KV blocks 1 to `blocks - 1`; block 0 is the padding's."""

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self._free = list(range(blocks - 1, PADDING_BLOCK, -1))

    @property
    def free(self) -> int:
        """How many blocks can be taken."""
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """`count` blocks; raises `OutOfBlocks`, and takes none, where fewer are free."""
        if count > len(self._free):
            raise OutOfBlocks(count, len(self._free))
        return [self._free.pop() for _ in range(count)]

    def give_back(self, blocks: Iterable[int]) -> None:
        """Frees `blocks`; raises `ValueError` for one that is not taken."""
        for block in blocks:
            if not PADDING_BLOCK < block < self.blocks or block in self._free:
                raise ValueError(f"KV block {block} is not taken\nhint: give each block back once")
            self._free.append(block)


def blocks_for(tokens: int, block_size: int) -> int:
    """How many blocks `tokens` tokens need."""
    return -(-tokens // block_size)
