"""
The two ways to a judgement, by what a start is known from: a journal of our own, or the words of a text log.

Each is loaded where it is needed, since either alone is most of what a reading verb loads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from startup_fsm.sources import Source
    from startup_fsm.verdict import Verdict
    from startup_fsm.what_if import Sizing


def judge(sources: Sequence[Source], *, source: str, origin: str | None) -> Verdict:
    """
    The verdict on one attempt of one run.

    Args:
        sources: All its processes; at least one.
        source: Where the events came from.
        origin: What was read.
    """
    if any(each.is_imported for each in sources):
        from startup_fsm.logged.verdict import logged_verdict

        return logged_verdict(sources, origin=origin)
    from startup_fsm.diagnose import diagnose

    return diagnose(sources, source=source, origin=origin)


def sizing(sources: Sequence[Source]) -> Sizing | None:
    """How the KV cache of a start was sized last; None where it came to no budget, or its log does not tell."""
    if any(each.is_imported for each in sources):
        from startup_fsm.logged.lacking import sizing_with_what_lacked

        return sizing_with_what_lacked(sources)
    from startup_fsm.what_if import sizing_of_journal

    return next((found for each in sources if (found := sizing_of_journal(each.run)) is not None), None)
