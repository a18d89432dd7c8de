"""The drawing process: reads requests from stdin one at a time, writes responses to stdout, within time and memory limits.

    python -m posenc.explorer.render_worker SECONDS BYTES
    message:   8 bytes of length (big-endian), then the content, JSON

Drawing runs in its own process so that a drawing can be cancelled and its memory bounded, whatever it does:

    SIGUSR1     the client left: the drawing ends at its next checkpoint, and the process continues
    SIGPROF     the CPU time is used up: the drawing ends at once, and the process with it
    memory      the system refuses allocations above the limit, and the process ends after its response

`render_queue.py` is the other end.
"""

from __future__ import annotations

import json
import os
import signal
import struct
import sys
from typing import IO, Any

from . import cancellation

SECONDS = 20.0
"""CPU time of one drawing; the slowest one within reach of the page's controls takes a few seconds."""
MEMORY = 2 * 2**30
"""Bytes that drawings may use in addition to the imported libraries."""
HEADER = struct.Struct(">Q")
MORE, LAST = b"+", b"."
"""First byte of a response: whether the process accepts another request."""


def send(stream: IO[bytes], content: bytes) -> None:
    stream.write(HEADER.pack(len(content)) + content)
    stream.flush()


def receive(stream: IO[bytes]) -> bytes | None:
    """The content of the next message; None once the other end has closed."""
    header = stream.read(HEADER.size)
    if len(header) < HEADER.size:
        return None
    (size,) = HEADER.unpack(header)
    content = stream.read(size)
    return content if len(content) == size else None


def main(seconds: float, memory: int) -> None:
    responses = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever libraries print goes to stderr, not between the responses
    drawing = timed_out = False

    def time_is_up(*_: Any) -> None:
        nonlocal timed_out
        if drawing:
            timed_out = True
            raise cancellation.Cancelled

    has_timer = hasattr(signal, "setitimer")
    if has_timer:
        signal.signal(signal.SIGUSR1, cancellation.request_cancel)
        signal.signal(signal.SIGPROF, time_is_up)
    import torch

    from .render import render_request, time_limit_response, to_json_bytes

    torch.set_num_threads(1)
    limit_memory(memory)
    while (content := receive(sys.stdin.buffer)) is not None:
        cancellation.reset()
        request = json.loads(content)
        timed_out = is_last = False
        try:
            if has_timer:
                signal.setitimer(signal.ITIMER_PROF, seconds)
            drawing = True
            response, is_last = render_request(request)
            drawing = False
        except cancellation.Cancelled:
            response, is_last = time_limit_response(request), timed_out
        finally:
            drawing = False
            if has_timer:
                signal.setitimer(signal.ITIMER_PROF, 0)
        send(responses, (LAST if is_last else MORE) + to_json_bytes(response))
        if is_last:  # an interrupted drawing may leave libraries in a broken state
            return


def limit_memory(more: int) -> None:
    """Limit this process to `more` bytes beyond its present data size. Linux only: other systems do not enforce it."""
    try:
        import resource

        with open("/proc/self/statm", encoding="ascii") as file:
            pages = int(file.read().split()[5])
    except (ImportError, OSError):
        return
    size = pages * resource.getpagesize() + more
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (size if hard == resource.RLIM_INFINITY else min(size, hard), hard))


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]))
