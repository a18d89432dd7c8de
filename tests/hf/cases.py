"""Every case of the harness, and each once with padding: name -> a function that makes (model, (inputs, mask))."""

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
    """(model, (inputs, mask)); mask: where the output's tokens are real, None where all of them count."""
    inputs = inputs_of(case, "mixed" if "left" in case.paddings else case.paddings[-1])
    return case.make(), (inputs, None if "decoder_input_ids" in inputs else inputs.get("attention_mask"))


CASES = {name: lambda case=case: once(case) for name, case in EVERY.items() if case.paddings != ("none",)}
"""Those that take padding."""
