"""The command line: exit codes, JSON, errors as two lines, and what goes where."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import orjson
import pytest

from startup_fsm.cli import main
from startup_fsm.engines.faults import FAULTS
from startup_fsm.findings import SETTINGS
from startup_fsm.plan import PLANS
from startup_fsm.testing import counting_start

ROOT = Path(__file__).parents[2]
READING = ["doctor", "time", "blame", "verify"]

#: Settings that advice may name and that a simulated device of one process cannot have.
ELSEWHERE = {
    "mem_fraction_static",
    "chunked_prefill_size",
    "max_running_requests",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "device_selection",
    "kv_cache_dtype",
    "quantization",
    "lora",
    "speculative",
    "other_process",
    "engine_version",
    "cpu_kv_space",
    "host_memory",
    "none",
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with one run that is ready."""
    directory = tmp_path_factory.mktemp("runs")
    boot, engine = counting_start(journal=directory)
    boot.run(engine)
    return directory


def journal_of(runs: Path) -> Path:
    """The only journal of a directory of runs."""
    (path,) = runs.glob("*/*.jsonl")
    return path


def changed(path: Path, to: Path, **payloads: dict[str, Any] | None) -> Path:
    """A journal with other payloads by kind; None leaves those events and all after the first of them out."""
    kept = []
    for line in path.read_bytes().splitlines():
        data = orjson.loads(line)
        if data["kind"] in payloads:
            change = payloads[data["kind"]]
            if change is None:
                break
            data["payload"] |= change
        kept.append(orjson.dumps(data) + b"\n")
    to.write_bytes(b"".join(kept))
    return to


def process(*arguments: str, cwd: Path | None = None, **options: Any) -> subprocess.CompletedProcess[str]:
    """The real command line in a process of its own."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "startup_fsm", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd, env=environment, **options)


def test_doctor(runs: Path, capsys: pytest.CaptureFixture[str]):
    """A start that is ready: exit code 0, the verdict on stdout, nothing on stderr."""
    assert main(["doctor", str(runs)]) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("ready\n")
    assert "Where every byte was" in captured.out
    assert captured.err == ""


def test_doctor_json(runs: Path, capsys: pytest.CaptureFixture[str]):
    """The JSON of the doctor keeps its schema."""
    jsonschema = pytest.importorskip("jsonschema")
    schema = json.loads((ROOT / "tests" / "doctor.schema.json").read_text(encoding="utf-8"))

    assert main(["doctor", str(runs), str(runs), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    jsonschema.validate(answer, schema)
    assert [run["outcome"] for run in answer["runs"]] == ["ready", "ready"]
    assert answer["main"] == 1


def test_doctor_says_what_the_other_views_cannot_see(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """What a source cannot tell is said by the doctor as by the others: starts of a crash loop that were left out."""
    log = tmp_path / "loop.log"
    start = "INFO 01-15 10:00:00 core.py:1] Initializing a V1 LLM engine (v0.10.2) with config: model='m'\nKilled\n"
    log.write_text(start * 230)

    main(["doctor", str(log), "--json"])
    first = json.loads(capsys.readouterr().out)["runs"][0]["unseen"]
    main(["time", str(log), "--json"])
    assert set(json.loads(capsys.readouterr().out)["starts"][0]["unseen"]) <= set(first)
    assert any("30 earlier starts in this log were left out" in each for each in first)
    assert len(first) == len(set(first))


def test_doctor_of_a_failed_start(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Not ready, whatever the cause: exit code 3; with several starts the last that failed decides."""
    cut = changed(journal_of(runs), tmp_path / "cut", budget_computed=None)

    assert main(["doctor", str(cut), str(runs)]) == 3
    assert capsys.readouterr().out.startswith("incomplete in size_kv\n")


def test_doctor_of_a_ready_start_with_an_error(runs: Path, tmp_path: Path):
    """Ready, with a finding of severity error: exit code 2."""
    finding = {"code": "verify.replay_differs", "severity": "error", "state": "verify", "message": "it differs"}
    wrong = changed(journal_of(runs), tmp_path / "wrong", check_judged={"findings": [finding]})

    assert main(["doctor", str(wrong)]) == 2


