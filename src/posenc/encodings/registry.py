"""Name -> encoding. Nothing here imports torch until an encoding is created."""

from __future__ import annotations

import importlib
import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, overload

from ..core.checks import nearest
from ..core.errors import OptionError
from ..core.formulas import head_size

if TYPE_CHECKING:
    from ..core.encoding import Encoding
    from .absolute import Learned, Sinusoidal
    from .bias import T5, ALiBi, Clipped
    from .cape import Cape
    from .deberta import DeBERTa
    from .fire import Fire
    from .fox import FoX
    from .grid.bias import GridBias
    from .grid.continuous import ContinuousBias
    from .grid.decomposed import Decomposed
    from .kerple import Kerple
    from .none import NoPosition
    from .relative_logits import RelativeLogits
    from .rope.axial import AxialRoPE
    from .rope.many_axes import ManyAxes
    from .rope.mixed import MixedRoPE
    from .rope.mrope import MRoPE
    from .rope.polar import PoPE
    from .rope.rope import RoPE
    from .rope.xpos import XPos
    from .sandwich import Sandwich
    from .shaw import Shaw
    from .sinks import Sinks
    from .sinusoidal_2d import Sinusoidal2D
    from .tempered import Tempered
    from .transformer_xl import TransformerXL, XLNet
    from .tupe import TUPE


@dataclass(frozen=True)
class EncodingInfo:
    """Facts about an encoding, for choosing one."""

    name: str
    target: str  # "module:Class" under posenc.encodings; of a registered class its own module
    family: str
    enters: str  # input; queries and keys; scores; scores and values
    parameters: str
    extrapolates: str
    used_by: str
    formula: str

    @property
    def module(self) -> str:
        module = self.target.split(":")[0]
        return module if self.name in _REGISTERED or module.startswith("posenc.") else f"posenc.encodings.{module}"

    @property
    def class_name(self) -> str:
        return self.target.split(":")[1]

    @property
    def public_name(self) -> str:
        """posenc.FoX, posenc.contextual.cope"""
        folder = "contextual." if self.module.startswith("posenc.contextual.") else ""
        return f"posenc.{folder}{self.class_name}"

    def load(self) -> type[Encoding]:
        return _REGISTERED.get(self.name) or getattr(importlib.import_module(self.module), self.class_name)


_REGISTERED: dict[str, type[Encoding]] = {}
"""Classes from outside the package, by name."""


