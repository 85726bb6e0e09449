"""What a start was given and what is being started: the banners, the arguments, the configuration (L00 to L05)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Final

from startup_fsm.importers.facts import Begin, Fact, Heard, Row, Sign, Version
from startup_fsm.importers.vllm import settings
from startup_fsm.importers.vllm.wording import count, say

_VERSION: Final = r"[\w.+\-]{1,80}"
_LEADING: Final = r"(\d{1,3})\.(\d{1,4})"

#: The V2 runner names itself from this version on; an older engine of the V1 family has the V1 runner.
_NAMES_RUNNER: Final = (0, 16)


def _arguments(found: re.Match[str], heard: Heard) -> Iterator[Fact]:
    yield Begin("arguments")
    yield from settings.pairs(found.string)


def _api(found: re.Match[str], heard: Heard) -> Iterable[Fact]:
    return (Begin("api"), Version("vllm", found[1]))


def _engine(found: re.Match[str], heard: Heard) -> Iterator[Fact]:
    family, version = found[1], found[2]
    yield Begin("engine")
    yield Version("vllm", version)
    if family == "V0" or (family == "V1" and _is_before(version, _NAMES_RUNNER)):
        yield Sign("runner", {"runner": family})
    yield from settings.pairs(found.string)


def _is_before(version: str, other: tuple[int, int]) -> bool:
    found = re.match(_LEADING, version)
    return found is not None and (int(found[1]), int(found[2])) < other


def _command(found: re.Match[str], heard: Heard) -> Iterator[Fact]:
    yield from settings.flags(found.string)


def _engine_row(name: str, family: str) -> Row:
    anchor = f"Initializing a{'n' if not family else f' {family}'} LLM engine (v"
    pattern = rf"Initializing an?(?: (V[01]))? LLM engine \(v({_VERSION})\)"
    return Row(name, anchor, pattern, _engine)


ROWS: Final = (
    Row("L00", "non-default args: ", r"non-default args: ", _arguments),
    Row("L00", "args: Namespace(", r"args: Namespace\(", _arguments),
    Row("L01", "vLLM API server version ", rf"vLLM API server version ({_VERSION})", _api),
    Row("L01", "vLLM server version ", rf"vLLM server version ({_VERSION}),", _api),
    Row("L01", "█  version ", rf"█  version ({_VERSION})", _api),
    _engine_row("L02", ""),
    _engine_row("L03", "V0"),
    _engine_row("L04", "V1"),
    Row("L05", "Using max model len ", rf"Using max model len {count('max_model_len')}", say()),
    Row("command", "vllm serve ", r"\bvllm serve [\w./'\"$\-]", _command),
    Row("command", "vllm.entrypoints.", r"-m vllm\.entrypoints\.", _command),
    Row("command", "vllm/vllm-", r"\bvllm/vllm-[\w.\-]{1,40}[:@]\S{1,120} .{0,400}?--", _command, form="plain"),
    Row(
        "command",
        "--",
        r"^[ \t]{0,40}(?:- )?['\"]?--(?:gpu[-_]memory[-_]utilization|max[-_]model[-_]len|max[-_]num[-_]seqs"
        r"|max[-_]num[-_]batched[-_]tokens|enforce[-_]eager|kv[-_]cache[-_]memory|cudagraph[-_]capture[-_]sizes)\b",
        _command,
        form="plain",
    ),
)
