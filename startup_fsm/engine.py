"""
What an engine implements, and what it is handed: protocols only.

An engine that has these methods can be driven by ``Bootstrap.run``. Every method that may take device memory gets
the open ``Step``; it allocates with whatever its framework offers, and the device counts. No torch here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, Self, runtime_checkable

import attrs


class Pool(Protocol):
    """
    A pool of the allocator, held as an object: while it lives, the allocator cannot lose track of it.

    As a context manager it is the scope in which this thread's allocations go to it.
    """

    @property
    def id(self) -> str:
        """Identity in snapshots, such as ``0.3``."""

    @property
    def purpose(self) -> str:
        """What it was opened for."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *error: object) -> None: ...

    def use_count(self) -> int:
        """References; 1 (ours) proves that no graph holds it."""

    def release(self) -> None:
        """Give up our reference; segments that nothing uses go back to the device."""


class Graph(Protocol):
    """A captured step that can be replayed."""

    @property
    def size(self) -> int:
        """Rows of the batch it was captured for."""

    @property
    def nodes(self) -> int | None:
        """Nodes of the graph; None where nobody tells."""

    @property
    def output(self) -> Any:
        """What the captured body returned; overwritten by every replay."""

    def replay(self) -> None:
        """Run it again on the same addresses."""

    def reset(self) -> None:
        """Destroy it and give up its reference to the pool."""


@attrs.frozen
class LongestRequest:
    """
    One request of the greatest length that the engine admits.

    Attributes:
        tokens: Its length.
        block_tokens: Tokens of one KV block.
    """

    tokens: int
    block_tokens: int

    @property
    def blocks(self) -> int:
        """KV blocks that it needs."""
        return -(-self.tokens // self.block_tokens)


class Step(Protocol):
    """The open state, as its body sees it."""

    @property
    def state(self) -> str:
        """Name of the state."""

    @property
    def visit(self) -> int:
        """From 1, rising with every visit."""

    def note(self, **facts: Any) -> None:
        """Record facts that exist only inside this state (plain values; bytes as ints)."""

    def part(self, name: str) -> AbstractContextManager[None]:
        """A named part of this state, such as ``sampler``."""

    def pool(self, purpose: str | None = None) -> Pool:
        """
        The pool of this state; opened when first asked for.

        Raises:
            ValueError: In a state whose KV cache lies in an arena, where no ``purpose`` is given.
        """

    def kv_buffers(self, count: int, block_bytes: int, blocks: int) -> list[Any]:
        """
        Memory for the KV cache: ``count`` byte buffers of ``blocks * block_bytes`` bytes each.

        They come from this state's pool, or from the arena where the plan has one. Block ``i`` of a buffer starts at
        ``i * block_bytes``, whatever is mapped later. Elements are ``uint8``; view them as you like.
        """

    def capture(self, size: int, body: Callable[[], Any], *, warmups: int = 1, part: str | None = None) -> Graph:
        """Run ``body`` ``warmups`` times on the capture stream, then capture it into this state's graph pool."""

    def probe(self, name: str, result: Mapping[str, Any], **inputs: Any) -> None:
        """Record a raw result that checks will judge."""

    def skip(self, name: str, reason: str) -> None:
        """Record that a probe did not run, and why."""

    def workspace(self, name: str, size: int) -> None:
        """Name a persistent workspace and its bytes, so that its growth can be told from a leak."""

    def progress(self, done: int, total: int, unit: str = "B") -> None:
        """Show progress, on a terminal and to whoever watches; the journal gets at most one note a second."""


@runtime_checkable
class Engine(Protocol):
    """
    An engine that can be started.

    Beyond these methods the following are used where they exist: ``name`` and ``version`` (text), ``knobs()``
    (settings for the journal), ``longest_request() -> LongestRequest``, ``profiling_blocks() -> int`` (KV blocks that
    capture needs; default: two for each row of the largest size), ``reserve_bytes() -> Mapping[str, int]`` (what it
    will take after sizing beside graphs and its largest step, by name), ``warmup(step)``, ``commit_kv(step, blocks)``
    (after the arena grew), ``weights_digest() -> str``, ``kv_addresses() -> Sequence[int]``.
    """

    def load_weights(self, step: Step) -> None:
        """Load all weights. Call ``step.note(checkpoint_bytes=n)`` before the first byte is loaded."""

    def profile_activations(self, step: Step) -> None:
        """Run the largest admissible eager step; what it needs beyond the weights is the headroom."""

    def kv_block_bytes(self) -> int:
        """Bytes of one KV block over all layers."""

    def allocate_kv(self, step: Step, blocks: int) -> None:
        """Make the KV cache from ``step.kv_buffers``; called for profiling and for real."""

    def capture_sizes(self) -> Sequence[int]:
        """Batch sizes that get a graph, in any order."""

    def capture(self, step: Step, size: int) -> None:
        """Call ``step.capture(size, body)`` and keep the graph."""

    def release_graphs(self) -> None:
        """Drop every graph and all that belongs to it; harmless when there is none."""

    def release_kv(self) -> None:
        """Drop the KV cache and every view of it; harmless when there is none."""

    def verify(self, step: Step) -> None:
        """Run the largest admissible step after capture, sampler included; record ``replay`` with ``step.probe``."""
