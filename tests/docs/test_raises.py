"""What a public name's docstring says it raises, it raises: one call for each."""

import re

import pytest
import torch
import transformers

pytest.importorskip("griffe", reason="needs the extra docs")

import posenc
from docs.site import reference
from posenc import contextual, formulas, hf, index, parallel, plot, rope, scaling
from posenc.core.errors import OptionError, UnsupportedPlan

q = k = v = torch.zeros(1, 2, 4, 8)
short = torch.zeros(1, 2, 3, 8)
at = posenc.Positions(4)
alibi = posenc.ALiBi(heads=2)
linear = torch.nn.Linear(2, 2)
far = posenc.Positions(torch.full((1, 1, 2), 99))
RAISES = {
    "posenc.create": (OptionError, lambda: posenc.create("t5", heads=2, bucket=3)),
    "posenc.info": (ValueError, lambda: posenc.info("ropes")),
    "posenc.register_encoding": (ValueError, lambda: posenc.register_encoding("t5", type("X", (posenc.ALiBi,), {}))),
    "posenc.Positions": (ValueError, lambda: posenc.Positions(q=[0, 1])),
    "posenc.Index": (ValueError, lambda: posenc.Index(2, -2)),
    "posenc.index.exact": (ValueError, lambda: index.exact(at, most=-1)),
    "posenc.index.clip": (ValueError, lambda: index.clip(-3, 1)),
    "posenc.index.log_buckets": (ValueError, lambda: index.log_buckets(7, 32, causal=False)),
    "posenc.index.deberta_buckets": (ValueError, lambda: index.deberta_buckets(2, 4)),
    "posenc.Plan": (ValueError, lambda: posenc.attend(q, k, v, posenc.Plan(at, slopes=torch.ones(5)))),
    "posenc.Lookup": (ValueError, lambda: posenc.attend(q, k, v, posenc.Plan(at, lookups=(posenc.Lookup(index.clip(1, 1), bias=torch.zeros(2, 9)),)))),
    "posenc.Rotation": (ValueError, lambda: posenc.attend(q, k, v, posenc.RoPE(head_dim=16).plan(at))),
    "posenc.apply_rotary": (ValueError, lambda: posenc.apply_rotary(q, torch.ones(3, 4), torch.ones(3, 4))),
    "posenc.Encoding": (ValueError, lambda: posenc.create("relative_logits", d_model=16, heads=2).plan(at)),
    "posenc.attend": (UnsupportedPlan, lambda: posenc.attend(q, k, v, alibi.plan(at), engine="sdpa")),
    "posenc.explain": (ValueError, lambda: posenc.explain(q, short, v)),
    "posenc.merge": (ValueError, lambda: posenc.merge([(q, q[..., 0]), (short, short[..., 0])])),
    "posenc.scores": (ValueError, lambda: posenc.scores(q, k, posenc.ALiBi(heads=3).plan(at))),
    "posenc.to_flex": (UnsupportedPlan, lambda: posenc.to_flex(q, k, v, posenc.Shaw(head_dim=8, max_distance=2, values=True).plan(at))),
    "posenc.register_engine": (ValueError, lambda: posenc.register_engine("cpu", posenc.ENGINES["cpu"])),
    "posenc.warm_up": (ValueError, lambda: posenc.warm_up(posenc.Attention(16, 2), torch.zeros(1, 4, 8))),
    "posenc.Attention": (OptionError, lambda: posenc.Attention(16, 3)),
    "posenc.KVCache": (ValueError, lambda: posenc.KVCache(max_length=0)),
    "posenc.LatentAttention": (OptionError, lambda: posenc.LatentAttention(16, 2, kv_rank=0, nope_dim=4, rope_dim=4, v_dim=4)),
    "posenc.Randomized": (ValueError, lambda: posenc.Randomized(encoding=posenc.RoPE(head_dim=8), max_length=2).plan(at)),
    "posenc.Sinusoidal": (ValueError, lambda: posenc.Sinusoidal(d_model=8).embed(torch.zeros(1, 1, 8), far)),
    "posenc.Learned": (ValueError, lambda: posenc.Learned(max_length=2, d_model=8).embed(torch.zeros(1, 4, 8), at)),
    "posenc.Shaw": (OptionError, lambda: posenc.Shaw(head_dim=8, max_distance=2, keys=False, values=False)),
    "posenc.Clipped": (OptionError, lambda: posenc.Clipped(heads=2, max_distance=-1)),
    "posenc.T5": (OptionError, lambda: posenc.T5(heads=2, buckets=31)),
    "posenc.ALiBi": (OptionError, lambda: posenc.ALiBi(heads=0)),
    "posenc.TransformerXL": (OptionError, lambda: posenc.TransformerXL(d_model=15, heads=2)),
    "posenc.XLNet": (ValueError, lambda: posenc.XLNet(d_model=16, heads=2, bi_data=True).plan(at)),
    "posenc.DeBERTa": (OptionError, lambda: posenc.DeBERTa(d_model=16, heads=2, terms="p2p")),
    "posenc.RoPE": (OptionError, lambda: posenc.RoPE(head_dim=8, rotary_dim=7)),
    "posenc.MRoPE": (OptionError, lambda: posenc.MRoPE(head_dim=8, sections=(1, 1, 1))),
    "posenc.AxialRoPE": (OptionError, lambda: posenc.AxialRoPE(head_dim=6)),
    "posenc.Sinusoidal2D": (OptionError, lambda: posenc.Sinusoidal2D(d_model=6)),
    "posenc.ManyAxes": (OptionError, lambda: posenc.ManyAxes(head_dim=4, axis_of=(0, 1, 1))),
    "posenc.XPos": (OptionError, lambda: posenc.XPos(head_dim=8, max_length=0)),
    "posenc.RelativeLogits": (ValueError, lambda: posenc.create("relative_logits", d_model=16, heads=2).plan(at)),
    "posenc.Sinks": (OptionError, lambda: posenc.Sinks(heads=2, encoding="nothing")),
    "posenc.Tempered": (OptionError, lambda: posenc.create("tempered", heads=2, head_dim=8, form="llama9")),
    "posenc.GridBias": (ValueError, lambda: posenc.GridBias(window=(2, 2), heads=2).plan(far)),
    "posenc.ContinuousBias": (ValueError, lambda: posenc.ContinuousBias(window=(2, 2), heads=2).plan(far)),
    "posenc.Decomposed": (ValueError, lambda: posenc.Decomposed(grid=(2, 2), head_dim=8).plan(far)),
    "posenc.MixedRoPE": (OptionError, lambda: posenc.MixedRoPE(heads=2, head_dim=7)),
    "posenc.FoX": (OptionError, lambda: posenc.FoX(d_model=16, heads=2, gate="fixed", timescales=(9,))),
    "posenc.Kerple": (OptionError, lambda: posenc.Kerple(heads=2, form="line")),
    "posenc.Sandwich": (OptionError, lambda: posenc.Sandwich(heads=2, size=1)),
    "posenc.Fire": (OptionError, lambda: posenc.Fire(heads=2, hidden=0)),
    "posenc.TUPE": (ValueError, lambda: posenc.TUPE(d_model=16, heads=2, max_length=2).plan(at)),
    "posenc.Cape": (OptionError, lambda: posenc.Cape(d_model=8, rescale=0.0)),
    "posenc.PoPE": (OptionError, lambda: posenc.PoPE(heads=2, head_dim=8, base=-1.0)),
    "posenc.hf.accelerate": (hf.UnsupportedModel, lambda: hf.accelerate(linear)),
    "posenc.hf.extend": (hf.UnsupportedModel, lambda: hf.extend(linear, None)),
    "posenc.hf.to_posenc": (hf.UnsupportedModel, lambda: hf.to_posenc(linear)),
    "posenc.hf.from_posenc": (hf.UnsupportedModel, lambda: hf.from_posenc(posenc.Attention(16, 2), linear)),
    "posenc.plot.overview": (OptionError, lambda: plot.overview("t5", bucket=3)),
    "posenc.plot.encoding": (ValueError, lambda: plot.encoding("none")),
    "posenc.plot.dimensions": (ValueError, lambda: plot.dimensions("sinusoidal", selected=[9999])),
    "posenc.plot.similarity": (ValueError, lambda: plot.similarity("none")),
    "posenc.plot.kernel": (ValueError, lambda: plot.kernel("alibi", heads=2, head=5)),
    "posenc.plot.distance": (ValueError, lambda: plot.distance("alibi", heads=2, selected_heads=[5])),
    "posenc.plot.buckets": (ValueError, lambda: plot.buckets("rope")),
    "posenc.plot.wavelengths": (ValueError, lambda: plot.wavelengths(head_dim=-2)),
    "posenc.plot.decomposition": (ValueError, lambda: plot.decomposition("t5", head=99)),
    "posenc.plot.save": (ValueError, lambda: plot.save(plot.buckets("t5"), "figure.txt")),
    "posenc.scaling.Linear": (OptionError, lambda: scaling.Linear(factor=0)),
    "posenc.scaling.NTK": (OptionError, lambda: scaling.NTK(factor=-1)),
    "posenc.scaling.MixedNTK": (OptionError, lambda: scaling.MixedNTK(factor=-1)),
    "posenc.scaling.DynamicNTK": (OptionError, lambda: scaling.DynamicNTK(original=0)),
    "posenc.scaling.YaRN": (OptionError, lambda: scaling.YaRN(factor=4, original=4096, ramp="line")),
    "posenc.scaling.DynamicYaRN": (OptionError, lambda: scaling.DynamicYaRN(original=-1)),
    "posenc.scaling.LongRoPE": (OptionError, lambda: scaling.LongRoPE(short=(1.0,), long=(1.0, 1.0), original=4096)),
    "posenc.scaling.Llama3": (OptionError, lambda: scaling.Llama3(factor=0)),
    "posenc.scaling.Proportional": (OptionError, lambda: scaling.Proportional(fraction=2)),
    "posenc.scaling.from_config": (OptionError, lambda: scaling.from_config({"rope_type": "yarm", "factor": 2.0})),
    "posenc.scaling.to_config": (OptionError, lambda: scaling.to_config(3)),
    "posenc.rope.by_layer": (OptionError, lambda: rope.by_layer(transformers.BertConfig())),
    "posenc.rope.clip_positions": (ValueError, lambda: rope.clip_positions(-1, 1, 1)),
    "posenc.rope.grid_positions": (ValueError, lambda: rope.grid_positions(3, 3, merge=2)),
    "posenc.rope.mixed_positions": (ValueError, lambda: rope.mixed_positions([(1, 2, 3, 4)])),
    "posenc.rope.random_positions": (ValueError, lambda: rope.random_positions(5, 3)),
    "posenc.rope.convert": (OptionError, lambda: rope.convert(torch.zeros(8, 2), heads=3, to="half")),
    "posenc.rope.from_config": (OptionError, lambda: rope.from_config({"model_type": "bert"})),
    "posenc.rope.to_config": (OptionError, lambda: rope.to_config(posenc.RoPE(head_dim=8, values=True), "vllm")),
    "posenc.rope.self_extend": (ValueError, lambda: rope.self_extend(q, k, v, rope=posenc.RoPE(head_dim=8), group=2, window=3)),
    "posenc.rope.rerope": (ValueError, lambda: rope.rerope(q, k, v, rope=posenc.RoPE(head_dim=8), window=0)),
    "posenc.rope.dual_chunk": (ValueError, lambda: rope.dual_chunk(q, k, v, rope=posenc.RoPE(head_dim=8), chunk_size=4, local=9)),
    "posenc.formulas.head_size": (OptionError, lambda: formulas.head_size(15, 2)),
    "posenc.formulas.t5_bucket": (OptionError, lambda: formulas.t5_bucket(3, buckets=2, max_distance=128, causal=False)),
    "posenc.formulas.t5_rows": (OptionError, lambda: formulas.t5_rows(31, 128, False)),
    "posenc.formulas.inverse_frequencies": (OptionError, lambda: formulas.inverse_frequencies(4, -1.0)),
    "posenc.scaling.frequencies": (OptionError, lambda: scaling.frequencies(4, -1.0)),
    "posenc.formulas.deberta_rows": (OptionError, lambda: formulas.deberta_rows(2, 4)),
    "posenc.formulas.alibi_slopes": (OptionError, lambda: formulas.alibi_slopes(0)),
    "posenc.contextual.cope": (ValueError, lambda: contextual.cope(q, k, v, torch.zeros(4, 9))),
    "posenc.contextual.stick_breaking": (ValueError, lambda: contextual.stick_breaking(q, short, v)),
    "posenc.contextual.path": (ValueError, lambda: contextual.path(q, k, v, short, torch.zeros(1, 2, 4))),
    "posenc.contextual.path_keys": (ValueError, lambda: contextual.path_keys(k, short, torch.zeros(1, 2, 4))),
    "posenc.contextual.path_step": (ValueError, lambda: contextual.path_step(q, k, v, q, torch.zeros(1, 2, 4), keys=k, values=v)),
    "posenc.parallel.ContextParallel": (ValueError, lambda: parallel.ContextParallel(None, strategy="line")),
}  # fmt: skip


@pytest.mark.parametrize("name", RAISES)
def test_it_raises_what_its_docstring_names(name):
    error, call = RAISES[name]
    with pytest.raises(error):
        call()
    doc = reference.public_names()[name].__doc__
    assert re.search(r"\b[Rr]aises?\b", doc), name
