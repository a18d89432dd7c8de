"""Painter: asks the drawing process (`worker.py`), one question at a time, and keeps it within its limits.

a drawing that nobody waits for any more is stopped, and one that still waits for its turn is never begun
more questions than fit the queue are refused at once
a process that does not stop is ended, and the next question starts another
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

from .worker import LAST, MEMORY, SECONDS, receive, send

WAITING = 8
"""Questions that may wait, the one that is being drawn included; an open page asks one at a time."""
PATIENCE = 90.0
"""Seconds of the clock until a process that does not answer is ended. Its own limit counts processor time."""
GRACE = 3.0
"""Seconds between asking a drawing to stop and ending its process, where no checkpoint comes."""


class Busy(Exception):
    """The queue is full."""


class Failed(Exception):
    """The process ended without an answer."""


@dataclass(eq=False)
class Job:
    question: dict[str, Any]
    process: subprocess.Popen[bytes] | None = None
    cancelled: bool = False
    done: bool = False


class Painter:
    def __init__(
        self, *, waiting: int = WAITING, seconds: float = SECONDS, memory: int = MEMORY, patience: float = PATIENCE,
        grace: float = GRACE,
    ):  # fmt: skip
        self.waiting, self.patience, self.grace = waiting, patience, grace
        self.limits = str(seconds), str(memory)
        self.pending = 0
        self._thread = ThreadPoolExecutor(1, "posenc-painter")
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    async def ask(self, question: dict[str, Any], gone: Callable[[], Awaitable[bool]]) -> bytes | None:
        """The answer as JSON, or None once `gone()`. Raises Busy, or Failed where the process had to be ended."""
        if self.pending >= self.waiting:
            raise Busy
        self.pending += 1
        job = Job(question)
        work = asyncio.get_running_loop().run_in_executor(self._thread, self._draw, job)
        try:
            while not (await asyncio.wait({work}, timeout=0.2))[0]:
                if await gone():
                    return None
            return work.result()
        finally:
            self._cancel(job)
            work.add_done_callback(lambda _: self._left())

    def start(self) -> None:
        """Let the process import its libraries before the first question."""
        self._thread.submit(self._running)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
        if self._process is not None:
            self._end(self._process)

    def _left(self) -> None:
        self.pending -= 1

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            if self._process is not None:
                self._end(self._process)
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
            # a session of its own: Ctrl-C in the terminal is for the server, which then ends this process
            self._process = subprocess.Popen(
                [sys.executable, "-m", f"{__package__}.worker", *self.limits], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                env=environment, start_new_session=True,
            )  # fmt: skip
        return self._process

    def _draw(self, job: Job) -> bytes | None:
        with self._lock:
            if job.cancelled:
                return None
            job.process = process = self._running()
        assert process.stdin is not None
        assert process.stdout is not None
        watch = threading.Timer(self.patience, process.kill)
        watch.daemon = True
        watch.start()
        content = None
        try:
            send(process.stdin, json.dumps(job.question).encode())
            content = receive(process.stdout)
        except (OSError, ValueError):  # it has ended, or the painter was closed
            pass
        finally:
            watch.cancel()
            with self._lock:
                job.done = True
        if content is None:
            self._end(process)
            if job.cancelled:
                return None
            raise Failed
        if content[:1] == LAST:
            self._end(process)
        return content[1:]

    def _cancel(self, job: Job) -> None:
        """Stop a drawing; where it is done already this does nothing."""
        with self._lock:
            if job.done or job.cancelled:
                return
            job.cancelled = True
            process = job.process
            if process is None:
                return
            if hasattr(signal, "SIGUSR1"):
                process.send_signal(signal.SIGUSR1)

        def end() -> None:
            if not job.done:
                process.kill()

        timer = threading.Timer(self.grace if hasattr(signal, "SIGUSR1") else 0.0, end)
        timer.daemon = True
        timer.start()

    @staticmethod
    def _end(process: subprocess.Popen[bytes]) -> None:
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                with suppress(OSError):  # what was not sent yet cannot be
                    stream.close()
