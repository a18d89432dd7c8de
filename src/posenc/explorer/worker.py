"""The process that draws: it reads questions, one at a time, and writes answers, within limits of time and memory.

    python -m posenc.explorer.worker SECONDS BYTES      a question, an answer: 8 bytes of length, then so many of content

Drawing runs here and not in the server, so that a drawing can be stopped and its memory bounded, whatever it does:

    SIGUSR1     nobody waits for the drawing any more: it ends at its next checkpoint, and the process goes on
    SIGPROF     its processor time is spent: it ends at once, and the process with it
    memory      the system refuses what is past the limit, and the process ends after its answer

`painter.py` is the other end.
"""

from __future__ import annotations

import json
import os
import signal
import struct
import sys
from typing import IO, Any

from . import stop

SECONDS = 20.0
"""Processor time of one drawing. The slowest one that the page's own controls ask for takes a few."""
MEMORY = 2 * 2**30
"""Bytes that drawings may add to what the libraries take."""
HEADER = struct.Struct(">Q")
MORE, LAST = b"+", b"."
"""The first byte of an answer: whether the process takes another question."""


def send(stream: IO[bytes], content: bytes) -> None:
    stream.write(HEADER.pack(len(content)) + content)
    stream.flush()


def receive(stream: IO[bytes]) -> bytes | None:
    """The next content, or None where the other end has gone."""
    header = stream.read(HEADER.size)
    if len(header) < HEADER.size:
        return None
    (size,) = HEADER.unpack(header)
    content = stream.read(size)
    return content if len(content) == size else None


def main(seconds: float, memory: int) -> None:
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints must not get between the answers
    drawing = late = False

    def spent(*_: Any) -> None:
        nonlocal late
        if drawing:
            late = True
            raise stop.Stopped

    timed = hasattr(signal, "setitimer")
    if timed:
        signal.signal(signal.SIGUSR1, stop.request)
        signal.signal(signal.SIGPROF, spent)
    import torch

    from .answer import as_bytes, of_question, too_long

    torch.set_num_threads(1)
    limit_memory(memory)
    while (content := receive(sys.stdin.buffer)) is not None:
        stop.reset()
        question = json.loads(content)
        late = ended = False
        try:
            if timed:
                signal.setitimer(signal.ITIMER_PROF, seconds)
            drawing = True
            answered, ended = of_question(question)
            drawing = False
        except stop.Stopped:
            answered, ended = too_long(question), late
        finally:
            drawing = False
            if timed:
                signal.setitimer(signal.ITIMER_PROF, 0)
        send(answers, (LAST if ended else MORE) + as_bytes(answered))
        if ended:  # the next drawing must not find what this one left behind
            return


def limit_memory(more: int) -> None:
    """Let this process take `more` bytes beyond what it has. Linux only: elsewhere the system does not count so."""
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
