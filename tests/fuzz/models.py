"""Part 3: random models of every family that `posenc.hf` accelerates, outputs and gradients, against the originals.

The accelerated model in float32 is compared with the original in float64, element by element, within what roundings do to
the original (`tests.rounding`). What the original computes in float32 whatever it is given, it computes in float64 here.
"""

from __future__ import annotations

import copy
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from random import Random

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from posenc import hf
from tests import budget, oracle, rounding
from tests.fuzz.refused import Refused

FAMILIES = (
    "t5", "mt5", "umt5", "longt5 local", "longt5 global", "mpnet", "deberta", "deberta v2", "xlnet", "bloom", "mpt",
    "conformer", "wav2vec2 bert", "seamless", "seamless v2", "inkling",
)  # fmt: skip
DECODERS = ("t5", "mt5", "umt5", "longt5 local", "longt5 global")
SPEECH = ("conformer", "wav2vec2 bert", "seamless", "seamless v2")
CAUSAL = ("bloom", "mpt", "inkling")


@dataclass(frozen=True)
class Case:
    data: int = 0
    family: str = "t5"
    heads: int = 1
    head_dim: int = 4
    layers: int = 1
    batch: int = 1
    length: int = 4
    target: int = 3  # tokens of a decoder
    buckets: int = 8
    most: int = 20  # the largest distance
    padding: str = ""  # left | right | holes
    variant: int = 0  # of the family's own options
    train: bool = False  # training mode, without dropout
    gradients: bool = True
    threads: int = 1
    engine: str = ""  # eager | sdpa, of the original

    def __repr__(self) -> str:
        plain = type(self)()
        shown = [f.name for f in fields(self) if getattr(self, f.name) != getattr(plain, f.name)]
        return f"Case({', '.join(f'{name}={getattr(self, name)!r}' for name in shown)})"


def draw(random: Random) -> Case:
    family = random.choice(FAMILIES)
    return Case(
        data=random.randrange(2**31),
        family=family,
        heads=random.choice((1, 2, 3, 4)),
        head_dim=random.choice((4, 8, 16)),
        layers=random.choice((1, 1, 2)),
        batch=random.choice((1, 2, 3)),
        length=random.choice((1, 2, 3, 7, 16, 17, 33, 50)),
        target=random.choice((1, 2, 7, 19)),
        buckets=random.choice((4, 6, 8, 32)),
        most=random.choice((17, 20, 40, 128)),
        padding=random.choice(("", "left", "right", "holes")),
        variant=random.randrange(4),
        train=random.random() < 0.3,
        gradients=random.random() < 0.7,
        threads=2 if random.random() < 0.2 else 1,
        engine=random.choice(("", "", "eager")),
    )


def features(case: Case) -> set[str]:
    plain = Case()
    found = {field.name for field in fields(case) if getattr(case, field.name) != getattr(plain, field.name)}
    return found | {case.family, case.family.split()[0], case.padding} - {""}


def script(case: Case, engine: str, device: str) -> str:
    return (
        "from tests.fuzz import models\nfrom tests.fuzz.models import Case\n\n"
        f"case = {case!r}\nfor fault in models.check(case, {engine!r}, {device!r}):\n    print(fault)\n"
    )


