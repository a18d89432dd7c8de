"""The checks of a build find faults, each of its kind, and a build with a fault fails."""

import pytest

pytest.importorskip("griffe", reason="needs the extra docs")

from docs.site import __main__ as command
from docs.site import assemble, check


@pytest.mark.parametrize(
    ("page", "fault"),
    [
        ('<a href="other.html">x</a>', "index.html links to other.html, which does not exist"),
        ('<a href="#nowhere">x</a>', "index.html links to #nowhere, and there is no such anchor"),
        ("<p>| a | b |</p>", "index.html shows a table as text"),
        ('<img src="missing.svg">', "index.html loads missing.svg, which does not exist"),
        ('<script src="https://example.org/x.js"></script>', "index.html loads https://example.org/x.js from another machine"),
        ('<link rel="stylesheet" href="//example.org/x.css">', "index.html loads //example.org/x.css from another machine"),
    ],
)  # fmt: skip
def test_a_fault_of_the_built_site_is_found(page, fault, tmp_path):
    (tmp_path / "index.html").write_text(page)
    (found,) = check.faults(tmp_path)
    assert found.startswith(fault)


def test_a_public_name_without_a_page_is_found(tmp_path):
    (tmp_path / "api").mkdir()
    (tmp_path / "api" / "a.html").write_text('<h3 id="posenc.one"></h3><h3 id="tests.two"></h3>')
    two = type("two", (), {"__module__": "tests"})
    (found,) = check.unreferenced(tmp_path, {"posenc.one": len, "posenc.two": two, "posenc.three": len})
    assert found.startswith("posenc.three is on no page")


def test_right_links_are_no_faults(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "index.html").write_text(
        '<p id="here"></p><a href="../b.html#there">x</a><a href="https://x.org">y</a>'
    )
    (tmp_path / "b.html").write_text('<p id="there"></p><a href="a/#here">x</a><a href="mailto:x@y.z">y</a>')
    assert check.faults(tmp_path) == []


@pytest.mark.parametrize("kind", ["translation", "reference", "markdown"])
def test_a_fault_of_the_sources_fails_the_build(kind, monkeypatch, capsys):
    monkeypatch.setattr(command.translation, "faults", lambda: ["a page is missing"] * (kind == "translation"))
    monkeypatch.setattr(command.reference, "faults", lambda: ["a page is missing"] * (kind == "reference"))
    found = ["a page is missing"]
    monkeypatch.setattr(
        command.markdown, "output_faults", lambda page: found if kind == "markdown" and page.stem == "01-order" else []
    )
    monkeypatch.setattr(assemble, "assemble", lambda **_: pytest.fail("it must stop before"))
    monkeypatch.setattr("sys.argv", ["docs"])
    assert command.main() == 1
    assert capsys.readouterr().err == "a page is missing\n"
