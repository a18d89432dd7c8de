"""The text to train on: the standard library, a file, a folder of files, a book of Project Gutenberg."""

import gzip

import pytest

from posenc.lab import corpus
from posenc.lab.errors import LabError

BOOK = b"It was the best of times. " * 100


def test_a_book_of_project_gutenberg_loses_its_licence(tmp_path):
    start = b"*** START OF THE PROJECT GUTENBERG EBOOK A TALE ***\r\n"
    end = b"\r\n*** END OF THE PROJECT GUTENBERG EBOOK A TALE ***\r\nlicence " * 2
    path = tmp_path / "98-0.txt"
    path.write_bytes(b"\xef\xbb\xbfThe Project Gutenberg eBook\r\n" + start + b"First line.\r\n" + BOOK + end)
    found = corpus.read(path)
    text = found.train + found.held_out
    assert text.startswith(b"First line.\nIt was") and text.endswith(b"of times.\n")
    assert b"\r" not in text and b"licence" not in text and b"GUTENBERG" not in text
    assert found.source == "98-0.txt" and len(found.held_out) == len(text) // 10


def test_any_other_text_is_used_as_it_is(tmp_path):
    path = tmp_path / "text"
    path.write_bytes(BOOK)
    assert corpus.read(path).train + corpus.read(path).held_out == BOOK
    (tmp_path / "text.gz").write_bytes(gzip.compress(BOOK))
    assert corpus.read(tmp_path / "text.gz").train == corpus.read(path).train


def test_a_folder_is_all_its_texts(tmp_path):
    for number in range(20):
        (tmp_path / f"{number:02}.txt").write_bytes(b"%02d " % number * 40)
    (tmp_path / "part").mkdir()
    (tmp_path / "part" / "changelog.gz").write_bytes(gzip.compress(b"changes " * 30))
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\0\0" * 500)
    (tmp_path / ".hidden").write_bytes(b"hidden " * 100)
    (tmp_path / "broken.gz").write_bytes(b"\x1f\x8b" + b"x" * 100)
    found = corpus.read(tmp_path)
    assert found.files == 21 and found.source == f"{tmp_path.name}/"
    assert found.held_out == b"09 " * 40 + b"\n" + b"19 " * 40  # every tenth
    assert b"changes" in found.train and b"PNG" not in found.train and b"hidden" not in found.train
    assert found.about["files"] == "21" and found.about["bytes"] == str(len(found.train))


def test_a_folder_of_few_files_holds_out_the_end_of_each(tmp_path):
    for letter in "ab":
        (tmp_path / letter).write_bytes(letter.encode() * 1000)
    found = corpus.read(tmp_path)
    assert found.train == b"a" * 900 + b"\n" + b"b" * 900 and found.held_out == b"a" * 100 + b"\n" + b"b" * 100


def test_what_has_no_text_is_refused(tmp_path):
    with pytest.raises(LabError, match="0 bytes of text in 0 files.*give --text a folder of text files"):
        corpus.read(tmp_path)
    with pytest.raises(LabError, match="cannot read the text"):
        corpus.read(tmp_path / "nothing")
