"""The host's part of calls on a GPU: repeated calls give what first ones gave, decoding gives what prefill gives; and where the
host's time goes.

    python -m tests.gpu.host check       correctness; check 2/3: a third of it; check 1/1 decoding,windows: these
    python -m tests.gpu.host profile     host time by part, and a profile of deberta's, transformer_xl's and rope's steps
    python -m tests.gpu.host launches    what one launch, one allocation and one lookup cost
"""

import cProfile
import io
import pstats
import statistics
import sys
import threading
import time
from contextlib import nullcontext

import torch
import torch.nn.functional as F

import posenc
from posenc import Attention, Positions, attend
from posenc.bench.uses_calls import PER_HEAD, make_encoding
from posenc.engines import known_calls

CAUSAL = ("none", "rope", "alibi")


def forget() -> None:
    from posenc.engines.triton import prepared, replay

    known_calls.forget()
    prepared._calls.clear()
    replay._programs.clear()


def make_layer(name, heads=4, size=64, dtype=torch.bfloat16):
    encoding = make_encoding(name, heads, size, "cuda", dtype)
    return Attention(heads * size, heads, encoding=encoding, causal=name in CAUSAL).to("cuda", dtype)


def step(layer, q, k, v, g, name, plan=None):
    """out and gradients"""
    leaves = [q, k, v, *layer.encoding.parameters()]
    plan = layer.encoding.plan(Positions(q.shape[2]), host=layer) if plan is None else plan
    out = attend(q, k, v, plan, causal=name in CAUSAL)
    return [out.detach(), *torch.autograd.grad(out, leaves, g)]


def draw(seed, batch=2, heads=4, length=96, size=64, transposed=False):
    generator = torch.Generator("cuda").manual_seed(seed)
    shape = (batch, length, heads, size) if transposed else (batch, heads, length, size)
    made = [torch.randn(shape, generator=generator, device="cuda").bfloat16() for _ in range(4)]
    made = [x.transpose(1, 2) if transposed else x for x in made]
    return [*(x.requires_grad_() for x in made[:3]), made[3]]


def same(ours, expected, name, what):
    exact = name not in ("none", "rope")  # PyTorch's own backward kernels may add in any order
    for number, (a, b) in enumerate(zip(ours, expected, strict=True)):
        if exact or number == 0:
            assert torch.equal(a, b), f"{name}, {what}: result {number} differs by {(a - b).abs().max()}"
        else:
            torch.testing.assert_close(a, b, atol=0.02 * float(b.abs().max()), rtol=0.02)


def repeated_calls(name):
    """Calls of several layouts and values in turns, with records and without; parameters change in between."""
    layer = make_layer(name)
    cases = [(seed, transposed, length) for seed in range(6) for transposed in (False, True) for length in (96, 130)]
    expected = {}
    for case in cases:
        forget()
        with torch.no_grad():
            for parameter in layer.encoding.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(case[0])) / 4)
        expected[case] = step(layer, *draw(case[0], transposed=case[1], length=case[2]), name)
    forget()
    for case in cases:
        with torch.no_grad():
            for parameter in layer.encoding.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(case[0])) / 4)
        q, k, v, g = draw(case[0], transposed=case[1], length=case[2])
        same(step(layer, q, k, v, g, name), expected[case], name, f"repeated {case}")
        with torch.no_grad():
            plan = layer.encoding.plan(Positions(case[2]), host=layer)
            out = attend(q, k, v, plan, causal=name in CAUSAL)
        same([out], expected[case][:1], name, f"without gradients {case}")
        with torch.autocast("cuda", torch.bfloat16):
            out = attend(q, k, v, layer.encoding.plan(Positions(case[2]), host=layer), causal=name in CAUSAL)
        if name not in ("deberta", "transformer_xl"):  # their plans are products, which autocast changes
            same([out.detach()], expected[case][:1], name, f"autocast {case}")


