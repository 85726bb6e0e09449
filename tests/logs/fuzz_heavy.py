"""
Logs of many megabytes that try to fill the memory of a reader: whatever it keeps, there is too much of it.

    python -m tests.logs.fuzz_heavy [--size 20] [NAME ...]

Each is read in a process of its own; its peak of resident memory counts, and its processor time.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import attrs

#: Most memory of the process, in MB, and most seconds of processor time for each MB of log.
LIMIT_MB: Final = 150
LIMIT_S: Final = 2.0

_READ: Final = """
import sys
from startup_fsm.errors import JournalError
from startup_fsm.reading import read_starts
from startup_fsm.reports.markdown import markdown_pages
from startup_fsm.verdict import report
from startup_fsm.verdicts import judge
import orjson
try:
    starts = read_starts(sys.argv[1])
except JournalError as error:
    print(error)
else:
    verdicts = [judge(each.sources, source=each.source, origin=each.origin) for each in starts]
    print(len(starts), len(orjson.dumps(report(verdicts))), len(markdown_pages(verdicts)))
# What the kernel says of a child that has ended counts the memory of its parent too.
print(open("/proc/self/status").read().split("VmHWM:")[1].split()[0])
"""

_CLOCK: Final = "INFO 01-02 03:04:05 [a.py:1]"


def _counted(line: str) -> Iterator[str]:
    number = 0
    while True:
        yield line.replace("%", str(number))
        number += 1


def _one_line() -> Iterator[str]:
    while True:
        yield "(EngineCore pid=7) Loading safetensors checkpoint shards:  50% "


def _bars() -> Iterator[str]:
    return _counted("(EngineCore pid=7) Capturing CUDA graphs: %/9\r")


def _crash_loop() -> Iterator[str]:
    return _counted(
        f"(APIServer pid=%) {_CLOCK} vLLM API server version 0.11.%\n"
        f"(EngineCore pid=%) {_CLOCK} Starting to load model %\n(EngineCore pid=%) RuntimeError: CUDA error %\n"
    )


def _ranks() -> Iterator[str]:
    return _counted(f"(Worker_TP% pid=%) {_CLOCK} Model loading took 1.% GiB and 1.0 seconds\n")


def _ranks_that_fail() -> Iterator[str]:
    return _counted(f"(Worker_TP% pid=%) ERROR 01-02 03:04:05 [a.py:1] torch.OutOfMemoryError: {'x' * 300} %\n")


def _figures() -> Iterator[str]:
    return _counted(f"(EngineCore pid=7) {_CLOCK} Available KV cache memory: 1.% GiB\n")


def _figures_of_ranks() -> Iterator[str]:
    for number, line in enumerate(_figures()):
        yield line.replace("EngineCore", f"Worker_TP{number % 4_000}")


def _states() -> Iterator[str]:
    return _counted(
        f"(EngineCore pid=7) {_CLOCK} Starting to load model %\n(EngineCore pid=7) {_CLOCK} Model loading took 1 GiB and 1 s\n"
    )


def _frames_of_ranks() -> Iterator[str]:
    """Tracebacks of thousands that never end, and news in between, without which nobody would read on."""
    number = 0
    while True:
        rank = number % 4_096
        if number < 4_096:
            yield f"(Worker_TP{rank} pid=1) Traceback (most recent call last):\n"
        yield f'(Worker_TP{rank} pid=1)   File "f{number}", line 1, in g{number}\n'
        if number % 1_000 == 0:
            yield f"(EngineCore pid=7) {_CLOCK} Available KV cache memory: 1.{number} GiB\n"
        number += 1


def _chain() -> Iterator[str]:
    yield "Traceback (most recent call last):\n" + "".join(f'  File "f{at}", line 1, in g{at}\n' for at in range(390))
    yield from _counted(
        "ValueError: %\n\nThe above exception was the direct cause of the following exception:\n\n"
        'Traceback (most recent call last):\n  File "f%", line 1, in g%\n'
    )


def _halves() -> Iterator[str]:
    return _counted("2026-01-02T03:04:05.678901234Z stdout P half % of a line\n")


def _halves_of_json() -> Iterator[str]:
    text = json.dumps({"log": "x" * 20_000, "stream": "stderr"})
    while True:
        yield f"{text}\n"


def _json_of_lines() -> Iterator[str]:
    text = json.dumps({"log": "\n" * 30_000, "stream": "stderr"})
    while True:
        yield f"{text}\n"


def _json_of_nothing() -> Iterator[str]:
    name = "vllm." + "a" * 120
    fields = {"levelname": "ERROR", "message": "x" + "\n" * 30_000, "name": name, "asctime": "2026-01-02 03:04:05"}
    text = json.dumps({**fields, "processName": "P" * 128, "process": 10**18})
    while True:
        yield f"{text}\n"


def _deep_json() -> Iterator[str]:
    while True:
        yield '{"log":' * 900 + "[" * 100 + "]" * 100 + "}" * 900 + "\n"


def _settings() -> Iterator[str]:
    sizes = ", ".join(map(str, range(1, 900)))
    return _counted(f"{_CLOCK} non-default args: {{'max_model_len': %, 'cudagraph_capture_sizes': [{sizes}]}}\n")


def _signs() -> Iterator[str]:
    return _counted(f"(EngineCore pid=7) {_CLOCK} Worker proc VllmWorker-% died unexpectedly (exit code: -%)\n")


def _tenants() -> Iterator[str]:
    many = " ".join(f"Process {at} has 1.00 GiB memory in use." for at in range(90))
    return _counted(f"CUDA out of memory. Tried to allocate %.00 GiB. {many}\n")


def _speakers() -> Iterator[str]:
    return _counted("(RayWorkerWrapper pid=%, ip=192.0.2.%) ERROR 01-02 03:04:05 [a.py:1] ValueError: x\n")


def _banners() -> Iterator[str]:
    return _counted(f"(APIServer_% pid=%) {_CLOCK} vLLM API server version 0.11.%\n")


def _marks() -> Iterator[str]:
    return _counted("startup_fsm|0|run%|p%|1|%|1|2|0000000000000000|00000000|{'v':1|\n")


#: By name.
HEAVY: Final[dict[str, Callable[[], Iterator[str]]]] = {
    make.__name__[1:]: make
    for make in (
        *(_one_line, _bars, _crash_loop, _ranks, _ranks_that_fail, _figures, _figures_of_ranks, _states),
        *(
            _frames_of_ranks,
            _chain,
            _halves,
            _halves_of_json,
            _json_of_lines,
            _json_of_nothing,
            _deep_json,
            _settings,
            _signs,
        ),
        *(_tenants, _speakers, _banners, _marks),
    )
}


@attrs.frozen
class Weighed:
    """What reading took: MB of resident memory, seconds of processor time, and what was said at the end."""

    peak_mb: float
    seconds: float
    said: str


def write(name: str, path: Path, size: int) -> None:
    """A log of ``size`` bytes or a little more."""
    with path.open("w", encoding="utf-8", newline="") as file:
        written = 0
        for piece in HEAVY[name]():
            written += file.write(piece)
            if written >= size:
                return


def weigh(path: Path) -> Weighed:
    """Read a log in a new process, judge it and write its views."""
    with tempfile.TemporaryFile() as out:
        process = subprocess.Popen([sys.executable, "-c", _READ, str(path)], stdout=out, stderr=subprocess.STDOUT)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        said = out.read().decode("utf-8", "replace").strip()
    assert process.returncode == 0, said[-2_000:]
    said, _, peak = said.rpartition("\n")
    return Weighed(int(peak) / 1_024, usage.ru_utime + usage.ru_stime, said[-200:])


def main() -> int:
    """All of them, or those that are named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=list(HEAVY), metavar="NAME")
    parser.add_argument("--size", type=int, default=20, metavar="MB")
    given = parser.parse_args()
    # Should one of them fill the memory after all, it ends and not the machine.
    resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
    is_good = True
    with tempfile.TemporaryDirectory(prefix="fuzz-") as directory:
        path = Path(directory) / "heavy.log"
        for name in given.names:
            write(name, path, given.size * 1_000_000)
            found = weigh(path)
            is_light = found.peak_mb < LIMIT_MB and found.seconds < LIMIT_S * given.size
            is_good = is_good and is_light
            verdict = "" if is_light else "  TOO MUCH"
            print(f"{name:18} {found.peak_mb:6.0f} MB {found.seconds:6.1f} s  {found.said}{verdict}", flush=True)
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
