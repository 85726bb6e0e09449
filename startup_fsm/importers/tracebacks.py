"""
Exceptions out of printed tracebacks, whoever's lines lie between theirs.

Each speaker has a traceback of its own. Lines without a name belong to whoever said last that one follows, else to
nobody. Chained exceptions keep their cause, and the later one has the frames of both: those that lead to where it was
raised, then those of its cause.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

import attrs

from startup_fsm.importers.facts import NOBODY, Frame, Raised, Said, Speaker

_BEGIN: Final = "Traceback (most recent call last)"
_CHAINED: Final = ("The above exception was the direct cause of", "During handling of the above exception")
_FRAME: Final = re.compile(r'\s*File "([^"\n]{1,500})", line \d{1,9}, in ([^\s,]{1,200})')
_CALL: Final = re.compile(r"\b([a-z_]\w{0,100})\(")
_ERROR: Final = re.compile(r"([A-Za-z_][\w.]{0,200})(?:: ?(.*))?\Z", re.DOTALL)
#: What an exception is called where no traceback shows that it is one.
_NAMED: Final = re.compile(
    r"(?:[A-Za-z_]\w{0,80}\.){0,8}[A-Z]\w{0,80}(?:Error|Exception|Interrupt|Exit|Timeout|Killed)\Z"
)
#: An exception that is named in the middle of an error.
_WITHIN: Final = re.compile(
    r"\b(?:exception|error|failed)[^:\n]{0,40}: ((?:[A-Za-z_]\w{0,80}\.){0,8}[A-Z]\w{0,80}(?:Error|Exception)): (.*)",
    re.DOTALL | re.IGNORECASE,
)
#: Levels at which an engine prints what it got over.
SURVIVED: Final = frozenset({"DEBUG", "INFO", "WARNING"})

#: Deepest stack that is kept, outermost frames first to go.
_FRAMES: Final = 400
#: Speakers whose tracebacks may be open at once.
_OPEN: Final = 1_024
#: Longest chain that is kept.
CHAIN: Final = 16
_MESSAGE: Final = 4_096


@attrs.define(slots=True)
class _Open:
    """What one speaker has printed of its traceback."""

    is_open: bool = False
    frames: list[Frame] = attrs.field(factory=list)
    cause: Raised | None = None
    last: Raised | None = None


@attrs.define(slots=True)
class Tracebacks:
    """Takes messages in the order of the file, gives exceptions as they end."""

    _open: dict[Speaker, _Open] = attrs.field(factory=dict)
    _borrower: Speaker = NOBODY

    def take(self, said: Said) -> tuple[Speaker, Raised] | None:
        """The exception that ends with this message, and whose it is."""
        text = said.text
        speaker = said.speaker
        if speaker == NOBODY and said.form == "plain":
            speaker = self._borrower
        elif not self._is_open(self._borrower):
            # What Python prints itself has no name in front of it.
            self._borrower = speaker if said.level in ("ERROR", "CRITICAL") else NOBODY
        if _BEGIN in text:
            self._begin(speaker)
            return None
        here = self._open.get(speaker)
        if here is not None and here.is_open:
            return self._inside(here, speaker, said)
        if text.startswith(_CHAINED):
            if here is not None and here.last is not None:
                here.cause = here.last
            return None
        return self._alone(speaker, said)

    def _is_open(self, speaker: Speaker) -> bool:
        here = self._open.get(speaker)
        return here is not None and here.is_open

    def _begin(self, speaker: Speaker) -> None:
        self._borrower = speaker
        here = self._of(speaker)
        here.is_open = True
        here.frames = []

    def _of(self, speaker: Speaker) -> _Open:
        here = self._open.get(speaker)
        if here is None:
            if len(self._open) >= _OPEN:
                del self._open[next(iter(self._open))]
            here = self._open[speaker] = _Open()
        return here

    def _inside(self, here: _Open, speaker: Speaker, said: Said) -> tuple[Speaker, Raised] | None:
        text = said.text
        if (frame := _FRAME.match(text)) is not None:
            if len(here.frames) >= _FRAMES:
                del here.frames[: _FRAMES // 2]
            here.frames.append(Frame(frame[1].replace("\\", "/"), frame[2]))
            return None
        if not text or text[0] in " \t|+^~":
            # A source line, a marker below it, or the border of an exception group.
            if here.frames and not here.frames[-1].calls and (call := _CALL.search(text, 0, 300)) is not None:
                here.frames[-1] = attrs.evolve(here.frames[-1], calls=call[1])
            return None
        found = _ERROR.match(text)
        if found is None or (said.form != "plain" and said.level in SURVIVED):
            # Another thing came between; the traceback goes on.
            return None
        here.is_open = False
        return speaker, self._end(here, said, found[1], found[2] or "")

    def _alone(self, speaker: Speaker, said: Said) -> tuple[Speaker, Raised] | None:
        """An exception of which only its last line is there."""
        if said.level in SURVIVED:
            return None
        name, colon, message = said.text.partition(": ")
        if not colon or len(name) > 200 or _NAMED.match(name) is None:
            within = _WITHIN.search(said.text, 0, 400) if said.form != "plain" else None
            if within is None:
                return None
            name, message = within[1], said.text[within.start(2) :]
        here = self._of(speaker)
        here.frames = []
        return speaker, self._end(here, said, name, message)

    def _end(self, here: _Open, said: Said, name: str, message: str) -> Raised:
        cause, here.cause = here.cause, None
        frames = tuple(here.frames)
        if cause is not None:
            frames = (*frames, *cause.frames)[-_FRAMES:]
            cause = _shortened(cause)
        here.last, here.frames = Raised(said.line, name, message[:_MESSAGE], frames, cause), []
        return here.last


def _shortened(cause: Raised) -> Raised:
    """A chain with room for one more: where there is none, what the last one was raised from goes, never the first."""
    length, each = 1, cause
    while each.cause is not None:
        length, each = length + 1, each.cause
    return cause if length < CHAIN or cause.cause is None else attrs.evolve(cause, cause=cause.cause.cause)


def with_calls(frames: Sequence[Frame]) -> tuple[Frame, ...]:
    """The frames, and between them those that a source line calls and that are not printed."""
    found: list[Frame] = []
    for at, frame in enumerate(frames):
        found.append(frame)
        if frame.calls and (at + 1 == len(frames) or frames[at + 1].function != frame.calls):
            found.append(Frame(frame.file, frame.calls))
    return tuple(found)