def simpler(case: Case) -> Iterator[Case]:
    plain = Case()
    for field in fields(case):
        if field.name not in ("family", "length", "target") and getattr(case, field.name) != getattr(plain, field.name):
            yield replace(case, **{field.name: getattr(plain, field.name)})
    for name in ("length", "target"):
        value = getattr(case, name)
        for smaller in dict.fromkeys((1, value // 2, value - 1)):
            if 1 <= smaller < value:
                yield replace(case, **{name: smaller})


# ---- models --------------------------------------------------------------------------------------------------------
def make(case: Case) -> torch.nn.Module:
    """The family's model with random numbers, in float32."""
    import transformers as hub

    width, off = case.heads * case.head_dim, dict(vocab_size=50)
    quiet = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    common = dict(hidden_size=width, num_hidden_layers=case.layers, num_attention_heads=case.heads, intermediate_size=9)
    how = dict(attn_implementation=case.engine) if case.engine else {}
    variant, family = case.variant, case.family
    if family in DECODERS:
        sizes = dict(
            d_model=width, d_kv=case.head_dim, d_ff=9, num_layers=case.layers, num_heads=case.heads, dropout_rate=0.0,
            relative_attention_num_buckets=case.buckets, relative_attention_max_distance=max(case.most, case.buckets + 1),
            decoder_start_token_id=0, pad_token_id=0, eos_token_id=1, **off,
        )  # fmt: skip
        if family.startswith("longt5"):
            sizes.update(local_radius=(3, 6, 10, 1)[variant], global_block_size=(4, 5, 16, 1)[variant])
            kind = "local" if family.endswith("local") else "transient-global"
            return hub.LongT5Model(hub.LongT5Config(**sizes, encoder_attention_type=kind))
        config, model = {
            "t5": (hub.T5Config, hub.T5Model),
            "mt5": (hub.MT5Config, hub.MT5Model),
            "umt5": (hub.UMT5Config, hub.UMT5Model),
        }[family]
        return model(config(**sizes, **how, feed_forward_proj=("relu", "gated-gelu")[variant % 2]))
    if family == "mpnet":
        sizes = dict(**common, **quiet, relative_attention_num_buckets=32, max_position_embeddings=80)
        return hub.MPNetModel(hub.MPNetConfig(**off, **sizes))
    if family == "deberta":
        kinds = (["c2p", "p2c"], ["c2p"], ["p2c"], ["c2p", "p2c"])[variant]
        sizes = dict(max_relative_positions=(case.most, -1)[variant == 3], pos_att_type=kinds, relative_attention=True)
        more = dict(position_biased_input=variant == 1, max_position_embeddings=64)
        return hub.DebertaModel(hub.DebertaConfig(**off, **common, **quiet, **sizes, **more))
    if family == "deberta v2":
        kinds = (["c2p", "p2c"], ["c2p"], ["p2c"], ["c2p", "p2c"])[variant]
        sizes = dict(
            position_buckets=(case.buckets, -1)[variant == 1], max_relative_positions=max(case.most, case.buckets), pos_att_type=kinds,
            share_att_key=variant != 2, relative_attention=True, position_biased_input=False, max_position_embeddings=64,
            **(dict(norm_rel_ebd="layer_norm") if variant == 0 else dict(conv_kernel_size=3) if variant == 3 else {}),
        )  # fmt: skip
        return hub.DebertaV2Model(hub.DebertaV2Config(**off, **common, **quiet, **sizes))
    if family == "xlnet":
        sizes = dict(d_model=width, n_layer=case.layers, n_head=case.heads, d_inner=9, dropout=0.0)
        more = dict(attn_type="uni" if variant == 1 else "bi", clamp_len=7 if variant == 2 else -1)
        return hub.XLNetModel(hub.XLNetConfig(**off, **sizes, **more))
    if family == "bloom":
        sizes = dict(
            hidden_size=width, n_layer=case.layers, n_head=case.heads, hidden_dropout=0.0, attention_dropout=0.0
        )
        return hub.BloomModel(hub.BloomConfig(**off, **sizes, pad_token_id=0, eos_token_id=1))
    if family == "mpt":
        sizes = dict(d_model=width, n_layers=case.layers, n_heads=case.heads, max_seq_len=64)
        return hub.MptModel(hub.MptConfig(**off, **sizes, pad_token_id=0, eos_token_id=1))
    if family == "inkling":
        return _inkling(case, off)
    encoder = _speech(case)
    # a part of a model does not choose for itself; Seamless v2's eager attention adds its boolean mask to the scores
    encoder.config._attn_implementation = "sdpa" if family == "seamless v2" else case.engine or "sdpa"
    return encoder


def _inkling(case: Case, off: dict):
    from transformers.models.inkling.configuration_inkling import InklingTextConfig
    from transformers.models.inkling.modeling_inkling import InklingTextModel

    heads = dict(num_attention_heads=2 * case.heads, num_key_value_heads=case.heads, head_dim=case.head_dim)
    sizes = dict(
        **off, hidden_size=2 * case.heads * case.head_dim, intermediate_size=9, num_hidden_layers=2, **heads,
        **{f"swa_{name}": value for name, value in heads.items()}, sliding_window_size=(7, 3, 20, 1)[case.variant],
        rel_extent=(11, 5, 30, 2)[case.variant], d_rel=4, log_scaling_n_floor=5, local_layer_ids=[1],
        mlp_layer_types=["dense", "dense"], pad_token_id=0, eos_token_id=1, bos_token_id=2,
    )  # fmt: skip
    return InklingTextModel(InklingTextConfig(**sizes, attn_implementation="eager"))


def _speech(case: Case):
    import transformers as hub
    from transformers.models.seamless_m4t.modeling_seamless_m4t import SeamlessM4TConformerEncoder
    from transformers.models.seamless_m4t_v2.modeling_seamless_m4t_v2 import SeamlessM4Tv2ConformerEncoder
    from transformers.models.wav2vec2_conformer.modeling_wav2vec2_conformer import Wav2Vec2ConformerEncoder

    width = case.heads * case.head_dim
    quiet = dict(hidden_dropout=0.0, attention_dropout=0.0, activation_dropout=0.0, conformer_conv_dropout=0.0)
    sizes = dict(
        hidden_size=width, num_hidden_layers=case.layers, num_attention_heads=case.heads, intermediate_size=9,
        layerdrop=0.0, conv_depthwise_kernel_size=5, num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2, **quiet,
    )  # fmt: skip
    speech = dict(
        hidden_size=width, speech_encoder_layers=case.layers, speech_encoder_attention_heads=case.heads,
        speech_encoder_intermediate_size=9, speech_encoder_layerdrop=0.0, speech_encoder_dropout=0.0,
        conv_depthwise_kernel_size=5,
    )  # fmt: skip
    near = dict(
        left_max_position_embeddings=(9, 2, 30, 0)[case.variant],
        right_max_position_embeddings=(4, 2, 0, 1)[case.variant],
    )
    if case.family == "conformer":
        return Wav2Vec2ConformerEncoder(hub.Wav2Vec2ConformerConfig(**sizes, position_embeddings_type="relative"))
    if case.family == "wav2vec2 bert":
        kind = ("relative", "relative_key")[case.variant % 2]
        more = dict(feature_projection_input_dim=8, apply_spec_augment=False, add_adapter=False)
        return hub.Wav2Vec2BertModel(
            hub.Wav2Vec2BertConfig(**sizes, **near, **more, position_embeddings_type=kind)
        ).encoder
    if case.family == "seamless":
        return SeamlessM4TConformerEncoder(hub.SeamlessM4TConfig(**speech, position_embeddings_type="relative"))
    chunks = dict(speech_encoder_chunk_size=(10**6, 8, 5, 3)[case.variant], speech_encoder_left_chunk_num=1)
    return SeamlessM4Tv2ConformerEncoder(
        hub.SeamlessM4Tv2Config(**speech, **near, **chunks, position_embeddings_type="relative_key")
    )


def _real(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randint(-(2**22), 2**22 + 1, shape, generator=generator).double() / 2**21


def inputs_of(case: Case, data: int, device: str) -> tuple[dict, Tensor | None]:
    """Inputs, and which tokens of the output count."""
    generator = torch.Generator().manual_seed(data)
    whole = lambda low, high, *shape: torch.randint(low, high + 1, shape, generator=generator)  # noqa: E731
    b, l = case.batch, case.length
    mask = torch.ones(b, l, dtype=torch.long)
    if case.padding:
        real = whole(1, l, b, 1)
        mask = (torch.arange(l) < real).long()
        if case.padding == "left":
            mask = mask.flip(1)
        elif case.padding == "holes":
            mask = (whole(0, 3, b, l) > 0).long()
            mask[:, 0 if case.family in CAUSAL else -1] = 1
    mask = mask.to(device)
    if case.family in SPEECH:
        states = _real(generator, b, l, case.heads * case.head_dim).to(device)
        return dict(hidden_states=states, attention_mask=mask.bool()), mask
    ids = whole(3, 49, b, l).to(device)
    inputs = dict(input_ids=ids, attention_mask=mask)
    if case.family in DECODERS:
        inputs["decoder_input_ids"] = whole(3, 49, b, case.target).to(device)
        return inputs, None
    if case.family == "xlnet" and case.variant % 2 == 0:
        inputs["token_type_ids"] = whole(0, 1, b, l).to(device)
    return inputs, mask


# ---- comparing -----------------------------------------------------------------------------------------------------
def check(case: Case, engine: str = "auto", device: str = "cpu") -> list[str]:
    """What is wrong; nothing where all is right."""
    generator = torch.Generator().manual_seed(case.data)
    torch.manual_seed(0)
    original = make(case)
    with torch.no_grad():
        for parameter in original.parameters():
            if parameter.dim() > 1:
                parameter.copy_(_real(generator, *parameter.shape) * (0.8 * parameter.shape[-1] ** -0.5))
    original = original.to(device).train(case.train)
    ours = hf.accelerate(copy.deepcopy(original), engine=engine)
    every = [inputs_of(case, case.data + number, device) for number in range(case.threads)]
    expected = [_expect(original, case, *given) for given in every]
    faults: list[str] = []

    def compare(number: int) -> None:
        try:
            for _ in range(1 if case.threads == 1 else 5):
                faults.extend(_faults(run(ours, case, *every[number]), *expected[number]))
        except Exception as error:
            faults.append(f"raised {type(error).__name__}: {error}")

    if case.threads == 1:
        compare(0)
    else:
        threads = [threading.Thread(target=compare, args=(number,)) for number in range(case.threads)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return faults


def _expect(original, case: Case, inputs: dict, real: Tensor | None) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The original's results in float64, and how far those in float32 may be from them."""
    truth = copy.deepcopy(original).double()
    try:
        run(original, case, inputs, real)
        with oracle.wide(sys.modules[type(original).__module__]), sdpa_kernel(SDPBackend.MATH):
            return rounding.expect(lambda: run(truth, case, inputs, real), torch.float32)
    except Exception as error:
        raise Refused(f"the original raises {type(error).__name__}: {error}") from error


def run(model, case: Case, inputs: dict, real: Tensor | None) -> dict[str, Tensor]:
    """The output at real tokens, and gradients by name (of threads: the output alone, for they share gradients)."""
    parameter = next(model.parameters())
    inputs = {n: x.to(parameter.dtype, copy=True) if x.is_floating_point() else x for n, x in inputs.items()}
    backward = case.gradients and case.threads == 1
    with torch.set_grad_enabled(backward):
        output = model(**inputs)
    output = output if isinstance(output, Tensor) else output[0]
    if real is not None:
        output = output[real.bool()]
    results = {"output": output.detach()}
    if backward:
        weights = _real(torch.Generator().manual_seed(5), *output.shape).to(output)
        named = dict(model.named_parameters())
        grads = torch.autograd.grad(output, list(named.values()), weights, allow_unused=True)
        results.update({name: torch.zeros_like(named[name]) if g is None else g for name, g in zip(named, grads)})
    return results


def _faults(ours: dict, exact: dict, allowed: dict) -> list[str]:
    found = []
    for name, wanted in exact.items():
        if not wanted.isfinite().all() or not allowed[name].isfinite().all():
            continue  # the original divides by zero there
        try:
            budget.assert_within(ours[name], wanted, allowed[name], name)
        except AssertionError as error:
            found.append(str(error))
    return found
