"""Every encoding has all of its parts: a class or function, a card, options, an oracle, general tests, a picture, a lab entry,
`posenc show`, the explorer, pages in both languages. What is missing for one fails here by name."""

import ast
import inspect
from pathlib import Path

import pytest
import torch

import posenc
from posenc.cli import pictures, show
from posenc.encodings.registry import ENCODINGS, OWN_ATTENTION
from posenc.lab.model import Transformer
from tests.encodings import every

ROOT = Path(__file__).parents[2]
CARDS = {**ENCODINGS, **OWN_ATTENTION}
ORACLES = {  # the tests that compare with other people's code, or with the paper's formula where there is none
    "none": ["nn/test_attention.py::test_order_is_seen_but_for_none"],
    "sinusoidal": ["encodings/test_absolute.py::test_interleaved_is_distilberts"],
    "sinusoidal_2d": ["encodings/rope/test_axial.py::test_equals_vit_mae"],
    "learned": ["encodings/test_absolute.py::test_learned_is_the_models_own"],
    "shaw": ["encodings/test_shaw.py::test_keys_and_values_are_opennmts"],
    "clipped": ["encodings/test_bias.py::test_t5_with_every_distance_exact_is_clipped"],
    "t5": ["encodings/test_bias.py::test_t5_is_the_models_own"],
    "transformer_xl": ["encodings/test_transformer_xl.py::test_transformer_xl_is_the_original"],
    "xlnet": ["encodings/test_transformer_xl.py::test_xlnet_is_transformers"],
    "deberta": ["encodings/test_deberta.py::test_v1_is_transformers"],
    "rope": ["encodings/rope/test_rope.py::test_equals_llama"],
    "mrope": ["encodings/rope/test_axial.py::test_equals_qwen_text"],
    "axial": ["encodings/rope/test_axial.py::test_equals_pixtral", "encodings/rope/test_axial.py::test_equals_dinov3_with_prefix"],
    "xpos": ["encodings/rope/test_xpos.py::test_scores_equal_the_oracle"],
    "relative_logits": ["encodings/test_relative_logits.py::test_the_layer_is_inklings"],
    "alibi": ["encodings/test_bias.py::test_alibi_is_blooms_and_mpts"],
    "sinks": ["encodings/test_sinks.py::test_the_layer_is_gpt_oss"],
    "tempered": ["encodings/test_tempered.py::test_every_layer_is_the_models_own"],
    "grid_bias": ["encodings/test_grid.py::test_grid_bias_is_timms", "encodings/test_grid.py::test_the_layer_is_swins"],
    "continuous_bias": ["encodings/test_grid.py::test_the_layer_is_swin_v2s", "encodings/test_grid.py::test_the_bias_is_timms_too"],
    "decomposed": ["encodings/test_grid.py::test_the_layer_is_sams", "encodings/test_grid.py::test_pooled_queries_and_keys_are_mvitv2s"],
    "mixed_rope": ["encodings/test_grid.py::test_mixed_rotations_are_timms"],
    "many_axes": ["encodings/test_grid.py::test_many_axes_make_mrope_and_axial"],
    "fox": ["encodings/test_fox.py::test_attention_is_flas", "encodings/test_fox.py::test_the_bias_is_x_transformers"],
    "kerple": ["encodings/test_length_biases.py::test_kerple_is_its_formula"],
    "sandwich": ["encodings/test_length_biases.py::test_sandwich_has_the_published_numbers"],
    "fire": ["encodings/test_length_biases.py::test_fire_is_its_formula"],
    "tupe": ["encodings/test_untied.py::test_tupe_is_its_formula"],
    "cape": ["encodings/test_untied.py::test_cape_moves_positions_in_training_alone"],
    "pope": ["encodings/test_untied.py::test_pope_is_x_transformers"],
    "latent": ["nn/test_latent.py::test_the_layer_is_deepseeks"],
    "cope": ["encodings/test_contextual.py::test_cope_is_x_transformers"],
    "stick_breaking": ["encodings/test_contextual.py::test_stick_breaking_is_flas"],
    "path": ["encodings/test_contextual.py::test_path_is_flas"],
}  # fmt: skip
GENERAL = {  # tests of all encodings by name: gradients in float64 by differences, prefill = decoding, packing, padding, engines
    "nn/test_attention.py": [
        "test_gradients_of_every_parameter", "test_token_by_token_is_prefill", "test_packed_is_separate", "test_left_padding_is_no_padding",
    ],
    "nn/test_decoding.py": ["test_steps_are_the_whole_whatever_happens_in_between", "test_packed_is_separate_without_positions"],
    "core/test_encoding.py": [
        "test_compiles_without_a_graph_break", "test_autocast", "test_bfloat16_keeps_positions_exact", "test_copies_pickles_and_strict_state_dicts",
    ],
    "encodings/test_engines.py": ["test_engines_are_the_reference"],
    "lab/test_model.py": ["test_every_encoding_trains"],
    "plot/test_plot.py": ["test_the_terms_of_any_encoding_sum_to_the_scores_of_its_layer"],
    "explorer/test_pages.py": ["test_the_sentence_s_code_makes_the_drawn_attention"],
}  # fmt: skip
EXPLORER = "explorer/test_pages.py::test_the_gallery_shows_the_weights_of_attention_of_its_own"
OWN = {  # what the tests of all encodings cover, for attention of its own
    "latent": ["test_token_by_token_is_prefill", "test_packed_is_separate", "test_gradients_of_every_parameter"],
    "contextual": [
        "test_token_by_token_is_prefill", "test_left_padding_is_no_padding", "test_packed_is_separate", "test_gradients",
    ],
}  # fmt: skip


