"""Context extensions of RoPE. Each is a value: inverse frequencies in, inverse frequencies out, and one factor.

    posenc.RoPE(head_dim=128, scaling=posenc.scaling.YaRN(factor=16, original=4096))

`original` is the context length the model was trained with, `factor` how many times longer it is to become.
Nothing here needs torch:
the numbers are Python floats, the same on every device and in every dtype.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Literal

from ...core import formulas
from ...core.checks import show_value
from ...core.errors import OptionError

if TYPE_CHECKING:
    from torch import Tensor

Frequencies = tuple[float, ...]
MOST = 1e100
"""No length or factor reaches this; products of those below are finite."""
POSITIVE = frozenset(
    ("factor", "original", "b", "low", "high", "beta_fast", "beta_slow", "attention_factor", "max_length", "freeze_at")
)
"""Options of scalings that are positive numbers."""


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """What every context extension is. `size` below is the number of rotated channels.

    Each raises OptionError for values out of range.

        >>> isinstance(posenc.scaling.Linear(factor=2.0), posenc.scaling.Scaling)
        True
    """

    def __post_init__(self):
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name not in POSITIVE or (value is None and field.default is None):
                continue
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < MOST:
                raise OptionError(f"{type(self).__name__}: {field.name}={show_value(value)} must be a positive number")

    @property
    def magnitude(self) -> float:
        """What cos and sin are multiplied by, so that scores are multiplied by its square."""
        return 1.0

    def magnitude_at(self, total):
        """The same for a sequence of `total` tokens: a number, or a float64 tensor of them [.., 1]."""
        return self.magnitude

    @property
    def score_factor(self) -> float:
        """What scores are multiplied by in addition."""
        return 1.0

    @property
    def length_dependent(self) -> bool:
        """Whether the frequencies change with the total length: keys are then cached unrotated."""
        return False

    def frequencies(self, w: Frequencies, size: int, base: float, total: int | None = None) -> Frequencies:
        """The inverse frequencies of a sequence of `total` tokens (None: no longer than the original)."""
        raise NotImplementedError

    def frequencies_of(self, w: Frequencies, size: int, base: float, total: Tensor) -> Tensor:
        """The same for totals known on a device only: float64 [.., 1] -> [.., n]. Length-dependent scalings only."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Linear(Scaling):
    """Position interpolation (Chen et al. 2023, arXiv:2306.15595): position / factor, at every length.

    Raises OptionError for a factor that is not positive.

        >>> posenc.scaling.frequencies(4, 10000.0, posenc.scaling.Linear(factor=4.0))
        (0.25, 0.0025)
    """

    factor: float

    def frequencies(self, w, size, base, total=None):
        return tuple(x / self.factor for x in w)


@dataclass(frozen=True, kw_only=True)
class NTK(Scaling):
    """NTK-aware base: base · factor^(size / (size - 2)). The first pair keeps its frequency, the last is divided
    by `factor`; the usable extension is less than `factor`.

    Raises OptionError for a factor that is not positive.

        >>> posenc.scaling.frequencies(4, 10000.0, posenc.scaling.NTK(factor=4.0))[0]
        1.0
    """

    factor: float

    def frequencies(self, w, size, base, total=None):
        return tuple(ntk(x, c, size, self.factor) for c, x in enumerate(w))


@dataclass(frozen=True, kw_only=True)
class MixedNTK(Scaling):
    """NTK-aware, fixed and mixed (Su 2023): no pair goes unscaled, the last is divided by `factor` exactly.

    w'_c = w_c / factor^(((c + 1) / n)^b)      n pairs;  b = 1: "NTK-fixed", b < 1: "NTK-mixed"

    Raises OptionError for values out of range.

        >>> [round(w, 4) for w in posenc.scaling.frequencies(4, 10000.0, posenc.scaling.MixedNTK(factor=4.0))]
        [0.5, 0.0025]
    """

    factor: float
    b: float = 1.0

    def frequencies(self, w, size, base, total=None):
        return tuple(x * self.factor ** -(((c + 1) / len(w)) ** self.b) for c, x in enumerate(w))


