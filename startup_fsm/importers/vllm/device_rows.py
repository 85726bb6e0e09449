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


#: Devices whose memory is the host's too, or whose driver moves pages between the two.
_SHARED: Final = r"(?:GB10|GH200|GB[23]00)(?![A-Za-z0-9])"
_BOARD: Final = r"(?:Orin|Thor)(?![A-Za-z0-9])"
#: Rows of which one stands before any line that names a device; without one the line may be of another program.
_BEGUN: Final = ("L00", "L01", "L02", "L03", "L04", "command")


def _named(found: re.Match[str], heard: Heard) -> Iterator[Fact]:
    if heard.state is not None or any(map(heard.has, _BEGUN)):
        yield Sign("unified_memory")


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
    # torch's warning of a device that it was not built for, names of tuned configurations, pasted tables.
    Row("device", "NVIDIA G", rf"NVIDIA {_SHARED}", _named),
    Row("device", "NVIDIA_G", rf"NVIDIA_{_SHARED}", _named),
    Row("device", "NVIDIA Jetson", r"NVIDIA Jetson ", _named),
    Row("device", "Found GPU", rf"Found GPU\d{{1,3}} (?:NVIDIA )?{_BOARD}", _named),
    Row("device", "device_name=", rf"device_name=(?:NVIDIA_)?{_BOARD}", _named),
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
