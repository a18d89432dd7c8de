"""A case as a Python script. The script is what runs, so what is printed for a failure is what failed.

It makes q, k, v, plan, options, g, g_lse and `leaves`, every tensor that may want a gradient by its name in
`tests.budget`. Numbers come from integers, so that they are the same bits on every machine.
"""

from __future__ import annotations

from tests.fuzz.case import Case, Table, names

HEAD = '''\
import torch

from posenc import Grid, Index, Lookup, Plan, Positions, attend, index
from posenc.core.rotation import Rotation
from tests.plans import Pair

generator = torch.Generator().manual_seed({data})
dtype, tables, device = torch.{dtype}, torch.{table_dtype}, "{device}"


def whole(low, high, *shape):
    return torch.randint(low, high + 1, shape, generator=generator)


def real(*shape, dtype=tables):
    """Between -2 and 2, with as many bits as a float32 (or a float64) has."""
    bits = 51 if dtype == torch.float64 else 22
    return (whole(-(2 << bits), 2 << bits, *shape).double() / (1 << bits)).to(device, dtype)


B, H, G, Lq, Lk, D, Dv = {batch}, {heads}, {kv_heads}, {lq}, {lk}, {size}, {v_size}
leaves = {{}}
'''

LAYOUT = {
    "": "real(B, {h}, {l}, {d}, dtype=dtype)",
    "length first": "real(B, {l}, {h}, {d}, dtype=dtype).transpose(1, 2)",
    "channels first": "real(B, {h}, {d}, {l}, dtype=dtype).transpose(2, 3)",
    "slice": "real(B, {h}, {l}, 3 * {d}, dtype=dtype)[..., {d} : 2 * {d}]",
    "every other": "real(B, {h}, {l}, 2 * {d}, dtype=dtype)[..., ::2]",
    "one row": "real(1, {h}, {l}, {d}, dtype=dtype).expand(B, -1, -1, -1)",
    "one token": "real(B, {h}, 1, {d}, dtype=dtype).expand(-1, -1, {l}, -1)",
}


def render(case: Case, device: str = "cpu") -> str:
    lines = [HEAD.format(**{**vars(case), "device": device})]
    for name, layout, sizes in zip("qkv", case.layouts, (("H", "Lq", "D"), ("G", "Lk", "D"), ("G", "Lk", "Dv"))):
        made = LAYOUT[layout].format(h=sizes[0], l=sizes[1], d=sizes[2])
        # a product keeps its factor's strides, but for expanded ones: numbers are enlarged before
        if name != "v" and case.magnitude != 1.0:
            made = made.replace("dtype=dtype)", f"dtype=dtype).mul_({case.magnitude})")
        lines.append(f'{name} = leaves["{name}"] = {made}')
    lines += _positions(case)
    lines += _plan(case)
    lines += _options(case)
    lines.append("g = real(B, H, Lq, Dv, dtype=dtype)")
    if case.summed:
        lines.append("g = real(dtype=dtype).expand(B, H, Lq, Dv)")
    precise = "torch.float64" if case.dtype == "float64" else "torch.float32"
    lines.append(f"g_lse = real(B, H, Lq, dtype={precise})" if case.lse else "g_lse = None")
    return "\n".join(lines) + "\n"


def _positions(case: Case) -> list[str]:
    s, d = case.start, case.ahead
    if case.positions == "aligned":
        lines = []
        positions = "Positions((Lk - Lq, Lq), Lk"
    elif case.positions == "run":
        lines = []
        positions = f"Positions(({s + d}, Lq), ({s}, Lk)"
    elif case.positions == "starts":
        lines = ["start = whole(-5, 5, B).to(device)"]
        positions = f"Positions((start + {s + d}, Lq), (start + {s}, Lk)"
        if d == 0:
            lines = [f"start = (whole(-5, 5, B) + {s}).to(device)"]
            positions = "Positions((start, Lq), (start, Lk)"
    else:
        rows = {"L": "", "1L": "1, ", "BL": "B, "}[case.rank]
        steps = {"in order": "1, 1", "gaps": "1, 6", "repeated": "0, 1", "shuffled": "1, 1"}[case.order]
        lines = [f"p = whole({steps}, {rows}max(Lq, Lk)).cumsum(-1) + {s}"]
        if case.order == "shuffled":
            lines.append("p = p[..., torch.randperm(p.shape[-1], generator=generator)]")
        lines.append("p = p.to(device)")
        lines.append("p_q, p_k = p[..., p.shape[-1] - Lq :], p[..., p.shape[-1] - Lk :]")
        positions = f"Positions(p_q + {d}, p_k" if d else "Positions(p_q, p_k"
    if case.axes:
        pairs = []
        for number, count in enumerate(case.axes):
            lines.append(f"s{number} = whole(0, {count - 1}, B, max(Lq, Lk)).to(device)")
            pairs.append(f"(s{number}[:, :Lq], s{number}[:, :Lk])")
        positions += f", more=[{', '.join(pairs)}]"
    return [*lines, f"positions = {positions})"]


