"""Drawn values, read back from the figures and compared with closed formulas."""

import math

import numpy as np
import pytest
import torch

import posenc
from posenc.cli import main as cli
from posenc.core import formulas
from posenc.encodings.registry import ENCODINGS
from posenc.plot import analysis, panels

pytest.importorskip("matplotlib")


def on_one_axis(name):
    """Whether an encoding takes positions with one axis; those for images and video need two or three."""
    try:
        analysis.subject(name, d_model=32, heads=2).plan(posenc.Positions(2))
    except ValueError:
        return False
    return True


def causal_only(name):
    return getattr(posenc, ENCODINGS[name].class_name).causal_only


NAMES = [name for name in posenc.list_encodings() if on_one_axis(name)]


def images(figure):
    return [np.asarray(axes.images[0].get_array()) for axes in figure.axes if axes.images]


def curves(figure, axes=0):
    return {line.get_label(): np.asarray(line.get_ydata()) for line in figure.axes[axes].lines}


@pytest.mark.parametrize("name", NAMES)
def test_every_encoding_has_an_overview_with_titles_and_labelled_axes(name):
    figure = posenc.plot.overview(name, length=24, d_model=32, heads=4)
    drawn = [axes for axes in figure.axes if axes.get_title(loc="left")]
    assert len(drawn) in (2, 4)
    for axes in drawn:
        assert name in axes.get_title(loc="left")
        assert axes.get_xlabel()
        assert axes.get_ylabel()
    for image in images(figure):  # later keys are masked where the encoding is for causal attention only
        assert np.isfinite(np.tril(np.nan_to_num(image, nan=0.0) if causal_only(name) else image)).all()
        assert not np.isnan(np.diag(image)).any()


def test_every_encoding_for_text_is_covered():
    text = "none sinusoidal learned shaw clipped t5 transformer_xl xlnet deberta rope relative_logits alibi"
    assert set(NAMES) >= set(text.split())


def test_alibi_over_distance_is_minus_slope_times_distance():
    figure = posenc.plot.distance("alibi", reach=40, heads=8, selected_heads=range(8))
    slopes = formulas.alibi_slopes(8)
    r = np.asarray(figure.axes[0].lines[0].get_xdata())
    assert list(r) == list(range(-40, 41))
    for head, curve in enumerate(curves(figure).values()):
        np.testing.assert_allclose(curve, -slopes[head] * np.abs(r), atol=1e-12)


def test_t5_kernel_is_its_table_indexed_by_the_buckets():
    encoding = posenc.T5(heads=4, buckets=16, max_distance=40)
    (image,) = images(posenc.plot.kernel(encoding, length=50, head=3))
    table = encoding.table.detach()
    for i in range(0, 50, 7):
        for j in range(50):
            bucket = formulas.t5_bucket(j - i, buckets=16, max_distance=40, causal=False)
            assert image[i, j] == pytest.approx(table[bucket, 3].item(), abs=1e-9)


def test_t5_buckets_are_those_of_the_formula():
    figure = posenc.plot.buckets("t5", reach=130)
    (line,) = figure.axes[0].lines
    wanted = [formulas.t5_bucket(r, buckets=32, max_distance=128, causal=False) for r in range(-130, 131)]
    assert list(line.get_ydata()) == wanted
    assert "-91" in figure.axes[0].get_title(loc="left") and "91" in figure.axes[0].get_title(loc="left")


def test_sinusoidal_encoding_and_its_single_dimensions():
    (image,) = images(posenc.plot.encoding("sinusoidal", length=30, d_model=16))
    assert image.shape == (30, 16)
    for p in (0, 3, 29):
        for c in (0, 3, 7):
            w = 10000.0 ** (-2 * c / 16)
            assert image[p, 2 * c] == pytest.approx(math.sin(p * w), abs=1e-12)
            assert image[p, 2 * c + 1] == pytest.approx(math.cos(p * w), abs=1e-12)
    drawn = curves(posenc.plot.dimensions("sinusoidal", length=30, d_model=16, selected=[5]))
    np.testing.assert_allclose(drawn["dimension 5"], image[:, 5])


