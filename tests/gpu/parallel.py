"""posenc.parallel on one GPU: `python -m tests.gpu.parallel`, without a GPU (for a trial) with TRITON_INTERPRET=1.

alone      one process, NCCL: every kind of message, sent to itself, and each strategy
nccl       two processes on the GPU with NCCL, which may refuse two ranks on one device: its answer is printed
host       two processes on the GPU, messages through host memory (gloo): the strategies with the triton engine
           against one process, in float32 and bfloat16, dropout included
"""

import argparse
import json
import os
import sys
import tempfile
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

import posenc
from posenc import parallel
from posenc.parallel import collectives
from posenc.parallel.layout import take_order

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LENGTH, HEADS, SIZE = (1024, 4, 64) if DEVICE == "cuda" else (32, 2, 16)
ENCODINGS = {
    "alibi": {}, "t5": {}, "shaw": {"values": True, "std": 0.5}, "deberta": {"max_distance": 64, "std": 0.5}, "rope": {},
    "transformer_xl": {"std": 0.2},
}  # fmt: skip


def messages(cp):
    """Every kind of message of a rank to itself."""
    cp.sends_alone = True
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(2, 3, 8, device=DEVICE, dtype=dtype)
        flags = x > 0
        a, b = collectives.exchange(cp, [x, flags]).wait()
        assert torch.equal(a, x) and torch.equal(b, flags)
        assert torch.equal(collectives.gather(cp, x)[0], x)
        assert torch.equal(collectives.scatter_sum(cp, x[None]), x)
        assert torch.equal(collectives.swap(cp, x[None])[0], x)
        assert torch.equal(collectives.total(cp, x), x)
        assert torch.equal(collectives.broadcast(cp, x), x)
    collectives.check_alike(cp, ("sizes",), (3,), torch.device(DEVICE))


def attention(group, strategy, balance, name, dtype, dropout):
    """The largest difference to one process, relative to the largest number."""
    cp = parallel.ContextParallel(group, strategy=strategy, balance=balance, timeout=120.0)
    torch.manual_seed(1)
    module = posenc.create(name, d_model=HEADS * SIZE, heads=HEADS, head_dim=SIZE, **ENCODINGS[name])
    tensors = [torch.randn(1, HEADS, LENGTH, SIZE).to(DEVICE, dtype) for _ in range(4)]
    module = module.to(DEVICE)

    def local(x):
        return take_order(x, cp.size, cp.balance, 2).chunk(cp.size, 2)[cp.rank]

    def run(attend, tensors, weight):
        inputs = [x.clone().requires_grad_() for x in tensors]
        module.zero_grad()
        torch.manual_seed(2)
        out = attend(*inputs)
        (out * weight).sum().backward()
        grads = [p.grad.clone() for p in module.parameters() if p.grad is not None]
        return [out.detach(), *(x.grad for x in inputs)], grads

    plan = module.plan(posenc.Positions(LENGTH))
    options = dict(causal=True, dropout=dropout, engine="triton")
    exact, tables = run(lambda q, k, v: posenc.attend(q, k, v, plan, **options), tensors[:3], tensors[3])
    own = [local(x) for x in tensors]
    found, own_tables = run(
        lambda q, k, v: parallel.attend(q, k, v, module, context_parallel=cp, **options), own[:3], own[3]
    )
    pairs = [(a, local(b)) for a, b in zip(found, exact, strict=True)] + list(zip(own_tables, tables, strict=True))
    return max(float((a.float() - b.float()).abs().max() / b.float().abs().max().clamp(min=1e-6)) for a, b in pairs)


STRATEGIES = (("ring", "zigzag"), ("ring", "striped"), ("ulysses", "none"), ("gather", "zigzag"))
# bfloat16: the ring makes dlse_p = w_p do · (o_p - o) from partial outputs that were rounded (2^-9 of o each, as FlashAttention's
# delta is), and they add up in rows of tables, whose largest gradients are a few times smaller than the sums' terms
DTYPES = ((torch.float32, 2e-4), (torch.bfloat16, 2.0**-4))


def strategies(group, names):
    worst = {}
    for name in names:
        for strategy, balance in STRATEGIES if DEVICE == "cuda" else STRATEGIES[:1]:  # the interpreter is slow
            for dtype, allowed in DTYPES if DEVICE == "cuda" else DTYPES[:1]:
                for dropout in (0.0, 0.3) if dtype == torch.bfloat16 or DEVICE != "cuda" else (0.0,):
                    error = attention(group, strategy, balance, name, dtype, dropout)
                    key = f"{name} {strategy} {balance} {str(dtype)[6:]} dropout {dropout}"
                    worst[key] = error
                    assert error < allowed, f"{key}: {error:.2e}, allowed {allowed}"
    return worst


def serve(rank, size, backend, file, names, results):
    torch.set_num_threads(1)
    try:
        if os.environ.get("TRITON_INTERPRET") == "1":
            from tests.engines import interpreter

            interpreter.mend()
        device = torch.device(DEVICE, 0) if backend == "nccl" else None
        dist.init_process_group(
            backend, init_method=f"file://{file}", rank=rank, world_size=size, timeout=timedelta(seconds=120),
            device_id=device,
        )  # fmt: skip
        group = dist.group.WORLD
        if size == 1:
            messages(parallel.ContextParallel(group))
        results.put((rank, "passed", strategies(group, names)))
    except BaseException:
        results.put((rank, "failed", traceback.format_exc()[-1500:]))


def launch(size, backend, names):
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        file = str(Path(folder) / "rendezvous")
        workers = [
            context.Process(target=serve, args=(rank, size, backend, file, names, results)) for rank in range(size)
        ]
        for worker in workers:
            worker.start()
        try:
            return sorted(results.get(timeout=500) for _ in workers)
        finally:
            for worker in workers:
                worker.kill()
                worker.join()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", help="a file for the differences, as JSON")
    parser.add_argument("--encodings", nargs="+", default=list(ENCODINGS), choices=list(ENCODINGS))
    given = parser.parse_args()
    cases = {"host": (2, "gloo")}
    if DEVICE == "cuda":
        cases = {"alone": (1, "nccl"), "nccl": (2, "nccl"), **cases}
    record, failed = {}, False
    for name, (size, backend) in cases.items():
        try:
            record[name] = launch(size, backend, given.encodings)
        except Exception as error:  # NCCL may end its processes without an answer
            record[name] = [(0, "failed", repr(error))]
        passed = all(kind == "passed" for _, kind, _ in record[name])
        print(f"{name}: {'passed' if passed else 'failed'}", flush=True)
        if passed:
            print("   ", "worst", max(record[name][0][2].items(), key=lambda pair: pair[1]))
        else:
            print(record[name][0][2] if record[name][0][1] == "failed" else record[name][-1][2])
        failed |= not passed and name != "nccl"  # two ranks on one device are NCCL's to refuse
    if given.out:
        Path(given.out).write_text(json.dumps(record, indent=1), encoding="utf-8")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
