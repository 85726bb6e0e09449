"""
Advice as changes: our name of a setting, a direction, and the engine's own spelling, ready to paste.

Nothing is said that the engine's version does not have, that it would refuse, or that the start had already.
"""

from __future__ import annotations

from typing import Any, Final

from startup_fsm.findings import Advice, Change, Direction
from startup_fsm.logged.start import Start

#: What is no flag of an engine.
_OUTSIDE: Final = frozenset(
    {"other_process", "engine_version", "host_memory", "none", "lora", "speculative", "device_selection"}
)


def say(
    start: Start,
    setting: str,
    direction: Direction,
    because: str,
    *,
    to: Any = None,
    flag: str | None = None,
    leftover: int | None = None,
    interval: tuple[float, float] | None = None,
) -> list[Advice]:
    """
    One change; nothing where this engine has no such setting, or where the value is refused or was given already.

    Args:
        start: Whose.
        setting: By our name.
        direction: Which way.
        because: One sentence with the arithmetic.
        to: The value; None where it cannot be told.
        flag: Ready to paste where the dialect has no spelling for it.
        leftover: Bytes that are expected to be free afterwards.
        interval: Values that the numbers allow.
    """
    dialect, before = start.facts.dialect, given(start, setting)
    spelled = dialect.flag(setting)
    if setting not in _OUTSIDE and dialect.flags and spelled is None:
        return []
    if to is not None and (to == before or (spelled is not None and not spelled.takes(to))):
        return []
    written = flag if flag is not None else (None if spelled is None else spelled.write(to))
    unit = spelled.unit if spelled is not None and to is not None and flag is None else None
    change = Change(setting=setting, direction=direction, flag=written, before=before, to=to, unit=unit)
    return [Advice(changes=(change,), because=because, leftover_bytes=leftover, interval=interval)]


def given(start: Start, setting: str) -> Any:
    """A setting as the start had it; None where nobody said."""
    value = start.facts.knob(setting)
    if value is None:
        value = start.facts.get(setting)
    if isinstance(value, list | tuple | dict):
        # Lists of sizes are told by their largest.
        numbers = [each for each in value if isinstance(each, int) and not isinstance(each, bool)]
        return max(numbers, default=None)
    return value


def number(start: Start, setting: str) -> int | None:
    """A setting as a whole number above 0; None where nobody said, or where it is none."""
    value = given(start, setting)
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 16:
        value = int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
