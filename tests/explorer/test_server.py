"""The server without a browser: pages, views, exports, reports and the command."""

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

from posenc.explorer import cli, render
from posenc.explorer.pages import PAGES
from posenc.explorer.texts import LANGUAGES


def test_both_languages_are_served(client):
    assert client.get("/").status_code == 200
    assert client.get("/zh/").status_code == 200
    for path, word in (("/", "Your sentence"), ("/zh", "你的句子")):
        assert word in client.get(f"{path.rstrip('/')}/config").text


def test_the_export_holds_the_numbers_of_its_link(client):
    response = client.get("/export.csv", params={"view": "compare", "a": "alibi", "b": "none", "c": "", "length": 20})
    assert response.status_code == 200 and "attachment" in response.headers["content-disposition"]
    rows = list(csv.reader(io.StringIO(response.content.decode("utf-8-sig"))))
    assert len(rows) == 21 and rows[0][1:] == ["alibi", "none"]
    page = PAGES["compare"]
    view = page.draw(page.complete({"a": "alibi", "b": "none", "c": "", "length": "20"}), LANGUAGES["en"])
    over = view.panels()[0]
    drawn = np.array(rows[1:], dtype=float)
    np.testing.assert_allclose(drawn[:, 0], over.x)
    np.testing.assert_allclose(drawn[:, 1], over.series["alibi"])
    assert "距离" in client.get("/export.csv", params={"view": "gallery", "lang": "zh"}).text


@pytest.mark.parametrize("query", ["", "view=nothing", "view=compare&length=x", "view=gallery&lang=fr"])
def test_an_invalid_export_is_refused_with_a_sentence(client, query):
    response = client.get(f"/export.csv?{query}")
    assert response.status_code == 400 and "Traceback" not in response.text


def test_only_reports_of_runs_are_served_and_they_are_sandboxed(client, tmp_path):
    (tmp_path / "report.html").write_text("<h1>hello</h1>")
    response = client.get("/report", params={"run": str(tmp_path)})
    assert response.text == "<h1>hello</h1>"
    assert response.headers["content-security-policy"].startswith("sandbox")
    for other in ("/etc", "/etc/passwd", str(tmp_path / "report.html"), "\0"):
        assert client.get("/report", params={"run": other}).status_code == 404


def test_every_table_is_a_csv_that_pandas_reads(client):
    pandas = pytest.importorskip("pandas")
    for page in ("gallery", "learn", "compare", "sentence", "extend"):
        response = client.post("/draw", json={"page": page, "query": "", "width": 1000}).json()
        assert response["csv"]
        for number, (title, address) in enumerate(response["csv"], 1):
            answer = client.get(address)
            assert f'filename="posenc-{page}-{number}.csv"' in answer.headers["content-disposition"]
            table = pandas.read_csv(io.BytesIO(answer.content), index_col=0)
            assert table.size and all(kind == "float64" or kind == "int64" for kind in table.dtypes), (page, title)
            assert table.columns.is_unique and not any(str(name).startswith("Unnamed") for name in table.columns)
    assert client.get(f"{address}9").status_code == 400
    assert "tables of this view are 1 to 3" in client.get("/export.csv?view=extend&table=7").text


@pytest.mark.parametrize(
    "accepted, language",
    [
        ("", "en"), ("zh-CN,zh;q=0.9,en;q=0.8", "zh"), ("en-US,en;q=0.9,zh;q=0.8", "en"), ("fr,zh;q=0.5", "zh"), ("fr", "en"),
        ("en;q=0.5, zh-Hant-TW", "zh"), ("zh;q=0", "en"), ("zh;q=x", "en"), ("*", "en"), (";;,,q=", "en"),
    ],
)  # fmt: skip
def test_a_first_visit_is_in_the_browser_s_language(client, accepted, language):
    headers = {"accept-language": accepted}
    response = client.get("/?view=extend&target=8192", headers=headers, follow_redirects=False)
    if language == "zh":
        assert response.status_code == 307 and response.headers["location"] == "/zh/?view=extend&target=8192"
    else:
        assert response.status_code == 200
    for chosen, status in (("en", 200), ("zh", 307)):  # the switch has the last word
        cookie = {**headers, "cookie": f"posenc-language={chosen}"}
        assert client.get("/", headers=cookie, follow_redirects=False).status_code == status
    assert client.get("/zh/", headers={"accept-language": "en"}, follow_redirects=False).status_code == 200


