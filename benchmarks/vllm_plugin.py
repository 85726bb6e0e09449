"""
What the vLLM plugin does on a card: memory against the request, its own time, tokens, and what log and journal say.

    python benchmarks/vllm_plugin.py --out DIR [--only PATTERN,...] [--seconds N] [--tensor-parallel-size 2]
    python benchmarks/vllm_plugin.py --again DIR/vllm_plugin.tar.gz          (anywhere: the table once more)

Each start is a process of its own on the first cards, with random weights of an 8B Llama shape, and is named
RUNNER-UTILIZATION-PLUGIN, as in ``v1-0.995-record``. The plugin is ``none``, ``record``, or ``enforce`` twice:
``enforce-first`` has no journal to learn from and writes the one that ``enforce-next`` learns from; ``record`` has a
directory of runs of its own. ``cold`` is ``none`` once for each runner: it compiles, which takes memory of its own.
While one start runs, the next ones import; they hold no memory of the card.

Sizes in the table are MiB, in DIR/vllm_plugin.json bytes; of several cards and ranks the worst counts. The peak by NVML
is the whole card's, less what was used before. Own is the plugin's part of the start, by the journal. Log and journal
agree when outcome, state, part and first finding are equal, figures that both have are within the resolution of the
print, and the KV cache of the journal holds the tokens of the log.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import importlib
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import attrs

from startup_fsm.diff import difference
from startup_fsm.errors import StartupError
from startup_fsm.fold import RunState
from startup_fsm.memory import MIB
from startup_fsm.reading import read_starts
from startup_fsm.starts import Start
from startup_fsm.verdict import Verdict
from startup_fsm.verdicts import judge

MODEL: Final = """{
  "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16", "hidden_act": "silu",
  "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "vocab_size": 128256, "head_dim": 128,
  "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131072, "rope_theta": 500000.0,
  "rms_norm_eps": 1e-5, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": false
}
"""
#: Bytes of a token in the KV cache: K and V of 32 layers with 8 heads of 128 values, 2 bytes each.
TOKEN_BYTES: Final = 2 * 32 * 8 * 128 * 2
PROMPTS: Final = [[5 + number, 6, 7, 8] for number in range(64)]
#: Figures that log and journal have to agree about.
AGREED: Final = ("total_bytes", "requested_bytes", "weights_bytes", "graph_actual_bytes", "kv_available_bytes")

PLUGINS: Final = {"none": None, "record": "record", "enforce-first": "enforce", "enforce-next": "enforce"}
SWITCH: Final = "VLLM_USE_V2_MODEL_RUNNER"
ENVIRONMENT: Final = {
    "CUDA_DEVICE_ORDER": "PCI_BUS_ID",  # as NVML counts
    "HF_HUB_OFFLINE": "1",
    "PYTHONUNBUFFERED": "1",
    "VLLM_LOGGING_LEVEL": "INFO",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
}
#: Starts that import while another one runs.
AHEAD: Final = 3
POLL_S: Final = 0.02
#: Seconds that must be left for a start, and for one that compiles.
WARM_S, COLD_S = 30, 75
#: Seconds that importing, starting, ending after the last token, and freeing memory may take.
IMPORT_S, START_S, END_S, FREE_S = 120, 150, 12, 15

Judged = tuple[Start, Verdict]


@attrs.frozen(kw_only=True)
class Case:
    """A start: runner ``v1`` or ``v2``, share of the card, and what the plugin does."""

    runner: str
    utilization: float
    plugin: str

    @property
    def name(self) -> str:
        return f"{self.runner}-{self.utilization:g}-{self.plugin}"

    @property
    def mode(self) -> str | None:
        """What the plugin is told; None where it is off."""
        return PLUGINS.get(self.plugin)

    @property
    def runs(self) -> str:
        """The name of its directory of runs, which both starts with ``enforce`` share."""
        return f"{self.runner}-{self.utilization:g}-{self.mode}"


@attrs.frozen(kw_only=True)
class Seen:
    """A start from outside: bytes by card, ``run`` below the directory of runs, and what the start itself said."""

    ended: str
    wall_s: float
    total_bytes: list[int]
    before_bytes: list[int]
    peak_bytes: list[int]
    run: str | None
    ready_s: float | None = None
    tokens: list[list[int]] | None = None


def cases(utilizations: Sequence[float]) -> Iterator[Case]:
    for runner in ("v2", "v1"):
        yield Case(runner=runner, utilization=utilizations[0], plugin="cold")
        for utilization in utilizations:
            yield from (Case(runner=runner, utilization=utilization, plugin=plugin) for plugin in PLUGINS)


def start(folder: Path) -> None:
    """One start, in its own process: import, wait for a line, start, generate, and say what came."""
    library = importlib.import_module("vllm")
    make, sampling = library.LLM, library.SamplingParams(max_tokens=16, temperature=0.0, detokenize=False)
    (folder / "imported").touch()
    if not sys.stdin.readline():
        return
    began = time.monotonic()
    engine = make(**json.loads((folder / "asked.json").read_text()))
    ready_s = round(time.monotonic() - began, 2)
    made = engine.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], sampling)
    said = {"ready_s": ready_s, "tokens": [list(each.outputs[0].token_ids) for each in made]}
    (folder / "said.part").write_text(json.dumps(said))
    (folder / "said.part").rename(folder / "said.json")


class Cards:
    """The first cards by NVML, without a context on them; bytes by card."""

    def __init__(self, count: int) -> None:
        self._nvml: Any = importlib.import_module("pynvml")
        self._nvml.nvmlInit()
        self._cards = [self._nvml.nvmlDeviceGetHandleByIndex(index) for index in range(count)]

    def _read(self) -> list[Any]:
        return [self._nvml.nvmlDeviceGetMemoryInfo(card, version=self._nvml.nvmlMemory_v2) for card in self._cards]

    def used(self) -> list[int]:
        return [each.used for each in self._read()]

    def total(self) -> list[int]:
        """As CUDA counts: without what the driver reserves."""
        return [each.total - each.reserved for each in self._read()]


class Prepared:
    """A process that imports, and waits until it is told to start."""

    def __init__(self, case: Case, scratch: Path, model: Path, cards: int) -> None:
        self.case = case
        self._runs = scratch / "runs"
        self._folder = scratch / "starts" / case.name
        self._folder.mkdir(parents=True)
        asked = {"model": str(model), "load_format": "dummy", "skip_tokenizer_init": True, "max_model_len": 8192}
        asked |= {"gpu_memory_utilization": case.utilization, "tensor_parallel_size": cards}
        (self._folder / "asked.json").write_text(json.dumps(asked))
        environment = {key: value for key, value in os.environ.items() if not key.startswith(("STARTUP_FSM_", SWITCH))}
        environment |= ENVIRONMENT | {"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(cards)))}
        if case.runner == "v1":
            environment[SWITCH] = "0"
        if case.mode is not None:
            environment |= {"STARTUP_FSM_VLLM": case.mode, "STARTUP_FSM_RUNS": str(self._runs / case.runs)}
        with (self._folder / "log.txt").open("wb") as log:
            self._process = subprocess.Popen(
                # -P: what lies beside this file is no module for vLLM to find.
                [sys.executable, "-P", __file__, "--start", str(self._folder)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,
            )

    def run(self, cards: Cards, limit_s: float) -> Seen:
        """Let it start, look at memory until it has ended, and wait until that is free again."""
        said = self._folder / "said.json"
        wait(lambda: (self._folder / "imported").exists() or self._process.poll() is not None, IMPORT_S)
        runs, before = self._listed(), cards.used()
        assert self._process.stdin is not None
        # It may have died while it imported.
        with contextlib.suppress(BrokenPipeError), self._process.stdin as pipe:
            pipe.write(b"start\n")
        peak, ended, began, limit = before, "", time.monotonic(), time.monotonic() + limit_s
        while not ended:
            peak = [max(pair) for pair in zip(peak, cards.used(), strict=True)]
            now = time.monotonic()
            if said.exists():
                limit = min(limit, now + END_S)
            if (code := self._process.poll()) is not None:
                ended = f"exit {code}"
            elif now > limit:
                ended = "killed"
            time.sleep(POLL_S)
        wall_s = round(time.monotonic() - began, 1)
        self.end()
        wait(lambda: all(now < was + 256 * MIB for now, was in zip(cards.used(), before, strict=True)), FREE_S)
        new = sorted(self._listed() - runs)
        return Seen(
            ended=ended,
            wall_s=wall_s,
            total_bytes=cards.total(),
            before_bytes=before,
            peak_bytes=peak,
            run=str(new[-1].relative_to(self._runs)) if new else None,
            **(json.loads(said.read_text()) if said.exists() else {}),
        )

    def _listed(self) -> set[Path]:
        return set((self._runs / self.case.runs).glob("*"))

    def end(self) -> None:
        """Whatever is left of its own processes."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def wait(condition: Callable[[], bool], seconds: float) -> None:
    """Until something holds, or for so long."""
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(POLL_S)