def other_uses(name):
    """retain_graph, hooks, gradients of some inputs, a second derivative, a side stream, a CUDA graph of a forward pass."""
    layer = make_layer(name)
    q, k, v, g = draw(1)
    plan = layer.encoding.plan(Positions(96), host=layer)
    expected = step(layer, q, k, v, g, name)
    for _ in range(4):
        seen = []
        out = attend(q, k, v, plan, causal=name in CAUSAL)
        out.register_hook(seen.append)
        first = torch.autograd.grad(out, (q, k, v), g, retain_graph=True)
        again = torch.autograd.grad(out, (q, k, v), g, retain_graph=True)
        same([out.detach(), *first], expected[:4], name, "retained")
        same([out.detach(), *again], expected[:4], name, "the second time")
        assert len(seen) == 2
        (dv,) = torch.autograd.grad(out, v, g, retain_graph=True)
        same([out.detach(), dv], [expected[0], expected[3]], name, "one gradient")
    if name not in CAUSAL:
        for _ in range(3):
            (slope,) = torch.autograd.grad(attend(q, k, v, plan).sum(), q, create_graph=True)
            message = ""
            try:
                slope.sum().backward()
            except RuntimeError as error:
                message = str(error)
            assert "first derivatives only" in message, "a second derivative must raise"
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(4):
            results = step(layer, q, k, v, g, name)
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    same(results, expected, name, "on a side stream")
    with torch.no_grad():
        plan = layer.encoding.plan(Positions(96), host=layer)
        attend(q, k, v, plan, causal=name in CAUSAL)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = attend(q, k, v, plan, causal=name in CAUSAL)
        out.zero_()
        graph.replay()
        same([out], expected[:1], name, "a graph")


def in_threads(names):
    """Two threads, each with calls of several encodings."""
    faults = []

    def work(number):
        try:
            for name in names:
                layer = make_layer(name)
                q, k, v, g = draw(number, length=64 + 32 * number)
                expected = step(layer, q, k, v, g, name)
                for _ in range(10):
                    same(step(layer, q, k, v, g, name), expected, name, "threads")
        except Exception as error:
            faults.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults, faults[0]


