"""RenderQueue: sends requests to the drawing process (`render_worker.py`) one at a time and enforces its limits.

- If a client disconnects, its drawing is cancelled; if it is still queued, it never starts.
- If the queue is full, further requests are refused at once.
- If a process does not respond in time, it is killed, and the next request starts another.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from .render_worker import LAST, MEMORY, SECONDS, receive, send

TIMEOUT = 90.0
"""Wall-clock seconds until a process that does not respond is killed; the process itself limits its CPU time."""


class QueueFull(Exception):
    """The queue is full."""


class RenderFailed(Exception):
    """The process ended without a response."""


@dataclass(eq=False)
class Job:
    request: dict[str, Any]
    process: subprocess.Popen[bytes] | None = None
    cancelled: bool = False
    done: bool = False


class RenderQueue:
    max_pending = 8
    """Requests in the queue, including the one in progress; an open page sends one at a time."""
    grace = 3.0
    """Seconds between cancelling a drawing and killing its process if it reaches no checkpoint."""

    def __init__(self, *, seconds: float = SECONDS, memory: int = MEMORY, timeout: float = TIMEOUT):
        self.timeout = timeout
        self.limits = str(seconds), str(memory)
        self.pending = 0
        self._thread = ThreadPoolExecutor(1, "posenc-render")
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    async def render(self, request: dict[str, Any], is_disconnected: Callable[[], Awaitable[bool]]) -> bytes | None:
        """The response as JSON, or None if the client disconnects. Raises QueueFull, or RenderFailed if the process died."""
        if self.pending >= self.max_pending:
            raise QueueFull
        self.pending += 1
        job = Job(request)
        work = asyncio.get_running_loop().run_in_executor(self._thread, self._run, job)
        try:
            while not (await asyncio.wait({work}, timeout=0.2))[0]:
                if await is_disconnected():
                    return None
            return work.result()
        finally:
            self._cancel(job)
            work.add_done_callback(self._finished)

    def start(self) -> None:
        """Start the process, so that its libraries are imported before the first request."""
        self._thread.submit(self._ensure_process)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
        if self._process is not None:
            self._kill(self._process)

    def _finished(self, _: object) -> None:
        self.pending -= 1

    def _ensure_process(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            if self._process is not None:
                self._kill(self._process)
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
            # own session: Ctrl-C in the terminal reaches only the server, which then kills this process
            self._process = subprocess.Popen(
                [sys.executable, "-m", f"{__package__}.render_worker", *self.limits], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                env=environment, start_new_session=True,
            )  # fmt: skip
        return self._process

    def _run(self, job: Job) -> bytes | None:
        with self._lock:
            if job.cancelled:
                return None
            job.process = process = self._ensure_process()
        assert process.stdin is not None and process.stdout is not None
        watchdog = threading.Timer(self.timeout, process.kill)
        watchdog.daemon = True
        watchdog.start()
        content = None
        try:
            send(process.stdin, json.dumps(job.request).encode())
            content = receive(process.stdout)
        except (OSError, ValueError):  # the process ended, or the queue was closed
            pass
        finally:
            watchdog.cancel()
            with self._lock:
                job.done = True
        if content is None:
            self._kill(process)
            if job.cancelled:
                return None
            raise RenderFailed
        if content[:1] == LAST:
            self._kill(process)
        return content[1:]

    def _cancel(self, job: Job) -> None:
        """Cancel a drawing that is not done yet."""
        has_signals = hasattr(signal, "SIGUSR1")
        with self._lock:
            if job.done or job.cancelled:
                return
            job.cancelled = True
            process = job.process
            if process is None:
                return
            if has_signals:
                process.send_signal(signal.SIGUSR1)

        def kill() -> None:
            if not job.done:
                process.kill()

        timer = threading.Timer(self.grace if has_signals else 0.0, kill)
        timer.daemon = True
        timer.start()

    @staticmethod
    def _kill(process: subprocess.Popen[bytes]) -> None:
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                with suppress(OSError):  # unsent data cannot be flushed to a dead process
                    stream.close()
