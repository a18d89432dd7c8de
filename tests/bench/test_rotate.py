"""posenc.bench.rotate: a wrong rotation is not timed, the others are measured and written."""

import json

from posenc.bench import rotate as bench


def tiny(device):
    return [bench.Case(size=16, width=width, rows=rows, batch=1, length=5, heads=4, kv_heads=2, dtype=dtype)
            for width, rows, dtype in ((None, False, "float32"), (8, True, "bfloat16"))]  # fmt: skip


def test_measures_and_writes(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(bench, "cases", tiny)
    out = tmp_path / "new" / "rotate.json"
    assert bench.main(["--device", "cpu", "--out", str(out)]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [row["bytes"] for row in rows] == [2 * 4 * 5 * 6 * 16, 2 * 2 * 5 * 6 * 16]
    assert all(row["of_copy"]["posenc"] > 0 and row["of_copy"]["step"] > 0 for row in rows)
    assert "usual" in rows[0]["of_copy"]
    assert "of the copy's bandwidth" in capsys.readouterr().out


def test_a_wrong_rotation_is_not_timed(tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "cases", tiny)
    right = bench.rotate_both
    monkeypatch.setattr(bench, "rotate_both", lambda q, k, cos, sin, layout: right(q, k, cos, 1.01 * sin, layout))
    out = tmp_path / "rotate.json"
    assert bench.main(["--device", "cpu", "--out", str(out)]) == 1
    rows = json.loads(out.read_text())["rows"]
    assert all("is off by" in row["wrong"] and "seconds" not in row for row in rows)