def functions(path):
    """name -> source of the tests of a file."""
    source = (ROOT / "tests" / path).read_text()
    return {
        node.name: ast.get_source_segment(source, node) or ""
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef)
    }


def decorators(path, name):
    source = (ROOT / "tests" / path).read_text()
    node = next(node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef) and node.name == name)
    return " ".join(ast.unparse(one) for one in node.decorator_list)


@pytest.mark.parametrize("name", CARDS)
def test_it_has_a_class_a_card_and_options(name):
    card, made = CARDS[name], CARDS[name].load()
    assert all((card.family, card.enters, card.parameters, card.extrapolates, card.used_by, card.formula))
    assert callable(made)
    assert ">>>" in (made.__doc__ or "")
    scope = posenc.contextual if inspect.isfunction(made) else posenc
    assert getattr(scope, card.class_name) is made
    if name in ENCODINGS:
        assert name in posenc.list_encodings()
        assert every.make(name) is not None


@pytest.mark.parametrize("name", CARDS)
def test_it_has_an_oracle(name):
    for test in ORACLES[name]:
        file, function = test.split("::")
        assert function in functions(file), test


def test_no_oracle_is_of_something_else():
    assert set(ORACLES) == set(CARDS)


@pytest.mark.parametrize("file", GENERAL)
def test_the_general_tests_take_all_encodings(file):
    found = functions(file)
    for test in GENERAL[file]:
        assert test in found
        assert "NAMES" in decorators(file, test) or "list_encodings()" in decorators(file, test), test


@pytest.mark.parametrize("name", OWN_ATTENTION)
def test_attention_of_its_own_has_the_same_tests(name):
    file, key = ("nn/test_latent.py", "latent") if name == "latent" else ("encodings/test_contextual.py", "contextual")
    file_of_explorer, test_of_explorer = EXPLORER.split("::")
    assert "OWN_ATTENTION" in decorators(file_of_explorer, test_of_explorer)
    for test in OWN[key]:
        source = functions(file)[test]
        assert name == "latent" or name in source or "function" in source, (name, test)


@pytest.mark.parametrize("name", CARDS)
def test_it_is_drawn_and_shown(name, capsys):
    assert pictures.draw(name, pictures.Options({}))
    assert show.show_command([name]) == 0
    shown = capsys.readouterr().out
    assert CARDS[name].formula in shown
    assert name in shown


LAB = {"axial": "axial:columns=4", "sinusoidal_2d": "sinusoidal_2d:columns=4", "mixed_rope": "mixed_rope:columns=4",
       "many_axes": "many_axes:axis_of=(0,1),text=true", "tupe": "tupe:max_length=20"}  # fmt: skip
"""Specifications of encodings that need an option."""


@pytest.mark.parametrize("name", CARDS)
def test_the_lab_trains_it(name):
    model = Transformer(LAB.get(name, name), vocabulary=5, width=16, heads=4, layers=2, causal=True, longest=16)
    loss = model(torch.randint(5, (2, 12))).square().mean()
    loss.backward()
    assert loss.isfinite()
    assert model.embedding.weight.grad is not None


@pytest.mark.parametrize("language", ["en", "zh"])
@pytest.mark.parametrize("name", CARDS)
def test_it_has_a_page(name, language):
    text = (ROOT / "docs" / language / "encodings" / f"{name}.md").read_text(encoding="utf-8")
    assert text.count("\n## ") == 2
    assert len(text) > 200
