"""
Words for hostile logs: lines as the grammars know them, made from their patterns, and pieces that break readers.

Nothing here is written twice: a row that is added to a grammar is fuzzed from then on.
"""

from __future__ import annotations

import ast
import functools
import random
import re
import string
from collections.abc import Iterable
from pathlib import Path
from re import _constants as kinds  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any, Final

import startup_fsm
from startup_fsm.importers.facts import Row
from startup_fsm.importers.general import GENERAL
from startup_fsm.importers.sglang import SGLANG
from startup_fsm.importers.torch_alone import TORCH
from startup_fsm.importers.vllm import VLLM

ROWS: Final[tuple[Row, ...]] = (*VLLM.rows, *SGLANG.rows, *GENERAL, *TORCH.rows)
_IMPORTERS: Final = Path(startup_fsm.__file__).parent / "importers"

_CATEGORIES: Final = {
    kinds.CATEGORY_DIGIT: string.digits,
    kinds.CATEGORY_NOT_DIGIT: "abc -",
    kinds.CATEGORY_SPACE: " ",
    kinds.CATEGORY_NOT_SPACE: "abcXYZ019._/",
    kinds.CATEGORY_WORD: "abcTPxyz0129_",
    kinds.CATEGORY_NOT_WORD: " -.",
}
_ANY: Final = "abc xyz 019 .,:/=-"


def matching(pattern: str, draw: random.Random) -> str:
    """A text that mostly matches a pattern; what looks ahead or behind is passed over."""
    return _made(_parsed(pattern), draw)


@functools.cache
def _parsed(pattern: str) -> Any:
    return parser.parse(pattern)


def _made(items: Any, draw: random.Random) -> str:
    return "".join(_one(kind, value, draw) for kind, value in items)


def _one(kind: Any, value: Any, draw: random.Random) -> str:
    if kind is kinds.LITERAL:
        return chr(value)
    if kind in (kinds.ANY, kinds.NOT_LITERAL):
        return draw.choice(_ANY)
    if kind is kinds.IN:
        return _of_set(value, draw)
    if kind in (kinds.MAX_REPEAT, kinds.MIN_REPEAT, kinds.POSSESSIVE_REPEAT):
        least, most, inner = value
        most = min(most, least + (200 if draw.random() < 0.06 else 4))
        return "".join(_made(inner, draw) for _ in range(draw.randint(least, most)))
    if kind is kinds.SUBPATTERN:
        return _made(value[-1], draw)
    if kind is kinds.ATOMIC_GROUP:
        return _made(value, draw)
    return _made(draw.choice(value[1]), draw) if kind is kinds.BRANCH else ""


def _of_set(items: list[tuple[Any, Any]], draw: random.Random) -> str:
    if items[0][0] is kinds.NEGATE:
        left_out = {chr(value) for kind, value in items if kind is kinds.LITERAL}
        is_space_out = any(kind is kinds.CATEGORY and value is kinds.CATEGORY_SPACE for kind, value in items)
        allowed = [each for each in _ANY if each not in left_out and not (is_space_out and each == " ")]
        return draw.choice(allowed or ["a"])
    kind, value = draw.choice(items)
    if kind is kinds.LITERAL:
        return chr(value)
    if kind is kinds.RANGE:
        return chr(draw.randint(*value))
    return draw.choice(_CATEGORIES.get(value, "a"))