def test_sinusoidal_similarity_depends_on_the_distance_alone():
    (image,) = images(posenc.plot.similarity("sinusoidal", length=20, d_model=32))
    wanted = [np.mean([math.cos(r * 10000.0 ** (-2 * c / 32)) for c in range(16)]) for r in range(20)]
    for i in range(20):
        for j in range(20):
            assert image[i, j] == pytest.approx(wanted[abs(i - j)], abs=1e-12)


def test_rope_over_distance_is_the_sum_of_cosines():
    figure = posenc.plot.distance("rope", reach=50, d_model=64, heads=2, base=500.0)
    (curve,) = curves(figure).values()
    for r, value in zip(range(-50, 51), curve):
        wanted = sum(2 * math.cos(r * 500.0 ** (-2 * c / 32)) for c in range(16)) / math.sqrt(32)
        assert value == pytest.approx(wanted, abs=1e-5)


def test_rotary_wavelengths_and_each_scaling():
    figure = posenc.plot.wavelengths(head_dim=64, base=1e4, original=2048, target=8192)
    drawn = curves(figure)
    plain = [math.tau * 1e4 ** (2 * c / 64) for c in range(32)]
    np.testing.assert_allclose(drawn["RoPE"], plain, rtol=1e-12)
    np.testing.assert_allclose(drawn["linear"], np.multiply(plain, 4.0), rtol=1e-12)
    assert drawn["YaRN"][0] == pytest.approx(plain[0]) and drawn["YaRN"][-1] == pytest.approx(4 * plain[-1])
    assert drawn["NTK"][-1] == pytest.approx(4 * plain[-1])
    assert sorted(line.get_ydata()[0] for line in figure.axes[0].lines[-2:]) == [2048, 8192]
    assert f"{sum(w > 2048 for w in plain)} of 32" in figure.axes[0].get_title(loc="left")


@pytest.mark.parametrize("name", NAMES)
def test_the_terms_sum_to_the_layer_s_scores(name):
    encoding = posenc.create(name, d_model=32, heads=2, **analysis.DRAWN_OPTIONS.get(name, {}))
    layer = posenc.Attention(32, 2, encoding=encoding, causal=encoding.causal_only).double()
    x, positions = torch.randn(1, 7, 32, dtype=torch.float64), posenc.Positions(7)
    figure = posenc.plot.decomposition(layer, x, head=1)
    total, *terms = images(figure)
    full = encoding.embed(x, positions)
    q, k = (p(full).unflatten(-1, (2, 16)).transpose(1, 2) for p in (layer.q_proj, layer.k_proj))
    wanted = posenc.scores(q, k, encoding.plan(positions, x=full, host=layer))[0, 1].detach()
    np.testing.assert_allclose(total, wanted, atol=1e-9)
    np.testing.assert_allclose(np.sum(terms, axis=0), wanted, atol=1e-9)


def test_content_and_position_terms_match_the_literature():
    def terms(name, **options):
        layer = posenc.Attention(32, 2, encoding=posenc.create(name, d_model=32, heads=2, **options)).double()
        found = analysis.decomposition(layer, torch.randn(1, 5, 32, dtype=torch.float64), posenc.Positions(5))
        return {term for term, value in found.items() if value.abs().max() > 1e-9}

    content = "content·content"
    assert terms("none") == {content}
    assert terms("alibi") == {content, "position·position"}
    assert terms("shaw") == {content, "content·position"}
    assert terms("deberta", terms=("p2c",)) == {content, "position·content"}
    assert terms("transformer_xl") == {content, "content·position", "position·content", "position·position"}
    assert terms("sinusoidal") == {content, "content·position", "position·content", "position·position"}
    assert terms("rope") == {content, "rotation"}


@pytest.mark.parametrize("name", posenc.list_encodings())
def test_the_terms_of_any_encoding_sum_to_the_scores_of_its_layer(name):
    figure = posenc.plot.decomposition(name, length=6, head=5)
    total, *terms = (np.asarray(axes.images[0].get_array()) for axes in figure.axes if axes.images)
    layer, positions = analysis.layer(analysis.subject(name)), posenc.Positions(6)
    x = layer.encoding.embed(analysis.content(layer, 6), positions)
    q, k = (p(x).unflatten(-1, (8, -1)).transpose(1, 2) for p in (layer.q_proj, layer.k_proj))
    wanted = posenc.scores(q, k, layer.encoding.plan(positions, x=x, host=layer))[0, 5].detach()
    np.testing.assert_allclose(total, wanted, atol=1e-9)
    np.testing.assert_allclose(np.sum(terms, axis=0), total, atol=1e-12)