def drive(chosen: Sequence[Case], scratch: Path, out: Path, seconds: float, count: int) -> None:
    """Run what fits into ``seconds``; after each start all that there is lies packed in ``out``."""
    began, cards = time.monotonic(), Cards(count)
    # Always in the same place: what vLLM has compiled is found again by it.
    model = Path(tempfile.gettempdir()) / "vllm_plugin_model"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(MODEL)
    waiting, prepared, warm = deque(chosen), deque[Prepared](), set[str]()
    seen: dict[str, Any] = {}
    try:
        while waiting or prepared:
            while waiting and len(prepared) < AHEAD:
                prepared.append(Prepared(waiting.popleft(), scratch, model, count))
            case, left = prepared[0].case, seconds - (time.monotonic() - began)
            if left < (WARM_S if case.runner in warm else COLD_S):
                print(f"{case.name}: not begun, {left:.0f} s are left", flush=True)
            else:
                found = prepared[0].run(cards, min(START_S, left - END_S))
                warm.add(case.runner)
                seen[case.name] = {"case": attrs.asdict(case), "seen": attrs.asdict(found)}
                (scratch / "seen.json").write_text(json.dumps(seen, indent=1))
                with tarfile.open(out / "vllm_plugin.part", "w:gz") as archive:
                    archive.add(scratch, "vllm_plugin")
                (out / "vllm_plugin.part").rename(out / "vllm_plugin.tar.gz")
                print(f"{case.name}: {found.ended} after {found.wall_s} s, ready after {found.ready_s} s", flush=True)
            prepared.popleft().end()
    finally:
        for each in prepared:
            each.end()


