"""Shared fixtures: the built pages, a client without a socket, a server with a browser, and a small run of the lab."""

import os
import re
import signal
import subprocess
import sys
import urllib.request
from dataclasses import asdict
from urllib.parse import urlparse

import pytest

from tests.explorer.browser import CHROMIUM, FLAGS, PATIENCE, take_interrupts


@pytest.fixture(scope="session")
def built():
    """{language: {page key: PageLayout}}."""
    pytest.importorskip("gradio")
    from posenc.explorer import layout
    from posenc.explorer.texts import LANGUAGES

    return {language: layout.build_blocks(language)[1] for language in LANGUAGES}


@pytest.fixture(scope="session")
def client():
    """A client of the application, without a socket."""
    pytest.importorskip("gradio")
    from starlette.testclient import TestClient

    from posenc.explorer import server

    with TestClient(server.create_app(), base_url="http://127.0.0.1") as made:
        yield made


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory):
    """The folder of a finished run in the lab's own format: copy, two encodings, two seeds, without a report."""
    from posenc.lab.presets import from_dict
    from posenc.lab.results import Results

    task = {"task": "copy", "encodings": ["alibi", "rope"], "train": 16, "test": [16, 32], "steps": 1, "lr": 0.001}
    rows = [
        {"task": "copy", "encoding": encoding, "seed": seed, "lr": 0.001, "size": size, "accuracy": value + seed / 10}
        for encoding, value in (("alibi", 0.4), ("rope", 0.2))
        for size in (16, 32)
        for seed in (0, 1)
    ]
    folder = tmp_path_factory.mktemp("lab") / "tiny"
    folder.mkdir()
    run = Results(asdict(from_dict({"tasks": [task]}, "tiny")), {}, [], rows, 4, 4)
    (folder / "results.json").write_bytes(run.as_json())
    return folder


@pytest.fixture(scope="session")
def address(tmp_path_factory):
    """The address of a server that runs in an empty folder."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "OMP_NUM_THREADS": "1"}
    server = subprocess.Popen(
        [sys.executable, "-m", "posenc", "explore", "--no-open", "--port", "0"],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment,
        cwd=tmp_path_factory.mktemp("explorer"), preexec_fn=take_interrupts,
    )  # fmt: skip
    try:
        output = []
        while (found := re.search(r"http://127\.0\.0\.1:\d+/", line := server.stdout.readline())) is None:
            output.append(line)
            if not line:
                pytest.fail("the server did not start:\n" + "".join(output))
        yield found[0]
        with urllib.request.urlopen(
            f"{found[0]}gradio_api/heartbeat/page", timeout=60
        ):  # the connection of an open page
            server.send_signal(signal.SIGINT)
            last = server.communicate(timeout=60)[0]  # also closes the pipe
        assert server.returncode == 130 and "Traceback" not in last and "Error" not in last, last
    finally:
        if server.poll() is None:
            server.kill()
            server.communicate()


@pytest.fixture(scope="module")
def browser(address):
    """The server starts before the browser and ends after it. A module's own: the browser's event loop is this thread's
    as long as it is open, and other modules open a browser or a loop of theirs.
    """
    playwright = pytest.importorskip("playwright.sync_api")
    playwright.expect.set_options(timeout=PATIENCE)
    with playwright.sync_playwright() as driver:
        made = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS, timeout=PATIENCE)
        yield made
        made.close()


@pytest.fixture(scope="module")
def context(browser):
    made = browser.new_context(viewport={"width": 1400, "height": 1000}, accept_downloads=True, locale="en-US")
    made.set_default_timeout(PATIENCE)
    return made


def watched(context):
    """A new window; at the end of the test, its console must be free of errors and all requests local."""
    window, complaints, requests = context.new_page(), [], []
    window.on("console", lambda m: complaints.append(m.text) if m.type in ("error", "warning") else None)
    window.on("pageerror", lambda error: complaints.append(str(error)))
    window.on("request", lambda request: requests.append(urlparse(request.url)))
    yield window
    window.close()
    assert complaints == []
    assert [url for url in requests if url.scheme not in ("blob", "data") and url.hostname != "127.0.0.1"] == []


@pytest.fixture
def page(context):
    yield from watched(context)
