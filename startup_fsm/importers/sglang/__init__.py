"""
The grammar of SGLang, 0.4 to 0.5: lines to facts by topic, exceptions to deaths.

Old and new wordings stand side by side: a log rarely names its version.
"""

from __future__ import annotations

from typing import Final

import attrs

from startup_fsm.importers.facts import Death, Heard, Raised, Row
from startup_fsm.importers.sglang import arguments, capture, endings, loading, pools
from startup_fsm.importers.sglang.failures import death_of


@attrs.frozen(slots=True)
class _SGLang:
    """Rows and deaths of one engine."""

    source: str = "sglang"
    rows: tuple[Row, ...] = (*arguments.ROWS, *loading.ROWS, *pools.ROWS, *capture.ROWS, *endings.ROWS)

    def death(self, raised: Raised, heard: Heard) -> Death:
        """By its own sentences, the words of torch, and its frames."""
        return death_of(raised, heard)


#: The grammar.
SGLANG: Final = _SGLang()
