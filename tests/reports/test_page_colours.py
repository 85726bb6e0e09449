"""Colours can be read on their ground, and told apart by readers who see fewer of them."""

from __future__ import annotations

import itertools
import math
import re

import pytest

from startup_fsm.reports.page.render import asset

#: Colours that stand beside each other in one picture; those of other processes and of nobody are hatched besides.
FILLS = ("weights", "kv", "graphs", "pool", "outside", "peak")
TEXTS = ("ink", "soft", "accent", "bad", "warn", "good", "request")

Colour = tuple[float, float, float]

#: What is left of linear red, green and blue: Machado, Oliveira and Fernandes 2009, at full severity.
SIGHT: dict[str, tuple[Colour, Colour, Colour]] = {
    "all": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "no red": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "no green": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.01182, 0.04294, 0.968881)),
    "no blue": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.3039)),
}


def themes() -> dict[str, dict[str, str]]:
    """The variables of each theme, by name without dashes."""
    css = asset("page.css")
    found = {}
    for name, begin in (("light", ":root {"), ("dark", ':root[data-theme="dark"] {')):
        block = css[css.index(begin) : css.index("}", css.index(begin))]
        found[name] = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", block))
    return found


def linear(colour: str) -> Colour:
    """Linear red, green and blue of a colour such as #1d1c1a."""
    channels = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (each / 12.92 if each <= 0.04045 else ((each + 0.055) / 1.055) ** 2.4 for each in channels)
    return red, green, blue


def luminance(colour: str) -> float:
    """Relative luminance, as the guidelines for accessibility define it."""
    red, green, blue = linear(colour)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    """Contrast of two colours, from 1 to 21."""
    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def seen(colour: str, sight: str) -> Colour:
    """Lightness and hues (CIE Lab) of a colour as such a reader sees it."""
    red, green, blue = (
        min(1.0, max(0.0, sum(share * each for share, each in zip(row, linear(colour), strict=True))))
        for row in SIGHT[sight]
    )
    x = (0.4124 * red + 0.3576 * green + 0.1805 * blue) / 0.9505
    y = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    z = (0.0193 * red + 0.1192 * green + 0.9505 * blue) / 1.089
    fx, fy, fz = (each ** (1 / 3) if each > 0.008856 else 7.787 * each + 16 / 116 for each in (x, y, z))
    return 116 * fy - 16, 500 * (fx - fy), 200 * (fy - fz)


@pytest.mark.parametrize("sight", SIGHT)
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_told_apart(theme: str, sight: str):
    """Any two accounts that stand beside each other differ by far more than an eye needs."""
    colours = themes()[theme]
    for one, other in itertools.combinations(FILLS, 2):
        distance = math.dist(seen(colours[f"k-{one}"], sight), seen(colours[f"k-{other}"], sight))
        assert distance >= 20, (one, other, round(distance, 1))


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_legible(theme: str):
    """Every text has the contrast that small letters need, on paper and on raised ground."""
    colours = themes()[theme]
    for text, ground in itertools.product(TEXTS, ("paper", "raised")):
        assert contrast(colours[text], colours[ground]) >= 4.5, (text, ground)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_names_on_bars(theme: str):
    """The name of a state can be read on the bar of its colour."""
    colours = themes()[theme]
    for kind in ("weights", "graphs", "pool"):
        assert contrast(colours["on-dark"], colours[f"k-{kind}"]) >= 4.5, kind
    for kind in ("peak", "outside", "verify"):
        assert contrast(colours["ink"], colours[f"k-{kind}"]) >= 3.5, kind
    assert contrast("#1d1c1a", colours["k-kv"]) >= 4.5


def test_themes_are_whole():
    """Both themes set the same variables, and the one of the system is the one of the button."""
    css = asset("page.css")
    light, dark = themes().values()
    system = css[css.index(':root:not([data-theme="light"]) {') :]

    assert set(light) == set(dark)
    assert dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", system[: system.index("}")])) == dark
