"""The server without a browser: exports, reports, and who is answered."""

import csv
import io
import json
import os
import signal
import subprocess
import sys
import urllib.request

import numpy as np
import pytest

pytest.importorskip("gradio")

from posenc.explorer import answer, command, frame
from posenc.explorer.texts import LANGUAGES


def test_both_languages_are_served(client):
    assert client.get("/").status_code == 200
    assert client.get("/zh/").status_code == 200
    for path, word in (("/", "Your sentence"), ("/zh", "你的句子")):
        assert word in client.get(f"{path.rstrip('/')}/config").text


def test_the_export_holds_the_numbers_of_its_link(client):
    answer = client.get("/export.csv", params={"view": "compare", "a": "alibi", "b": "none", "c": "", "length": 20})
    assert answer.status_code == 200 and "attachment" in answer.headers["content-disposition"]
    rows = list(csv.reader(io.StringIO(answer.content.decode("utf-8-sig"))))
    page = frame.PAGES["compare"]
    view = page.draw(page.complete({"a": "alibi", "b": "none", "c": "", "length": "20"}), LANGUAGES["en"])
    over = view.panels()[0]
    assert rows[0] == [over.title]
    drawn = np.array(rows[2:22], dtype=float)
    np.testing.assert_allclose(drawn[:, 0], over.x)
    np.testing.assert_allclose(drawn[:, 1], over.series["alibi"])
    assert "位置" in client.get("/export.csv", params={"view": "gallery", "lang": "zh"}).text


@pytest.mark.parametrize("query", ["", "view=nothing", "view=compare&length=x", "view=gallery&lang=fr"])
def test_a_wrong_export_is_refused_in_words(client, query):
    answer = client.get(f"/export.csv?{query}")
    assert answer.status_code == 400 and "Traceback" not in answer.text


def test_only_reports_of_runs_are_served_and_they_get_no_rights(client, tmp_path):
    (tmp_path / "report.html").write_text("<h1>hello</h1>")
    answer = client.get("/report", params={"run": str(tmp_path)})
    assert answer.text == "<h1>hello</h1>"
    assert answer.headers["content-security-policy"].startswith("sandbox")
    for other in ("/etc", "/etc/passwd", str(tmp_path / "report.html"), "\0"):
        assert client.get("/report", params={"run": other}).status_code == 404


def test_a_name_that_is_not_this_machine_s_gets_nothing(client):
    assert client.get("/", headers={"host": "evil.example"}).status_code == 400
    assert client.get("/export.csv?view=gallery", headers={"host": "evil.example"}).status_code == 400


def test_the_socket_is_on_this_machine_alone_and_a_taken_port_is_no_trouble():
    first = command.listen(0)
    second = command.listen(first.getsockname()[1])
    try:
        assert first.getsockname()[0] == second.getsockname()[0] == "127.0.0.1"
        assert second.getsockname()[1] > first.getsockname()[1]
    finally:
        first.close()
        second.close()


@pytest.mark.slow  # the browser's server ends so as well, where there is a browser
def test_ctrl_c_ends_it_while_a_page_is_open(tmp_path):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    command = [sys.executable, "-m", "posenc", "explore", "--no-open", "--port", "0"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, cwd=tmp_path
    ) as server:
        address = next(word for line in server.stdout for word in line.split() if word.startswith("http"))
        with urllib.request.urlopen(f"{address}gradio_api/heartbeat/page", timeout=300):  # as an open page holds it
            server.send_signal(signal.SIGINT)
            said = server.communicate(timeout=300)[0]
    assert server.returncode == 130 and "Traceback" not in said and "Error" not in said, said


def test_a_bad_port_is_refused_in_words():
    for port in ("99999", "-1"):
        with pytest.raises(ValueError, match="not a port"):
            command.main(["--port", port])


def test_an_unexpected_error_becomes_a_sentence(monkeypatch, caplog):
    def broken(*arguments, **options):
        raise ZeroDivisionError("oops")

    page = frame.PAGES["extend"]
    monkeypatch.setattr(page, "draw", broken)
    told = answer.of_state(page, LANGUAGES["en"], {}, width=1000, coarse=False)
    assert list(told) == ["status"]
    assert "This cannot be shown: ZeroDivisionError: oops" in told["status"] and "Traceback" not in told["status"]
    assert "drawing extend failed" in caplog.text


def test_a_view_is_answered_for_a_link_and_for_the_controls_values(client):
    asked = {"page": "extend", "query": "?scaling=linear&target=8192", "width": 1000}
    by_link = client.post("/draw", json=asked).json()
    values = [128, 10000, 4096, 8192, "linear", "", "", ""]
    by_values = client.post("/draw", json={"page": "extend", "values": values, "width": 1000}).json()
    assert by_link == by_values and by_link["link"] == "?view=extend&target=8192&scaling=linear"
    assert len(by_link["plots"]) == 2 and "finer" in by_link
    narrow = client.post("/draw", json={**asked, "width": 380}).json()
    assert json.loads(narrow["plots"][1])["layout"]["height"] == 2 * json.loads(by_link["plots"][1])["layout"]["height"]
    assert "转不满一圈" in client.post("/draw", json={**asked, "language": "zh"}).json()["titles"][0]


@pytest.mark.parametrize(
    "body", ["", "{", "[]", "3", "{}", '{"page": "nothing"}', '{"page": "extend", "width": "wide"}']
)
def test_a_question_that_no_page_asks_is_refused(client, body):
    answered = client.post("/draw", content=body)
    assert answered.status_code == 400 and "Traceback" not in answered.text


def test_plotly_is_served_from_here(client):
    assert "plotly.js" in client.get("/plotly.js").text[:200]
