"""Pictures of encodings for a terminal, drawn from core/formulas.py without torch or a plotting library.

A picture is a function from an encoding's options to lines of text, and an entry of PICTURES. Encodings without one are
shown without a picture.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from ..core import checks, formulas
from ..core.errors import OptionError
from ..core.options import require_bool, require_choice, require_int
from . import terminal

if TYPE_CHECKING:
    from ..encodings.rope.scaling import Scaling

FARTHEST = 1 << 16  # largest distances and sizes: larger ones would take too long to draw
WIDEST = 4096


class Options:
    """An encoding's options. `read` collects those that a picture uses, so that unused ones can be refused."""

    def __init__(self, values: dict[str, Any]):
        self.values = values
        self.read: set[str] = set()

    def get(self, name: str, default: Any = None) -> Any:
        """The option, or `default` if it is absent or None."""
        self.read.add(name)
        value = self.values.get(name)
        return default if value is None else value

    def whole(self, name: str, default: int, least: int = 1, most: int = WIDEST) -> int:
        """An integer option."""
        return checks.whole(least, most)(name, self.get(name, default))

    def number(self, name: str, default: float) -> float:
        """A positive option."""
        value = self.get(name, default)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not value > 0:
            raise OptionError(f"{name} must be a positive number, got {value!r}")
        return float(value)

    def choice(self, name: str, allowed: tuple[str, ...]) -> str:
        """One of a few strings, by default the first."""
        return require_choice(name, self.get(name, allowed[0]), allowed)


def draw(name: str, options: Options) -> list[str]:
    """The picture of an encoding under a title; nothing for encodings without one."""
    return PICTURES[name](options) if name in PICTURES else []


def titled(title: str, lines: Sequence[str]) -> list[str]:
    """The lines under a wrapped title."""
    return [*terminal.wrap(title, terminal.width()), *lines]


def charted(title: str, curves: Mapping[str, Sequence[float]], axis: tuple[str, str, str], **options: Any) -> list[str]:
    """`terminal.chart` under a title."""
    return titled(title, terminal.chart(curves, axis, **options))


def around(reach: int) -> tuple[str, str, str]:
    """Axis labels of distances from -reach to reach."""
    return f"j-i = -{reach} (past)", "0", f"+{reach} (future)"


def none(options: Options) -> list[str]:
    return titled("Every distance gets the same score; only a causal mask carries order.", [])


def sinusoidal(options: Options) -> list[str]:
    size, base = options.whole("d_model", 512, 2), options.number("base", 10000.0)
    layout = options.choice("layout", ("interleaved", "concatenated", "tensor2tensor"))
    spacing = "tensor2tensor" if layout == "tensor2tensor" else "paper"
    frequencies = formulas.inverse_frequencies(size, base, spacing=spacing)
    lines = _kernel(frequencies, f"Similarity of two positions, P[i]·P[j] / (d/2) with d_model={size}, base={base:g}:")
    columns = min(64, terminal.width() - 14)
    selected = [frequencies[round(c * (len(frequencies) - 1) / 7)] for c in range(8)]
    grid = terminal.heat_map([[math.sin(p * w) for p in range(columns)] for w in selected], low=-1, high=1)
    lines += ["", f"sin(p w_c) at positions 0 .. {columns - 1}, from the fastest frequency to the slowest:"]
    periods = [2 * math.pi / w for w in selected]
    return lines + [f"{p:>9.4g} │{row}" for p, row in zip(periods, grid)] + [" " * 4 + "^ positions per period"]