def test_what_can_be_read_is_shown(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """One bad path among several: it is an error, the others are answered, the exit code is 4."""
    assert main(["doctor", str(tmp_path / "none"), str(runs)]) == 4
    captured = capsys.readouterr()
    assert captured.out.startswith("ready\n")
    assert captured.err.startswith(f"error: {tmp_path / 'none'}: No such file or directory\nhint: ")


def test_json_of_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """A program gets an answer even where there is none."""
    assert main(["doctor", "--json", str(tmp_path)]) == 4
    assert json.loads(capsys.readouterr().out) == {"schema": 1, "main": None, "runs": []}


@pytest.mark.parametrize("verb", READING)
def test_every_reading_verb_has_json(verb: str, runs: Path, capsys: pytest.CaptureFixture[str]):
    """The same as data, under a schema number."""
    assert main([verb, str(runs), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["schema"] == 1
    if verb != "doctor":
        (start,) = answer["starts"]
        assert start["processes"][0]["process"] == "rank 0"
        assert isinstance(start["unseen"], list)


@pytest.mark.parametrize("verb", READING)
def test_every_page_fits_and_says_what_it_cannot_see(verb: str, runs: Path, capsys: pytest.CaptureFixture[str]):
    """80 columns, no colour in a pipe, and a section of what is not seen."""
    main([verb, str(journal_of(runs))])
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    assert "\x1b" not in out
    assert verb == "doctor" or "Not seen" in out


def test_times_add_up(runs: Path, capsys: pytest.CaptureFixture[str]):
    """States and what lies outside them are the whole start."""
    main(["time", str(runs), "--json"])
    (times,) = json.loads(capsys.readouterr().out)["starts"][0]["processes"]
    inside = sum(state["duration_ns"] for state in times["states"])
    assert inside + times["unattributed_ns"] == times["total_ns"]


def test_costs_add_up(runs: Path, capsys: pytest.CaptureFixture[str]):
    """The rows of the ranking by time are the whole start, to the ns."""
    main(["blame", str(runs), "--json"])
    (blame,) = json.loads(capsys.readouterr().out)["starts"][0]["processes"]
    main(["time", str(runs), "--json"])
    (times,) = json.loads(capsys.readouterr().out)["starts"][0]["processes"]
    assert sum(each["ns"] for each in blame["time"]) == times["total_ns"]
    assert blame["bytes"] == sorted(blame["bytes"], key=lambda each: -abs(each["delta_bytes"]))


def test_verify(runs: Path, capsys: pytest.CaptureFixture[str]):
    """A journal follows its own plan, and today's checks say what they said."""
    assert main(["verify", str(runs)]) == 0
    assert "today's checks say the same" in capsys.readouterr().out


def test_divergence(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """An edge that the plan does not have: exit code 5, the page, and one sentence with the place."""
    data = [orjson.loads(line) for line in journal_of(runs).read_bytes().splitlines()]
    entries = [each for each in data if each["kind"] == "state_entered"]
    entries[3]["payload"]["edge"] = "elsewhere"
    path = tmp_path / "changed"
    path.write_bytes(b"".join(orjson.dumps(each) + b"\n" for each in data))

    assert main(["verify", str(path)]) == 5
    captured = capsys.readouterr()
    assert f"seq {entries[3]['seq']}: " in captured.out
    assert captured.err.startswith(f"error: seq {entries[3]['seq']}: ")
    assert "\nhint: " in captured.err


def test_worse_today(runs: Path, tmp_path: Path):
    """Facts that today's checks find an error in: exit code 2, whatever was judged then."""
    path = changed(journal_of(runs), tmp_path / "held", pool_released={"left_bytes": 4096})

    assert main(["verify", str(path)]) == 2


def test_plans(capsys: pytest.CaptureFixture[str]):
    """Plans are listed by name."""
    assert main(["plan"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in PLANS)
    assert main(["plan", "--json"]) == 0
    assert [each["name"] for each in json.loads(capsys.readouterr().out)["plans"]] == list(PLANS)


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_as_mermaid(name: str, capsys: pytest.CaptureFixture[str]):
    """A plan is drawn as Mermaid."""
    assert main(["plan", name, "--retries", "2"]) == 0
    assert capsys.readouterr().out.startswith("stateDiagram-v2\n    [*] --> init_device\n")


def test_the_way_of_a_start(runs: Path, capsys: pytest.CaptureFixture[str]):
    """The plan of a journal is drawn with the edges that were taken."""
    assert main(["plan", str(runs)]) == 0
    out = capsys.readouterr().out
    assert "init_device --> load_weights: advance ✓" in out
    assert "verify --> ready: advance ✓" in out
    assert "capture_graphs --> failed: fail\n" in out


@pytest.mark.parametrize(
    ("arguments", "message", "hint"),
    [
        (["doctr"], 'Unknown command "doctr". Did you mean "doctor"?', "startup-fsm --help"),
        (["doctor"], "doctor needs a PATH", "startup-fsm doctor runs/"),
        (["doctor", "--jsno"], "no such option: --jsno", "./--jsno"),
        (["time"], 'Command "time" parameter PATH requires an argument', "startup-fsm time --help"),
        (["demo", "--seed", "x"], 'unable to convert "x" into int', "startup-fsm demo --help"),
        (["demo", "--nope"], "Unknown option: --nope", "startup-fsm demo --help"),
        (["demo", "--device", "tpu"], "device: 'tpu' is none of", "--device sim"),
        (["demo", "--capture-sizes", "1,x"], "capture_sizes: '1,x' are no sizes", "1,2,4,8"),
        (["demo", "--graph-estimate", "much"], "graph_estimate: 'much' is none of measure, none, BYTES", "digits"),
        (["plan", "throwawy"], "'throwawy' is neither a plan nor a path", "throwaway"),
        (["run", "nothing"], "'nothing' is no MODULE:FACTORY", "MODULE:FACTORY"),
    ],
)
def test_usage(arguments: list[str], message: str, hint: str, capsys: pytest.CaptureFixture[str]):
    """A mistake in the arguments: exit code 1, one sentence, a hint, nothing on stdout, no traceback."""
    assert main(arguments) == 1
    captured = capsys.readouterr()
    error, said = captured.err.splitlines()
    assert captured.out == ""
    assert error.startswith("error: ")
    assert message in error
    assert said.startswith("hint: ")
    assert hint in said


def test_faults_are_listed(capsys: pytest.CaptureFixture[str]):
    """Every fault with what it does."""
    assert main(["demo", "--list-faults"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in FAULTS)


def test_every_setting_of_advice_is_an_option(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    """What advice names can be typed as it stands."""
    monkeypatch.setenv("COLUMNS", "200")
    main(["demo", "--help"])
    out = capsys.readouterr().out
    assert [name for name in SETTINGS if name not in ELSEWHERE and f"--{name.replace('_', '-')}" not in out] == []


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["doctor", "--help"]])
def test_talk_about_itself(arguments: list[str], capsys: pytest.CaptureFixture[str]):
    """Help and version are data: stdout, exit code 0."""
    assert main(arguments) == 0
    captured = capsys.readouterr()
    assert "startup-fsm" in captured.out
    assert captured.err == ""


ENGINES = """
import time
from startup_fsm.devices.simulated import SimulatedDevice
from startup_fsm.engines.counting import CountingEngine
from startup_fsm.memory import GIB

class Slow(CountingEngine):
    def capture(self, step, size):
        if step.state == "capture_graphs":
            time.sleep(60)
        super().capture(step, size)

class Wrong(CountingEngine):
    def load_weights(self, step):
        raise ValueError("no such weights")

def of(kind):
    device = SimulatedDevice(4 * GIB)
    return kind(device=device), {"device": device}

def good(): return of(CountingEngine)
def slow(): return of(Slow)
def wrong(): return of(Wrong)
def number(): return 3
def raises(): raise RuntimeError("no licence")
def options(): return good()[0], {"colour": "red"}
nothing = 3
"""


@pytest.fixture
def engines(tmp_path: Path) -> Path:
    """A directory with a module of engines."""
    (tmp_path / "engines_of_mine.py").write_text(ENGINES)
    (tmp_path / "broken_of_mine.py").write_text("import not_there_at_all\n")
    return tmp_path


def test_run(engines: Path):
    """An engine from the current directory starts; states, budget, verdict and journal are on stdout."""
    ran = process("run", "engines_of_mine:good", cwd=engines)

    assert ran.returncode == 0, ran.stderr
    assert ran.stderr == ""
    for text in ("capture_throwaway", "The budget of the KV cache", "Where every byte was", "\nready\n"):
        assert text in ran.stdout
    journal = ran.stdout.splitlines()[-1].strip()
    assert (engines / journal).is_file()
    assert process("doctor", str(engines / "runs")).returncode == 0


def test_run_that_fails(engines: Path):
    """A failed start is a verdict, not a traceback."""
    ran = process("run", "engines_of_mine:wrong", "--json", cwd=engines)
    (run,) = json.loads(ran.stdout)["runs"]

    assert ran.returncode == 3
    assert (run["outcome"], run["failed_state"], run["findings"][0]["code"]) == (
        "error",
        "load_weights",
        "state.raised",
    )
    assert "Traceback" not in ran.stderr


def test_options_win(engines: Path):
    """What is said on the command line wins over the factory."""
    ran = process("run", "engines_of_mine:good", "--gpu-memory-utilization", "0.15", "--plan", "eager", cwd=engines)

    assert ran.returncode == 3
    assert "\nfailed in size_kv" in ran.stdout


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("not_there_at_all:make", "not_there_at_all cannot be imported: ModuleNotFoundError"),
        ("broken_of_mine:make", "broken_of_mine cannot be imported: ModuleNotFoundError"),
        ("engines_of_mine:missing", "engines_of_mine has no missing"),
        ("engines_of_mine:nothing", "engines_of_mine:nothing is no function: it is int"),
        ("engines_of_mine:number", "engines_of_mine:number() returned int, which has no load_weights"),
        ("engines_of_mine:raises", "engines_of_mine:raises() raised RuntimeError: no licence"),
        ("engines_of_mine:options", "unexpected keyword argument 'colour'"),
    ],
)
def test_factory_that_does_not_work(engines: Path, target: str, message: str):
    """A factory that does not import, or does not make an engine: exit code 1, one sentence, a hint."""
    ran = process("run", target, cwd=engines)

    assert ran.returncode == 1
    assert ran.stderr.startswith("error: ")
    assert message in ran.stderr.splitlines()[0]
    assert ran.stderr.splitlines()[1].startswith("hint: ")
    assert "Traceback" not in ran.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_signal(engines: Path, number: signal.Signals):
    """A signal is in the journal, the process ends by it, and the verdict says so."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "startup_fsm", "run", "engines_of_mine:slow"]
    child = subprocess.Popen(
        command, cwd=engines, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    until = time.monotonic() + 30
    while b'"state":"capture_graphs"' not in b"".join(each.read_bytes() for each in engines.glob("runs/*/*.jsonl")):
        assert time.monotonic() < until
        time.sleep(0.02)
    child.send_signal(number)
    _, said = child.communicate(timeout=30)
    doctor = process("doctor", str(engines / "runs"), "--json")
    (run,) = json.loads(doctor.stdout)["runs"]

    assert child.returncode == -number
    assert "Traceback" not in said
    assert (run["outcome"], run["failed_state"]) == ("interrupted", "capture_graphs")
    assert run["findings"][0]["code"] == "run.ended_by_signal"


def test_closed_pipe(runs: Path):
    """Whoever has read enough may go; nobody complains."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    child = subprocess.Popen(
        [sys.executable, "-m", "startup_fsm", "doctor", str(runs)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
    )
    assert child.stdout is not None
    assert child.stderr is not None
    child.stdout.close()
    said = child.stderr.read()
    child.stderr.close()
    child.wait()

    assert said == b""


def test_terminal_without_letters(runs: Path):
    """An encoding that lacks letters costs letters, not the page."""
    ran = process("plan", str(runs))
    poor = subprocess.run(
        [sys.executable, "-m", "startup_fsm", "plan", str(runs)],
        capture_output=True,
        check=False,
        env=os.environ | {"PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "ascii"},
    )

    assert ran.returncode == poor.returncode == 0
    assert rb"advance \u2713" in poor.stdout


def test_demo(tmp_path: Path):
    """The main job from end to end: the reference engine starts, generates, and says where its journal is."""
    pytest.importorskip("torch")
    ran = process("demo", "--runs", str(tmp_path), "--max-num-seqs", "4", "--max-model-len", "64")

    assert ran.returncode == 0, ran.stderr
    for text in ("capture_graphs", "Generated tokens", "Where every byte was", "\nready\n", str(tmp_path)):
        assert text in ran.stdout


def test_demo_with_a_fault(tmp_path: Path):
    """A fault gives its exit code and its verdict, and the doctor says the same from the journal."""
    pytest.importorskip("torch")
    ran = process("demo", "--runs", str(tmp_path), "--fault", "budget-too-small", "--json")
    doctor = process("doctor", str(tmp_path), "--json")
    told, found = (json.loads(each.stdout)["runs"][0] for each in (ran, doctor))

    assert (ran.returncode, doctor.returncode) == (3, 3)
    assert told["findings"][0]["code"] == "budget.negative"
    assert {name: told[name] for name in told if name != "origin"} == {
        name: found[name] for name in found if name != "origin"
    }


def test_demo_without_a_place_for_its_journal(tmp_path: Path):
    """A directory that cannot be written is said, and the start goes on and is judged."""
    pytest.importorskip("torch")
    (tmp_path / "file").touch()
    ran = process("demo", "--runs", str(tmp_path / "file"), "--max-num-seqs", "2", "--max-model-len", "64")

    assert ran.returncode == 0
    assert "the journal cannot be written" in ran.stderr
    assert "\nready" in ran.stdout
    assert "there is no journal: it could not be written" in ran.stdout
