"""
Engines as data: what they call our settings, how they size, what their versions are known for. Pure.

>>> dialect("vllm", "0.25.1").write("gpu_memory_utilization", 0.87)
'--gpu-memory-utilization 0.870'
"""

from __future__ import annotations

from typing import Final

from startup_fsm.dialects.base import Cure, Dialect, Flag, KnownFault, Reserving
from startup_fsm.dialects.sglang import SGLANG
from startup_fsm.dialects.versions import Span, parse
from startup_fsm.dialects.vllm import VLLM, VLLM_ASCEND

__all__ = ["Cure", "Dialect", "Flag", "KnownFault", "Reserving", "Span", "dialect", "parse"]

_DIALECTS: Final = {each.engine: each for each in (VLLM, VLLM_ASCEND, SGLANG)}

#: An engine that nobody named: our own words, no flags.
UNKNOWN: Final = Dialect(engine="unknown")


def dialect(engine: str | None, version: str | None = None) -> Dialect:
    """
    How an engine speaks.

    Args:
        engine: ``vllm``, ``vllm-ascend`` or ``sglang``; any other has no flags.
        version: In its own words; None or one that is no number leaves all versions open.
    """
    return _DIALECTS.get(engine or "", UNKNOWN).narrowed(Span.exactly(version))
