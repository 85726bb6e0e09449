"""Known faults of an engine's versions, named where a log shows them and its version may have them."""

from __future__ import annotations

from typing import Final

import attrs

from startup_fsm.dialects import KnownFault
from startup_fsm.logged.start import Found, Start

_UNUSED: Final = (None, 0, 1, "", "None", "none")


def named(start: Start, found: Found) -> tuple[Found, KnownFault | None]:
    """The finding with the known fault that explains it in its message; None where none is known."""
    fault = known(start, found)
    if fault is None:
        return found, None
    message = f"{found.finding.message}; {fault.sentence}"
    return attrs.evolve(found, finding=attrs.evolve(found.finding, message=message)), fault


def known(start: Start, found: Found) -> KnownFault | None:
    """The known fault that explains a finding best: of those that fit, its own one, or that with most conditions."""
    fitting = [fault for fault in start.facts.dialect.faults([found.finding.code]) if _fits(fault, start, found)]
    reason = found.finding.reason
    return max(fitting, key=lambda fault: (fault.reason == reason != "", _conditions(fault)), default=None)


def _conditions(fault: KnownFault) -> int:
    conditions = (fault.words, fault.states, fault.reason, fault.sign, fault.runner, fault.several, fault.setting)
    return sum(bool(condition) for condition in conditions) + fault.by_version


def _fits(fault: KnownFault, start: Start, found: Found) -> bool:
    failure = start.failure
    states = {found.finding.state, start.ending.state}
    return (
        (not fault.words or any(word in _words(start, found) for word in fault.words))
        and (not fault.states or bool(fault.states & states))
        and (not fault.reason or fault.reason in (found.finding.reason, failure and failure.reason))
        and (not fault.sign or start.facts.sign(fault.sign) is not None)
        and (not fault.runner or start.facts.runner == fault.runner)
        and (not fault.died or (failure is not None and failure.is_oom))
        and (not fault.several or len(start.facts.labels) > 1)
        and (not fault.setting or _uses(start, fault.setting))
    )


def _words(start: Start, found: Found) -> str:
    said = [] if start.failure is None else [start.failure.said]
    origins = [start.facts.origin(seen) for seen in found.seen]
    said += [origin.text.lower() for origin in origins if origin is not None and origin.text is not None]
    return "\n".join(said)


def _uses(start: Start, setting: str) -> bool:
    value = start.facts.knob(setting)
    if setting == "pipeline_parallel_size" and any("PP" in label for label in start.facts.labels):
        return True
    # A switch that is on equals the 1 of a number that changes nothing.
    return value if isinstance(value, bool) else value not in _UNUSED
