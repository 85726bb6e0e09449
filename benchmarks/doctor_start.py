"""
How long ``startup-fsm doctor JOURNAL`` takes as a whole process, against importing the libraries that it stands on.

    python benchmarks/doctor_start.py [--runs 15]

Both are run in turns, so that whatever else the machine does falls on both. Printed: medians in ms, their ratio, and
the ratio that is promised.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

#: Most that the doctor may take, in units of the imports alone.
LIMIT: Final = 2.0

#: What the doctor stands on.
IMPORTS: Final = "import attrs, cattrs, orjson, rich.console, rich.table, cyclopts"

_START: Final = """
import sys
from startup_fsm.testing import counting_start
boot, engine = counting_start(engine={"sizes": range(1, 52)}, journal=sys.argv[1])
boot.run(engine)
print(boot.path)
"""


def made_journal(directory: str) -> Path:
    """The journal of a start of ten states and 51 graphs."""
    ran = subprocess.run([sys.executable, "-c", _START, directory], check=True, capture_output=True, text=True)
    return Path(ran.stdout.strip())


def seconds(command: list[str]) -> float:
    """How long one process takes, from its start to its end."""
    before = time.perf_counter()
    ran = subprocess.run(command, check=False, capture_output=True)
    taken = time.perf_counter() - before
    if ran.returncode != 0:
        raise SystemExit(ran.stderr.decode())
    return taken


def measured(journal: Path, runs: int) -> tuple[float, float]:
    """Medians in seconds: the doctor, and the imports."""
    doctor = [sys.executable, "-m", "startup_fsm", "doctor", str(journal)]
    imports = [sys.executable, "-c", IMPORTS]
    both = [(seconds(doctor), seconds(imports)) for _ in range(runs + 1)][1:]
    return statistics.median(one for one, _ in both), statistics.median(other for _, other in both)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=15)
    runs = parser.parse_args().runs
    with tempfile.TemporaryDirectory() as directory:
        doctor, imports = measured(made_journal(directory), runs)
    sys.stdout.write(
        f"doctor   {1000 * doctor:7.1f} ms\n"
        f"imports  {1000 * imports:7.1f} ms\n"
        f"ratio    {doctor / imports:7.2f}  (at most {LIMIT}, median of {runs})\n"
    )


if __name__ == "__main__":
    main()