def _index(table: Table) -> str:
    n = table.numbers
    if table.kind == "clip":
        return f"index.clip({n[0]}, {n[1]})"
    if table.kind == "rows":
        rows = f"tuple(whole(0, {n[2] - 1}, {n[1] - n[0] + 1}).tolist())"
        return f"Index({n[0]}, {n[1]}, {rows}, {n[2]})"
    if table.kind == "log":
        return f"index.log_buckets({n[0]}, {n[1]}, causal={bool(n[2])})"
    if table.kind == "deberta":
        return f"index.deberta_buckets({n[0]}, {n[1]})"
    if table.kind == "exact":
        return f"index.exact(positions, most={None if n[0] < 0 else n[0]})"
    if table.kind == "axis":
        return f"index.clip({n[1]}, {n[2]}, axis={n[0]})"
    parts = ", ".join(f"index.clip({n[i]}, {n[i + 1]}, axis={i // 2})" for i in range(0, len(n), 2))
    return f"Grid(({parts},))"


def _plan(case: Case) -> list[str]:
    lines, arguments = [], []
    for number, table in enumerate(case.tables):
        h = "1" if table.shared else "H"
        width = table.width if "states" in table.slots else "D"
        shapes = {
            "bias": f"real({h}, i{number}.n)",
            "dot_query": f"real({h}, i{number}.n, {width})",
            "states": f"real(B, H, Lq, {width}, dtype=dtype)",
            "dot_key": f"real({h}, i{number}.n, D)",
            "add_value": f"real({h}, i{number}.n, Dv)",
            "query_shift": f"real({h}, {width})",
        }
        lines.append(f"i{number} = {_index(table)}")
        for slot, made in shapes.items():
            if slot in table.slots:
                lines.append(f'leaves["lookups[{number}].{slot}"] = {made}')
    if case.slopes:
        lines.append('leaves["slopes"] = real(H).abs() / 4')
    if case.decay == "random":
        lines += ['leaves["decay[0]"] = real(B, H, Lq)', 'leaves["decay[1]"] = real(B, H, Lk)']
    if case.decay == "gates":  # sums of log gates over all tokens, as a forgetting transformer has them
        lines.append("c = real(B, H, max(Lq, Lk)).double().abs().neg().cumsum(2)")
        for number, length in enumerate(("Lq", "Lk")):
            lines.append(f'leaves["decay[{number}]"] = c[..., max(Lq, Lk) - {length} :].to(tables)')
    if isinstance(case.scale, str):
        shape = {"one": "1", "H": "H, 1", "HL": "H, Lq", "BHL": "B, H, Lq"}[case.scale]
        lines.append(f'leaves["scale"] = real({shape}) / 4')
    elif case.scale is not None:
        arguments.append(f"scale={case.scale}")
    if case.shift:
        lines.append('leaves["shift"] = real(H, D)')
    if case.rotate is not None:
        lines += _rotation(case)
        arguments.append("rotate=rotation")
    if case.pair:
        precise = "torch.float64" if case.dtype == "float64" else "torch.float32"  # it computes in its weight's dtype
        lines.append(f'leaves["pair.weight"] = real(H, dtype={precise})')
    return [*lines, *_leaves(case, arguments)]


def _rotation(case: Case) -> list[str]:
    rotate = case.rotate
    assert rotate is not None
    rows = "B" if rotate.per_row else "1"

    def phases(length: str) -> str:
        angles = f"real({rows}, {length}, {rotate.pairs}, dtype=torch.float64) * 3"
        size = " * 1.5" if rotate.magnitude else ""
        return f"[f(a){size} for a in [{angles}] for f in (torch.cos, torch.sin)]"

    precise = "torch.float64" if case.dtype == "float64" else "torch.float32"
    lines = []
    for side, length in (("q", "Lq"), ("k", "Lk")):
        if rotate.sides in ("both", side) or (rotate.sides == "one" and side == "q"):
            lines.append(f"phases_{side} = tuple(x.to(device, {precise}) for x in {phases(length)})")
        else:
            lines.append(f"phases_{side} = {'phases_q' if rotate.sides == 'one' else 'None'}")
    lines.append(f"rotation = Rotation(phases_q, phases_k, {rotate.layout!r}, {rotate.values})")
    return lines