ENCODINGS: dict[str, EncodingInfo] = {
    one.name: one
    for one in (
        EncodingInfo("none", "none:NoPosition", "none", "nowhere", "none",
             "no: breaks at 2 × (lab); a causal mask alone gives some order", "NoPE layers of Llama 4, SmolLM3",
             "s = q·k / √d"),
        EncodingInfo("sinusoidal", "absolute:Sinusoidal", "absolute", "input", "none",
             "no: defined at every position, unseen ones mislead the model", "Transformer (2017), Whisper, Marian",
             "x_p + [sin(p w_c), cos(p w_c)],  w_c = base^(-2c/d)"),
        EncodingInfo("sinusoidal_2d", "sinusoidal_2d:Sinusoidal2D", "absolute", "input", "none",
             "no: defined everywhere, unseen rows and columns mislead the model", "MAE, ViT variants",
             "x_p + [sin(r w), cos(r w), sin(c w), cos(c w)],  w_i = base^(-4i/d)"),
        EncodingInfo("learned", "absolute:Learned", "absolute", "input", "max_length × d_model",
             "no: undefined past max_length", "BERT, GPT-2, OPT, ViT",
             "x_p + P[p]"),
        EncodingInfo("shaw", "shaw:Shaw", "relative, content", "scores and values", "(2 max_distance + 1) × d_head, per table",
             "limited: distances past max_distance share a row", "Shaw et al. 2018, wav2vec2-BERT, Seamless",
             "s = q·(k + a^K[clip(j-i)]) / √d,  o = Σ a (v + a^V[clip(j-i)])"),
        EncodingInfo("clipped", "bias:Clipped", "relative, bias", "scores", "heads × (2 max_distance + 1)",
             "limited: distances past max_distance share a value", "Swin-like and small models",
             "s = q·k / √d + b[h, clip(j-i)]"),
        EncodingInfo("t5", "bias:T5", "relative, bias", "scores", "buckets × heads",
             "to 2 × the training length; to 16 × after long training (lab)", "T5, mT5, UMT5, LongT5, MPNet",
             "s = q·k + b[bucket(j-i), h]"),
        EncodingInfo("transformer_xl", "transformer_xl:TransformerXL", "relative, content", "scores",
             "d_model × d_model + 2 × heads × d_head", "yes, with memory and clamp_length",
             "Transformer-XL, Conformer", "s = [(q+u)·k + (q+v)·W_R R(i-j)] / √d"),
        EncodingInfo("xlnet", "transformer_xl:XLNet", "relative, content", "scores",
             "d_model × d_model + 5 × heads × d_head", "yes, with memory and clamp_length", "XLNet",
             "s = [(q+u)·k + (q+v)·W_R R(i-j) + (q+w)·g[segment]] / √d"),
        EncodingInfo("deberta", "deberta:DeBERTa", "relative, content", "scores", "2k × d_model + projections",
             "yes: distances past the last bucket share a row", "DeBERTa v1, v2, v3",
             "s = [q·k + q·K_r[δ(i-j)] + k·Q_r[δ(i-j)]] / √(3d)"),
        EncodingInfo("rope", "rope.rope:RoPE", "rotary", "queries and keys", "none",
             "no; with scaling (linear, NTK, dynamic NTK, ...) yes", "Llama, Mistral, Qwen, Gemma, GPT-NeoX, GPT-J",
             "s = (R(i) q)·(R(j) k) / √d,  R(p) rotates pair c by p base^(-2c/d)"),
        EncodingInfo("mrope", "rope.mrope:MRoPE", "rotary", "queries and keys", "none",
             "no; with scaling (YaRN, ...) yes", "Qwen2-VL, Qwen3-VL",
             "pair c rotates by the position on its axis (time, row or column) × base^(-2c/d)"),
        EncodingInfo("axial", "rope.axial:AxialRoPE", "rotary", "queries and keys", "none",
             "no: unseen rows and columns mislead the model; DINOv3's are relative to the image's size",
             "Pixtral, DINOv3, Llama 4 vision, Qwen2-VL vision",
             "pair c rotates by its row or its column × base^(-4c/d)"),
        EncodingInfo("xpos", "rope.xpos:XPos", "rotary", "queries and keys", "none",
             "yes, with attention in blocks; causal only", "LEX, RetNet",
             "RoPE, and pair c fades as ((2c/d + 0.4) / 1.4)^((i-j) / 512)"),
        EncodingInfo("relative_logits", "relative_logits:RelativeLogits", "relative, content", "scores",
             "d_model × heads × d_rel + d_rel × max_distance", "yes: nothing is added past max_distance", "Inkling",
             "s = q·k / √d + r_i·bank[i-j],  0 ≤ i-j < max_distance"),
        EncodingInfo("alibi", "bias:ALiBi", "relative, bias", "scores", "none, or heads slopes",
             "yes: stays flat far past the training length", "BLOOM, MPT",
             "s = q·k / √d - m_h |i-j|"),
        EncodingInfo("sinks", "sinks:Sinks", "attention sink", "scores", "heads",
             "as the encoding beside it", "gpt-oss, with rotary positions and windows",
             "a_ij = exp(s_ij) / (exp(sink_h) + Σ_j exp(s_ij))"),
        EncodingInfo("tempered", "tempered:Tempered", "temperature", "scores", "none",
             "made for it, with an encoding that extrapolates", "Llama 4, Ministral 3, Mistral Large 4",
             "s = τ_i q·k / √d,  τ_i = 1 + α ln(1 + ⌊(i+1) / floor⌋)"),
        EncodingInfo("grid_bias", "grid.bias:GridBias", "relative, bias", "scores", "(2 rows - 1)(2 columns - 1) × heads",
             "no: one window; resize interpolates", "Swin, MaxViT, BEiT",
             "s = q·k / √d + b[h, row_i - row_j, column_i - column_j]"),
        EncodingInfo("continuous_bias", "grid.continuous:ContinuousBias", "relative, bias", "scores", "3 × hidden + hidden × heads + heads",
             "yes: other windows by the same network", "Swin v2",
             "s = τ_h cos(q, k) + 16 sigmoid(MLP(log-spaced row and column))_h"),
        EncodingInfo("decomposed", "grid.decomposed:Decomposed", "relative, content", "scores", "(2 rows + 2 columns - 2) × d_head",
             "interpolated tables for other sizes", "SAM, ViTDet, MViTv2",
             "s = q·k / √d + q·R_r[row_i - row_j] + q·R_c[column_i - column_j]"),
        EncodingInfo("mixed_rope", "rope.mixed:MixedRoPE", "rotary", "queries and keys", "axes × heads × d_head / 2",
             "partly: angles go on, unseen ones mislead the model", "RoPE-ViT (rope-mixed), timm",
             "pair c of head h rotates by Σ_a p_a w[a, h, c], w learned"),
        EncodingInfo("many_axes", "rope.many_axes:ManyAxes", "rotary", "queries and keys", "none",
             "as rope on each axis", "video and vision-language models",
             "pair c rotates by p[axis_of[c]] × frequency[c]"),
        EncodingInfo("fox", "fox:FoX", "data-dependent decay", "scores", "(d_model + 1) × heads",
             "yes: far keys are forgotten at a rate that the tokens set", "Forgetting Transformer",
             "s = q·k / √d + Σ_{t=j+1..i} log sigmoid(w_h·x_t + b_h)"),
        EncodingInfo("kerple", "kerple:Kerple", "relative, bias", "scores", "2 × heads",
             "yes: the decay goes on, logarithmically or as a power", "KERPLE",
             "s = q·k / √d - p_h ln(1 + a_h |i-j|)   or   - a_h |i-j|^p_h"),
        EncodingInfo("sandwich", "sandwich:Sandwich", "relative, bias", "scores", "none",
             "yes: the decay goes on, about logarithmically", "Sandwich",
             "s = q·k / √d + (Σ_c cos((i-j) base^(-2c/n)) - n/2) / (8h/H)"),
        EncodingInfo("fire", "fire:Fire", "relative, bias", "scores", "2 × hidden + (hidden + 1) × heads + 2",
             "to 2 × the training length; breaks at 32 × (lab, three seeds)", "FIRE",
             "s = q·k / √d + MLP(φ(i-j) / φ(max(i, T)))_h,  φ(x) = ln(1 + |c x|)"),
        EncodingInfo("tupe", "tupe:TUPE", "absolute", "scores", "(max_length + 1) × d_model + 2 d_model²",
             "no: undefined past max_length", "TUPE",
             "s = (q·k + (U_q p_i)·(U_k p_j)) / √(2d)"),
        EncodingInfo("cape", "cape:Cape", "absolute", "input", "none",
             "partly: shifts and stretches of training widen the range", "CAPE (speech, images, text)",
             "x_p + [sin(p' w_c), cos(p' w_c)],  p' = (p + Δ + δ_p) λ in training"),
        EncodingInfo("pope", "rope.polar:PoPE", "rotary", "queries and keys", "heads × d_head",
             "better than rope, by its authors", "PoPE",
             "s = Σ_c softplus(q_c) softplus(k_c) cos((j-i) w_c + δ[h,c]) / √d"),
    )
}  # fmt: skip

