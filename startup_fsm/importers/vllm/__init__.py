"""
The grammar of vLLM, and of vLLM on Ascend: what its lines say, and what its exceptions mean.

Rows bear ids: ``L`` and a number for a line, ``C`` and a number for a check, a word for the rest. One id may have
several rows, for the wordings of its versions or the lines of its report.
"""

from __future__ import annotations

from typing import Final

import attrs

from startup_fsm.importers.facts import Death, Grammar, Heard, Raised, Row
from startup_fsm.importers.vllm import (
    banner_rows,
    device_rows,
    end_rows,
    failures,
    graph_rows,
    profile_rows,
    sizing_rows,
    weight_rows,
)
from startup_fsm.importers.vllm.failures import quoted

__all__ = ["VLLM", "VLLM_ASCEND", "quoted"]


@attrs.frozen(slots=True)
class _Vllm:
    source: str
    rows: tuple[Row, ...]

    def death(self, raised: Raised, heard: Heard) -> Death:
        return failures.death(raised, heard)


VLLM: Final[Grammar] = _Vllm(
    "vllm",
    (
        *banner_rows.ROWS,
        *device_rows.ROWS,
        *weight_rows.ROWS,
        *profile_rows.ROWS,
        *graph_rows.ROWS,
        *sizing_rows.ROWS,
        *end_rows.ROWS,
    ),
)

#: The same words come from there; only its frames bear another name.
VLLM_ASCEND: Final[Grammar] = _Vllm("vllm-ascend", ())