def _leaves(case: Case, arguments: list[str]) -> list[str]:
    """Options first, for a mask may want a gradient; then the plan over the leaves."""
    lines = []
    for number, table in enumerate(case.tables):
        slots = [f'{slot}=leaves["lookups[{number}].{slot}"]' for slot in sorted(table.slots)]
        lines.append(f"    lookups.append(Lookup(i{number}, {', '.join(slots)}))")
    if lines:
        lines = ["    lookups = []", *lines]
        arguments = [*arguments, "lookups=tuple(lookups)"]
    for name in ("slopes", "shift"):
        if getattr(case, name):
            arguments = [*arguments, f'{name}=leaves["{name}"]']
    if isinstance(case.scale, str):
        arguments = [*arguments, 'scale=leaves["scale"]']
    if case.decay:
        arguments = [*arguments, 'decay=(leaves["decay[0]"], leaves["decay[1]"])']
    if case.pair:
        arguments = [*arguments, 'pair=Pair(leaves["pair.weight"])']
    body = [*lines, f"    return Plan({', '.join(['positions', *arguments])})"]
    return ["", "", "def plan_of(leaves):", *body, "", ""]


def _options(case: Case) -> list[str]:
    lines, options = [], []
    if case.causal:
        options.append("causal=True")
    if case.window is not None:
        options.append(f"window={case.window}")
    if case.padding:
        lines.append("keep = torch.arange(Lk)[None] >= whole(0, Lk, B, 1)")
        if case.padding == "right":
            lines[-1] = "keep = torch.arange(Lk)[None] < whole(1, max(1, Lk), B, 1)"
        elif case.padding == "holes":
            lines[-1] = "keep = whole(0, 2, B, Lk) > 0"
        elif case.padding == "empty":
            lines[-1] = "keep = whole(0, 3, B, Lk) > 0"
            lines.append("keep[-1] = False")
        elif case.padding == "shared":
            lines[-1] = "keep = whole(0, 2, 1, Lk) > 0"
        options.append("key_mask=keep.to(device)")
    if case.documents:
        lines.append(f"ids = (whole(1, {case.document}, B, max(Lq, Lk)) == 1).cumsum(1)")
        if case.documents == "shuffled":
            lines.append("ids = ids[:, torch.randperm(ids.shape[1], generator=generator)]")
        lines.append("ids = ids.to(device)")
        ours = "ids[:, ids.shape[1] - Lq :]"
        if case.documents == "foreign":
            lines.append("ours = whole(0, 3, B, Lq).to(device)")
            ours = "ours"
        options.append(f"documents=({ours}, ids[:, ids.shape[1] - Lk :])")
    if case.mask:
        sizes = {"B": "B", "H": "H", "Q": "Lq", "K": "Lk"}
        shape = ", ".join(sizes[letter] if letter in case.mask_dims else "1" for letter in "BHQK")
        if case.mask == "bool":
            lines.append(f"mask = (whole(0, 3, {shape}) > 0).to(device)")
        else:
            lines.append(f'leaves["mask"] = real({shape})')
            if case.mask == "infinite":
                lines.append(f'leaves["mask"][(whole(0, 3, {shape}) == 0).to(device)] = float("-inf")')
        options.append("mask=mask" if case.mask == "bool" else 'mask=leaves["mask"]')
    return [*lines, "", "", "def options_of(leaves):", f"    return dict({', '.join(options)})", "", ""]