OWN_ATTENTION: dict[str, EncodingInfo] = {
    one.name: one
    for one in (
        EncodingInfo("latent", "posenc.nn.latent:LatentAttention", "latent attention, rotary", "queries and keys",
             "low-rank projections", "as its rotation does", "DeepSeek V2 and V3, and models after them",
             "s = (q^r·R(j)W_kr x_j + q^n·W_uk c_j) / √(nope_dim + rope_dim),  c_j = norm(W_dkv x_j)"),
        EncodingInfo("cope", "posenc.contextual.counts:cope", "contextual", "scores", "n × d_head",
             "counts end at the table's last row", "CoPE",
             "s_ij = q·k / √d + q_i·e[p_ij],  p_ij = Σ_{t=j..i} sigmoid(q_i·k_t / √d)"),
        EncodingInfo("stick_breaking", "posenc.contextual.sticks:stick_breaking", "contextual", "in place of the softmax", "none",
             "yes: near keys take their share first", "Stick-Breaking Attention",
             "a_ij = β_ij Π_{t=j+1..i-1} (1 - β_it),  β = sigmoid(q·k / √d)"),
        EncodingInfo("path", "posenc.contextual.products:path", "contextual, multiplicative", "scores", "the model's projections of w and β",
             "partly; with forgetting gates (PaTH-FoX) yes", "PaTH Attention",
             "s_ij = q_i^T (H_i H_{i-1} ⋯ H_{j+1}) k_j / √d,  H_t = I - β_t w_t w_t^T"),
    )
}  # fmt: skip
"""Attention whose positions fit no plan: a layer (latent) and functions of q, k and v, which `Attention` does not take by name."""


