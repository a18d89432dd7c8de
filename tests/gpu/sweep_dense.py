"""Dense masks on a GPU: the tiles of each kernel, and a call beside PyTorch's attention with the same mask.

python -m tests.gpu.sweep_dense tiles [head size]     microseconds of a kernel with a mask in float32, causal: 512 x 32 tokens, 2048 x 4
python -m tests.gpu.sweep_dense masks                 milliseconds of 4 x 2048 tokens, 16 heads of 64, graph replay: forward and a step
"""

import sys

import torch
from torch.nn.functional import scaled_dot_product_attention

import posenc
from posenc.engines import known_calls
from posenc.engines.triton import pair, prepared, replay, schedule
from posenc.engines.triton.schedule import Tile

TILES = {
    "forward": (Tile(64, 64, 4, 3), Tile(64, 64, 4, 3, 2), Tile(64, 64, 4, 3, 3), Tile(128, 64, 8, 3, 2), Tile(128, 64, 8, 3, 3)),
    "backward_q": (Tile(64, 64, 4, 3), Tile(64, 64, 4, 3, 2), Tile(64, 32, 4, 3, 2), Tile(64, 32, 4, 3, 3)),
    "backward_k": (Tile(64, 64, 4, 3), Tile(64, 64, 4, 3, 2), Tile(32, 64, 4, 3), Tile(64, 64, 8, 3)),
}  # fmt: skip
OWN = (*TILES, "preprocess", "delta_kernel", "gradient_kernel")


def forget():
    """Recorded calls keep the tiles with which they were recorded."""
    replay._programs.clear()
    prepared._calls.clear()
    known_calls._known.clear()


def kernel_times(call, rounds=4):
    """Microseconds of our kernels in a call, by name."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(rounds):
            call()
        torch.cuda.synchronize()
    return {e.key: round(e.self_device_time_total / rounds) for e in profile.key_averages() if e.key in OWN}


def make_step(batch, heads, length, size):
    """A training step with a bias of all pairs as `pair.py` has it, and its gradient."""
    q, k, v = torch.randn(3, batch, heads, length, size, device="cuda", dtype=torch.bfloat16).unbind()
    bias, g = torch.randn(1, heads, length, length, device="cuda"), torch.randn_like(q)
    leaves = [x.requires_grad_() for x in (q, k, v, bias)]

    def step():
        out, _ = pair._attend_with(q, k, v, bias, size**-0.5, True)
        return torch.autograd.grad(out, leaves, g)

    return step


def sweep_tiles(size):
    steps = make_step(32, 6, 512, size), make_step(4, 8, 2048, size)
    dense = schedule.HOPPER_KINDS["dense"]
    for kernel, tiles in TILES.items():
        before = dense.get((kernel, size))
        for tile in tiles:
            dense[kernel, size] = tile
            forget()
            print(kernel, tuple(tile), [kernel_times(step)[kernel] for step in steps], flush=True)
        if before is None:
            del dense[kernel, size]
        else:
            dense[kernel, size] = before
    forget()
    for step in steps:
        print("as they are", kernel_times(step), flush=True)


def replayed(call, rounds=20):
    """Milliseconds of a call as a CUDA graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(4):
            call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for _ in range(3):
        graph.replay()
    start.record()
    for _ in range(rounds):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return round(start.elapsed_time(end) / rounds, 3)


def compare_masks(batch=4, heads=16, length=2048, size=64):
    q, k, v = (
        x.requires_grad_() for x in torch.randn(3, batch, heads, length, size, device="cuda").bfloat16().unbind()
    )
    g, t5 = torch.randn_like(q), posenc.create("t5", heads=heads).to("cuda", torch.bfloat16)
    masks = {
        "boolean, one for all": torch.rand(1, 1, length, length, device="cuda") < 0.8,
        "boolean, for each text": torch.rand(batch, 1, length, length, device="cuda") < 0.8,
        "bfloat16, for each head": torch.randn(1, heads, length, length, device="cuda").bfloat16(),
    }
    for what, mask in masks.items():
        calls = {
            "PyTorch": lambda mask=mask: scaled_dot_product_attention(q, k, v, attn_mask=mask),
            "none": lambda mask=mask: posenc.attend(q, k, v, mask=mask, engine="triton"),
            "t5": lambda mask=mask: posenc.attend(q, k, v, t5.plan(posenc.Positions(length)), mask=mask, engine="triton"),
        }  # fmt: skip
        for name, call in calls.items():
            with torch.no_grad():
                forward = replayed(call)
            step = replayed(lambda call=call: torch.autograd.grad(call(), (q, k, v), g))
            print(f"{what:24} {name:8} {forward} {step}", flush=True)


if __name__ == "__main__":
    torch.manual_seed(0)
    if sys.argv[1:2] == ["masks"]:
        compare_masks()
    elif sys.argv[1:2] == ["tiles"]:
        sweep_tiles(int(sys.argv[2]) if len(sys.argv) > 2 else 64)
    else:
        sys.exit(__doc__)
