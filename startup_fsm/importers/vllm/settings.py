"""
Settings out of what a start was given: the dictionary of arguments, the configuration of the engine, a command line.

The text is untrusted: names are picked by one bounded pattern, values are numbers, words or short pieces of text, and
nothing is evaluated.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from startup_fsm.importers.facts import Setting, Sign

Value = bool | int | float | str | list[int]

#: vLLM's names, in arguments and configurations, and ours.
_NAMES: Final = {
    "gpu_memory_utilization": "gpu_memory_utilization",
    "kv_cache_memory_bytes": "kv_cache_memory_bytes",
    "kv_cache_memory": "kv_cache_memory_bytes",
    "max_model_len": "max_model_len",
    "max_seq_len": "max_model_len",
    "max_num_seqs": "max_num_seqs",
    "max_num_batched_tokens": "max_num_batched_tokens",
    "tensor_parallel_size": "tensor_parallel_size",
    "tp": "tensor_parallel_size",
    "pipeline_parallel_size": "pipeline_parallel_size",
    "pp": "pipeline_parallel_size",
    "data_parallel_size": "data_parallel_size",
    "dp": "data_parallel_size",
    "enforce_eager": "enforce_eager",
    "kv_cache_dtype": "kv_cache_dtype",
    "quantization": "quantization",
    "q": "quantization",
    "cudagraph_capture_sizes": "capture_sizes",
    "cuda_graph_sizes": "capture_sizes",
    "speculative_config": "speculative",
    "speculative_model": "speculative",
    "enable_lora": "lora",
}
#: What flags alone may be called.
_SHORT: Final = ("tp", "pp", "dp", "q")
#: Flags without a value.
_SWITCHES: Final = ("enforce_eager", "enable_lora")
#: What a message may be long.
_LONGEST: Final = 32_768

_PAIR: Final = (
    rf"(?<![\w.\-])({'|'.join(name for name in _NAMES if name not in _SHORT)})['\"]?\s?[:=]\s?"
    r"(-?\d{1,20}(?:\.\d{1,12})?(?![\w.])"
    r"|'[^'\n]{0,200}'|\"[^\"\n]{0,200}\""
    r"|\[[\d, ]{0,4000}\]"
    r"|\{[^{}\n]{0,600}\}"
    r"|[A-Za-z]\w{0,40}\([^()\n]{0,600}\)"
    r"|[A-Za-z][\w.\-/]{0,80})"
)
_FLAG: Final = (
    rf"(?<![^\s'\"])--?({'|'.join(name.replace('_', '[_-]') for name in _NAMES)})(?![\w\-])"
    r"(?:(?:=|[ \t]{1,4})('[^'\n]{0,600}'|\"[^\"\n]{0,600}\"|[^\s'\"\\\-][^\s'\"\\]{0,120}))?"
)
_SIZES: Final = r"--cuda[_-]?graph[_-](?:capture[_-])?sizes[= ]([\d ,]{1,2000})"
_WORDS: Final[dict[str, Value | None]] = {
    "None": None,
    "null": None,
    "True": True,
    "true": True,
    "False": False,
    "false": False,
}
_SUFFIXES: Final = {"k": 1_000, "K": 1 << 10, "m": 1_000_000, "M": 1 << 20, "g": 10**9, "G": 1 << 30}
_HUMAN: Final = r"(\d{1,9}(?:\.\d{1,6})?)([kKmMgG])\Z"
_NUMBERS: Final = r"\d{1,9}"


def pairs(text: str) -> Iterator[Setting | Sign]:
    """Settings of ``'name': value`` and ``name=value`` pairs; the first of a name counts."""
    yield from _told((found[1], found[2]) for found in re.finditer(_PAIR, text[:_LONGEST]))


def flags(text: str) -> Iterator[Setting | Sign]:
    """Settings of a command line, or of a line of one."""
    line = text[:_LONGEST]
    sizes = re.search(_SIZES, line)
    if sizes is not None:
        yield Setting("capture_sizes", [int(number) for number in re.findall(_NUMBERS, sizes[1])])
        line = line[: sizes.start()] + line[sizes.end() :]
    given = ((found[1].replace("-", "_"), found[2]) for found in re.finditer(_FLAG, line))
    yield from _told((name, value or "True") for name, value in given if value or name in _SWITCHES)


def _told(given: Iterator[tuple[str, str]]) -> Iterator[Setting | Sign]:
    seen: set[str] = set()
    for name, text in given:
        ours = _NAMES[name]
        value = _value(text)
        if value is None or ours in seen:
            continue
        seen.add(ours)
        if ours == "data_parallel_size":
            if isinstance(value, int) and value > 1:
                yield Sign("parallel", {"data_parallel_size": value})
        elif ours == "max_model_len" and value == -1:
            yield Setting(ours, "auto")
        else:
            yield Setting(ours, value)


def _value(text: str) -> Value | None:
    if text[0] in "'\"":
        text = text[1:-1]
    if not text:
        return None
    if text in _WORDS:
        return _WORDS[text]
    if text[0] == "[":
        return [int(number) for number in re.findall(_NUMBERS, text)] or None
    human = re.match(_HUMAN, text)
    if human is not None:
        return round(float(human[1]) * _SUFFIXES[human[2]])
    try:
        return int(text)
    except ValueError:
        pass
    try:
        return float(text)
    except ValueError:
        return text
