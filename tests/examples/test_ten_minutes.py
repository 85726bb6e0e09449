"""The guide is followed to the letter on an engine that has nothing of ours, and what it shows is what comes out."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
GUIDE = (ROOT / "docs" / "guide" / "ten-minutes.md").read_text(encoding="utf-8")
#: The engine's lines, without the way to start it as it is.
ENGINE = sorted((EXAMPLES / "classic_engine").glob("*.py"))

_FILE = re.compile(r"<!-- file: (\S+) -->\n```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_CONSOLE = re.compile(r"^```console\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_SECOND = "## Or let it drive\n"


def written(part: str) -> dict[str, str]:
    """What a reader of that part has in each file."""
    files: dict[str, str] = {}
    for name, block in _FILE.findall(part):
        files[name] = files.get(name, "") + block + "\n"
    return files


def typed(part: str) -> list[tuple[str, list[str]]]:
    """What a reader of that part types, and the lines that the guide shows below it."""
    lines = [line for block in _CONSOLE.findall(part) for line in block.splitlines()]
    commands: list[tuple[str, list[str]]] = []
    for line in lines:
        if line.startswith("$ "):
            commands.append((line[2:], []))
        elif line != "[...]":
            commands[-1][1].append(line)
    return commands


@pytest.fixture
def follow(tmp_path, environment):
    """Write the files and type the commands of a part of the guide, in one shell; gives what each said and shall say."""
    (tmp_path / "examples").symlink_to(EXAMPLES)

    def of(part):
        commands = typed(part)
        setup, *others = [command for command, _ in commands]
        script = [setup]
        script += [f"printf %s {shlex.quote(text)} > {name}" for name, text in written(part).items()]
        script += [f"echo '--- next' && {command}" for command in others]
        ran = subprocess.run(
            ["bash", "-ec", "\n".join(script)],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        assert ran.returncode == 0, ran.stdout + ran.stderr
        outputs = ran.stdout.split("--- next\n")[1:]
        return [(command, output, shown) for (command, shown), output in zip(commands[1:], outputs, strict=True)]

    return of


def first_part() -> str:
    return GUIDE.partition(_SECOND)[0]


def second_part() -> str:
    """With the setup of the first."""
    setup = f"```console\n$ {typed(GUIDE)[0][0]}\n```\n"
    return setup + GUIDE.partition(_SECOND)[2]


def verdict(folder: Path, run) -> dict:
    """Of the newest start in a directory of runs."""
    (newest,) = json.loads(run("-m", "startup_fsm", "doctor", "--json", folder / "runs", returns=(0, 2, 3)))["runs"]
    return newest


def keeps_its_request(found: dict) -> bool:
    """Ready, nothing worse than a note, and the peak within the request."""
    quiet = all(each["severity"] == "note" for each in found["findings"])
    figures = found["figures"]
    return found["outcome"] == "ready" and quiet and figures["used_peak_bytes"] <= figures["requested_bytes"]


def test_the_engine_has_nothing_of_ours():
    """A few hundred lines that name no state, and size their KV cache before they capture their graphs."""
    texts = [path.read_text(encoding="utf-8") for path in ENGINE]

    assert 200 <= sum(len(text.splitlines()) for text in texts) <= 350
    assert not re.search(r"startup.?fsm|bootstrap", "\n".join(texts), re.IGNORECASE)
    start = (EXAMPLES / "classic_engine" / "engine.py").read_text(encoding="utf-8").partition("def start(self)")[2]
    assert start.index("self.kv_blocks(self.profile())") < start.index("self.capture_graphs()")


def test_what_the_guide_writes_is_the_example():
    """The blocks of the guide, one after the other, are the files in examples/, but for empty lines."""
    for name, text in written(GUIDE).items():
        example = (EXAMPLES / name).read_text(encoding="utf-8")
        assert [line for line in text.splitlines() if line] == [line for line in example.splitlines() if line], name
    assert set(written(GUIDE)) == {"embedded_classic.py", "driven_classic.py"}


def test_followed_with_states(follow, run, tmp_path):
    """Up to "Or let it drive": every command works, prints what is shown, and the start stays within its request."""
    followed = follow(first_part())

    assert [command for command, _, _ in followed] == [
        "python -m classic_engine",
        "python embedded_classic.py",
        "startup-fsm doctor runs/",
    ]
    for command, output, shown in followed:
        assert [line for line in shown if line not in output.splitlines()] == [], command
    # The same weights, the same prompts: the engine says the same as before.
    assert followed[0][1].splitlines()[0] == followed[1][1].splitlines()[0]
    found = verdict(tmp_path / "try", run)
    assert keeps_its_request(found)
    assert found["figures"]["graph_actual_bytes"] == found["figures"]["graph_estimate_bytes"] > 0


def test_followed_driven(follow, run, tmp_path):
    """The rest: the command starts the engine behind the nine methods, with the same KV cache."""
    ((command, output, shown),) = follow(second_part())

    assert [line for line in shown if line not in output.splitlines()] == [], command
    found = verdict(tmp_path / "try", run)
    assert keeps_its_request(found)
    assert found["figures"]["gpu_blocks"] == 6737


def test_a_forgotten_view_is_named(run, tmp_path):
    """Without the last two lines of ``release`` the start ends in teardown, in the words that the guide shows."""
    text = written(GUIDE)["embedded_classic.py"]
    views = "    for layer in engine.model.layers:\n        layer.attention.keys = layer.attention.values = None\n"
    assert text.count(views) == 1
    script = tmp_path / "forgetful.py"
    script.write_text(text.replace(views, ""), encoding="utf-8")
    (tmp_path / "classic_engine").symlink_to(EXAMPLES / "classic_engine")

    run(script, returns=(1,))

    found = verdict(tmp_path, run)
    message = found["findings"][0]["message"]
    assert (found["outcome"], found["failed_state"]) == ("error", "teardown")
    shown = re.search(r"^```text\nteardown.kv_alive in teardown: (.*?)\n```$", GUIDE, re.MULTILINE | re.DOTALL)
    assert shown is not None
    assert message == shown[1].replace("\n", " ")


def test_the_fault_comes_back_with_the_formula(run, tmp_path):
    """The same embedded engine without a term for graphs, as its own formula was, overruns its request by them."""
    script = f"""
import sys
sys.path.insert(0, {str(EXAMPLES)!r})
import driven_classic
from startup_fsm import Bootstrap, Knobs
config = driven_classic.Config(max_length=2048, max_batch_tokens=2048, capture_sizes=(2, 64))
boot = Bootstrap(device="sim", knobs=Knobs(requested_bytes=3 << 29, graph_estimate="none"))
boot.run(driven_classic.Driven(driven_classic.ClassicEngine(config)))
"""
    run("-c", script)

    findings = verdict(tmp_path, run)["findings"]
    assert {each["code"] for each in findings} == {"graphs.not_reserved", "budget.overrun"}