@functools.cache
def texts() -> tuple[str, ...]:
    """Every text that the importers hold: words of exceptions, names of functions, pieces of patterns."""
    found: set[str] = set()
    for path in sorted(_IMPORTERS.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        told = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        found.update(
            node.value
            for node in ast.walk(tree)
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in told
        )
    return tuple(sorted(each for each in found if 2 < len(each) < 2_000))


def known_text(draw: random.Random) -> str:
    """One of these texts, or what matches it."""
    text = draw.choice(texts())
    try:
        return matching(text, draw) if draw.random() < 0.5 else text
    except re.error:
        return text


def message(draw: random.Random) -> str:
    """What one of the rows looks for."""
    row = draw.choice(ROWS)
    made = matching(row.pattern, draw)
    if row.anchor in made or draw.random() < 0.1:
        return made
    return row.anchor + made if draw.random() < 0.7 else made + row.anchor


_LEVELS: Final = ("INFO", "INFO", "WARNING", "ERROR", "CRITICAL", "DEBUG")
_FILES: Final = ("core.py", "gpu_worker.py", "model_runner.py", "kv_cache_utils.py", "api_server.py", "monitor.py")


def label(draw: random.Random) -> str:
    """A rank as engines print one; now and then as none does."""
    tp, few = draw.choice((0, 1, 2, 7, 63)), draw.randrange(4)
    usual = ("", "", f" TP{tp}", f" DP{few} TP{tp}", f" PP{few} TP{tp} EP{tp}", f" rank={tp}")
    return draw.choice(usual if draw.random() < 0.95 else HOSTILE_LABELS)


HOSTILE_LABELS: Final = (
    *(" TP999999999999", " TP-1", " TP\u0663", " DP0 DP0 TP1 TP2", " TP0 " * 9, " rank=9999999", "_TP999999999999"),
    *(" ../../TP1", " TP1/../..", " <b>TP1</b>", " TP1\x1b[31m", " TP00000", " EP999999", " \u202eTP1"),
)


def prefix(draw: random.Random) -> str:
    """What stands before a message."""
    clock = f"{draw.randint(1, 12):02}-{draw.randint(1, 31):02} {draw.randrange(24):02}:{draw.randrange(60):02}:30"
    rank, pid = label(draw), draw.choice((1, 77, 4321, 999_999_999_999, 10**30))
    level, file = draw.choice(_LEVELS), draw.choice(_FILES)
    worker = draw.choice(("Worker", "VllmWorker", "EngineCore", "APIServer", "RayWorkerWrapper", "Worker_DP0"))
    joined = "".join(f"_{each}" for each in rank.split())
    return draw.choice(
        (
            f"{level} {clock} [{file}:{draw.randrange(3000)}] ",
            f"({worker}{rank} pid={pid}) {level} {clock} [{file}:12] ",
            f"({worker}{joined} pid={pid}) {level} {clock} [{file}:3] ",
            f"({worker}{rank} pid={pid}) ",
            f"({worker}{rank} pid={pid}, ip=192.0.2.7) {level} {clock} [{file}:99] ",
            f"[2026-{clock}{rank}] ",
            f"[2026-{clock}{rank}] ",
            f"[rank{draw.choice((0, 1, 7, 123456))}]: ",
            f"2026-{clock},123 - {level} - {file}:7 - ",
            f"[{level[0]}1130 20:49:06.392522340 socket.cpp:207] ",
            f"{level}:     ",
            "",
            "",
        )
    )


def line(draw: random.Random) -> str:
    """A line that says something."""
    return prefix(draw) + message(draw)


def traceback(draw: random.Random, depth: int = 3) -> list[str]:
    """A chain of exceptions, all its lines with one prefix or none."""
    before, lines = prefix(draw), []
    for at in range(draw.randint(1, depth)):
        if at:
            lines += ["", draw.choice(_CHAINS), ""]
        lines.append("Traceback (most recent call last):")
        for _ in range(draw.randint(0, 12)):
            path = draw.choice(("vllm/v1/worker/gpu_worker.py", "sglang/srt/x.py", "torch/cuda/graphs.py", "a.py"))
            name = known_text(draw).replace("\n", " ") if draw.random() < 0.6 else "load_model"
            lines += [f'  File "/usr/lib/{path}", line {draw.randrange(9999)}, in {name}', "    self.run()"]
        kind = draw.choice(_ERRORS)
        lines.append(kind if draw.random() < 0.05 else f"{kind}: {draw.choice((known_text, message, sentence))(draw)}")
    return [before + each for each in lines]


_CHAINS: Final = (
    "The above exception was the direct cause of the following exception:",
    "During handling of the above exception, another exception occurred:",
)
_ERRORS: Final = (
    *("RuntimeError", "ValueError", "torch.OutOfMemoryError", "torch.cuda.OutOfMemoryError", "KeyboardInterrupt"),
    *("AssertionError", "MemoryError", "TimeoutError", "EOFError", "Exception", "ray.exceptions.OutOfMemoryError"),
)


def sentence(draw: random.Random) -> str:
    """The sentence of an out-of-memory, as torch writes it."""
    gib = (f"{draw.choice((0, 0.02, 1.5, 79.1, 139.8, 17179869184.0)):.2f} GiB" for _ in range(9))
    return (
        f"CUDA out of memory. Tried to allocate {next(gib)}. GPU {draw.randrange(8)} has a total capacity of {next(gib)} "
        f"of which {next(gib)} is free. Process {draw.choice((7, 4321, 10**11))} has {next(gib)} memory in use. Including "
        f"non-PyTorch memory, this process has {next(gib)} memory in use. Of the allocated memory {next(gib)} is allocated "
        f"by PyTorch, with {next(gib)} allocated in private pools (e.g., CUDA Graphs), and {next(gib)} is reserved by "
        "PyTorch but unallocated."
    )


def synthetic(draw: random.Random, lines: int) -> list[str]:
    """A log of lines that the grammars know, in no order."""
    found: list[str] = []
    while len(found) < lines:
        if draw.random() < 0.05:
            found += traceback(draw)
        else:
            found.append(line(draw) if draw.random() < 0.9 else prefix(draw) + known_text(draw))
    return found


def settings(draw: random.Random) -> str:
    """A banner whose settings have hostile values."""
    names = (
        "gpu_memory_utilization",
        "max_model_len",
        "max_num_seqs",
        "tensor_parallel_size",
        "cudagraph_capture_sizes",
    )
    names += (
        "kv_cache_memory_bytes",
        "enforce_eager",
        "mem_fraction_static",
        "quantization",
        "tp_size",
        "kv_cache_dtype",
    )
    pairs: Iterable[tuple[str, str]] = [(name, draw.choice(HOSTILE_VALUES)) for name in draw.choices(names, k=8)]
    if draw.random() < 0.4:
        return "server_args=ServerArgs(" + ", ".join(f"{name}={value}" for name, value in pairs) + ")"
    if draw.random() < 0.3:
        return "vllm serve m " + " ".join(f"--{name.replace('_', '-')} {value}" for name, value in pairs)
    return "non-default args: {" + ", ".join(f"'{name}': {value}" for name, value in pairs) + "}"


HOSTILE_NUMBERS: Final = (
    *("0", "-0", "-1", "0.0", "-0.00", "nan", "NaN", "inf", "-inf", "1e999", "-1e999", "1e-999", "0x10", "1_000"),
    *("9223372036854775807", "9223372036854775808", "18446744073709551615", "18446744073709551616", "999999999999"),
    *("1" + "0" * 400, "9" * 19, "9" * 20, "0." + "9" * 300, "1,234,567", "1,2,3", "1.234.567", "1,5", "007", "."),
    *("\u0661\u0662", "\uff11\uff12", "\u00b2", "\u2460", "\u096a.\u0968", "1\u00a0000", "1\u202f000", "--1", "+5"),
)
HOSTILE_VALUES: Final = (
    *HOSTILE_NUMBERS,
    *("None", "True", "''", "'" + "x" * 500 + "'", "[]", "[1, 2, 99999999999999999999]", "[" + "1, " * 5000 + "1]"),
    *("{'a': {'b': [1]}}", "'<script>alert(1)</script>'", "'../../../etc/passwd'", "'@everyone'", "'\x1b[31mred'"),
    *(
        "object()",
        "1k",
        "99G",
        "999999999.9G",
        "'a\\'b'",
        '"`code`"',
        "'\u202e\u2066x'",
        "__import__('os')",
        "'\\ud800'",
    ),
)

#: Numbers as a log prints them.
NUMBERS: Final = re.compile(rb"(\d[\d,.]*)")
