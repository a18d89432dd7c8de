"""Every encoding, and every function of its own: which engine runs it, its error against float64, its time beside plain attention.

    python -m tests.gpu.encodings [--out FILE.json] [--only fox,kerple] [--length 2048] [--seconds 170] [--what errors] [--part 2/12]
    --what times,alone    without the other ways of a function of both positions, which take long
    python -m tests.gpu.encodings --device cpu --length 1024            the same table for the engines of a CPU, in float32
    TRITON_INTERPRET=1 python -m tests.gpu.encodings --device cpu --length 64      the GPU's kernels, interpreted: errors alone
    python -m tests.gpu.encodings --table bench/results/encodings-cpu.json bench/results/encodings-h200.json    the rows of docs/encodings/speed.md

A line for each: engine; largest error of the output and of the gradients of q, k, v and the encoding's parameters, relative to
their size, in float32 (TF32 off) and bfloat16; forward and training time over attention without positions of the same call,
medians of alternate runs (minima on a CPU); and beside it, where there is another way: FIRE past its threshold and a function of both positions in
blocks of dense scores, and by FlexAttention. The kernels of others: tests.gpu.encoding_peers.
Those that were never measured on a card come first; after --seconds nothing new is begun.
"""

import argparse
import json
import os
import statistics
import sys
import time
import warnings
from pathlib import Path

import torch

import posenc
from posenc import Plan, Positions
from posenc.encodings.registry import causal_options

OPTIONS = {
    "axial": {"columns": 32}, "sinusoidal_2d": {"columns": 32}, "grid_bias": {"window": (64, 32)}, "continuous_bias": {"window": (64, 32)},
    "decomposed": {"grid": (64, 32)}, "mixed_rope": {"columns": 32},
    "many_axes": {"axis_of": (0, 1, 2, 0), "text": True}, "tupe": {"max_length": 2048}, "relative_logits": {"max_distance": 256},
    "fire": {"threshold": 1e6}, "fire past its threshold": {"threshold": 64.0}, "learned": {"max_length": 2048},
}  # fmt: skip
INPUT = ("sinusoidal", "sinusoidal_2d", "learned", "cape")  # nothing inside attention
OWN = ("cope", "stick_breaking", "path", "latent")  # no plans
KNOWN = (
    "none", "shaw", "clipped", "t5", "transformer_xl", "xlnet", "deberta", "rope", "mrope", "axial", "xpos", "relative_logits",
    "alibi", "sinks",
)  # fmt: skip
"""Measured on an H200 before."""
FIRST = ("fire past its threshold", "pair")
HEADS, SIZE = 8, 64


def names():
    rest = [name for name in (*posenc.list_encodings(), *OWN) if name not in KNOWN]
    return [*FIRST, *rest, *KNOWN]


class Encoding:
    """An encoding within attention, or at its input."""

    def __init__(self, name, device):
        torch.manual_seed(0)
        self.registered = name.split(" ")[0]
        options = {**causal_options(self.registered), **OPTIONS.get(name, {})}
        encoding = posenc.create(self.registered, d_model=HEADS * SIZE, heads=HEADS, **options)
        for parameter in encoding.parameters():
            if not parameter.any():  # zeros would hide a wrong look-up
                torch.nn.init.normal_(parameter, std=0.1)
        self.encoding = encoding.to(device).eval()
        self.host = posenc.Attention(HEADS * SIZE, HEADS, encoding=encoding, causal=True).to(device)
        self.leaves = list(encoding.parameters())

    def plan(self, x):
        if self.registered in INPUT:
            return None
        return self.encoding.plan(Positions(x.shape[1]), x=x, host=self.host)

    def __call__(self, q, k, v, x, engine="auto"):
        return self.embed(posenc.attend(q, k, v, self.plan(x), causal=True, engine=engine), x)

    def embed(self, out, x):
        """The output with what an encoding of the input adds."""
        if self.registered not in INPUT:
            return out
        embedded = self.encoding.embed(x.to(out.dtype), Positions(x.shape[1]))
        return out + embedded.view(*x.shape[:2], HEADS, SIZE).transpose(1, 2)

    def exact(self, q, k, v, x):
        """The output by the reference engine, attention's own part of it, and its log-sum-exp."""
        out, lse = posenc.attend(q, k, v, self.plan(x), causal=True, engine="reference", return_lse=True)
        return self.embed(out, x), out, lse

    def engine(self, q, k, v, x):
        """Forward, and in training where that is another."""
        found = []
        for gradient in (False, True):
            with torch.set_grad_enabled(gradient):
                found.append(posenc.explain(q, k, v, self.plan(x), causal=True).engine)
        return ", ".join(dict.fromkeys(found))


