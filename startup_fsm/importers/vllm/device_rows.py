"""Device and baseline (L06 to L13), and what the checks of that state print (C01 to C03, C52)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from startup_fsm.importers.facts import Fact, Heard, Row, Sign, Step
from startup_fsm.importers.vllm.wording import NUMBER, amount, gib, phrase, say, share

_IN: Final = Step("init_device")
_END: Final = Step("init_device", moment="ends")

_FREE: Final = rf"\({gib('free_at_start_bytes')}/{gib('total_bytes')} GiB\)"
_ASKED: Final = rf"\({share('gpu_memory_utilization')}, {gib('requested_bytes')} GiB\)"


def _no_pinning(found: re.Match[str], heard: Heard) -> Iterator[Fact]:
    yield Sign("pin_memory_off")
    if "WSL" in found.string:
        yield Sign("wsl")


ROWS: Final = (
    Row(
        "L06",
        "distributed_init_method=",
        r"world_size=\d{1,6} rank=\d{1,6} local_rank=\d{1,6} distributed_init_method=",
        say(_IN),
    ),
    phrase("L07", "vLLM is using nccl==", say(_IN)),
    phrase("L08", "Custom allreduce is disabled", say(_IN, Sign("custom_allreduce_off"))),
    phrase("L09", "Using V2 Model Runner", say(_IN, Sign("runner", {"runner": "V2"}))),
    phrase("L09b", "using the V1 model runner instead", say(Sign("runner", {"runner": "V1"}))),
    Row(
        "L10",
        "worker init memory snapshot: ",
        rf"worker init memory snapshot: .{{0,120}}?free_memory={amount('free_at_start_bytes')}, "
        rf"total_memory={amount('total_bytes')}",
        say(_END),
    ),
    Row("L11", "worker requested memory: ", rf"worker requested memory: {amount('requested_bytes')}", say(_END)),
    phrase("L12", "Weights are held outside this process", say(_IN, Sign("weights_external"))),
    Row("L13", "Using 'pin_memory=False'", r"Using 'pin_memory=False'", _no_pinning),
    Row(
        "C01",
        " memory utilization (",
        rf"(?:Free memory on device|Available memory on node) (?:\S{{1,40}} )?{_FREE} on startup is less than desired "
        rf"[CG]PU memory utilization {_ASKED}",
        say(),
    ),
    Row(
        "C02",
        "Externally held weights on device",
        rf"\({NUMBER}/{gib('total_bytes')} GiB\) exceed the desired GPU memory utilization {_ASKED}",
        say(Sign("weights_external")),
    ),
    Row(
        "C03",
        "budget after excluding external",
        rf"{_FREE} on startup is less than the engine's budget after excluding external process's weights {_ASKED}",
        say(Sign("weights_external")),
    ),
)
