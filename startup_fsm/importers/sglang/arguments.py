"""
What SGLang was asked for: the arguments that it prints, and command lines that people paste above their logs.

Both are somebody's text: quoted values are taken whole, names that are not ours are passed over, nothing is evaluated.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any, Final

from startup_fsm.importers.facts import Begin, Fact, Figure, Heard, Row, Setting
from startup_fsm.importers.sglang.words import COMMAND, NUMBER

#: Fields of its arguments to our names of settings.
_SETTINGS: Final = {
    "mem_fraction_static": "mem_fraction_static",
    "chunked_prefill_size": "chunked_prefill_size",
    "max_running_requests": "max_running_requests",
    "context_length": "max_model_len",
    "tp_size": "tensor_parallel_size",
    "pp_size": "pipeline_parallel_size",
    "kv_cache_dtype": "kv_cache_dtype",
    "quantization": "quantization",
    "speculative_algorithm": "speculative",
    "cuda_graph_max_bs": "capture_sizes",
    "cuda_graph_max_bs_decode": "capture_sizes",
    "disable_cuda_graph": "enforce_eager",
    "enable_lora": "lora",
}

#: Short spellings on a command line.
_SHORT: Final = {
    "tp": "tp_size",
    "tensor_parallel_size": "tp_size",
    "pp": "pp_size",
    "pipeline_parallel_size": "pp_size",
    "speculative_algo": "speculative_algorithm",
}

#: ``name=value`` or ``'name': value``; a quoted value hides whatever it holds.
_PAIR: Final = re.compile(
    r"""(?<![\w.])['"]?([a-z]\w{1,60})['"]?(?:=|:\ )"""
    r"""('(?:[^'\\]|\\.){0,2000}'|"(?:[^"\\]|\\.){0,2000}"|\[[^\[\]\n]{0,8000}\]|[-\w.+]{1,64})"""
)
_FLAG: Final = re.compile(
    r"""--([a-z][a-z0-9-]{1,60})(?:(?:=| {1,8})["']?(-?\d[\w.]{0,60}|[^\s"'\\-][^\s"'\\]{0,200}))?"""
)
#: Flags that no other engine has: a line that begins with one of others may be anybody's.
_OWN: Final = (
    r"(?:mem-fraction-static|chunked-prefill-size|max-running-requests|max-total-tokens|context-length|tp|tp-size|pp-size"
    r"|cuda-graph-max-bs\w{0,10}|disable-cuda-graph|speculative-algo\w{0,10})"
)
_WHOLE: Final = re.compile(r"-?\d{1,15}")
_REAL: Final = re.compile(NUMBER)


def _value(text: str) -> Any:
    """A word as a plain value; None where it is None or a list."""
    if text[:1] in "'\"" and len(text) >= 2:
        return text[1:-1]
    words = {"True": True, "true": True, "False": False, "false": False, "None": None}
    if text in words or text.startswith("["):
        return words.get(text)
    if _WHOLE.fullmatch(text):
        return int(text)
    return float(text) if _REAL.fullmatch(text) else text


def _facts(pairs: Iterable[tuple[str, Any]]) -> Iterator[Fact]:
    seen: set[str] = set()
    for name, value in pairs:
        if name in seen or value is None or value == "":
            continue
        seen.add(name)
        if name in _SETTINGS:
            yield Setting(_SETTINGS[name], value)
        if type(value) in (int, float) and name == "mem_fraction_static":
            yield Figure(name, value)
        if type(value) is int and name == "max_total_tokens":
            yield Figure("max_total_tokens_requested", value)


def _arguments(found: re.Match[str], heard: Heard) -> Iterable[Fact]:
    yield Begin("arguments")
    yield from _facts((pair[1], _value(pair[2])) for pair in _PAIR.finditer(found[1]))


def _flags(text: str) -> Iterator[tuple[str, Any]]:
    for flag in _FLAG.finditer(text):
        name = flag[1].replace("-", "_")
        yield _SHORT.get(name, name), True if flag[2] is None else _value(flag[2])


def _command(found: re.Match[str], heard: Heard) -> Iterable[Fact]:
    return _facts(_flags(found[1]))


def _more(found: re.Match[str], heard: Heard) -> Iterable[Fact]:
    return _facts(_flags(found[1])) if heard.has(COMMAND) else ()


ROWS: Final = (
    Row("sgl.arguments", "server_args=", r"\bserver_args=(?:ServerArgs\(|\{)(.{1,65536})", _arguments),
    Row(COMMAND, "sglang", r"\b(?:sglang\.(?:srt\.server|launch_server)|sglang serve)\b(.{0,8192})", _command),
    Row(
        "sgl.command_more",
        "--",
        rf"^[ \t]{{0,40}}(?:- )?[\"']?(?=--[^\n]{{0,400}}?\b{_OWN}(?:[= ]|$))(--.{{0,8192}})",
        _more,
        form="plain",
    ),
)