ENCODINGS_BY_CLASS: dict[str, EncodingInfo] = {one.class_name: one for one in ENCODINGS.values()}
SIZES = ("d_model", "heads", "head_dim")

CAUSAL: dict[str, dict[str, object]] = {
    "t5": {"causal": True},
    "transformer_xl": {"causal": True},
    "xlnet": {"attn_type": "uni"},
    "shaw": {"right": 0},
    "clipped": {"right": 0},
}
"""Options of encodings in causal layers: tables without rows for later keys."""


def find_card(name: str) -> EncodingInfo:
    """The card of an encoding, or of attention of its own."""
    return OWN_ATTENTION.get(name) or info(name)


def list_encodings() -> list[str]:
    """Every encoding's name.

    Never raises.

        >>> "rope" in posenc.list_encodings()
        True
    """
    return list(ENCODINGS)


def info(name: str) -> EncodingInfo:
    """Facts about an encoding: its formula, parameters, extrapolation, models that use it.

    Raises ValueError for an unknown name.

        >>> posenc.info("alibi").class_name
        'ALiBi'
    """
    if not isinstance(name, str):
        raise ValueError(f"an encoding's name must be a string, got {name!r}; the encodings are {', '.join(ENCODINGS)}")
    if name not in ENCODINGS:
        if name in OWN_ATTENTION:
            own = OWN_ATTENTION[name]
            raise ValueError(
                f"{name} is no encoding of a layer; call {own.public_name}; the encodings are {', '.join(ENCODINGS)}"
            )
        plain, colon, options = str(name).partition(":")
        if colon and plain in ENCODINGS:
            raise ValueError(
                f"{name!r} is for the command line; give options as arguments: create({plain!r}, {options})"
            )
        hint = nearest(str(name), ENCODINGS)
        raise ValueError(f"unknown encoding {name!r}{hint}; the encodings are {', '.join(ENCODINGS)}")
    return ENCODINGS[name]


def register_encoding(
    name: str, cls: type[Encoding], *, enters: str = "scores", family: str = "registered",
    parameters: str = "not described", extrapolates: str = "not described", used_by: str = "not described",
    formula: str = "not described", causal_options: dict[str, object] | None = None,
) -> None:  # fmt: skip
    """Register a class from outside the package under a name, for `create`, `Attention(encoding=name)`, the lab and the
    explorer of this process.

    causal_options   what a causal layer adds when it creates the encoding by name

    Raises ValueError for a name that is taken or is not an identifier.

        >>> class Far(posenc.ALiBi): ...
        >>> posenc.register_encoding("far", Far)
        >>> type(posenc.create("far", heads=2)).__name__
        'Far'
    """
    from ..core.encoding import Encoding

    if not (isinstance(name, str) and name.isidentifier()):
        raise ValueError(f"an encoding's name must be an identifier, got {name!r}")
    if not (isinstance(cls, type) and issubclass(cls, Encoding)):
        raise TypeError(f"cls must be a subclass of posenc.Encoding, got {cls!r}")
    if name in ENCODINGS or cls.__name__ in ENCODINGS_BY_CLASS:
        raise ValueError(f"the name {name!r} or the class name {cls.__name__!r} is taken; choose others")
    _REGISTERED[name] = cls
    target = f"{cls.__module__}:{cls.__name__}"
    entry = EncodingInfo(name, target, family, enters, parameters, extrapolates, used_by, formula)
    ENCODINGS[name] = ENCODINGS_BY_CLASS[cls.__name__] = entry
    if causal_options:
        CAUSAL[name] = dict(causal_options)


def options_of(name: str) -> list[str]:
    """The options of `create` for this encoding, sizes included."""
    return [parameter for parameter in inspect.signature(info(name).load().__init__).parameters if parameter != "self"]


def causal_options(name: str) -> dict[str, object]:
    """The options of an encoding in a causal layer: its tables have no rows for later keys, which are masked.

    Most encodings need none: rotations and slopes have no table. DeBERTa's table has both sides in all of its models.
    """
    return dict(CAUSAL.get(info(name).name, {}))