def test_foreign_host_names_are_refused(client):
    assert client.get("/", headers={"host": "evil.example"}).status_code == 400
    assert client.get("/export.csv?view=gallery", headers={"host": "evil.example"}).status_code == 400


def test_the_socket_is_local_and_a_taken_port_is_an_error():
    first = cli.listen(0)
    taken = first.getsockname()[1]
    with pytest.raises(ValueError, match=f"--port {taken} cannot be used.*in use.*or 0 for any"):
        cli.listen(taken)
    second = cli.listen(taken, 20)  # without --port: the next free one
    try:
        assert first.getsockname()[0] == second.getsockname()[0] == "127.0.0.1"
        assert second.getsockname()[1] > first.getsockname()[1]
    finally:
        first.close()
        second.close()


@pytest.mark.slow  # test_browser.py ends its server in the same way
def test_ctrl_c_ends_the_server_while_a_page_is_open(tmp_path):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    command = [sys.executable, "-m", "posenc", "explore", "--no-open", "--port", "0"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, cwd=tmp_path,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background ignores it
    ) as server:  # fmt: skip
        address = next(word for line in server.stdout for word in line.split() if word.startswith("http"))
        with urllib.request.urlopen(f"{address}gradio_api/heartbeat/page", timeout=300):  # as an open page holds it
            server.send_signal(signal.SIGINT)
            output = server.communicate(timeout=300)[0]
    assert server.returncode == 130 and "Traceback" not in output and "Error" not in output, output


def test_an_invalid_port_is_refused_with_a_sentence():
    for port in ("99999", "-1"):
        with pytest.raises(ValueError, match="--port must be"):
            cli.main(["--port", port])


def test_an_unexpected_error_becomes_a_sentence(monkeypatch, caplog):
    def broken(*arguments, **options):
        raise ZeroDivisionError("oops")

    page = PAGES["extend"]
    monkeypatch.setattr(page, "draw", broken)
    response = render.render_state(page, LANGUAGES["en"], {}, width=1000, coarse=False)
    assert list(response) == ["status"]
    assert "This cannot be drawn: ZeroDivisionError: oops" in response["status"]
    assert "Traceback" not in response["status"]
    assert "drawing extend failed" in caplog.text


def test_a_link_and_the_values_of_the_controls_give_the_same_view(client):
    request = {"page": "extend", "query": "?scaling=linear&target=8192", "width": 1000}
    by_link = client.post("/draw", json=request).json()
    values = [128, 10000, 4096, 8192, "linear", "", "", "", "", "Llama 2 7B"]
    by_values = client.post("/draw", json={"page": "extend", "values": values, "width": 1000}).json()
    assert by_link == by_values and by_link["link"] == "?view=extend&target=8192&scaling=linear"
    assert len(by_link["plots"]) == 2 and "finer" in by_link
    narrow = client.post("/draw", json={**request, "width": 380}).json()
    assert json.loads(narrow["plots"][1])["layout"]["height"] == 2 * json.loads(by_link["plots"][1])["layout"]["height"]
    assert "转不满一圈" in client.post("/draw", json={**request, "language": "zh"}).json()["titles"][0]


@pytest.mark.parametrize(
    "body", ["", "{", "[]", "3", "{}", '{"page": "nothing"}', '{"page": "extend", "width": "wide"}']
)
def test_a_malformed_request_is_refused(client, body):
    response = client.post("/draw", content=body)
    assert response.status_code == 400 and "Traceback" not in response.text


def test_plotly_is_served_locally(client):
    assert "plotly.js" in client.get("/plotly.js").text[:200]
