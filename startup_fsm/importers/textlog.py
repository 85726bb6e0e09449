"""
The text log of an engine as journals: read in blocks, with bounded memory, as fast as its serving lines allow.

Two phases. The full grammar reads until the start is ready or dead, or until nothing it knows has come for a long
while; from then on blocks are only searched for the few fragments that another start would print, or an engine that
dies beneath a living server. A process that dies prints nothing more, so how it died stands before one of these or at
the end: that much before them is read by the grammar too.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Protocol

import attrs

from startup_fsm.importers.assembly import Assembly
from startup_fsm.importers.facts import Grammar
from startup_fsm.importers.gathered import ImportedStart, run_name
from startup_fsm.importers.general import GENERAL
from startup_fsm.importers.physical import Line, Physical
from startup_fsm.importers.prefixes import said
from startup_fsm.importers.torch_alone import TORCH
from startup_fsm.mirror import MARKER

_BLOCK: Final = 1 << 20

#: Lines without any news after which only the fragments are looked for: before the end of a start, and after it.
_QUIET: Final = 40_000
_SETTLED: Final = 200
#: Bytes between two looks at whether it is quiet.
_PIECE: Final = 64 << 10

#: What another start would print, and an engine that dies beneath a living server. Each costs a tenth of the reading.
_FRAGMENTS: Final = (
    b"LLM engine (v",
    b"server_args=",
    b"hit an exception",
    b"encountered a fatal error",
)
_LONGEST: Final = max(map(len, _FRAGMENTS))
#: Bytes before such a fragment, and before the end, that are read by the grammar: the tracebacks of many ranks.
_BEFORE: Final = 1 << 20


#: Words of which an SGLang log has one, whatever part of it is there.
_SGLANG_WORDS: Final = (
    b"sglang",
    b"avail mem=",
    b"avail_mem=",
    b"mem-fraction-static",
    b"max_total_num_tokens",
    b"#tokens:",
)


class Stream(Protocol):
    """A binary file."""

    def read(self, size: int, /) -> bytes:
        """At most ``size`` bytes; empty at the end."""


@attrs.frozen(kw_only=True)
class TextLog:
    """
    What a text log tells.

    Attributes:
        starts: Oldest first.
        left_out: How many older ones were left out.
        holds_mirror: Whether there are mirrored lines of our own in it.
    """

    starts: tuple[ImportedStart, ...]
    left_out: int = 0
    holds_mirror: bool = False


def read_log(stream: Stream) -> TextLog:
    """The starts of a text log, which is read to its end."""
    return _Reader(stream).read()


def _grammars(head: bytes) -> tuple[Grammar, ...]:
    """Those of the engines that the beginning names; all of them where it names none. Each is long to load."""
    is_sglang = any(word in head for word in _SGLANG_WORDS)
    # A path may hold the name of the other one; only vLLM's processes print their own before each line.
    is_vllm = b"vllm" in head or b" pid=" in head or not is_sglang
    found: list[Grammar] = []
    if is_vllm:
        from startup_fsm.importers.vllm import VLLM

        found.append(VLLM)
    if is_sglang or b"vllm" not in head:
        from startup_fsm.importers.sglang import SGLANG

        found.append(SGLANG)
    return tuple(found)


class _Reader:
    """The two phases over one log."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._head = stream.read(_BLOCK)
        #: The fragments are bytes of ASCII: a log in UTF-16 is read by the grammar alone.
        self._is_wide = b"\0" in self._head[:4_096]
        grammars = _grammars(self._head)
        self._assembly = Assembly(grammars, (*GENERAL, *TORCH.rows), TORCH, run_name(self._head[:4_096]))
        self._physical = Physical()
        self._is_searching = False
        self._quiet = 0
        #: Lines that ended before what is looked at now, and what was only searched since then, its last bytes.
        self._ended = 0
        self._held: list[bytes] = []
        self._held_bytes = 0
        #: The line that has not ended.
        self._rest = b""

    def read(self) -> TextLog:
        """All of it."""
        holds_mirror = False
        block = self._head
        while block:
            at = 0
            while at < len(block):
                if self._is_searching:
                    at = self._search(block, at)
                else:
                    piece = block[at : at + _PIECE]
                    holds_mirror = holds_mirror or MARKER in piece
                    self._read(piece)
                    at += len(piece)
            block = self._stream.read(_BLOCK)
        if self._is_searching:
            self._resume()
        self._take(self._physical.feed(self._rest))
        self._take(self._physical.close())
        starts = self._assembly.finish()
        return TextLog(starts=starts, left_out=self._assembly.left_out, holds_mirror=holds_mirror)

    def _read(self, piece: bytes) -> None:
        """A piece by the full grammar, up to its last whole line; the rest goes on with the next one."""
        data = self._rest + piece
        whole = data.rfind(b"\n") + 1
        if not whole and len(data) > _PIECE:
            whole = len(data)
        self._rest = data[whole:]
        if whole:
            self._take(self._physical.feed(data[:whole]))
            self._ended += data.count(b"\n", 0, whole)
        if not self._is_wide and self._quiet > (_SETTLED if self._assembly.is_settled else _QUIET):
            self._take(self._physical.close())
            self._is_searching = True
            self._held, self._held_bytes, self._rest = [self._rest], len(self._rest), b""

    def _search(self, block: bytes, at: int) -> int:
        """Up to the next fragment; where the full grammar goes on."""
        if self._held:
            seam = self._held[-1][-_LONGEST:] + block[at : at + _LONGEST]
            if any(fragment in seam for fragment in _FRAGMENTS):
                self._resume()
                return at
        hits = [hit for fragment in _FRAGMENTS if (hit := block.find(fragment, at)) >= 0]
        end = min(hits, default=len(block))
        self._hold(block[at:end] if (at, end) != (0, len(block)) else block)
        if hits:
            self._resume()
        return end

    def _hold(self, piece: bytes) -> None:
        """Keep a piece that was only searched, and let go of what lies too far back."""
        self._held.append(piece)
        self._held_bytes += len(piece)
        while self._held_bytes - len(self._held[0]) >= _BEFORE:
            gone = self._held.pop(0)
            self._held_bytes -= len(gone)
            self._ended += gone.count(b"\n")

    def _resume(self) -> None:
        """The full grammar takes over, from some way back."""
        held = b"".join(self._held)
        self._held, self._held_bytes = [], 0
        far = max(0, len(held) - _BEFORE)
        self._ended += held.count(b"\n", 0, far)
        self._physical = Physical(self._ended + 1)
        self._ended += held.count(b"\n", far)
        self._take(self._physical.feed(held[far:]))
        self._is_searching, self._quiet = False, 0

    def _take(self, lines: Iterator[Line]) -> None:
        take = self._assembly.take
        for line in lines:
            for message in said(line):
                if take(message):
                    self._quiet = 0
                else:
                    self._quiet += 1
