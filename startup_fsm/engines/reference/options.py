"""What the reference engine is started with: the model, and how large a request and a batch may become."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

import attrs

from startup_fsm.engines.reference.checkpoint import checkpoint_shape
from startup_fsm.engines.reference.paging import blocks_for
from startup_fsm.engines.reference.sampler import Sampling
from startup_fsm.engines.reference.shapes import Shape, named


def default_capture_sizes(limit: int) -> tuple[int, ...]:
    """The 51 sizes 1, 2, 4, 8 to 248 by 8 and 256 to 512 by 16, as far as they do not exceed `limit` rows."""
    sizes = (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16))
    return tuple(size for size in sizes if size <= limit)


def _shape(value: Shape | str) -> Shape:
    return named(value) if isinstance(value, str) else value


@attrs.frozen(kw_only=True)
class Options:
    """
    What is started, and how large it may become.

    Attributes:
        shape: The model; a name stands for the shape of that name.
        checkpoint: Folder of a Hugging Face checkpoint of that shape; None draws random weights from `seed`.
        max_model_len: Longest request in tokens. Decode gathers this much context for every row.
        max_num_seqs: Sequences that run at once: rows of the largest decode step.
        max_num_batched_tokens: Tokens of the largest prefill step.
        block_size: Tokens of one KV block.
        capture_sizes: Rows that get a graph; None takes `default_capture_sizes(max_num_seqs)`.
        keep_logits: Whether every graph keeps logits of its own; else all write into one buffer for the largest batch.
        sampling: How `generate` chooses tokens where nobody says.
        seed: Of random weights.

    Raises:
        ValueError: A number that no start can use.
    """

    shape: Shape = attrs.field(converter=_shape)
    checkpoint: Path | None = None
    max_model_len: int = 256
    max_num_seqs: int = 32
    max_num_batched_tokens: int = 512
    block_size: int = 16
    capture_sizes: tuple[int, ...] | None = None
    keep_logits: bool = True
    sampling: Sampling = attrs.field(factory=Sampling)
    seed: int = 0

    def __attrs_post_init__(self) -> None:
        """Refuses what no start can use."""
        for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "block_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: {getattr(self, name)} is not positive")
        if self.max_model_len > self.shape.max_positions:
            text = f"max_model_len: {self.max_model_len}, the model has {self.shape.max_positions} positions"
            raise ValueError(f"{text}\nhint: lower it to at most {self.shape.max_positions}")
        for size in self.sizes:
            if not 1 <= size <= self.max_num_seqs:
                text = f"capture_sizes: {size} is not between 1 and max_num_seqs, {self.max_num_seqs}"
                raise ValueError(f"{text}\nhint: raise max_num_seqs, or leave this size out")

    @classmethod
    def of_checkpoint(cls, folder: Path, **rest: Any) -> Self:
        """Options for the checkpoint in `folder`, whose `config.json` says the shape."""
        return cls(shape=checkpoint_shape(folder), checkpoint=folder, **rest)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Rows that get a graph."""
        return default_capture_sizes(self.max_num_seqs) if self.capture_sizes is None else self.capture_sizes

    @property
    def width(self) -> int:
        """KV blocks of the longest request."""
        return blocks_for(self.max_model_len, self.block_size)
