"""One way to compare an accelerated model with the original, for every family."""

import copy
import os
import subprocess
import sys
from math import sqrt
from pathlib import Path

import torch

import posenc
from posenc import hf
from posenc.hf.family import first
from tests.seeds import generator, seed


def batch(length=37):
    """Tokens [3, length] and their mask: without padding, padded on the right, on the left."""
    torch.manual_seed(seed(2))
    ids = torch.randint(2, 99, (3, length))
    mask = torch.ones(3, length, dtype=torch.long)
    mask[1, 20:] = 0
    mask[2, :9] = 0
    return ids, mask


def run(model, inputs, mask, *, backward=True):
    """(output at real tokens, gradients by name): what a model computes at padding is nobody's output."""
    model.zero_grad()
    with torch.set_grad_enabled(backward):
        output = first(model(**inputs))
    output = output if mask is None else output[mask.bool()]
    if not backward:
        return output, {}
    weights = torch.randn(output.shape, generator=generator(5)).to(output)
    (output * weights).sum().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return output.detach(), gradients


def c(n):
    """Roundings of a sum of n terms: errors of either sign add up as a random walk."""
    return 4 + 2 * sqrt(n)


def roundings(terms=64):
    """Of an activation, relative to the largest: two layers of eight sums in series (projections, scores, softmax, values,
    norms, feed-forward) over so many numbers each, whose errors are independent. Ours and theirs may be wrong by as many
    times half an eps each."""
    return c(terms) * sqrt(2 * 8)


TERMS = c(32)
"""Of a gradient that cancels to nothing (a key bias's; all of a query's with one key): the terms of its last sum remain, and
they are as large as the largest gradients of the model."""


def outputs_agree(ours, theirs, terms=64):
    worst, size = (ours - theirs).abs().max().item(), theirs.abs().max().item()
    allowed = torch.finfo(theirs.dtype).eps * roundings(terms) * size
    assert worst <= allowed, f"outputs are off by {worst:.2e}, allowed is {allowed:.2e}"


def gradients_agree(ours, theirs, terms=64):
    assert ours.keys() == theirs.keys(), ours.keys() ^ theirs.keys()
    largest = max(g.norm().item() for g in theirs.values())
    for name, wanted in theirs.items():
        allowed = torch.finfo(wanted.dtype).eps * (roundings(terms) * wanted.norm().item() + TERMS * largest)
        worst = (ours[name] - wanted).norm().item()
        assert worst <= allowed, f"gradient of {name} is off by {worst:.2e}, allowed is {allowed:.2e}"


def shape_of(model):
    return {id(m): (type(m), set(vars(m)), len(m._forward_pre_hooks)) for m in model.modules()}


def same(model, inputs, mask, *, layers):
    """Accelerate, compare outputs, gradients, state_dict; restore, compare again; copies are copies."""
    model.eval()
    before = shape_of(model)
    pointers = {name: t.data_ptr() for name, t in model.state_dict().items()}
    theirs, their_gradients = run(model, inputs, mask)

    assert hf.accelerate(model) is model
    assert len(hf.report(model).layers) == layers, hf.report(model)
    ours, our_gradients = run(model, inputs, mask)
    outputs_agree(ours, theirs)
    gradients_agree(our_gradients, their_gradients)
    assert {name: t.data_ptr() for name, t in model.state_dict().items()} == pointers

    twin = copy.deepcopy(model)
    for parameter in model.parameters():
        parameter.data.add_(0.1)  # a copy that still used the original's weights would notice
    assert torch.equal(run(twin, inputs, mask, backward=False)[0], ours)

    assert hf.restore(model) is model
    assert shape_of(model) == before
    assert hf.report(model).layers == []
    hf.restore(twin)
    outputs_agree(run(twin, inputs, mask, backward=False)[0], theirs)


def interpreted(code):
    """Run the code in a process of its own, in which the triton engine's kernels are interpreted."""
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    env["PYTHONPATH"] = os.pathsep.join([str(Path(posenc.__file__).parents[1]), str(Path(__file__).parents[2])])
    code = "from tests.engines.interpreter import mend\nmend()\n" + code
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]


def attentions_agree(model, inputs, by):
    """output_attentions, by an argument or by the configuration, gives those of the original."""
    model.config.output_attentions = by == "configuration"
    options = {"output_attentions": True} if by == "argument" else {}
    with torch.no_grad():
        theirs = model(**inputs, **options).attentions
        ours = hf.accelerate(model)(**inputs, **options).attentions
    assert len(ours) == len(theirs) == 2
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)
