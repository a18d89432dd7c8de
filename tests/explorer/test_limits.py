"""What one request may cost, and who may ask: limits of options, time, memory, waiting and origin."""

import asyncio
import json
import resource
import sys
import time

import pytest

pytest.importorskip("gradio")

from starlette.datastructures import Headers

import posenc
from posenc.explorer import answer, guard
from posenc.explorer.options import FURTHEST, LIMITS, options_of
from posenc.explorer.pages import PAGES
from posenc.explorer.painter import Busy, Failed, Painter
from posenc.explorer.texts import LANGUAGES

EASY = {"page": "extend", "language": "en", "state": {}, "width": 1000, "coarse": True}
HARD = {
    **EASY,
    "page": "compare",
    "state": {"a": "transformer_xl", "b": "xlnet", "c": "sinusoidal_2d", "length": "65536"},
}
LARGE = {**EASY, "page": "compare", "state": {"a": "sinusoidal", "b": "", "c": "", "length": "65536"}, "export": True}


async def present():
    return False


async def asked(painter, question, gone=present):
    told = await painter.ask(question, gone)
    return None if told is None else json.loads(told)


def drawn(told):
    return told is not None and len(told.get("plots", ())) == 2


# ---- options ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("path", ["/export.csv?view=compare&a=clipped:max_distance=100000000", "/export.csv?view=compare&a=t5:buckets=100000000",
                                  "/export.csv?view=compare&b=shaw:max_distance=100000000", "/export.csv?view=compare&c=learned:max_length=1e12"])  # fmt: skip
def test_one_get_takes_neither_memory_nor_time(client, path):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    client.get("/export.csv?view=extend")  # the drawing process has started
    began = time.perf_counter()
    told = client.get(path)
    assert told.status_code == 400 and "more than a picture shows" in told.text
    assert time.perf_counter() - began < 10
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500_000  # KiB


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=pytest.mark.slow) if name in ("relative_logits", "transformer_xl") else name
    for name in posenc.list_encodings()
])  # fmt: skip
def test_the_largest_options_are_drawn_or_refused_in_words(name):
    """Each slider's option at its limit: the picture is still there."""
    page = PAGES["compare"]
    for option in options_of(name):
        if option.kind != "slider":
            continue
        low, high = LIMITS.get(f"{name}.{option.name}", LIMITS.get(option.name, (0, FURTHEST)))
        assert low <= option.low and option.high <= high  # whatever a slider gives is within
        word = f"{name}:{option.name}={int(high) if isinstance(option.default, int) else option.high}"
        state = page.complete({"a": word, "b": "", "c": "", "length": "64"})
        told = answer.of_state(page, LANGUAGES["en"], state, width=1000, coarse=True)
        assert "more than a picture" not in told["status"] and "cannot be shown" not in told["status"], word


# ---- time, memory, waiting --------------------------------------------------------------------------------------------
def test_a_drawing_that_takes_too_long_is_stopped_and_the_next_one_is_drawn():
    async def ask():
        painter = Painter(seconds=0.3)
        try:
            slow = await asked(painter, HARD)
            assert list(slow) == ["status"] and "takes longer" in slow["status"]
            assert drawn(await asked(painter, EASY))  # by another process: what was interrupted is not used again
        finally:
            painter.close()
        assert painter._process.poll() is not None

    asyncio.run(ask())
    assert "takes longer" in answer.too_long({**HARD, "export": True})["sentence"]


def test_a_drawing_that_nobody_waits_for_is_stopped_and_those_behind_it_are_never_begun(client, monkeypatch):
    painter = client.app.state.painter
    monkeypatch.setattr(painter, "waiting", 2)
    monkeypatch.setattr(painter, "grace", 60)

    async def gone():
        return True

    async def ask():
        assert drawn(await asked(painter, EASY))
        process, began = painter._process, time.perf_counter()
        left = asyncio.create_task(asked(painter, HARD, gone))
        waits = asyncio.create_task(asked(painter, EASY, gone))
        await asyncio.sleep(0)
        with pytest.raises(Busy):
            await asked(painter, EASY)
        assert await left is None and await waits is None
        while painter.pending:
            await asyncio.sleep(0.02)
        assert drawn(await asked(painter, EASY))
        assert painter._process is process  # it stopped between two parts, and goes on
        assert time.perf_counter() - began < 60

    asyncio.run(ask())


def test_a_process_that_does_not_answer_is_ended():
    async def ask():
        painter = Painter(patience=0.3)
        try:
            with pytest.raises(Failed):
                await asked(painter, HARD)  # its libraries alone take longer
            assert painter._process.poll() is not None and painter.pending <= 1
        finally:
            painter.close()

    asyncio.run(ask())


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts the memory of a process so")
def test_a_drawing_that_takes_too_much_memory_is_refused_and_its_process_ends():
    async def ask():
        painter = Painter(memory=150_000_000)
        try:
            told = await asked(painter, LARGE)
            assert list(told) == ["sentence"] and "more memory" in told["sentence"]
            assert painter._process.poll() is not None
        finally:
            painter.close()

    asyncio.run(ask())


