"""
Exceptions of SGLang to deaths: its own sentences first, then those of torch, the driver and the host.

A failed capture is printed with the same tips about memory whatever it failed of: what it failed of counts, the tips
mean nothing. Whatever leaves the event loop of a scheduler ends its process.
"""

from __future__ import annotations

import re
from typing import Final

import attrs

from startup_fsm.importers.facts import Death, Heard, Raised
from startup_fsm.importers.sglang.endings import death_of_child
from startup_fsm.importers.sglang.frames import Place, place_of
from startup_fsm.importers.sglang.words import DRAFT_PART, WEIGHTS_END
from startup_fsm.importers.torch_alone import death_by_words, text_of

_TIPS: Final = re.compile(r"\bPossible (?:solutions|suggestions):|\bFail when using backend: ")
_CHILD: Final = re.compile(r"\bscheduler died during initialization \(exit code: (-?\d{1,5})\)")
_CAPTURE: Final = re.compile(r"\bCapture (?:(\w{2,20}) )?(?:\w{2,20} graph|single-CG draft extend) failed: ")
_UNBALANCED: Final = "memory capacity is unbalanced"

_NO_BLOCKS: Final = (
    r"\bNot enough memory\b[^\n]{0,80}--mem-fraction-static|\bLoaded weights leave no GPU memory\b"
    r"|\bMemory pool size is too small\b"
)

#: Sentences and what they mean.
_SENTENCES: Final = (
    (
        _NO_BLOCKS,
        Death(category="budget", reason="no_blocks", state="size_kv"),
    ),
    (
        r"\bstate cache is too small to serve\b|\bmax_running_request is zero\b",
        Death(category="budget", reason="sequences_do_not_fit", state="size_kv"),
    ),
    (
        r"\bNot enough host memory\b",
        Death(category="host_oom", reason="host_out_of_memory", state="allocate_kv", part="host_pool"),
    ),
    (
        r"\bInitialization failed\. Please see the error messages above|\bFailed to initialize scheduler rank\b",
        Death(category="peer", reason="peer", is_echo=True),
    ),
)


def death_of(raised: Raised, heard: Heard) -> Death:
    """What an exception of SGLang means."""
    text = _TIPS.split(text_of(raised), maxsplit=1)[0]
    place = place_of(raised.frames)
    if _UNBALANCED in text:
        return _unbalanced(place, heard)
    if (child := _CHILD.search(text)) is not None:
        return death_of_child(int(child[1]))
    for pattern, death in _SENTENCES:
        if re.search(pattern, text) is not None:
            return _placed(death, place)
    if (failed := _CAPTURE.search(text)) is not None:
        return _capture(failed, text[failed.end() :], place)
    return _other(text, place, heard)


def _placed(death: Death, place: Place | None) -> Death:
    """A sentence knows its state; frames may know the part, a draft model's say."""
    if place is None or death.is_echo or place.state != death.state:
        return death
    return attrs.evolve(death, part=place.part or death.part)


def _unbalanced(place: Place | None, heard: Heard) -> Death:
    """The groups of the target, or those of a draft model once the target is complete."""
    if place is None:
        place = Place("load_weights", DRAFT_PART) if heard.has(WEIGHTS_END) else Place("init_device")
    return Death(reason="unbalanced", state=place.state, part=place.part)


def _capture(failed: re.Match[str], cause: str, place: Place | None) -> Death:
    death = death_by_words(cause, is_capturing=True) or Death(category="capture")
    if place is not None and place.state in ("capture_graphs", "serving"):
        return attrs.evolve(death, state=place.state, part=place.part)
    part = "piecewise" if failed[1] in ("prefill", "piecewise") else None
    return attrs.evolve(death, state="capture_graphs", part=DRAFT_PART if "draft" in failed[0] else part)


def _other(text: str, place: Place | None, heard: Heard) -> Death:
    state = heard.state if place is None else place.state
    death = death_by_words(text, is_capturing=state == "capture_graphs") or Death()
    if place is None:
        return death
    if place.part == "host_pool" and death.reason == "driver_out_of_memory":
        # The driver could not pin that much.
        death = attrs.evolve(death, category="host_oom", reason="host_out_of_memory")
    return attrs.evolve(death, state=place.state, part=place.part, is_final=place.state == "serving")
