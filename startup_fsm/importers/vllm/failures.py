"""
What an exception of vLLM means: by its text, and by the frames that it came through.

The text says what failed. Where it failed the frames say better, unless the text belongs to one state alone, as the
checks of the baseline and of the budget do. An echo is the report of somebody else's failure.
"""

from __future__ import annotations

import re
from typing import Final

import attrs

from startup_fsm.importers.facts import Death, Frame, Heard, Raised
from startup_fsm.importers.vllm.frames import located, sampler_place
from startup_fsm.importers.vllm.known_texts import DRIVER, KINDS, KNOWN, SENTENCE, Place
from startup_fsm.importers.vllm.phases import REAL, THROWAWAY, capture_state, next_state

_CAPTURES: Final = frozenset({REAL, THROWAWAY})
#: What is a fault of the capture only while something is captured.
_IN_CAPTURE: Final = frozenset({"no_kernel_image", "illegal_access"})

_PROFILE: Final = (
    r"Initial (free|used) memory (-?\d{1,20}(?:\.\d{1,6})?)(?: GiB)?, ?current(?:ly)? (?:free|used) memory "
    r"(-?\d{1,20}(?:\.\d{1,6})?)"
)
_NODE: Final = r"less than requested memory for kv \((-?\d{1,12}(?:\.\d{1,6})?)"
_METHOD: Final = r"RPC call to (\w{1,60}) timed out"
_QUOTED: Final = r"(?s)(?:failed with error ['\"]?|method failed: )(.{1,4000})"

_AFTER_QUOTE: Final = "', please check"


def death(raised: Raised, heard: Heard) -> Death:
    """What ``raised`` means for a process that said ``heard`` before."""
    text = f"{raised.type}: {raised.message}"
    told, place = _told(raised.type, text)
    if not raised.message and raised.frames and raised.frames[-1].function == "generate_scheduler_kv_cache_config":
        # A bare assertion: the ranks planned different numbers of blocks.
        told = attrs.evolve(told, reason="ranks_differ")
    state, part = located(raised.frames, heard)
    if told.reason == "timeout" and (method := re.search(_METHOD, text)) is not None:
        state, part = located((Frame("vllm/v1/", method[1]),), heard)
    found = _placed(told, place, (state, part), heard)
    return found if told.category != "peer" else _with_quoted(found, raised, heard)


def _with_quoted(echo: Death, raised: Raised, heard: Heard) -> Death:
    """An echo with the reason, and where only its text tells it the state, of the exception that it quotes."""
    inner = quoted(raised)
    if inner is None or not inner.message.partition(_AFTER_QUOTE)[0].strip("'\" "):
        return echo
    said = of_text("", inner.message, heard)
    if said.is_echo:
        return echo
    state, part = (said.state, said.part) if echo.state is None else (echo.state, echo.part)
    return attrs.evolve(echo, reason=said.reason, state=state, part=part)


def of_text(kind: str, message: str, heard: Heard) -> Death:
    """What a text means that no frames come with."""
    told, place = _told(kind, f"{kind}: {message}" if kind else message)
    return _placed(told, place, (None, None), heard)


def quoted(raised: Raised) -> Raised | None:
    """The exception that an echo quotes, for a log without that one's own lines; None where none is quoted."""
    found = re.search(_QUOTED, raised.message)
    return None if found is None else attrs.evolve(raised, type="", message=found[1].strip(), frames=(), cause=None)


def _told(kind: str, text: str) -> tuple[Death, Place]:
    """What the text says, and what it says of the place."""
    known = next((known for known in KNOWN if known.text in text), None)
    if known is not None:
        return _refined(known.death, text), known.place
    return _by_kind(kind, text), Place.NOWHERE


def _by_kind(kind: str, text: str) -> Death:
    name = kind.rpartition(".")[2]
    if name in KINDS:
        return KINDS[name]
    if name == "OutOfMemoryError" and kind.startswith("ray."):
        return Death("host_oom", "host_out_of_memory")
    if name == "OutOfMemoryError" or re.search(SENTENCE, text) is not None:
        return Death("oom", "out_of_memory")
    if re.search(DRIVER, text) is not None:
        return Death("oom", "driver_out_of_memory")
    return Death("raised", "timeout") if name.endswith("TimeoutError") else Death()


def _refined(told: Death, text: str) -> Death:
    if told.reason == "free_grew" and (found := re.search(_PROFILE, text)) is not None:
        first, then = float(found[2]), float(found[3])
        has_fallen = then < first if found[1] == "free" else then > first
        return attrs.evolve(told, reason="free_fell") if has_fallen else told
    if told.reason == "not_enough_free" and (asked := re.search(_NODE, text)) is not None and float(asked[1]) <= 0:
        # A host whose process alone fills what it asked for.
        return attrs.evolve(told, reason="no_blocks")
    return told


def _placed(told: Death, place: Place, seen: tuple[str | None, str | None], heard: Heard) -> Death:
    state, part = seen
    if place is Place.ITS_OWN or (told.state is not None and state is None):
        state, part = told.state, told.part
    elif place is Place.SAMPLER:
        state, part = sampler_place(seen, heard)
    elif place is Place.CAPTURE and state is None and heard.state != "serving":
        state = capture_state(heard)
    elif told.category == "oom" and state is None:
        # Planning asks for no memory, and what has ended does not either.
        state = next_state(heard)
    if told.reason in _IN_CAPTURE and (state or heard.state) in _CAPTURES:
        told = attrs.evolve(told, category="capture")
    return attrs.evolve(told, state=state, part=part)