@pytest.mark.parametrize("ending", ["png", "svg", "pdf"])
def test_equal_figures_are_equal_bytes(tmp_path, ending):
    first, second = (
        posenc.plot.save(posenc.plot.kernel("shaw", length=12, d_model=16, heads=2), tmp_path / f"{n}.{ending}")
        for n in "ab"
    )
    assert first.read_bytes() == second.read_bytes()
    assert first.stat().st_size > 1000
    assert sorted(p.name for p in tmp_path.iterdir()) == [f"a.{ending}", f"b.{ending}"]


def test_an_encoding_object_is_drawn_with_its_own_values_and_keeps_the_random_state():
    encoding = posenc.ALiBi(heads=2, learnable=True)
    with torch.no_grad():
        encoding.slopes.copy_(torch.tensor([1.0, 3.0]))
    before = torch.get_rng_state()
    drawn = curves(posenc.plot.distance(encoding, reach=3))
    posenc.plot.overview("t5", length=8)
    assert torch.equal(torch.get_rng_state(), before)
    np.testing.assert_allclose(drawn["head 1"], [-9, -6, -3, 0, -3, -6, -9])


@pytest.mark.parametrize(
    "draw, words",
    [
        (lambda: posenc.plot.buckets("alibi"), "no buckets"),
        (lambda: posenc.plot.encoding("none"), "no vectors"),
        (lambda: posenc.plot.kernel("t5", head=8), "heads are 0 to 7"),
        (lambda: posenc.plot.kernel("t5", length=0), "at least 1"),
        (lambda: posenc.plot.dimensions("rope", selected=[64]), "between 0 and 63"),
        (lambda: posenc.plot.kernel("t5", shoes=2), "no option 'shoes'"),
        (lambda: posenc.plot.decomposition("t5", head=8), "heads are 0 to 7"),
        (lambda: posenc.plot.decomposition("t5", length=0), "at least 1"),
        (lambda: posenc.plot.save(posenc.plot.kernel("none", length=2), "x.gif"), "png"),
    ],
)
def test_figures_that_cannot_be_drawn_raise_a_sentence(draw, words):
    with pytest.raises(ValueError, match=words):
        draw()


def test_csv_has_the_drawn_values():
    subject = analysis.subject("alibi", heads=2)
    lines, cells = (
        panels.csv(*drawn).splitlines() for drawn in (panels.distance(subject, 2), panels.kernel(subject, 2))
    )
    assert lines[0] == "distance r = j − i (tokens; negative: past),head 0,head 1"
    assert lines[1].split(",") == ["-2", "-0.125", "-0.0078125"] and len(lines) == 6
    assert cells[0].endswith(",0,1") and cells[-1].startswith("1,-0.0625,") and len(cells) == 3


def test_an_extension_is_drawn_as_compare_takes_it(tmp_path, capsys):
    from posenc.cli.main import main

    paths = [tmp_path / "plain.svg", tmp_path / "extended.svg"]
    for path, name in zip(paths, ("rope", "RoPE+linear:8"), strict=True):
        assert main(["plot", name, "-o", str(path), "--view", "kernel", "--length", "16"]) == 0
    assert paths[0].read_bytes() != paths[1].read_bytes()
    printed = capsys.readouterr()
    assert (
        printed.out.splitlines() == [str(path) for path in paths]
        and "2/2 drawing kernel of rope+linear:8" in printed.err
    )


def test_the_command_writes_a_figure_and_refuses_invalid_options(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    arguments = ["plot", "t5:buckets=8,max_distance=20,heads=2,d_model=16", "--length", "16", "-o", "out/t5.svg"]
    assert cli.main(arguments) == 0
    assert (tmp_path / "out" / "t5.svg").read_bytes().startswith(b"<?xml")
    assert exit_status("plot", "t5:buckets=7") == 2
    assert "buckets" in capsys.readouterr().err


def exit_status(*arguments):
    """argparse exits for invalid arguments of a subcommand."""
    try:
        return cli.main(list(arguments))
    except SystemExit as end:
        return end.code
