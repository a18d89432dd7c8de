"""LayoutLMv2 and v3, and PP-DocLayoutV2's reading order, against transformers."""

import pytest
import torch
from transformers import LayoutLMv3Model

from posenc import hf
from posenc.hf import layout
from tests.hf.compare import attentions_agree, outputs_agree
from tests.hf.harness import Case, inputs_of, pairs, real_output, run_check, scatter
from tests.hf.tiny import batch, make, tiny_case

OPTIONS = dict(layers=2, way="override", checkpoints=())  # the originals have none


def text():
    return {name: x for name, x in batch(layout, "layoutlmv3").items() if name != "pixel_values"}


def boxes():
    """Three pages, two of them with a mask."""
    return {name: torch.cat((x, x[1:])) for name, x in layout.tiny("pp_doclayout_v2")[1].items()}


CASES = {
    "layoutlmv2": tiny_case(layout, "layoutlmv2", **OPTIONS),
    "layoutlmv3": tiny_case(layout, "layoutlmv3", **OPTIONS),
    "layoutlmv3 text": Case(lambda: make(layout, "layoutlmv3"), text, **OPTIONS),
    "pp_doclayout_v2": Case(lambda: make(layout, "pp_doclayout_v2"), boxes, **OPTIONS, paddings=("none",)),
}


@pytest.mark.parametrize(("case", "check"), pairs(CASES))
def test_family(case, check):
    run_check(CASES[case], check)


@pytest.mark.parametrize("engine", ["blocked", "reference"])
def test_a_named_engine_runs(engine):
    model, inputs = make(layout, "layoutlmv3"), inputs_of(CASES["layoutlmv3"], "right")
    with torch.no_grad():
        theirs = real_output(model, inputs)
        hf.accelerate(model, engine=engine)
        assert {one.engine for one in hf.report(model).layers} == {engine}
        outputs_agree(real_output(model, inputs), theirs)


@pytest.mark.parametrize("by", ["argument", "configuration"])
def test_output_attentions_are_the_originals(by):
    model, inputs = make(layout, "layoutlmv3"), inputs_of(CASES["layoutlmv3"], "right")
    attentions_agree(model, inputs, by)


@pytest.mark.parametrize("relative", [True, False])
def test_terms_may_be_missing(relative):
    """The original ignores a spatial term alone."""
    config = make(layout, "layoutlmv3").config
    config.has_relative_attention_bias, config.has_spatial_attention_bias = relative, False
    model, inputs = scatter(LayoutLMv3Model(config)), inputs_of(CASES["layoutlmv3"], "left")
    with torch.no_grad():
        theirs = model(**inputs)[0]
        outputs_agree(hf.accelerate(model)(**inputs)[0], theirs)