class Pair(Encoding):
    """A function of both positions that no table holds, with a learned number for each head."""

    def __init__(self, name, device):
        torch.manual_seed(0)
        self.registered = name
        self.weight = torch.randn(HEADS, device=device).requires_grad_()
        self.leaves = [self.weight]

    def plan(self, x):
        def pair(p_q, p_k):
            late = (p_q.float() + 1).sqrt()[:, None]
            return self.weight[:, None, None] * ((p_k[None, :] - p_q[:, None]) / late).cos()

        return Plan(Positions(x.shape[1]), pair=pair)

    def flex(self, q, k, v):
        """The same function, written by hand for FlexAttention."""
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        weight, length = self.weight, q.shape[2]

        def score_mod(score, b, h, i, j):
            return score + weight[h] * ((j - i) / torch.sqrt(i + 1.0)).cos()

        mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, length, length, device=q.device)
        compiled = torch.compile(flex_attention, fullgraph=True)
        return lambda: compiled(q, k, v, score_mod=score_mod, block_mask=mask)


class Own:
    """Functions of their own (posenc.contextual), and latent attention, a layer of the same width."""

    def __init__(self, name, device):
        torch.manual_seed(0)
        self.name, self.made = name, {}
        self.layer, self.leaves = None, []
        if name == "cope":
            self.leaves = [torch.randn(64, SIZE, device=device).requires_grad_()]
        if name == "latent":
            sizes = dict(kv_rank=2 * SIZE, nope_dim=SIZE // 2, rope_dim=SIZE // 2, v_dim=SIZE)
            self.layer = posenc.LatentAttention(HEADS * SIZE, HEADS, **sizes).to(device)
            self.leaves = list(self.layer.parameters())
            self.plain = posenc.Attention(HEADS * SIZE, HEADS, causal=True, encoding="none").to(device)

    def __call__(self, q, k, v, x, engine="auto"):
        if self.layer is not None:
            return self._layer(self.layer, x, q)
        own = posenc.contextual
        if self.name == "cope":
            return own.cope(q, k, v, self.leaves[0].to(q.dtype))
        if self.name == "stick_breaking":
            return own.stick_breaking(q, k, v)[0]
        w = torch.nn.functional.normalize(k.roll(1, -1), dim=-1)
        return own.path(q, k, v, w, v[..., 0].sigmoid())

    def _layer(self, layer, x, q):
        """The layer, in q's dtype; its output as heads."""
        weights = {name: parameter.to(q.dtype) for name, parameter in layer.named_parameters()}
        y = torch.func.functional_call(layer, weights, (x.to(q.dtype),))
        return y.view(*x.shape[:2], HEADS, SIZE).transpose(1, 2)

    def exact(self, q, k, v, x):
        return self(q, k, v, x), None, None

    def beside(self, q, k, v, x):
        """What its time is compared with."""
        if self.layer is not None:
            return self._layer(self.plain, x, q)
        return posenc.attend(q, k, v, causal=True)

    def engine(self, q, k, v, x):
        return "layer" if self.layer is not None else "own"


def make(name, device):
    return Pair(name, device) if name == "pair" else (Own if name in OWN else Encoding)(name, device)


def inputs(batch, length, device, dtype):
    torch.manual_seed(1)
    q, k, v = (torch.randn(batch, HEADS, length, SIZE, device=device, dtype=dtype).requires_grad_() for _ in range(3))
    return q, k, v, torch.randn(batch, length, HEADS * SIZE, device=device)


def errors(name, device, length, dtype, limit):
    """The engine; the largest error of output and gradients, relative to its size; the largest share of what is allowed.

    Allowed is `limit` of the size, and what a rounded output does to a gradient. Kernels form ds_ij = p_ij (dp_ij - g_i·o_i) from the
    output o_i as it is returned, in bfloat16, which is off by r_i. So each ds_ij is off by p_ij g_i·r_i: nothing for a single
    pair, but of one sign for all keys of a query, and that is what the constant parts of a bias sum up (FIRE's hidden units).
    p_ij is the gradient of the log-sum-exp, which gives the sums for every parameter.
    """
    case = make(name, device)
    q, k, v, x = inputs(1, length, device, dtype)
    g = torch.randn(1, HEADS, length, SIZE, device=device).to(dtype)
    leaves = [q, k, v, *case.leaves]
    out = case(q, k, v, x)
    ours = [out, *torch.autograd.grad(out, leaves, g, allow_unused=True)]
    exact, attended, lse = case.exact(*(y.double() for y in (q, k, v)), x)
    theirs = [exact, *torch.autograd.grad(exact, leaves, g.double(), allow_unused=True, retain_graph=True)]
    rounded = [None] * len(leaves)
    if lse is not None:
        off = (g.double() * (attended.to(dtype).double() - attended)).sum(-1)
        rounded = torch.autograd.grad(lse, leaves, off.detach(), allow_unused=True)
    size_of = lambda y: 0.0 if y is None else y.double().square().mean().sqrt().item()  # noqa: E731
    found = [
        (size_of(mine.double() - wanted.double()), size_of(wanted), size_of(by_rounding))
        for mine, wanted, by_rounding in zip(ours, theirs, (None, *rounded), strict=True)
        if mine is not None and wanted is not None
    ]
    largest = max(size for _, size, _ in found)
    # a constant of all scores (FIRE's last bias) has a gradient of zero in theory: each query leaves the rounding of its output times
    # the output's gradient, which is of size 1, so that their sum is measured by what these add up to
    summed = found[0][1] * (length * SIZE) ** 0.5
    scales = [max(size, 5e-2 * largest, summed if size <= 1e-5 * largest else 0.0) for _, size, _ in found]
    worst = max(off / scale for (off, _, _), scale in zip(found, scales, strict=True))
    share = max(off / (limit * scale + more) for (off, _, more), scale in zip(found, scales, strict=True))
    return case.engine(q, k, v, x), worst, share


def measure(device, calls, rounds, training):
    """Seconds of each call, of alternate runs."""
    taken = {label: [] for label in calls}
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    for _ in range(rounds):
        for label, call in calls.items():
            wait()
            start = time.perf_counter()
            with torch.set_grad_enabled(training):
                out = call()
                if training:
                    out.sum().backward()
            wait()
            taken[label].append(time.perf_counter() - start)
    best = statistics.median if device == "cuda" else min  # a CPU has other work
    return {label: best(some[2:]) for label, some in taken.items()}


def times(name, device, length, beside=True):
    on_gpu = device == "cuda"
    case = make(name, device)
    q, k, v, x = inputs(4 if on_gpu else 1, length, device, torch.bfloat16 if on_gpu else torch.float32)
    calls = {"ours": lambda: case(q, k, v, x), "plain": lambda: posenc.attend(q, k, v, causal=True)}
    if name in OWN:
        calls["plain"] = lambda: case.beside(q, k, v, x)
    if name in FIRST and beside:
        calls["dense blocks"] = lambda: case(q, k, v, x, engine="blocked")
    found = {}
    if name == "pair" and on_gpu and beside:
        try:
            call = case.flex(q, k, v)
            call().sum().backward()
            calls["flex"] = call
        except Exception as error:
            found["flex"] = f"{type(error).__name__}: {error}"[:300]
    for kind in ("forward", "training"):
        taken = measure(device, calls, 10 if on_gpu else 7, kind == "training")
        found[kind] = taken["ours"] / taken["plain"]
        found[f"{kind}, ms"] = {label: 1e3 * seconds for label, seconds in taken.items()}
    return found


def table_rows(on_cpu, on_card):
    """The rows of docs/encodings/speed.md."""
    for name, card in on_card.items():
        cpu = on_cpu[name]
        cells = [
            cpu["engine"], f"{cpu['forward']:.1f}", f"{cpu['training']:.1f}", card["engine"], f"{card['float32']:.0e}",
            f"{card['bfloat16']:.0e}", f"{card['forward']:.1f}", f"{card['training']:.1f}",
        ]  # fmt: skip
        yield f"| {name if name in FIRST else f'`{name}`'} | {' | '.join(cells)} |"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out")
    parser.add_argument("--table", nargs=2, metavar=("CPU", "CARD"), help="print the table of two results instead")
    parser.add_argument("--only", default="")
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--part", default="1/1", help="N/M: each M-th encoding, from the N-th on, for M processes")
    parser.add_argument("--what", default="errors,times")
    given = parser.parse_args()
    if given.table:
        results = [json.loads(Path(path).read_text(encoding="utf-8")) for path in given.table]
        print("\n".join(table_rows(*results)))
        return False
    began, interpreted = time.monotonic(), os.environ.get("TRITON_INTERPRET") == "1"
    if interpreted:
        from tests.engines import interpreter

        interpreter.mend()
        global HEADS, SIZE
        HEADS, SIZE = 2, 16
    torch.backends.cuda.matmul.allow_tf32 = False
    warnings.filterwarnings("ignore", message="posenc computes dense scores")  # by name, to compare with
    rows = given.length // 32
    for name, option in (("grid_bias", "window"), ("continuous_bias", "window"), ("decomposed", "grid")):
        OPTIONS[name] = {option: (rows, 32)}
    results, failed, left_out = {}, [], []
    limits = {"float32": 1e-4, "bfloat16": 3e-2} if given.device == "cuda" or interpreted else {"float32": 1e-4}
    part, parts = map(int, given.part.split("/"))
    for name in names()[part - 1 :: parts]:
        if given.only and name not in given.only.split(","):
            continue
        if time.monotonic() - began > given.seconds:
            left_out.append(name)
            continue
        line = {}
        try:
            for kind, limit in limits.items() if "errors" in given.what else ():
                found = errors(name, given.device, given.length, getattr(torch, kind), limit)
                line["engine"], line[kind], line[f"{kind}, of allowed"] = found
            if not interpreted and "times" in given.what:
                line |= times(name, given.device, given.length, "alone" not in given.what)
        except Exception as error:
            line["error"] = f"{type(error).__name__}: {error}"[:500]
        line["at, s"] = round(time.monotonic() - began, 1)
        results[name] = line
        dense = ("blocked", "reference") if given.device == "cuda" or interpreted else ("reference",)
        wrong = any(not line.get(f"{kind}, of allowed", 0.0) <= 1.0 for kind in limits)  # NaN too
        if "error" in line or line.get("engine") in dense or wrong:
            failed.append(name)
        print(name, json.dumps(line), flush=True)
        if given.out:
            with open(given.out, "w") as file:
                json.dump(results, file, indent=1)
    print("left out:", ", ".join(left_out) or "none")
    print("failed:", ", ".join(failed) or "none", flush=True)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
