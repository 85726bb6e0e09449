"""
A metric: seconds and bytes of every state, as a text file that Prometheus' node exporter collects.

    python examples/hooks/metric.py
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from startup_fsm.testing import counting_start


class Metric:
    """Writes the file once, when the start is over, ready or not."""

    name = "metric"
    policy = "warn"  # a start is worth more than its metric

    def __init__(self, path: Path) -> None:
        self.path = path
        self.values: dict[str, float] = {}

    def after_state(self, *, state: str, snapshot: Any, **future: Any) -> None:
        self.values[f'startup_used_bytes{{state="{state}"}}'] = snapshot.total_bytes - snapshot.free_bytes

    def on_event(self, *, event: Any, **future: Any) -> None:
        if event.kind in ("state_left", "state_failed"):
            # A state that is tried again counts as one.
            name = f'startup_state_seconds{{state="{event.state}"}}'
            self.values[name] = self.values.get(name, 0) + event.duration_ns / 1e9
        if event.kind == "run_finished":
            self.values["startup_ready"] = int(event.end == "ready")
            self._write()

    def _write(self) -> None:
        # The collector may read at any time, so the file appears whole.
        half = self.path.with_suffix(".half")
        half.write_text("".join(f"{name} {value}\n" for name, value in self.values.items()), encoding="utf-8")
        half.replace(self.path)


def main(runs: str = "runs") -> None:
    path = Path("startup.prom")
    boot, engine = counting_start(journal=runs, hooks=[Metric(path)])
    boot.run(engine)
    print(path.read_text(encoding="utf-8"), end="")


if __name__ == "__main__":
    main(*sys.argv[1:])
