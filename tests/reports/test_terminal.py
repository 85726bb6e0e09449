"""The rim: cleaning, numbers for people, colour."""

from __future__ import annotations

import io

import pytest

from startup_fsm.reports.terminal import clean, duration, page, plain, quantity, say, severity, share, signed


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain", "plain"),
        ("Grüße, 世界", "Grüße, 世界"),
        ("a\nb\tc\r\nd\u00a0e", "a b c  d e"),
        ("\x1b[31m", "\\x1b[31m"),
        ("\x07\x00\x7f\x9b\x1c", "\\x07\\x00\\x7f\\x9b\\x1c"),
        ("\u202e\u2066\u200e\u061c", "\\u202e\\u2066\\u200e\\u061c"),
        ("\u200b\ufeff\u2028\u2029", "\\u200b\\ufeff\\u2028\\u2029"),
        ("\ud800", "\\ud800"),
        ("\U000e0041", "\\U000e0041"),
        (7, "7"),
    ],
)
def test_clean(text: object, expected: str):
    """What a terminal would obey, and what nobody could see, becomes visible; white space becomes a space."""
    assert clean(text) == expected


def test_clean_cuts():
    """A long text is cut, and how much of it is said."""
    assert clean("x" * 30, limit=10) == "x" * 10 + "... (20 more characters)"


def test_markup_is_text():
    """What looks like rich markup, a link or an emoji code is shown as it is written."""
    text = "[bold red]x[/] [link=http://a]y[/link] :smile: https://example.org"

    assert page([plain(text)], width=80) == f"{text}\n"


@pytest.mark.parametrize(
    ("ns", "expected"),
    [(None, "unknown"), (0, "0 ns"), (999, "999 ns"), (1_500, "1.50 us"), (12_345_678, "12.3 ms"), (61_000_000_000, "61.0 s"), (4_000_000_000_000, "4,000 s"), (-1_500, "-1.50 us")],
)  # fmt: skip
def test_duration(ns: int | None, expected: str):
    """Three digits and a unit."""
    assert duration(ns) == expected


def test_numbers():
    """Shares, signs and quantities by the name of their figure."""
    assert (share(1, 3), share(1, 0)) == ("33.3%", "-")
    assert (signed(1024), signed(-1024), signed(0)) == ("+1.00 KiB", "-1.00 KiB", "0 B")
    assert (quantity("kv_bytes", 2048), quantity("blocks", 2048), quantity("a_bytes", True)) == (
        "2.00 KiB",
        "2048",
        "True",
    )


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """A terminal with colours, whatever the tests run in."""
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "COLUMNS", "CLICOLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    return Terminal()


def test_colour_on_a_terminal(terminal: Terminal):
    """A terminal gets colours."""
    assert "\x1b[31m" in page([severity("error")], file=terminal)


def test_no_color(terminal: Terminal, monkeypatch: pytest.MonkeyPatch):
    """NO_COLOR is respected."""
    monkeypatch.setenv("NO_COLOR", "1")

    assert page([severity("error")], file=terminal) == "error\n"


def test_no_colour_in_a_pipe():
    """What is no terminal gets none."""
    assert page([severity("error")], file=io.StringIO()) == "error\n"


def test_say():
    """Talk is one line, however long, and clean."""
    stream = io.StringIO()
    say("error", "x" * 200 + "\n\x1b[2J", stream)

    assert stream.getvalue() == "error: " + "x" * 200 + " \\x1b[2J\n"
