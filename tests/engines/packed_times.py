"""Packed documents on a CPU beside plain attention over the whole text, causal, float32, 8 heads of 64, one thread.

python -m tests.engines.packed_times [length] [tokens of a document]        as they run; as without engines/cpu/packed.py; plain
"""

import sys
import time

import torch

import posenc
from posenc.engines.cpu import packed

HEADS, SIZE, WIDTH = 8, 64, 512


def milliseconds(call, training, rounds=4):
    best = float("inf")
    for _ in range(rounds):
        start = time.process_time()
        with torch.set_grad_enabled(training):
            out = call()
            if training:
                out.sum().backward()
        best = min(best, time.process_time() - start)
    return 1e3 * best


def main():
    torch.set_num_threads(1)
    length, document = (int(x) for x in (*sys.argv[1:], *("4096", "700")[len(sys.argv) - 1 :]))
    ids, x = (torch.arange(length) // document)[None], torch.randn(1, length, WIDTH)
    q, k, v = (torch.randn(1, HEADS, length, SIZE, requires_grad=True) for _ in range(3))
    for name in ("none", "t5", "shaw", "transformer_xl", "deberta"):
        encoding = posenc.create(name, d_model=WIDTH, heads=HEADS)
        host = posenc.Attention(WIDTH, HEADS, encoding=encoding, causal=True)

        def ours(encoding=encoding, host=host):
            plan = encoding.plan(posenc.Positions(length), x=x, host=host)
            return posenc.attend(q, k, v, plan, causal=True, documents=ids)

        for training in (False, True):
            now, least = milliseconds(ours, training), packed.LEAST
            packed.LEAST = 1 << 62
            without, packed.LEAST = milliseconds(ours, training), least
            plain = milliseconds(lambda: posenc.attend(q, k, v, causal=True), training)
            what = "training" if training else "forward"
            print(f"{name:15} {what:8} {now / plain:.2f} x plain attention, {without / plain:.2f} without", flush=True)


if __name__ == "__main__":
    main()