@overload
def create(name: Literal["none"], **options: Any) -> NoPosition: ...
@overload
def create(name: Literal["sinusoidal"], **options: Any) -> Sinusoidal: ...
@overload
def create(name: Literal["sinusoidal_2d"], **options: Any) -> Sinusoidal2D: ...
@overload
def create(name: Literal["learned"], **options: Any) -> Learned: ...
@overload
def create(name: Literal["shaw"], **options: Any) -> Shaw: ...
@overload
def create(name: Literal["clipped"], **options: Any) -> Clipped: ...
@overload
def create(name: Literal["t5"], **options: Any) -> T5: ...
@overload
def create(name: Literal["transformer_xl"], **options: Any) -> TransformerXL: ...
@overload
def create(name: Literal["xlnet"], **options: Any) -> XLNet: ...
@overload
def create(name: Literal["deberta"], **options: Any) -> DeBERTa: ...
@overload
def create(name: Literal["rope"], **options: Any) -> RoPE: ...
@overload
def create(name: Literal["mrope"], **options: Any) -> MRoPE: ...
@overload
def create(name: Literal["axial"], **options: Any) -> AxialRoPE: ...
@overload
def create(name: Literal["xpos"], **options: Any) -> XPos: ...
@overload
def create(name: Literal["relative_logits"], **options: Any) -> RelativeLogits: ...
@overload
def create(name: Literal["alibi"], **options: Any) -> ALiBi: ...
@overload
def create(name: Literal["sinks"], **options: Any) -> Sinks: ...
@overload
def create(name: Literal["tempered"], **options: Any) -> Tempered: ...
@overload
def create(name: Literal["grid_bias"], **options: Any) -> GridBias: ...
@overload
def create(name: Literal["continuous_bias"], **options: Any) -> ContinuousBias: ...
@overload
def create(name: Literal["decomposed"], **options: Any) -> Decomposed: ...
@overload
def create(name: Literal["mixed_rope"], **options: Any) -> MixedRoPE: ...
@overload
def create(name: Literal["many_axes"], **options: Any) -> ManyAxes: ...
@overload
def create(name: Literal["fox"], **options: Any) -> FoX: ...
@overload
def create(name: Literal["kerple"], **options: Any) -> Kerple: ...
@overload
def create(name: Literal["sandwich"], **options: Any) -> Sandwich: ...
@overload
def create(name: Literal["fire"], **options: Any) -> Fire: ...
@overload
def create(name: Literal["tupe"], **options: Any) -> TUPE: ...
@overload
def create(name: Literal["cape"], **options: Any) -> Cape: ...
@overload
def create(name: Literal["pope"], **options: Any) -> PoPE: ...
@overload
def create(name: str, **options: Any) -> Encoding: ...
def create(
    name: str, *, d_model: int | None = None, heads: int | None = None, head_dim: int | None = None, **options: Any
) -> Encoding:
    """An encoding by name. The sizes d_model, heads and head_dim may always be given: each encoding takes those it needs
    (head_dim defaults to d_model / heads). Any other option must be one of the encoding's own.

    Raises ValueError for an unknown name, with the nearest known one, and OptionError for an unknown option or a
    bad value.

        >>> posenc.create("t5", d_model=64, heads=4).table.shape  # [buckets, heads]
        torch.Size([32, 4])
    """
    cls = info(name).load()
    if d_model is not None and heads is not None:
        head_dim = head_size(d_model, heads, head_dim)
    accepted = options_of(name)
    unknown = [option for option in options if option not in accepted]
    if unknown:
        own = [option for option in accepted if option not in SIZES]
        raise OptionError(
            f"{name} has no option {', '.join(map(repr, unknown))}; "
            + (f"its options are {', '.join(own)}" if own else "it takes no options")
        )
    sizes = {"d_model": d_model, "heads": heads, "head_dim": head_dim}
    given = {size: value for size, value in sizes.items() if value is not None and size in accepted}
    missing = [
        p.name
        for p in inspect.signature(cls.__init__).parameters.values()
        if p.name != "self" and p.default is p.empty and p.name not in given and p.name not in options
    ]
    if missing:
        raise OptionError(
            f"{name} needs {', '.join(missing)}: create({name!r}, {', '.join(m + '=…' for m in missing)})"
        )
    return cls(**given, **options)