BLOCKS = {
    1: dict(QUERY_BLOCK=64, EDGE_BLOCK=16, MIN_FAR_KEYS=8, DECODE_ROWS=3, SKEW_ROWS=24, DIAGONAL_ROWS=28, SCORE_ROWS=30, SHORT_ROWS=25, MANY_BATCH_ROWS=1, SHORT_KEYS=0, KEPT_SCORES=0, PAIR_SCORES=3000),
    2: dict(QUERY_BLOCK=32, EDGE_BLOCK=8, MIN_FAR_KEYS=4, DECODE_ROWS=2, SKEW_ROWS=12, DIAGONAL_ROWS=14, SCORE_ROWS=15, SHORT_ROWS=12, MANY_BATCH_ROWS=1, SHORT_KEYS=200, LIGHT_PRODUCTS=1 << 30, FEWEST_SCORES=1),
    3: dict(QUERY_BLOCK=16, EDGE_BLOCK=16, MIN_FAR_KEYS=1, DECODE_ROWS=1, SKEW_ROWS=5, DIAGONAL_ROWS=5, SCORE_ROWS=7, SHORT_ROWS=7, MANY_BATCH_ROWS=1, SHORT_KEYS=0, SHORT_BIAS_KEYS=0, SHARED_MEMORY=1, LARGE_MATRIX=1, KEPT_SCORES=0, PAIR_SCORES=1, VARIED_SCORES=1),
}  # fmt: skip
"""Sizes of the cpu engine's blocks that make many blocks of few tokens."""
BLOCKED = dict(FEWEST=16, SCORES=1, LEAST=1)
"""The same for the blocked engine."""
PACKED = dict(LEAST=0, PIECE=0)
"""Documents of few tokens as calls of their own."""
HOPPER = dict(SHORTEST=1, FEWEST=1, SHORTEST_BACKWARD=1, SHORTEST_CONTENT=1, SHORTEST_CONTENT_BACKWARD=1)
"""Lengths and blocks from which on engines/gluon's kernels run."""


def script(case: Case, engine: str, device: str) -> str:
    """The whole story of one case: run it in the repository's root."""
    lines = [render(case, device)]
    if case.blocks:
        lines.append("from posenc.engines import blocked\nfrom posenc.engines.cpu import block_sizes, packed\n")
        lines += [f"block_sizes.{name} = {value}" for name, value in BLOCKS[case.blocks].items()]
        lines += [f"blocked.{name} = {value}" for name, value in BLOCKED.items()]
        lines += [f"packed.{name} = {value}" for name, value in PACKED.items()]
    if case.hopper:
        lines.append("from posenc.engines import gluon\n")
        lines += [f"gluon.{name} = {value}" for name, value in HOPPER.items()]
    if case.poison:
        lines.append("torch.use_deterministic_algorithms(True)  # fresh memory holds NaN")
    wanted = names(case) if case.wanted is None else list(case.wanted)
    lines.append(f"wanted = {wanted}")
    lines.append("leaves = {n: x.requires_grad_() if n in wanted else x for n, x in leaves.items()}")
    lines.append('call = (leaves["q"], leaves["k"], leaves["v"], plan_of(leaves))')
    lines.append("options = options_of(leaves)")
    rate = f", dropout={case.dropout}" if case.dropout else ""
    if case.dropout:
        lines.append("from tests.fuzz.engines import kept_by\n")
        lines.append(f"kept = kept_by(call, options, {case.dropout}, {engine!r}, {case.lse})\ntorch.manual_seed(1)")
    if case.lse:
        lines.append(f'out, lse = attend(*call, **options{rate}, engine="{engine}", return_lse=True)')
        lines.append("results = dict(out=out, lse=lse)")
    else:
        lines.append(f'out = attend(*call, **options{rate}, engine="{engine}")')
        lines.append("results = dict(out=out)")
    if wanted:
        lines.append("outs = [(x, w) for x, w in zip(results.values(), (g, g_lse)) if x.requires_grad]")
        lines.append(
            "grads = torch.autograd.grad([x for x, _ in outs], [leaves[n] for n in wanted], [w for _, w in outs],\n"
            "                            allow_unused=True)\nresults.update(zip(wanted, grads))"
        )
    more = ", kept=kept" if case.dropout else ""
    lines.append("from tests.fuzz.engines import arithmetic")
    more += f", **arithmetic(call, {engine!r})"
    lines.append(
        f"\nfrom tests import budget\n\nexpected, allowed = budget.expect(*call, g, g_lse, **options{more})\n"
        "for name, x in results.items():\n"
        "    error = (0 if x is None else x.detach().double()) - expected[name]\n"
        '    print(f"{name:24} largest error {error.abs().max().item() if error.numel() else 0.0:.3g}, "\n'
        '          f"{budget.excess(x, expected[name], allowed[name]):.3g} of its budget")'
    )
    return "\n".join(lines) + "\n"
