"""Every public name with the type that a user gets: read by type checkers, and run as far as it computes anything."""

from typing import assert_type

import torch
from torch import Tensor, nn

import posenc
import posenc.timm
from posenc import Encoding, Lookup, Plan, Positions
from posenc.engines import blocked

# ---- encodings by name: the class ----------------------------------------------------------------------------------
assert_type(posenc.create("none"), posenc.NoPosition)
assert_type(posenc.create("sinusoidal", d_model=8), posenc.Sinusoidal)
assert_type(posenc.create("sinusoidal_2d", d_model=8), posenc.Sinusoidal2D)
assert_type(posenc.create("learned", d_model=8, max_length=4), posenc.Learned)
assert_type(posenc.create("shaw", head_dim=8), posenc.Shaw)
assert_type(posenc.create("clipped", heads=2), posenc.Clipped)
assert_type(posenc.create("t5", heads=2), posenc.T5)
assert_type(posenc.create("transformer_xl", d_model=8, heads=2), posenc.TransformerXL)
assert_type(posenc.create("xlnet", d_model=8, heads=2), posenc.XLNet)
assert_type(posenc.create("deberta", d_model=8, heads=2), posenc.DeBERTa)
assert_type(posenc.create("rope", head_dim=8), posenc.RoPE)
assert_type(posenc.create("mrope", head_dim=16), posenc.MRoPE)
assert_type(posenc.create("axial", head_dim=8), posenc.AxialRoPE)
assert_type(posenc.create("xpos", head_dim=8), posenc.XPos)
assert_type(posenc.create("relative_logits", d_model=8, heads=2), posenc.RelativeLogits)
assert_type(posenc.create("alibi", heads=2), posenc.ALiBi)
assert_type(posenc.create("sinks", heads=2, head_dim=4), posenc.Sinks)
assert_type(posenc.create("tempered", head_dim=4), posenc.Tempered)
assert_type(posenc.create("grid_bias", heads=2), posenc.GridBias)
assert_type(posenc.create("continuous_bias", heads=2), posenc.ContinuousBias)
assert_type(posenc.create("decomposed", head_dim=4), posenc.Decomposed)
assert_type(posenc.create("mixed_rope", head_dim=4, heads=2), posenc.MixedRoPE)
assert_type(posenc.create("many_axes", axis_of=(0, 1)), posenc.ManyAxes)
assert_type(posenc.create("fox", d_model=8, heads=2), posenc.FoX)
assert_type(posenc.create("kerple", heads=2), posenc.Kerple)
assert_type(posenc.create("sandwich", heads=2), posenc.Sandwich)
assert_type(posenc.create("fire", heads=2), posenc.Fire)
assert_type(posenc.create("tupe", d_model=8, heads=2), posenc.TUPE)
assert_type(posenc.create("cape", d_model=8), posenc.Cape)
assert_type(posenc.create("pope", head_dim=4, heads=2), posenc.PoPE)
rope = posenc.RoPE(head_dim=8)
assert_type(posenc.Randomized(encoding=rope, max_length=16), posenc.Randomized)

# ---- positions, indices, plans -------------------------------------------------------------------------------------
run = posenc.Run(3, 2)
assert_type(run.positions(), Tensor)
grid = posenc.Grid((posenc.Index(-1, 1), posenc.index.clip(1, 1, axis=1)))
assert_type(grid.n, int)
positions = Positions(6)
plan = Plan(positions, lookups=(Lookup(posenc.index.log_buckets(8, 32, causal=True), bias=torch.zeros(2, 8)),))
rotation = rope.rotation(positions)
assert_type(rotation, posenc.Rotation)
assert_type(posenc.formulas.alibi_slopes(4), tuple[float, ...])

# ---- functions -----------------------------------------------------------------------------------------------------
q, k, v = torch.randn(3, 1, 2, 6, 8).unbind()
assert_type(posenc.attend(q, k, v, plan, causal=True), Tensor)
out, lse = posenc.attend(q, k, v, plan, causal=True, return_lse=True)
assert_type(out, Tensor)
assert_type(lse, Tensor)
assert_type(posenc.merge([(out, lse)]), tuple[Tensor, Tensor])
assert_type(posenc.scores(q, k, plan), Tensor)
assert_type(posenc.explain(q, k, v, plan).reasons, dict[str, str])
assert_type(posenc.apply_rotary(q, torch.ones(1, 6, 4), torch.zeros(1, 6, 4)), Tensor)
assert_type(posenc.to_flex(q, k, v, plan).q, Tensor)
assert_type(posenc.contextual.stick_breaking(q, k, v), tuple[Tensor, Tensor])
assert_type(posenc.rope.grid_positions(2, 3), Tensor)
assert_type(posenc.rope.self_extend(q, k, v, rope=rope, group=2, window=4), Tensor)
assert_type(posenc.scaling.frequencies(8, 10000.0, posenc.scaling.Linear(factor=2.0)), tuple[float, ...])

# ---- layers --------------------------------------------------------------------------------------------------------
x = torch.randn(1, 6, 16)
latent = posenc.LatentAttention(16, 2, kv_rank=4, nope_dim=4, rope_dim=4, v_dim=4)
assert_type(latent(x), Tensor)
attention = posenc.Attention(16, 2, encoding="t5")
assert_type(attention(x, context=x), Tensor)
cache = posenc.KVCache(max_length=8)
assert_type(cache.layer(attention).length, int)
cache.crop(0)


# ---- extending: what a user registers ------------------------------------------------------------------------------
class Mine(posenc.ALiBi):
    pass


def register() -> None:
    posenc.register_encoding("mine", Mine, formula="s = q·k")
    posenc.register_engine("mine", blocked, before="blocked")
    assert_type(list(posenc.ENGINES), list[str])


# ---- other libraries: a model keeps its type -----------------------------------------------------------------------
class Model(nn.Module):
    def generate(self) -> str:
        return ""


def accelerate(model: Model) -> None:
    assert_type(posenc.hf.accelerate(model, engine="auto"), Model)
    assert_type(posenc.hf.extend(model, posenc.scaling.YaRN(factor=2.0, original=64)), Model)
    assert_type(posenc.hf.report(model).layers[0].engine, str)
    assert_type(posenc.hf.restore(model), Model)
    assert_type(posenc.hf.to_posenc(model), posenc.Attention)
    assert_type(posenc.timm.accelerate(model), Model)
    assert_type(posenc.timm.restore(model), Model)
    assert_type(posenc.timm.report(model), dict[str, str])
    assert_type(posenc.warm_up(model, torch.zeros(1)), list[tuple[str, float]])


def draw(encoding: Encoding) -> None:
    posenc.plot.overview(encoding, length=16).savefig("overview.png")


def share(x: Tensor, mesh: object) -> None:
    cp = posenc.parallel.ContextParallel(mesh, strategy="ring", balance="zigzag")
    part = posenc.parallel.split_sequence({"x": x}, cp)
    assert_type(part.tensors, dict[str, Tensor])
    assert_type(posenc.parallel.attend(q, k, v, rope, context_parallel=cp), Tensor)
    assert_type(posenc.parallel.attend(q, k, v, rope, context_parallel=cp, return_lse=True), tuple[Tensor, Tensor])
    assert_type(posenc.parallel.unsplit_sequence(x, cp), Tensor)


def catch() -> str:
    try:
        posenc.attend(q, k, v, engine="triton")
    except (posenc.UnsupportedPlan, posenc.OptionError) as error:
        return str(error)
    return ""
