"""Lines can be distinguished: by colour with every common kind of colour vision, and by dash and marker without colour."""

import itertools
from pathlib import Path

import pytest

from posenc.lab import lines, results, svg

DOCS = Path(__file__).parents[2] / "docs" / "results"
# Machado, Oliveira and Fernandes 2009, severity 1, on linear RGB
VISION = {
    "normal": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanopia": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "deuteranopia": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
    "tritanopia": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.303900)),
}


def linear(colour):
    parts = [int(colour[n : n + 2], 16) / 255 for n in (1, 3, 5)]
    return [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]


def luminance(colour):
    return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear(colour)))


def contrast(a, b):
    low, high = sorted((luminance(a), luminance(b)))
    return (high + 0.05) / (low + 0.05)


def lab(colour, vision):
    """CIE L*a*b* of a colour as somebody with that vision sees it."""
    rgb = [min(1.0, max(0.0, sum(m * c for m, c in zip(row, linear(colour))))) for row in VISION[vision]]
    xyz = [
        sum(m * c for m, c in zip(row, rgb)) / white
        for row, white in (
            ((0.4124, 0.3576, 0.1805), 0.9505), ((0.2126, 0.7152, 0.0722), 1.0), ((0.0193, 0.1192, 0.9505), 1.089),
        )
    ]  # fmt: skip
    f = [t ** (1 / 3) if t > 0.008856 else 7.787 * t + 16 / 116 for t in xyz]
    return 116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])


def distance(a, b, vision):
    return sum((x - y) ** 2 for x, y in zip(lab(a, vision), lab(b, vision))) ** 0.5


def every_figure():
    for name in ("quick", "paper"):
        run = results.read(DOCS / name)
        for task in run.tasks():
            yield run.encodings(task)
    yield [*lines.SHADES, "rope+yarn:4", "rope+ntk:8", "rope+linear:4", "rope+dynamic", "xpos", "xlnet", "mine"]


def test_no_two_lines_have_the_same_dash_and_marker():
    for encodings in every_figure():
        looks = [(style.dash, style.marker) for style in lines.styles(encodings).values()]
        assert len(set(looks)) == len(looks)
        assert all(marker in svg.MARKERS for _, marker in looks)


@pytest.mark.parametrize("vision", VISION)
def test_encodings_differ_in_colour_whatever_the_colour_vision(vision):
    """A difference of 2.3 is just noticeable side by side. Variants differ in their dashes too."""
    for a, b in itertools.combinations(lines.SHADES, 2):
        assert distance(lines.SHADES[a][0], lines.SHADES[b][0], vision) > 15, (a, b)
    for encodings in every_figure():
        styles = lines.styles(encodings)
        for a, b in itertools.combinations(encodings, 2):
            if lines.family(a) == lines.family(b):  # one hue, another colour
                assert distance(styles[a].colour, styles[b].colour, vision) > 5, (a, b)


def test_lines_and_labels_stand_out_from_the_page():
    for encodings in every_figure():
        for name, style in lines.styles(encodings).items():
            assert contrast(style.colour, "#f1f5f9") >= 3.0, name  # the tint behind the lengths that were not trained
            assert contrast(style.ink, "#ffffff") >= 4.5, name


def test_variants_share_a_hue_and_keep_it_in_every_figure():
    quick = lines.styles(["t5", "t5:max_distance=32", "rope", "rope+yarn:8"])
    assert quick["t5"].ink == quick["t5:max_distance=32"].ink and quick["t5"] != quick["t5:max_distance=32"]
    assert lines.styles(["alibi", "rope"])["rope"] == quick["rope"]


def test_labels_are_short_where_that_is_clear():
    names = ["rope+yarn:4,beta_fast=4", "t5:buckets=8,max_distance=32", "t5:buckets=8,max_distance=64"]
    assert list(lines.labels(names).values()) == ["rope+yarn:4", *names[1:]]