def test_a_full_queue_is_told_so(client):
    painter = client.app.state.painter
    painter.pending += painter.waiting
    try:
        assert client.get("/export.csv?view=extend").status_code == 503
        told = client.post("/draw", json={"page": "extend", "query": "", "language": "zh"}).json()
        assert "请稍后再试" in told["status"]
    finally:
        painter.pending -= painter.waiting
    assert client.get("/export.csv?view=extend").status_code == 200


def test_deep_and_long_questions_are_refused(client):
    assert client.post("/draw", content="[" * 200_000).status_code == 400
    assert client.post("/draw", content=b"x" * (guard.LARGEST + 1)).status_code == 413
    assert client.post("/draw", content=iter([b"{}"])).status_code == 413  # chunked: its length is not known


# ---- who is answered ---------------------------------------------------------------------------------------------------
HOST = {"host": "127.0.0.1:7860"}
REFUSED = [
    ("POST", "/draw", {"host": "evil.example:7860"}, 400),
    ("POST", "/draw", {"host": "127.0.0.1.evil.example"}, 400),
    ("POST", "/draw", {}, 400),
    ("GET", "/", {"host": "localhost:7860@evil.example"}, 400),
    ("POST", "/draw", HOST | {"origin": "https://evil.example"}, 403),
    ("POST", "/draw", HOST | {"origin": "null"}, 403),
    ("POST", "/draw", HOST | {"origin": "http://127.0.0.1:3000"}, 403),
    ("POST", "/draw", HOST | {"origin": "http://localhost:7860"}, 403),
    ("POST", "/draw", HOST | {"sec-fetch-site": "cross-site"}, 403),
    ("GET", "/export.csv", HOST | {"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"}, 403),
    ("GET", "/export.csv", HOST | {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}, 403),
    ("GET", "/report", HOST | {"sec-fetch-site": "same-site"}, 403),
    ("GET", "/", HOST | {"sec-fetch-site": "cross-site", "sec-fetch-mode": "cors"}, 403),
    ("POST", "/gradio_api/upload", HOST | {"content-length": "10"}, 403),
    ("POST", "/zh/gradio_api/upload", HOST | {"content-length": "10", "origin": "http://127.0.0.1:7860"}, 403),
    ("GET", "/gradio_api/file=/etc/passwd", HOST, 403),
    ("GET", "/gradio_api/proxy=https://evil.example", HOST, 403),
    ("GET", "/gradio_api/deep_link", HOST, 403),
    ("POST", "/draw", HOST | {"content-length": "9999999999"}, 413),
    ("POST", "/draw", HOST | {"content-length": "9" * 5000}, 413),
]  # fmt: skip
ANSWERED = [
    ("GET", "/", HOST),
    ("GET", "/", HOST | {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}),  # a link in a chat
    ("GET", "/zh/", {"host": "localhost"}),
    (
        "POST",
        "/draw",
        HOST | {"origin": "http://127.0.0.1:7860", "sec-fetch-site": "same-origin", "content-length": "10"},
    ),
    (
        "POST",
        "/draw",
        {"host": "localhost:9", "origin": "http://localhost:9", "content-length": "10"},
    ),  # a tunnel's port
    ("POST", "/draw", HOST | {"content-length": "10"}),  # a program of this machine
    ("GET", "/report", HOST | {"sec-fetch-site": "same-origin", "sec-fetch-mode": "navigate"}),
]


@pytest.mark.parametrize(("method", "path", "headers", "status"), REFUSED)
def test_other_origins_and_uploads_are_refused(method, path, headers, status):
    told = guard.refused(method, path, Headers(headers))
    assert told is not None and told[0] == status and len(told[1]) > 20


@pytest.mark.parametrize(("method", "path", "headers"), ANSWERED)
def test_the_page_itself_is_answered(method, path, headers):
    assert guard.refused(method, path, Headers(headers)) is None


def test_the_server_asks_the_guard(client):
    ask = {"page": "extend", "query": ""}
    assert client.post("/draw", json=ask, headers={"origin": "https://evil.example"}).status_code == 403
    assert client.post("/draw", json=ask, headers={"origin": "http://127.0.0.1"}).status_code == 200
    assert client.post("/gradio_api/upload", files={"files": ("a.txt", b"text")}).status_code == 403
    assert client.post("/zh/gradio_api/upload", files={"files": ("a.txt", b"text")}).status_code == 403
    assert client.get("/config", headers={"host": "evil.example"}).status_code == 400
    assert json.loads(client.get("/config").text)
