"""
The page itself: data, style and scripts in one file that opens from a disk without a network.

Nothing of a journal is ever markup: all of it is JSON inside a block that is no script, and what shows it only sets
text. The policy of the page lets nothing else run: only what is in the file, by its digest, and no connection at all.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from importlib import resources
from typing import Any, Final

import orjson

from startup_fsm.reports.page.data import page_data
from startup_fsm.reports.page.redaction import Redactor
from startup_fsm.starts import Start
from startup_fsm.verdict import Verdict

#: Most that a page may be, in bytes.
LIMIT: Final = 1_500_000

#: Lengths of an event's line that are tried, longest first, until the page is small enough; then rows are left out.
_LINES: Final = (160, 120, 90, 60)

_SCRIPTS: Final = (
    "format", "dom", "model", "verdict", "memory", "lanes", "captures", "checks", "ledger", "graph", "line", "travel",
    "what_if", "events", "main"
)  # fmt: skip

_ESCAPES: Final = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}
_ESCAPED: Final = re.compile("[<>&\u2028\u2029]")


def page(starts: Sequence[Start], verdicts: Sequence[Verdict], shown: int, *, full: bool = False) -> str:
    """
    One start as HTML, at most :data:`LIMIT` bytes of it.

    Args:
        starts: All that were read.
        verdicts: One for each of them.
        shown: Index of the one to show.
        full: Keep paths, host names, user names, process numbers and environment.
    """
    frame = _frame()
    data = page_data(starts, verdicts, shown, Redactor(keeps_all=full))
    return frame(fitted(packed(data), LIMIT - len(frame("").encode())))


def fitted(data: dict[str, Any], room: int) -> str:
    """
    The data as JSON that fits into so many bytes; events are shortened first, then left out from the middle.

    Args:
        data: Packed.
        room: Bytes.
    """
    longest = max(map(len, data["texts"]), default=0)
    text = embedded(data)
    for line in (each for each in _LINES if each < longest):
        if len(text.encode()) <= room:
            return text
        text = embedded(data | {"texts": [_cut(each, line) for each in data["texts"]]})
    data = data | {"texts": [_cut(each, _LINES[-1]) for each in data["texts"]]}
    keep = max(len(rank["events"]["seq"]) for rank in data["ranks"])
    while len(text.encode()) > room and keep > 0:
        keep //= 2
        text = embedded(_fewer(data, keep))
    if len(text.encode()) <= room:
        return text
    return embedded(_fewer(data, 0) | {"checks": [], "checks_left": len(data["checks"]) + data["checks_left"]})


def _cut(text: str, line: int) -> str:
    return text if len(text) <= line else f"{text[: line - 1]}…"


def packed(data: dict[str, Any]) -> dict[str, Any]:
    """The same data with kinds and texts of events in tables, each once."""
    kinds: dict[str, int] = {}
    texts: dict[str, int] = {}
    ranks = []
    for rank in data["ranks"]:
        events = rank["events"]
        ranks.append(
            rank
            | {
                "events": events
                | {
                    "kind": [kinds.setdefault(each, len(kinds)) for each in events["kind"]],
                    "text": [texts.setdefault(each, len(texts)) for each in events["text"]],
                    "left": [0, 0],
                }
            }
        )
    return data | {"ranks": ranks, "kinds_of_events": list(kinds), "texts": list(texts)}


def _fewer(data: Mapping[str, Any], keep: int) -> dict[str, Any]:
    """At most ``keep`` events of each rank, the first and the last of them."""
    kinds, texts = data["kinds_of_events"], data["texts"]
    ranks = []
    for rank in data["ranks"]:
        events = rank["events"]
        count = len(events["seq"])
        if count <= keep:
            first, last = count, 0
        else:
            first, last = keep // 2, keep - keep // 2
        chosen = [*range(first), *range(count - last, count)]
        seqs, ts = _sums(events["seq"]), _sums(events["t"])
        ranks.append(
            rank
            | {
                "events": {
                    "seq": _differences([seqs[at] or 0 for at in chosen]),
                    "t": _differences([ts[at] for at in chosen]),
                    "kind": [kinds[events["kind"][at]] for at in chosen],
                    "visit": [events["visit"][at] for at in chosen],
                    "text": [texts[events["text"][at]] for at in chosen],
                }
            }
        )
    fewer = packed(dict(data) | {"ranks": ranks})
    for rank, was in zip(fewer["ranks"], data["ranks"], strict=True):
        kept, had = len(rank["events"]["seq"]), len(was["events"]["seq"])
        rank["events"]["left"] = [had - kept, keep // 2]
    return fewer


def _sums(differences: Sequence[int | None]) -> list[int | None]:
    found: list[int | None] = []
    total = 0
    for each in differences:
        total += each or 0
        found.append(None if each is None else total)
    return found


def _differences(values: Sequence[int | None]) -> list[int | None]:
    found: list[int | None] = []
    last = 0
    for each in values:
        found.append(None if each is None else each - last)
        last = last if each is None else each
    return found


def embedded(data: Any) -> str:
    """JSON that can stand inside a page: no character of it can end the block or begin markup."""
    return _ESCAPED.sub(lambda found: _ESCAPES[found[0]], orjson.dumps(data).decode())


def asset(name: str) -> str:
    """A file that is shipped beside this module."""
    return resources.files(__package__).joinpath("assets", name).read_text(encoding="utf-8")


def _frame() -> Callable[[str], str]:
    """Everything but the data."""
    style = f"{asset('vendor/uPlot.min.css')}\n{asset('page.css')}"
    library = f"/*!\n{asset('vendor/uPlot.LICENSE')}\n*/\n{asset('vendor/uPlot.iife.min.js')}"
    script = "\n".join(['"use strict";', *(asset(f"js/{name}.js") for name in _SCRIPTS)])
    script = f"(() => {{\n{script}\n}})();\n"
    policy = "; ".join(
        (
            "default-src 'none'",
            f"script-src {_digest(library)} {_digest(script)}",
            f"style-src {_digest(style)}",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
        )
    )
    before, after = asset("page.html").split("{{data}}")
    for name, value in (("policy", policy), ("style", style), ("library", library), ("script", script)):
        before, after = (part.replace(f"{{{{{name}}}}}", value) for part in (before, after))
    return lambda data: f"{before}{data}{after}"


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