def judged(path: Path) -> Judged | None:
    """The last start that a path holds, as ``startup-fsm doctor`` judges it; None where there is none."""
    try:
        found = read_starts(path)[-1]
    except StartupError as error:
        print(f"{path.name}: {error}", file=sys.stderr)
        return None
    return found, judge(found.sources, source=found.source, origin=found.origin)


def rows_of(scratch: Path) -> list[dict[str, Any]]:
    """A row for each start whose files lie in a folder; sizes in bytes, None for what nothing tells."""
    if not (scratch / "seen.json").exists():
        return []
    told = json.loads((scratch / "seen.json").read_text()).values()
    every = [(Case(**each["case"]), Seen(**each["seen"])) for each in told]
    return [row_of(case, seen, scratch, every) for case, seen in every]


def row_of(case: Case, seen: Seen, scratch: Path, every: Sequence[tuple[Case, Seen]]) -> dict[str, Any]:
    log = judged(scratch / "starts" / case.name / "log.txt")
    journal = None if seen.run is None else judged(scratch / "runs" / seen.run)
    requested = min(math.ceil(total * case.utilization) for total in seen.total_bytes)
    nvml_peak = max(peak - before for peak, before in zip(seen.peak_bytes, seen.before_bytes, strict=True))
    row: dict[str, Any] = {
        "start": case.name,
        "outcome": outcome(seen, log),
        "ready_s": seen.ready_s,
        "requested_bytes": requested,
        "nvml_peak_bytes": nvml_peak,
        "nvml_above_bytes": nvml_peak - requested,
        **of_journal(journal, requested),
        "unused_bytes": None if seen.tokens is None else max(0, requested - nvml_peak),
        "kv_tokens": None if log is None else log[1].figures.get("kv_tokens"),
        "tokens": same_tokens(case, seen, every),
    }
    if log is not None and journal is not None:
        row["disagreements"], row["other_figures"] = compare(journal, log, len(seen.total_bytes))
    elif case.mode is not None:
        row["disagreements"] = ["one of them is missing"]
    return row


def outcome(seen: Seen, log: Judged | None) -> str:
    if seen.tokens is not None:
        return "ready" if seen.ended == "exit 0" else f"ready, {seen.ended}"
    said = "unreadable" if log is None else " in ".join(filter(None, (log[1].outcome, log[1].failed_state)))
    return f"no tokens, {said}, {seen.ended}"


def of_journal(journal: Judged | None, requested: int) -> dict[str, Any]:
    """The largest peak, what sized the KV cache, and the plugin's part of the time where it is largest."""
    ranks = ranks_of(journal)
    peaks = figures_of(ranks, "used_peak_bytes")
    corrected = [event for rank in ranks for _, event in rank.decisions if event.decision == "kv_corrected"]
    learned = any("run" in each.inputs for each in corrected)
    sized = "the start before" if learned else "a bound" if corrected else "vLLM"
    ends = [rank.finished[1] for rank in ranks if rank.finished is not None]
    own = [(end.bookkeeping_ns + end.syncing_ns + end.measuring_ns, end.duration_ns) for end in ends]
    return {
        "journal_peak_bytes": max(peaks, default=None),
        "journal_above_bytes": max(peaks) - requested if peaks else None,
        "kv_sized_by": sized if ranks else None,
        "own_share": max((part / whole for part, whole in own if whole), default=None),
    }


