"""Every family once, after the harness's cases: name -> a function that makes (model, (inputs, padding))."""

from importlib import import_module
from pathlib import Path

from tests.hf.harness import inputs_of

EVERY = {
    name: case
    for file in sorted((Path(__file__).parent / "families").glob("test_*.py"))
    for name, case in import_module(f"tests.hf.families.{file.stem}").CASES.items()
}
"""name -> Case"""


def once(case):
    inputs = inputs_of(case, "mixed")
    return case.make(), (inputs, None if "decoder_input_ids" in inputs else inputs["attention_mask"])


CASES = {name: lambda case=case: once(case) for name, case in EVERY.items() if case.paddings != ("none",)}