def decoding(name, length=700, first=660, heads=8, kv_heads=2, size=64):
    """Steps over a growing cache give what prefill gives; bits are those of a call that was never recorded."""
    torch.manual_seed(3)
    encoding = make_encoding(name, heads, size, "cuda", torch.bfloat16, causal=True)
    q = torch.randn(2, heads, length, size, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(2, kv_heads, length, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    with torch.no_grad():
        prefill = attend(q, k, v, encoding.plan(Positions(length)), causal=True)

        def one(at, count=1):
            plan = encoding.plan(Positions((at + 1 - count, count), at + 1))
            return attend(q[:, :, at + 1 - count : at + 1], k[:, :, : at + 1], v[:, :, : at + 1], plan, causal=True)

        for at in range(first, length):
            forget()
            expected = one(at)
            assert torch.equal(one(at), expected) and torch.equal(one(at), expected), f"{name}: {at} repeated"
            error = (expected - prefill[:, :, at : at + 1]).abs().max()
            assert error <= 0.02, f"{name}: decoding differs from prefill by {error} at {at}"
        forget()
        steps = [one(at) for at in range(first, length)]  # the length alone changes
        error = (torch.cat(steps, 2) - prefill[:, :, first:]).abs().max()
        assert error <= 0.02, f"{name}: decoding differs from prefill by {error}"
        for at in range(first, length, 7):
            torch.testing.assert_close(one(at, 4), prefill[:, :, at - 3 : at + 1], atol=0.02, rtol=0.0)
        torch.cuda.synchronize()
        expected = one(length - 1)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = one(length - 1)
        out.zero_()
        graph.replay()
        assert torch.equal(out, expected), f"{name}: a graph of a step"


def with_cache(name):
    """Token by token, the first tokens of a text that crosses a tile of keys and the rows that decoding makes itself."""
    layer = posenc.Attention(256, 4, encoding=name, causal=True).to("cuda", torch.bfloat16).eval()
    x = torch.randn(2, 270, 256, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        whole = layer(x)
        cache = posenc.KVCache()
        parts = [layer(x[:, :40], cache=cache)]
        parts += [layer(x[:, t : t + 1], cache=cache) for t in range(40, 270)]
    error = (torch.cat(parts, 1) - whole).abs().max()
    assert error <= 0.02, f"{name}: a layer with a cache differs by {error}"


def padded(name):
    """Texts and tokens with padding: repeated calls give the bits of first ones, and what the reference engine gives."""
    options = {"max_length": 128} if name == "learned" else {}
    encoding = posenc.create(name, d_model=256, heads=4, **options)
    layer = posenc.Attention(256, 4, encoding=encoding, causal=True).to("cuda", torch.bfloat16).eval()
    exact = posenc.Attention(
        256, 4, encoding=posenc.create(name, d_model=256, heads=4, **options), causal=True, engine="reference"
    )
    exact = exact.to("cuda", torch.float32).eval()
    exact.load_state_dict(layer.state_dict())
    for rows, length in ((1, 12), (3, 16), (3, 60)):
        for seed in range(5):  # other masks and numbers, the same call
            torch.manual_seed(seed)
            x = torch.randn(rows, length + 8, 256, device="cuda", dtype=torch.bfloat16)
            first = torch.randint(0, length // 2, (rows, 1), device="cuda")
            real = torch.arange(length + 8, device="cuda") >= first
            with torch.no_grad():
                results = []
                for known in (False, True):
                    cache, outs = posenc.KVCache(), []
                    for begin, end in ((0, length), *((at, at + 1) for at in range(length, length + 8))):
                        if not known:
                            forget()
                        outs.append(layer(x[:, begin:end], cache=cache, key_mask=real[:, begin:end]))
                    text = layer(x[:, :length], key_mask=real[:, :length])
                    results.append((torch.cat(outs, 1), text))
                for a, b in zip(*results):
                    assert torch.equal(a, b), f"{name}, {rows}x{length}: a repeated call differs"
                truth, whole = exact(x.float(), key_mask=real), results[1][0]
            error = ((whole - truth)[real].norm() / truth[real].norm()).item()
            assert error < 0.02, f"{name}, {rows}x{length}: off by {error}"


def packed(name):
    """Texts with documents or a window, and four tokens at once: repeated calls give the bits of first ones, and what the reference engine gives."""
    for window in (None, (20, 0)):
        torch.manual_seed(0)
        options = {"causal": window is not None, "window": window}
        layer = posenc.Attention(256, 4, encoding=name, **options).to("cuda", torch.bfloat16).eval()
        exact = posenc.Attention(256, 4, encoding=name, engine="reference", **options).to("cuda").eval()
        exact.load_state_dict(layer.state_dict())
        for seed in range(10):
            length = (60, 130)[seed % 2]
            x = torch.randn(3, length, 256, device="cuda", dtype=torch.bfloat16)
            ids = torch.randint(4, (3, length), device="cuda")
            ids = ids if seed > 7 else ids.sort(-1)[0]
            masks = {"documents": ids} if window is None else {}
            with torch.no_grad():
                again = layer(x, **masks)
                forget()
                first, truth = layer(x, **masks), exact(x.float(), **masks)
            assert torch.equal(again, first), f"{name}, window {window}: a repeated call differs"
            error = ((first - truth).norm() / truth.norm()).item()
            assert error < 0.02, f"{name}, window {window}, documents: off by {error}"
        if window is not None:
            with torch.no_grad():
                whole, cache = layer(x), posenc.KVCache()
                parts = [layer(x[:, :50], cache=cache)]
                parts += [layer(x[:, at : at + 4], cache=cache) for at in range(50, length, 4)]
            assert (torch.cat(parts, 1) - whole).abs().max() <= 0.02, f"{name}: four tokens at once differ"


def changed_tables(name):
    """A layer's recorded tokens and texts read its tables: written in place, by an optimiser, through .data, and replaced."""
    layer = posenc.Attention(256, 4, encoding=name, causal=True).to("cuda", torch.bfloat16).eval()
    x = torch.randn(2, 120, 256, device="cuda", dtype=torch.bfloat16)
    cache = posenc.KVCache()
    owner, key = next(
        (module, key)
        for module in layer.encoding.modules()
        for key, one in module._parameters.items()
        if one is not None
    )

    def double():
        getattr(owner, key).mul_(2.0)

    def step():
        with torch.enable_grad():
            optimiser = torch.optim.AdamW([getattr(owner, key)], lr=0.5)
            layer(x[:, :32]).float().square().mean().backward()
            optimiser.step()
            layer.zero_grad()

    def write_data():
        getattr(owner, key).data.add_(0.5)

    def replace():
        setattr(owner, key, torch.nn.Parameter(getattr(owner, key).detach() * -1.5))

    def load():
        layer.load_state_dict({name: one * 1.25 for name, one in layer.state_dict().items()})

    with torch.no_grad():
        layer(x[:, :40], cache=cache)
        at = 40
        for change in (lambda: None, double, step, write_data, replace, load):
            change()
            for _ in range(5):  # the second call is recorded, the third replayed
                whole = layer(x[:, : at + 1])
                if change is load:  # keys are projected anew
                    cache = posenc.KVCache()
                    layer(x[:, :at], cache=cache)
                token = layer(x[:, at : at + 1], cache=cache)
                error = (token - whole[:, -1:]).abs().max() / whole.abs().max()
                assert error <= 0.03, f"{name}: {change.__name__}, a token differs by {error}"
                at += 1


def projections(name):
    """Tables that linear layers project (core/projection.py): not further from float64 than PyTorch's own products."""
    from posenc.core import projection

    for size, count, n, needs in ((768, 2, 255, True), (512, 1, 31, False), (1024, 2, 512, True), (64, 2, 1000, True)):
        torch.manual_seed(size)
        linears = [torch.nn.Linear(size, size, bias=number > 0, device="cuda") for number in range(count)]
        table = torch.randn(n + 7, size, device="cuda").bfloat16()
        grads = [torch.randn(8, n, size // 8, device="cuda").bfloat16() for _ in linears]

        def results(run, dtype):
            own = [linear.to(torch.bfloat16).to(dtype) for linear in linears]  # noqa: B023
            rows = table.to(dtype).requires_grad_(needs)  # noqa: B023
            outs = run(rows, own)
            leaves = [*([rows] if needs else []), *(x for linear in own for x in linear.parameters())]  # noqa: B023
            return [*outs, *torch.autograd.grad(outs, leaves, [g.to(dtype) for g in grads])]  # noqa: B023

        def plain(rows, own):
            return [linear(rows[4:-3]).unflatten(1, (8, -1)).transpose(0, 1) for linear in own]

        assert projection._find_weights(table, [linear.bfloat16() for linear in linears])
        for _ in range(3):
            ours = results(lambda rows, own: projection.project_heads(rows, own, 8, slice(4, -3)), torch.bfloat16)
        theirs, truth = results(plain, torch.bfloat16), results(plain, torch.float64)
        for number, (a, b, exact) in enumerate(zip(ours, theirs, truth, strict=True)):
            error, usual = (((x.double() - exact).norm() / exact.norm()).item() for x in (a, b))
            assert error <= 1.1 * usual + 1e-5, f"size {size}, result {number}: off by {error}, PyTorch by {usual}"


def windows(name):
    """Windows like earlier ones: the same numbers and gradients."""
    rows, columns = (x.flatten().cuda() for x in torch.meshgrid(torch.arange(7), torch.arange(9), indexing="ij"))
    positions = Positions(rows, rows, more=[(columns, columns, (-8, 8))], reach=(-6, 6))
    grid = posenc.index.Grid((posenc.index.clip(6, 6, axis=0), posenc.index.clip(8, 8, axis=1)))
    table = torch.randn(4, grid.n, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    q, k, v, g = draw(2, 8, 4, 63, 32)
    plan = posenc.Plan(positions, lookups=(posenc.Lookup(grid, bias=table),))
    expected = attend(q, k, v, plan, engine="reference")
    truth = [expected.detach(), *torch.autograd.grad(expected, (q, k, v, table), g)]
    for _ in range(3):
        out = attend(q, k, v, plan)
        for a, b in zip([out.detach(), *torch.autograd.grad(out, (q, k, v, table), g)], truth, strict=True):
            torch.testing.assert_close(a, b, atol=0.02 * float(b.abs().max()), rtol=0.02)


def check(part: str = "1/1", names: str = "") -> None:
    failed = 0
    decoded = ("none", "rope", "alibi", "t5", "clipped", "shaw", "transformer_xl")
    cases = [(repeated_calls, name) for name in PER_HEAD] + [(other_uses, name) for name in PER_HEAD]
    cases += [(decoding, name) for name in decoded] + [(with_cache, name) for name in (*decoded, "relative_logits")]
    cases += [
        (changed_tables, name) for name in ("t5", "clipped", "shaw", "transformer_xl", "relative_logits", "deberta")
    ]
    cases += [(padded, name) for name in ("none", "learned", "rope", "alibi", "t5", "shaw")]
    cases += [(packed, name) for name in ("none", "rope", "alibi", "t5")]
    cases += [(in_threads, PER_HEAD), (projections, "bfloat16"), (windows, "a grid")]
    cases = [case for case in cases if not names or case[0].__name__ in names.split(",")]
    number, count = map(int, part.split("/"))
    for function, name in cases[number - 1 :: count]:
        began = time.time()
        try:
            function(name)
            print(f"passed  {function.__name__} {name} ({time.time() - began:.1f} s)", flush=True)
        except Exception as error:
            failed += 1
            print(f"FAILED  {function.__name__} {name}: {type(error).__name__} {str(error)[:300]}", flush=True)
    sys.exit(failed)


# ---- where the host's time goes ----------------------------------------------------------------------------------------
def microseconds(call, rounds=30, inner=20, prepare=None) -> float:
    taken = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(inner):
            call()
        taken.append((time.perf_counter() - began) / inner)
    torch.cuda.synchronize()
    return statistics.median(taken) * 1e6


def profile() -> None:
    for name in PER_HEAD:
        layer = make_layer(name, 12)
        q, k, v, g = draw(0, 16, 12, 128)
        causal, leaves = name in CAUSAL, [q, k, v, *layer.encoding.parameters()]

        def plan():
            return layer.encoding.plan(Positions(128), host=layer)  # noqa: B023

        def plain():
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal)  # noqa: B023

        def ours():
            return attend(q, k, v, plan(), causal=causal)  # noqa: B023

        made, parts = plan(), {}
        for grad in (False, True):
            with nullcontext() if grad else torch.no_grad():
                which = "with gradients" if grad else "forward"
                parts |= {
                    f"plan, {which}": microseconds(plan),
                    f"attend, {which}": microseconds(lambda: attend(q, k, v, made, causal=causal)),  # noqa: B023
                    f"sdpa, {which}": microseconds(plain),
                }
        parts["step"] = microseconds(lambda: torch.autograd.grad(ours(), leaves, g))  # noqa: B023
        parts["sdpa's step"] = microseconds(lambda: torch.autograd.grad(plain(), (q, k, v), g))  # noqa: B023
        print(name, ", ".join(f"{what} {time:.0f}" for what, time in parts.items()), flush=True)
        if name in ("rope", "t5", "deberta", "transformer_xl"):
            torch.autograd.set_multithreading_enabled(False)
            profiler = cProfile.Profile()
            torch.cuda.synchronize()
            with profiler:
                for _ in range(30):
                    torch.autograd.grad(ours(), leaves, g)
                    torch.cuda.synchronize()
            torch.autograd.set_multithreading_enabled(True)
            text = io.StringIO()
            pstats.Stats(profiler, stream=text).sort_stats("tottime").print_stats(28)
            print("\n".join(line for line in text.getvalue().splitlines() if line.strip()), flush=True)


def launches() -> None:
    """The parts of a decoding step, in microseconds."""
    q = torch.randn(1, 32, 1, 128, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(1, 8, 1024, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    with torch.no_grad():
        print("sdpa", microseconds(lambda: F.scaled_dot_product_attention(q, k, v, enable_gqa=True)))
        print("torch.empty", microseconds(lambda: torch.empty((1, 32, 1, 128), dtype=torch.bfloat16, device=q.device)))
        print("new_empty", microseconds(lambda: q.new_empty((1, 32, 1, 128))))
        print("empty_like", microseconds(lambda: torch.empty_like(q)))
        print("stream", microseconds(lambda: torch._C._cuda_getCurrentRawStream(0)))
        print("current_device", microseconds(lambda: torch.cuda.current_device()))
        print("_cuda_getDevice", microseconds(lambda: torch._C._cuda_getDevice()))
        print("shape, stride, dtype", microseconds(lambda: (q.shape, q.stride(), q.dtype)))
        print("data_ptr", microseconds(lambda: q.data_ptr()))
        print("no_grad", microseconds(lambda: torch.no_grad().__enter__()))
        for name in ("none", "rope", "alibi", "t5", "clipped", "shaw"):
            encoding = make_encoding(name, 32, 128, "cuda", torch.bfloat16, causal=True)
            positions = Positions((1023, 1), 1024)
            terms = encoding.terms(positions)
            parts = {
                "terms": microseconds(lambda: encoding.terms(positions)),  # noqa: B023
                "attend": microseconds(lambda: attend(q, k, v, terms, causal=True)),  # noqa: B023
            }
            if terms.lookups or terms.slopes is not None:
                described = known_calls.describe(q, k, v, terms, 0.0, "auto", False, {"causal": True})
                parts["describe"] = microseconds(
                    lambda: known_calls.describe(q, k, v, terms, 0.0, "auto", False, {"causal": True})  # noqa: B023
                )
                known = known_calls.find(described[0])
                parts["find"] = microseconds(lambda: known_calls.find(described[0]))  # noqa: B023
                if known is not None and known.step is not None:
                    parts["Step.run"] = microseconds(lambda: known.step.run(q, k, v, terms, -1023))  # noqa: B023
                    for shared, (found, merge) in known.step.launches.items():
                        print(f"  {name}: shared {shared}, {found[0]!r}, {merge and merge[0]!r}")
            print(name, ", ".join(f"{what} {time:.1f}" for what, time in parts.items()), flush=True)


if __name__ == "__main__":
    {"check": check, "profile": profile, "launches": launches}[sys.argv[1]](*sys.argv[2:])