@dataclass(frozen=True, kw_only=True)
class DynamicNTK(Scaling):
    """NTK-aware with a factor that grows with the total length n:

        s(n) = factor · n / original - (factor - 1)    for n > original, else 1

    factor=1 gives n / original. The rotation of every key changes with each token, so keys are cached unrotated.
    `freeze_at=n` uses s(n) at every length instead, as some serving engines do; that is a different model.

    Raises OptionError for values out of range.

        >>> dynamic = posenc.scaling.DynamicNTK(original=4096)
        >>> [posenc.scaling.frequencies(4, 10000.0, dynamic, total=n)[1] for n in (4096, 8192)]
        [0.01, 0.005]
    """

    factor: float = 1.0
    original: int
    freeze_at: int | None = None

    @property
    def length_dependent(self) -> bool:
        return self.freeze_at is None

    def frequencies(self, w, size, base, total=None):
        total = self.freeze_at or total or self.original
        stretch = self._stretch(max(total, self.original))
        return tuple(ntk(x, c, size, stretch) for c, x in enumerate(w))

    def frequencies_of(self, w, size, base, total):
        pairs = _row(range(len(w)), total)
        return ntk(_row(w, total), pairs, size, self._stretch(total.clamp(min=self.original)))

    def _stretch(self, total):
        return self.factor * total / self.original - (self.factor - 1.0)