def figures_of(ranks: Sequence[RunState], name: str) -> list[int]:
    """What every rank that has a figure says it is."""
    return [int(rank.figures[name][1].value) for rank in ranks if name in rank.figures]


def ranks_of(journal: Judged | None) -> list[RunState]:
    """Of several ranks the engine's own process writes a journal too, which has no memory of a card."""
    processes = () if journal is None else journal[0].processes
    return [each.history for each in processes if each.history.rank is not None]


def compare(journal: Judged, log: Judged, cards: int) -> tuple[list[str], list[str]]:
    """What journal and log of a start disagree about, and names of other figures that differ."""
    (ours, mine), (theirs, other) = journal, log
    ends = {name: (getattr(mine, name), getattr(other, name)) for name in ("outcome", "failed_state", "part")}
    firsts = [next((each.finding.code for each in verdict.findings), None) for verdict in (mine, other)]
    figures = {each.name: (each.a, each.b) for each in difference(ours.sources, mine, theirs.sources, other).figures}
    held = {size * cards // TOKEN_BYTES for size in figures_of(ranks_of(journal), "kv_cache_bytes")}
    tokens = other.figures.get("kv_tokens")
    said = ends | {"finding": (firsts[0], firsts[1])} | {name: figures[name] for name in AGREED if name in figures}
    # A figure that the log does not print but that follows from others has the slack of all of them.
    found = {name: pair for name, pair in said.items() if pair[0] != pair[1] and name not in other.inferred}
    if tokens is not None and held and held != {tokens}:
        found["kv_tokens"] = (sorted(held), tokens)
    text = [f"{name} {a}, by the log {b}" for name, (a, b) in found.items()]
    return text, sorted(figures.keys() - set(AGREED))


def same_tokens(case: Case, seen: Seen, every: Sequence[tuple[Case, Seen]]) -> str | None:
    """Against the plain start of this runner and share; against one of another share where that did not start."""
    plain = [(each, told) for each, told in every if each.runner == case.runner and each.mode is None and each != case]
    plain = [(each, told) for each, told in plain if told.tokens is not None]
    plain.sort(key=lambda pair: (pair[0].utilization != case.utilization, pair[0].plugin != "none"))
    if seen.tokens is None or not plain:
        return None
    return f"{'as' if plain[0][1].tokens == seen.tokens else 'NOT as'} {plain[0][0].name}"


def show(rows: Sequence[dict[str, Any]]) -> None:
    """As Markdown, sizes in MiB."""
    names = [name for name in dict.fromkeys(name for row in rows for name in row) if name != "other_figures"]
    if not names:
        return
    print("| " + " | ".join(name.removesuffix("_bytes").replace("_", " ") for name in names) + " |")
    print("|" + " --- |" * len(names))
    for row in rows:
        print("| " + " | ".join(cell(name, row.get(name)) for name in names) + " |")


def cell(name: str, value: Any) -> str:
    if value is None:
        return ""
    if name.endswith("_bytes"):
        return f"{value / MIB:{'+' if 'above' in name else ''},.0f}"
    if name == "disagreements":
        return "; ".join(value) or "none"
    if name == "own_share":
        return f"{value:.2%}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("vllm_plugin"), help="directory of the results")
    parser.add_argument("--again", type=Path, help="packed results that are judged again; nothing is started")
    parser.add_argument("--only", default="*", help="names of starts, or patterns such as v2-*")
    parser.add_argument("--utilizations", default="0.9,0.99,0.995")
    parser.add_argument(
        "--seconds", type=float, default=math.inf, help="a start that does not fit any more is not begun"
    )
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--start", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.start is not None:
        start(given.start)
        return
    with tempfile.TemporaryDirectory(prefix="vllm_plugin_") as directory:
        scratch = Path(directory)
        if given.again is not None:
            shutil.unpack_archive(given.again, scratch, filter="data")
            show(rows_of(scratch / "vllm_plugin"))
            return
        given.out.mkdir(parents=True, exist_ok=True)
        every = cases([float(each) for each in given.utilizations.split(",")])
        chosen = [case for case in every if any(fnmatch.fnmatch(case.name, each) for each in given.only.split(","))]
        drive(chosen, scratch, given.out, given.seconds, given.tensor_parallel_size)
        rows = rows_of(scratch)
    (given.out / "vllm_plugin.json").write_text(json.dumps(rows, indent=1) + "\n")
    show(rows)


if __name__ == "__main__":
    main()