def learned(options: Options) -> list[str]:
    rows = options.whole("max_length", 512, most=10**9)
    bar = max(8, min(48, terminal.width() - 24))
    return titled(
        f"With max_length={rows}: one vector per position, random until trained; positions beyond the table raise.",
        ["█" * bar + "╳" * (bar // 4), "0" + f"{rows - 1}".rjust(bar - 1) + f"  {rows} → ValueError"],
    )


def shaw(options: Options) -> list[str]:
    left, right = _sides(options)
    ends = "a row of zeros" if options.choice("outside", ("clip", "zero")) == "zero" else "the same row"
    return _clip(left, right, f"all beyond share {ends}")


def clipped(options: Options) -> list[str]:
    return _clip(*_sides(options), "those beyond share the edge's")


def _sides(options: Options) -> tuple[int, int]:
    """The largest distances before and after the query that have a row of their own."""
    most = options.whole("max_distance", 16, 0, FARTHEST)
    return options.whole("left", most, 0, FARTHEST), options.whole("right", most, 0, FARTHEST)


def t5(options: Options) -> list[str]:
    buckets, most = options.whole("buckets", 32, most=1024), options.whole("max_distance", 128, most=FARTHEST)
    causal = require_bool("causal", options.get("causal", False))
    lo, hi, rows = formulas.t5_rows(buckets, most, causal)
    kind = "causal" if causal else "bidirectional"
    lines = _steps(lo, hi, rows, f"Bucket of each distance (buckets={buckets}, max_distance={most}, {kind}):")
    lines += ["", "distance→bucket, keys before the query:"]
    lines += terminal.hanging("  ", _ranges([(-r, rows[r - lo]) for r in range(0, lo - 1, -1)]))
    if not causal:
        lines += ["keys after it:"]
        lines += terminal.hanging("  ", _ranges([(r, rows[r - lo]) for r in range(1, hi + 1)]))
    return lines


def deberta(options: Options) -> list[str]:
    most = options.whole("max_distance", 512, most=FARTHEST)
    logarithmic = options.get("buckets") is not None
    buckets = options.whole("buckets", most, most=FARTHEST)
    lo, hi, rows = formulas.deberta_rows(buckets, most if logarithmic else None)
    kind = "log buckets" if logarithmic else "clipped; buckets=256 gives v3's log buckets"
    return _steps(lo, hi, rows, f"Row of the table for each distance ({2 * buckets} rows, reach {most}, {kind}):")


def alibi(options: Options) -> list[str]:
    heads = options.whole("heads", 8)
    slopes = formulas.alibi_slopes(heads)
    selected = sorted({round(i * (heads - 1) / min(5, heads - 1)) for i in range(min(6, heads))}) if heads > 1 else [0]
    reach = 64
    curves = {f"head {h + 1}: m = {slopes[h]:.4g}": [-slopes[h] * d for d in range(reach + 1)] for h in selected}
    title = f"Bias -m |i-j| of {len(selected)} of {heads} heads: the smaller the slope, the longer the range."
    return charted(title, curves, ("distance 0", "", f"{reach}"), low=-8.0, high=0.0, rows=12)


def rope(options: Options) -> list[str]:
    size, base = _rotary(options)
    frequencies = formulas.inverse_frequencies(size, base)
    title = f"Score of equal q and k over distance, mean of cos(r w_c), {size} dimensions, base={base:g}:"
    first, middle, last = (2 * math.pi / frequencies[c] for c in (0, len(frequencies) // 2, -1))
    waves = f"wavelengths: {first:.3g} (pair 0), {middle:.4g} (middle pair), {last:.6g} tokens (last pair)"
    return [*_kernel(frequencies, title), "", *terminal.wrap(waves, terminal.width())]


def extended(options: Options, scaling: Scaling) -> list[str]:
    """RoPE with a context extension: what becomes of each frequency, at eight times the original length."""
    from ..encodings.rope.scaling import frequencies

    size, base = _rotary(options)
    original = getattr(scaling, "original", None) or 4096
    total = 8 * original
    plain = formulas.inverse_frequencies(size, base)
    scaled = frequencies(size, base, scaling, total)
    ratios = [new / old for new, old in zip(scaled, plain)]
    magnitude = scaling.magnitude_at(total)
    waves = (
        f"longest wavelength: {2 * math.pi / plain[-1]:.6g} tokens, with the extension {2 * math.pi / scaled[-1]:.6g}; "
        f"cos and sin are multiplied by {magnitude:.4g}, so scores by {magnitude**2 * scaling.score_factor:.4g}"
    )
    title = (
        f"Frequency of each pair divided by RoPE's ({size} dimensions, base={base:g}, at {total} tokens): 1 keeps it."
    )
    axis = "pair 0 (fast)", "", f"pair {len(ratios) - 1} (slow)"
    chart = charted(title, {"": ratios}, axis, low=0.0, high=max(1.0, *ratios))
    return [*chart, "", *terminal.wrap(waves, terminal.width())]


def axial(options: Options) -> list[str]:
    return _plane(options.whole("head_dim", 64, 4), options, "Score of equal q and k over rows and columns apart")


def sinusoidal_2d(options: Options) -> list[str]:
    return _plane(options.whole("d_model", 512, 4), options, "Similarity of two patches over rows and columns apart")


def _plane(size: int, options: Options, title: str) -> list[str]:
    """Mean cosine over both axes, half of the pairs each."""
    if size % 4:
        raise OptionError(f"two axes share the pairs, so the size must be a multiple of 4, got {size}")
    base, reach = options.number("base", 10000.0), 12
    frequencies = formulas.inverse_frequencies(size // 2, base)
    one = [_mean_cosine(frequencies, r) / 2 for r in range(-reach, reach + 1)]
    grid = [[row + column for column in one] for row in one[reach // 2 : -(reach // 2)]]
    return _over_grid(f"{title}, {size} dimensions, base={base:g} (dark is near):", grid, low=2 * min(one))


def _over_grid(title: str, grid: Sequence[Sequence[float]], low: float) -> list[str]:
    """Values over the difference of rows and of columns, both 0 in the middle."""
    rows, columns = len(grid) // 2, len(grid[0]) // 2
    lines = [f"{row - rows:>4} │{line}" for row, line in enumerate(terminal.heat_map(grid, low=low, high=1))]
    return titled(title, [*lines, f"rows   columns -{columns} .. {columns}"])


def xpos(options: Options) -> list[str]:
    size, base = _rotary(options)
    scale_base, gamma, reach = options.number("scale_base", 512.0), options.number("gamma", 0.4), 1024
    frequencies = formulas.inverse_frequencies(size, base)
    pairs = list(zip(frequencies, formulas.xpos_decays(size, gamma)))
    score = [
        sum(zeta ** (d / scale_base) * math.cos(d * w) for w, zeta in pairs) / len(pairs) for d in range(reach + 1)
    ]
    rotary = [_mean_cosine(frequencies, d) for d in range(reach + 1)]
    title = f"Score of equal q and k over distance into the past, {size} dimensions, next to RoPE's:"
    return charted(title, {"xpos": score, "rope": rotary}, ("i-j = 0", "", f"{reach}"), high=1.0, rows=11)


def transformer_xl(options: Options) -> list[str]:
    size, base = options.whole("d_model", 512, 2), options.number("base", 10000.0)
    clamp = options.whole("clamp_length", FARTHEST, most=FARTHEST)
    frequencies = formulas.inverse_frequencies(size, base)
    return _kernel(frequencies, f"Similarity of R(0) and R(i-j), what W_R reads, d_model={size}, base={base:g}:", clamp)


def relative_logits(options: Options) -> list[str]:
    most = options.whole("max_distance", 1024, most=10**9)
    bar = max(8, min(48, terminal.width() - 30))
    return titled(
        f"A learned profile over the last {most} positions, weighted by each query's own state; zero elsewhere.",
        [
            "·" * (bar // 4) + "█" * bar + "·" * 6,
            " " * (bar // 4) + f"i-j = {most - 1}" + "0".rjust(bar - 6 - len(str(most - 1))) + "  future: 0",
        ],
    )


def sinks(options: Options) -> list[str]:
    reach = 12
    curves = {f"sink {s:+d}": [n / (n + math.exp(s)) for n in range(1, reach + 1)] for s in (-2, 0, 2)}
    title = "Weight that the keys keep, n / (n + exp(sink)), if n keys of score 0 are visible; the sink takes the rest:"
    return charted(title, curves, ("1 key", "", f"{reach} keys"), low=0.0, high=1.0, rows=9)


def tempered(options: Options) -> list[str]:
    alpha, floor = options.number("alpha", 0.1), options.number("floor", 8192.0)
    form, columns = options.choice("form", ("llama4", "ministral3", "log")), 120
    at = [16 * floor * n / columns for n in range(columns + 1)]
    curve = {f"{form}, alpha={alpha:g}, floor={floor:g}": [formulas.temperature(i, alpha, floor, form) for i in at]}
    axis = "position 0", "", f"{16 * floor:g}"
    return charted("Factor of a query's scores over its position:", curve, axis, low=1.0, rows=8)


def grid_bias(options: Options) -> list[str]:
    rows, columns = _grid(options.get("window", (7, 7)))
    wide, high = 2 * columns - 1, 2 * rows - 1
    lines = [f"{row - rows + 1:>4} │{'██' * wide}" for row in range(high)] if high <= 31 else [f"{high} rows of {wide}"]
    return titled(
        f"One number for each of {high * wide} differences of rows and columns ({rows} × {columns} window):",
        [*lines, f"rows   columns {1 - columns} .. {columns - 1}"],
    )


def continuous_bias(options: Options) -> list[str]:
    rows, columns = _grid(options.get("window", (8, 8)))
    pretrained = options.get("pretrained", (rows, columns))
    scale = max(_grid(pretrained)[1] - 1, 1)
    x = range(1 - columns, columns)
    curve = [formulas.log_coordinate(d / scale) for d in x]
    title = "The network's input over the difference of columns, sign(x) log2(1 + 8|x| / (W - 1)) / 3:"
    return charted(title, {"": curve}, (f"{1 - columns}", "0", f"{columns - 1}"), rows=9)


def decomposed(options: Options) -> list[str]:
    rows, columns = _grid(options.get("grid", (14, 14)))
    bars = [
        f"{axis:<7}  {'█' * min(2 * n - 1, 60)}  {2 * n - 1} rows, {1 - n} .. {n - 1}"
        for axis, n in (("rows", rows), ("columns", columns))
    ]
    return titled("Two tables of vectors, multiplied with the query; their sum serves every pair of patches:", bars)


def mixed_rope(options: Options) -> list[str]:
    size, base, reach = options.whole("head_dim", 64, 4), options.number("base", 10.0), 12
    lengths = [base ** (-4 * c / size) for c in range(size // 4)]
    angle = math.pi / 6
    waves = [(w * math.cos(a), w * math.sin(a)) for a in (angle, angle + math.pi / 2) for w in lengths]
    grid = [
        [sum(math.cos(r * a + c * b) for a, b in waves) / len(waves) for c in range(-reach, reach + 1)]
        for r in range(-reach // 2, reach // 2 + 1)
    ]
    title = f"Score of equal q and k over rows and columns apart, a head at 30°, {size} dimensions, base={base:g} (dark is near):"
    return _over_grid(title, grid, low=-1)


def many_axes(options: Options) -> list[str]:
    axis_of = options.get("axis_of", (0, 1, 2) * 4)
    if not isinstance(axis_of, (tuple, list)) or not axis_of:
        raise OptionError(f"axis_of={axis_of!r} must name the axis of each pair, such as (0, 0, 1, 1)")
    for axis in axis_of:
        require_int("an axis", axis, most=255)
    return titled("Axis of each pair of channels, for example the axes in turn:", [" ".join(map(str, axis_of))])


def fox(options: Options) -> list[str]:
    reach, start = 64, options.get("start", 0.0)
    if not isinstance(start, (int, float)) or isinstance(start, bool):
        raise OptionError(f"start must be a number, got {start!r}")
    curves = {
        f"f = sigmoid({b:+g})": [-d * math.log1p(math.exp(-b)) for d in range(reach + 1)]
        for b in (start, start + 2, start + 4)
    }
    title = "Sum of log f over distance where every gate is the same; real gates depend on the tokens:"
    return charted(title, curves, ("i-j = 0", "", f"{reach}"), low=-12.0, high=0.0, rows=11)


def kerple(options: Options) -> list[str]:
    reach, form = 512, options.choice("form", ("log", "power"))
    curves = {}
    for a, p in ((0.1, 0.5), (0.5, 1.0), (1.0, 1.5)) if form == "log" else ((0.1, 0.25), (0.5, 0.5), (1.0, 0.75)):
        curves[f"a = {a:g}, p = {p:g}"] = [formulas.kerple_bias(d, a, p, form) for d in range(reach + 1)]
    title = f"Bias over distance ({form}) for some a and p in the range of the start; each head learns its own:"
    return charted(title, curves, ("distance 0", "", f"{reach}"), low=-14.0, high=0.0, rows=12)


def sandwich(options: Options) -> list[str]:
    heads, size = options.whole("heads", 8), options.whole("size", 128, 2)
    frequencies = formulas.sandwich_frequencies(size, options.number("base", 10000.0))
    factors, reach = formulas.sandwich_factors(heads), 512
    sums = [formulas.sandwich_sum(d, frequencies) for d in range(reach + 1)]
    selected = sorted({0, heads // 2, heads - 1})
    curves = {f"head {h + 1} of {heads}": [factors[h] * s for s in sums] for h in selected}
    return charted(f"Bias over distance with size={size}:", curves, ("distance 0", "", f"{reach}"), high=0.0, rows=12)


def fire(options: Options) -> list[str]:
    c, threshold, reach = options.number("c", 0.1), options.number("threshold", 512.0), 2048
    phi = formulas.fire_scale
    curves = {
        f"query at {i}": [phi(d, c) / phi(max(i, threshold), c) if d <= i else 1.0 for d in range(reach + 1)]
        for i in (reach // 4, reach // 2, reach)
    }
    title = "What the network reads over distance, φ(i-j) / φ(max(i, T)): at most 1 for every query:"
    return charted(title, curves, ("i-j = 0", "", f"{reach}"), low=0.0, high=1.0, rows=10)


def tupe(options: Options) -> list[str]:
    rows = options.whole("max_length", 512, most=10**9)
    lines = (
        "words      x_i W_q · x_j W_k",
        "positions  p_i U_q · p_j U_k",
        "           (no product of a word with a position)",
    )
    return titled(f"Two products instead of one of sums; a table of {rows + 1} positions:", lines)


def pope(options: Options) -> list[str]:
    size, base = options.whole("head_dim", 64), options.number("base", 10000.0)
    frequencies = formulas.inverse_frequencies(2 * size, base)
    return _kernel(
        frequencies, f"Score of equal magnitudes over distance, mean of cos(r w_c), {size} frequencies, base={base:g}:"
    )


def latent(options: Options) -> list[str]:
    rank, nope, rope_ = options.whole("kv_rank", 512), options.whole("nope_dim", 128), options.whole("rope_dim", 64)
    heads, value = 16, options.whole("v_dim", 128)
    whole, kept = heads * (nope + rope_ + value), rank + rope_
    bar = max(8, min(56, terminal.width() - 30))
    return titled(
        f"Numbers that a cache holds for each token, with {heads} heads of {nope} + {rope_} channels and values of {value}:",
        [
            "keys and values  " + "█" * bar + f" {whole}",
            "latent and r     " + "█" * max(1, round(bar * kept / whole)) + f" {kept}",
        ],
    )


def cope(options: Options) -> list[str]:
    words = ["the", "cat", "saw", "it", ".", "the", "dog", "ran", "."]
    gates = [1.0 if word == "." else 0.05 for word in words]
    counts = [sum(gates[j:]) for j in range(len(words))]
    return titled(
        "Gates of a query that counts sentences: positions are steps at the full stops, the table is read in between:",
        [
            "token     " + "".join(f"{word:>6}" for word in words),
            "gate      " + "".join(f"{gate:6.2f}" for gate in gates),
            "position  " + "".join(f"{count:6.2f}" for count in counts),
        ],
    )


def stick_breaking(options: Options) -> list[str]:
    reach = 32
    curves = {f"β = {b:g}": [b * (1 - b) ** d for d in range(reach + 1)] for b in (0.5, 0.2, 0.05)}
    title = "Weight over distance where every key asks for the same share β; the nearest takes its share first:"
    return charted(title, curves, ("i-j = 1", "", f"{reach + 1}"), low=0.0, high=0.5, rows=11)


def path(options: Options) -> list[str]:
    reach = 16
    curves = {f"β = {b:g}": [(1 - b) ** d for d in range(reach + 1)] for b in (0.1, 0.5, 1.9)}
    title = "Share of a key along w that is left over distance where every token has the same w and β; past 1 it changes sign:"
    return charted(title, curves, ("i-j = 0", "", f"{reach}"), low=-1.0, high=1.0, rows=11)


def _grid(size: Any) -> tuple[int, int]:
    match size:
        case (int() as rows, int() as columns) if 1 <= rows <= 64 and 1 <= columns <= 64:
            return rows, columns
    raise OptionError(f"a grid is (rows, columns), 1 to 64 each, got {size!r}")


PICTURES: Mapping[str, Callable[[Options], list[str]]] = {
    picture.__name__: picture
    for picture in (
        none, sinusoidal, learned, shaw, clipped, t5, transformer_xl, deberta, rope, axial, sinusoidal_2d, xpos, relative_logits, alibi, sinks,
        tempered, grid_bias, continuous_bias, decomposed, mixed_rope, many_axes, fox, kerple, sandwich, fire, tupe, pope, latent, cope,
        stick_breaking, path,
    )
} | {"xlnet": transformer_xl, "mrope": rope, "cape": sinusoidal}  # mrope: the picture for text  # fmt: skip


def _rotary(options: Options) -> tuple[int, float]:
    """How many channels rotate, and the base."""
    head = options.whole("head_dim", 64)
    size = options.whole("rotary_dim", head)
    if size > head:
        raise OptionError(f"rotary_dim={size} exceeds head_dim={head}")
    if size % 2:
        raise OptionError(f"the number of rotated channels must be even, got {size}")
    return size, options.number("base", 10000.0)


def _mean_cosine(frequencies: Sequence[float], r: int) -> float:
    """The score of equal q and k at distance r."""
    return sum(math.cos(r * w) for w in frequencies) / len(frequencies)


def _kernel(frequencies: Sequence[float], title: str, clamp: int = FARTHEST) -> list[str]:
    """The mean cosine over distance."""
    reach = 128
    mean = [_mean_cosine(frequencies, min(abs(r), clamp)) for r in range(-reach, reach + 1)]
    return charted(title, {"": mean}, around(reach), high=1.0, low=min(0.0, *mean))


def _clip(left: int, right: int, beyond: str) -> list[str]:
    """The row of each distance, clipped to [-left, right]."""
    reach = max(2, 2 * max(left, right))
    rows = [min(max(r, -left), right) + left for r in range(-reach, reach + 1)]
    title = f"Row of the table: each distance in [-{left}, {right}] has its own, {beyond} ({left + right + 1} rows):"
    return charted(title, {"": rows}, around(reach), rows=7)


def _steps(lo: int, hi: int, rows: Sequence[int], title: str) -> list[str]:
    """The row of every distance in [lo, hi] and a little beyond, where it is constant."""
    reach = max(-lo, hi) * 5 // 4
    last = reach if hi > 0 else 0
    drawn = [rows[min(max(r, lo), hi) - lo] for r in range(-reach, last + 1)]
    axis = around(reach) if hi > 0 else (f"j-i = -{reach} (past)", "", "0")
    return charted(title, {"": drawn}, axis, rows=8)


def _ranges(pairs: Sequence[tuple[int, int]]) -> str:
    """(distance, bucket) pairs as text, 0→0 … 7→7, 8–11→8, …: runs of single distances are abbreviated."""
    groups = [(bucket, [distance for distance, _ in same]) for bucket, same in groupby(pairs, key=itemgetter(1))]
    exact = next((n for n, (_, distances) in enumerate(groups) if len(distances) > 1), len(groups))
    parts = [f"{distances[0]}→{bucket}" for bucket, distances in groups[:exact]]
    if exact > 1:
        parts = [f"{parts[0]} … {parts[-1]}"]
    for bucket, (first, *more) in groups[exact:-1]:
        parts.append(f"{first}–{more[-1]}→{bucket}" if more else f"{first}→{bucket}")
    if exact < len(groups):
        bucket, (first, *_) = groups[-1]
        parts.append(f"{first}+→{bucket}")
    return ", ".join(parts)