@dataclass(frozen=True, kw_only=True)
class YaRN(Scaling):
    """NTK by parts (Peng et al. 2023, arXiv:2309.00071): fast pairs keep their frequency, slow ones are divided.

        w' = g w + (1 - g) w / factor          r = original · w / 2π cycles within the original length

        ramp="code"    g falls linearly with the pair's number from the pair with r = beta_fast to the one with
                       r = beta_slow, ends rounded outwards unless truncate=False: what every checkpoint uses
        ramp="paper"   g rises linearly with r between beta_slow and beta_fast: as printed

    attention_factor  0.1 ln(factor) + 1 unless given; with both mscale and mscale_all_dim the ratio
                      (0.1 mscale ln(factor) + 1) / (0.1 mscale_all_dim ln(factor) + 1)
    scale_scores      multiply scores by (0.1 mscale_all_dim ln(factor) + 1)^2 too: DeepSeek's attention does

    Raises OptionError for values out of range and for unknown ramps.

        >>> round(posenc.RoPE(head_dim=64, scaling=posenc.scaling.YaRN(factor=4.0, original=4096)).attention_factor, 4)
        1.1386
    """

    factor: float
    original: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    ramp: Literal["code", "paper"] = "code"
    truncate: bool = True
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None
    scale_scores: bool = False

    def __post_init__(self):
        super().__post_init__()
        for name in ("mscale", "mscale_all_dim"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, (int, float)) or not 0 <= value < MOST):
                raise OptionError(f"YaRN: {name}={show_value(value)} must be a number of at least 0, or None")
        if not isinstance(self.truncate, bool):
            raise OptionError(f"YaRN: truncate={show_value(self.truncate)} must be True or False")
        if self.beta_fast < self.beta_slow:
            raise OptionError(f"beta_fast={self.beta_fast} must be at least beta_slow={self.beta_slow}; swap them")
        if self.ramp not in ("code", "paper"):
            raise OptionError(f"ramp={self.ramp!r} is unknown; use 'code' (every checkpoint) or 'paper'")
        if self.scale_scores and not self.mscale_all_dim:
            raise OptionError("scale_scores multiplies scores by mscale_all_dim's factor; give mscale_all_dim")

    @property
    def magnitude(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return yarn_factor(self.factor, self.mscale) / yarn_factor(self.factor, self.mscale_all_dim)
        return yarn_factor(self.factor)

    @property
    def score_factor(self) -> float:
        return yarn_factor(self.factor, self.mscale_all_dim or 0.0) ** 2 if self.scale_scores else 1.0

    def frequencies(self, w, size, base, total=None):
        kept = self._kept(w, size, base)
        return tuple(g * x + (1.0 - g) * (x / self.factor) for g, x in zip(kept, w, strict=True))

    def _kept(self, w: Frequencies, size: int, base: float) -> list[float]:
        if self.ramp == "paper":
            cycles = [self.original * x / math.tau for x in w]
            span = self.beta_fast - self.beta_slow
            return [_clip((r - self.beta_slow) / span) if span else float(r > self.beta_slow) for r in cycles]
        return yarn_ramp(len(w), size, base, self.original, self.beta_fast, self.beta_slow, self.truncate)


@dataclass(frozen=True, kw_only=True)
class DynamicYaRN(Scaling):
    """YaRN whose factor is the total length n over the original one: s(n) = max(n, max_length) / original.

    max_length the length the model was extended to by training; default: it was not, and up to the original length
               nothing changes
    Frequencies and magnitude, 0.1 ln(s) + 1, change with each token, so keys are cached unrotated; `freeze_at=n` is
    YaRN(factor=s(n)) at every length.

    Raises OptionError for values out of range.

        >>> posenc.RoPE(head_dim=8, scaling=posenc.scaling.DynamicYaRN(original=4096)).length_dependent
        True
    """

    original: int
    max_length: int | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    freeze_at: int | None = None

    def __post_init__(self):
        super().__post_init__()
        if self.max_length is not None and self.max_length < self.original:
            raise OptionError(f"max_length={self.max_length} must be at least original={self.original}")
        self.fixed()  # the betas' order is checked there

    def fixed(self, total: int | None = None) -> YaRN:
        """The YaRN that this is at a length."""
        same = {name: getattr(self, name) for name in ("original", "beta_fast", "beta_slow", "truncate")}
        return YaRN(factor=max(self.freeze_at or total or 0, self._least) / self.original, **same)

    @property
    def _least(self) -> int:
        return self.max_length or self.original

    @property
    def magnitude(self) -> float:
        return self.magnitude_at(self._least)

    def magnitude_at(self, total):
        if self.freeze_at or isinstance(total, int) or total is None:
            return self.fixed(total).magnitude
        return 0.1 * (total.clamp(min=self._least) / self.original).log() + 1.0

    @property
    def length_dependent(self) -> bool:
        return self.freeze_at is None

    def frequencies(self, w, size, base, total=None):
        return self.fixed(total).frequencies(w, size, base)

    def frequencies_of(self, w, size, base, total):
        ramp = yarn_ramp(len(w), size, base, self.original, self.beta_fast, self.beta_slow, self.truncate)
        kept, plain = _row(ramp, total), _row(w, total)
        return kept * plain + (1.0 - kept) * (plain * self.original / total.clamp(min=self._least))


@dataclass(frozen=True, kw_only=True)
class LongRoPE(Scaling):
    """Every pair divided by its own searched factor (Ding et al. 2024, arXiv:2402.13753).

        w'_c = w_c / short[c]   while the total length is at most `original`, else   w_c / long[c]

    attention_factor is sqrt(1 + ln(factor) / ln(original)) at every length unless given; factor is the extended
    length over the original one. The switch changes the rotation of every key, so keys are cached unrotated.
    `freeze_at=n` uses the list for length n at every length.

    Raises OptionError for lists of different lengths and for factors that are not positive.

        >>> long = posenc.scaling.LongRoPE(short=(1.0, 1.0), long=(1.0, 4.0), original=4096)
        >>> [posenc.scaling.frequencies(4, 10000.0, long, total=n)[1] for n in (4096, 8192)]
        [0.01, 0.0025]
    """

    short: tuple[float, ...]
    long: tuple[float, ...]
    original: int
    factor: float = 1.0
    attention_factor: float | None = None
    freeze_at: int | None = None

    def __post_init__(self):
        for name in ("short", "long"):
            try:
                object.__setattr__(self, name, tuple(float(x) for x in getattr(self, name)))
                fine = all(math.isfinite(x) and x > 0 for x in getattr(self, name))
            except (TypeError, ValueError, OverflowError):
                fine = False
            if not fine:
                raise OptionError(f"{name} must hold positive numbers, one for each rotated pair")
        if len(self.short) != len(self.long):
            raise OptionError(f"short has {len(self.short)} factors and long {len(self.long)}; give one for each pair")
        super().__post_init__()
        if self.attention_factor is None and self.factor > 1.0 and self.original <= 1:
            raise OptionError(f"LongRoPE divides by ln(original), and original={self.original}; give attention_factor")

    @property
    def magnitude(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        return math.sqrt(1.0 + math.log(self.factor) / math.log(self.original)) if self.factor > 1.0 else 1.0

    @property
    def length_dependent(self) -> bool:
        return self.freeze_at is None and self.short != self.long

    def frequencies(self, w, size, base, total=None):
        if len(self.short) != len(w):
            raise OptionError(f"LongRoPE has factors for {len(self.short)} pairs, the rotation has {len(w)}")
        divisors = self.long if (self.freeze_at or total or 0) > self.original else self.short
        return tuple(x / divisor for x, divisor in zip(w, divisors, strict=True))

    def frequencies_of(self, w, size, base, total):
        short, long = (_row(self.frequencies(w, size, base, n), total) for n in (None, self.original + 1))
        return (total > self.original).to(total.dtype) * (long - short) + short


@dataclass(frozen=True, kw_only=True)
class Llama3(Scaling):
    """Wavelengths below original / high are kept, above original / low divided by factor, blended in between.

    t = original · w / 2π;   g = clip((t - low) / (high - low), 0, 1);   w' = g w + (1 - g) w / factor

    Raises OptionError for values out of range.

        >>> posenc.RoPE(head_dim=128, base=500000.0, scaling=posenc.scaling.Llama3()).frequencies()[0]
        1.0
    """

    factor: float = 8.0
    low: float = 1.0
    high: float = 4.0
    original: int = 8192

    def __post_init__(self):
        super().__post_init__()
        if self.high < self.low:
            raise OptionError(f"high={self.high} must be at least low={self.low}; swap them")

    def frequencies(self, w, size, base, total=None):
        return tuple(self._one(x) for x in w)

    def _one(self, w: float) -> float:
        cycles = self.original * w / math.tau
        if cycles < self.low:
            return w / self.factor
        if cycles > self.high or self.high == self.low:
            return w
        kept = (cycles - self.low) / (self.high - self.low)
        return kept * w + (1.0 - kept) * (w / self.factor)


@dataclass(frozen=True, kw_only=True)
class Proportional(Scaling):
    """p-RoPE (Barbero et al. 2024, arXiv:2410.06205): the slowest pairs are not rotated.

        w'_c = w_c / factor   for c < int(fraction · size / 2),   else 0

    fraction=1 is RoPE, 0 is no position. Partial rotary (`RoPE(rotary_dim=…)`) differs: it spreads all frequencies over
    fewer channels, while this drops the slow ones.

    Raises OptionError for a fraction outside 0 to 1.

        >>> posenc.scaling.frequencies(4, 10000.0, posenc.scaling.Proportional(fraction=0.5))
        (1.0, 0.0)
    """

    fraction: float
    factor: float = 1.0

    def __post_init__(self):
        super().__post_init__()
        if not isinstance(self.fraction, (int, float)) or not 0.0 <= self.fraction <= 1.0:
            raise OptionError(f"fraction={show_value(self.fraction)} must lie between 0 (no position) and 1 (RoPE)")

    def frequencies(self, w, size, base, total=None):
        rotating = int(self.fraction * size // 2)
        return tuple(x / self.factor if c < rotating else 0.0 for c, x in enumerate(w))


def ntk(w, pair, size: int, stretch):
    """Frequency of a pair when the base becomes base · stretch^(size / (size - 2)); numbers or tensors.

    Raises OptionError for a size of 2 or less.

        >>> round(posenc.scaling.ntk(0.01, 1, 4, 4.0), 6)
        0.0025
    """
    if size <= 2:
        raise OptionError(f"NTK scaling needs more than 2 rotated channels, got {size}; use Linear")
    return w * stretch ** (-2.0 * pair / (size - 2))


def yarn_ramp(
    pairs: int, size: int, base: float, original: int, beta_fast: float, beta_slow: float, truncate: bool
) -> list[float]:
    """How much of its frequency each pair keeps: 1 up to the pair that makes beta_fast cycles in the original length,
    0 from the one that makes beta_slow, linear in the pair's number between.

    Raises OptionError for a base of 1 or less.

        >>> posenc.scaling.yarn_ramp(4, 8, 10000.0, 4096, 32.0, 1.0, True)
        [1.0, 1.0, 0.5, 0.0]
    """
    if base <= 1.0:
        raise OptionError(f"YaRN finds its pairs through log(base), and base={base}; give a base above 1")
    betas = beta_fast, beta_slow
    low, high = (size * math.log(original / (beta * math.tau)) / (2.0 * math.log(base)) for beta in betas)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    if low == high:
        high += 0.001
    return [1.0 - _clip((c - low) / (high - low)) for c in range(pairs)]


def yarn_factor(factor: float, mscale: float = 1.0) -> float:
    """YaRN's temperature for cos and sin: 0.1 mscale ln(factor) + 1, and 1 where nothing is extended.

    Raises nothing: YaRN validates.

        >>> round(posenc.scaling.yarn_factor(4.0), 4)
        1.1386
    """
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1.0 else 1.0


def frequencies(size: int, base: float, scaling: Scaling | None = None, total: int | None = None) -> Frequencies:
    """The inverse frequencies of `size` rotated channels, scaled.

    `total` is the length that dynamic scalings follow; without it they are as trained. Raises OptionError for a base that
    is not positive.

        >>> posenc.scaling.frequencies(4, 10000.0)
        (1.0, 0.01)
    """
    w = formulas.inverse_frequencies(size, float(base))
    return w if scaling is None else scaling.frequencies(w, size, float(base), total)


def from_config(config, dialect: str = "hf", *, layer_type: str | None = None, length: int | None = None):
    """The scaling of a model's configuration, or None for plain RoPE.

    config      config.json as a dict, its `rope_parameters` or `rope_scaling` alone, or a transformers config;
                for "llama.cpp" the GGUF metadata, with the factor tensors (`rope_freqs.weight`, ...) as lists
    dialect     the library that it is for: "hf", "vllm", "llama.cpp" or "deepseek"; some keys mean different things to them
    layer_type  which of several rotations, for models that have one for each kind of layer
    length      the length that is served, for the readers that fix the frequencies once ("vllm", "llama.cpp")

    Unknown, missing and contradictory keys raise. `posenc.RoPE.from_config` gives the whole RoPE.

        >>> posenc.scaling.from_config({"rope_type": "linear", "factor": 2.0})
        Linear(factor=2.0)
    """
    from .configs import read

    return read(config, dialect, layer_type=layer_type, length=length).scaling


def to_config(scaling, dialect: str = "hf") -> dict:
    """The configuration that makes `dialect` use this scaling (a Scaling, None, or a RoPE with its base and sizes):
    keys to merge into config.json. What the dialect cannot express raises.

        >>> posenc.scaling.to_config(posenc.scaling.Linear(factor=2.0))
        {'rope_parameters': {'rope_type': 'linear', 'factor': 2.0}}
    """
    from .configs import write

    return write(scaling, dialect)


def _row(values, like: Tensor) -> Tensor:
    """Numbers on a tensor's device, made once: a copy at each step would wait for the device."""
    from ...core.constants import constant

    return constant(tuple(values), like.device, like.dtype)


def _clip(x: float) -> float:
    return min(max(x, 0.0), 1.0)
