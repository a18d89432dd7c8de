"""Limits of a request: options, time, memory, queue length, size and origin."""

import asyncio
import json
import resource
import sys
import time

import pytest

pytest.importorskip("gradio")

from starlette.datastructures import Headers

import posenc
from posenc.explorer import access, render
from posenc.explorer.pages import PAGES
from posenc.explorer.pages.option_controls import FURTHEST, LIMITS, options_of
from posenc.explorer.render_queue import QueueFull, RenderFailed, RenderQueue
from posenc.explorer.texts import LANGUAGES

EASY = {"page": "extend", "language": "en", "state": {}, "width": 1000, "coarse": True}
HARD = {
    **EASY,
    "coarse": False,
    "page": "compare",
    "state": {"a": "transformer_xl", "b": "xlnet", "c": "sinusoidal_2d", "length": "65536"},
}
LARGE = {**EASY, "page": "compare", "state": {"a": "sinusoidal", "b": "", "c": "", "length": "65536"}, "export": True}


async def connected():
    return False


async def rendered(queue, request, is_disconnected=connected):
    response = await queue.render(request, is_disconnected)
    return None if response is None else json.loads(response)


def is_drawn(response):
    return response is not None and len(response.get("plots", ())) == 2


# ---- options ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("path", ["/export.csv?view=compare&a=clipped:max_distance=100000000", "/export.csv?view=compare&a=t5:buckets=100000000",
                                  "/export.csv?view=compare&b=shaw:max_distance=100000000", "/export.csv?view=compare&c=learned:max_length=1e12"])  # fmt: skip
def test_too_large_options_are_refused_before_they_cost_memory_or_time(client, path):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    client.get("/export.csv?view=extend")  # the drawing process has started
    began = time.perf_counter()
    response = client.get(path)
    assert response.status_code == 400 and "outside the range" in response.text
    assert time.perf_counter() - began < 10
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500_000  # KiB


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=pytest.mark.slow) if name in ("relative_logits", "transformer_xl") else name
    for name in posenc.list_encodings()
])  # fmt: skip
def test_the_largest_options_are_drawn(name):
    """Each slider's option at its limit."""
    page = PAGES["compare"]
    for option in options_of(name):
        if option.kind != "slider":
            continue
        low, high = LIMITS.get(f"{name}.{option.name}", LIMITS.get(option.name, (0, FURTHEST)))
        assert low <= option.low and option.high <= high  # sliders stay within the limits
        word = f"{name}:{option.name}={int(high) if isinstance(option.default, int) else option.high}"
        state = page.complete({"a": word, "b": "", "c": "", "length": "64"})
        response = render.render_state(page, LANGUAGES["en"], state, width=1000, coarse=True)
        assert "outside the range" not in response["status"] and "cannot be drawn" not in response["status"], word


# ---- time, memory, waiting --------------------------------------------------------------------------------------------
def test_a_drawing_over_the_time_limit_is_stopped_and_the_next_one_is_drawn():
    async def scenario():
        queue = RenderQueue(seconds=0.3)
        try:
            slow = await rendered(queue, HARD)
            assert list(slow) == ["status"] and "takes longer" in slow["status"]
            assert is_drawn(await rendered(queue, EASY))  # by a new process
        finally:
            queue.close()
        assert queue._process.poll() is not None

    asyncio.run(scenario())
    assert "takes longer" in render.time_limit_response({**HARD, "export": True})["sentence"]


def test_disconnecting_cancels_a_drawing_and_those_queued_behind_it_never_start(client, monkeypatch):
    queue = client.app.state.queue
    monkeypatch.setattr(queue, "max_pending", 2)
    monkeypatch.setattr(queue, "grace", 60)

    async def disconnected():
        return True

    async def scenario():
        assert is_drawn(await rendered(queue, EASY))
        process, began = queue._process, time.perf_counter()
        running = asyncio.create_task(rendered(queue, HARD, disconnected))
        waiting = asyncio.create_task(rendered(queue, EASY, disconnected))
        await asyncio.sleep(0)
        with pytest.raises(QueueFull):
            await rendered(queue, EASY)
        assert await running is None and await waiting is None
        while queue.pending:
            await asyncio.sleep(0.02)
        assert is_drawn(await rendered(queue, EASY))
        assert queue._process is process  # it was cancelled at a checkpoint and continues
        assert time.perf_counter() - began < 60

    asyncio.run(scenario())


def test_a_process_that_does_not_respond_is_killed():
    async def scenario():
        queue = RenderQueue(timeout=0.3)
        try:
            with pytest.raises(RenderFailed):
                await rendered(queue, HARD)  # importing its libraries takes longer
            assert queue._process.poll() is not None and queue.pending <= 1
        finally:
            queue.close()

    asyncio.run(scenario())


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux enforces the memory limit")
def test_a_drawing_over_the_memory_limit_is_refused_and_its_process_ends():
    async def scenario():
        queue = RenderQueue(memory=150_000_000)
        try:
            response = await rendered(queue, LARGE)
            assert list(response) == ["sentence"] and "more memory" in response["sentence"]
            assert queue._process.poll() is not None
        finally:
            queue.close()

    asyncio.run(scenario())


def test_a_full_queue_refuses_requests(client):
    queue = client.app.state.queue
    queue.pending += queue.max_pending
    try:
        assert client.get("/export.csv?view=extend").status_code == 503
        response = client.post("/draw", json={"page": "extend", "query": "", "language": "zh"}).json()
        assert "请稍后再试" in response["status"]
    finally:
        queue.pending -= queue.max_pending
    assert client.get("/export.csv?view=extend").status_code == 200


def test_deeply_nested_and_long_requests_are_refused(client):
    assert client.post("/draw", content="[" * 200_000).status_code == 400
    assert client.post("/draw", content=b"x" * (access.MAX_BODY + 1)).status_code == 413
    assert client.post("/draw", content=iter([b"{}"])).status_code == 413  # chunked: no Content-Length


# ---- origins ---------------------------------------------------------------------------------------------------
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
ACCEPTED = [
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
    ("POST", "/draw", HOST | {"content-length": "10"}),  # a local program
    ("GET", "/report", HOST | {"sec-fetch-site": "same-origin", "sec-fetch-mode": "navigate"}),
]


@pytest.mark.parametrize(("method", "path", "headers", "status"), REFUSED)
def test_other_origins_and_uploads_are_refused(method, path, headers, status):
    refusal = access.check_request(method, path, Headers(headers))
    assert refusal is not None and refusal[0] == status and len(refusal[1]) > 20


@pytest.mark.parametrize(("method", "path", "headers"), ACCEPTED)
def test_requests_of_the_page_itself_are_accepted(method, path, headers):
    assert access.check_request(method, path, Headers(headers)) is None


def test_the_server_applies_the_access_rules(client):
    request = {"page": "extend", "query": ""}
    assert client.post("/draw", json=request, headers={"origin": "https://evil.example"}).status_code == 403
    assert client.post("/draw", json=request, headers={"origin": "http://127.0.0.1"}).status_code == 200
    assert client.post("/gradio_api/upload", files={"files": ("a.txt", b"text")}).status_code == 403
    assert client.post("/zh/gradio_api/upload", files={"files": ("a.txt", b"text")}).status_code == 403
    assert client.get("/config", headers={"host": "evil.example"}).status_code == 400
    assert json.loads(client.get("/config").text)
