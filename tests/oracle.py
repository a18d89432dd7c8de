"""Originals to compare with: recorded ones (tests/data/*.json, see make_oracles.py) as tensors, and models of transformers
whose float32 parts are widened, so that what is left of a difference is a difference of formulas."""

import ast
import copy as copies
import importlib.util
import json
import sys
import types
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from tests import budget, seeds


def cases(name):
    return json.loads((Path(__file__).parent / "data" / f"{name}.json").read_text())["cases"]


def tensor(numbers, dtype=torch.float64):
    return torch.tensor(numbers, dtype=dtype)


def copy(parameter, numbers):
    """Load numbers into a parameter of the same shape."""
    source = numbers if isinstance(numbers, torch.Tensor) else tensor(numbers)
    assert parameter.shape == source.shape, (parameter.shape, source.shape)
    with torch.no_grad():
        parameter.copy_(source)


class _Wide:
    """torch, with float64 for float."""

    float = float32 = torch.float64

    def __getattr__(self, name):
        return getattr(torch, name)


@contextmanager
def wide(*modules):
    """What these modules compute in float32, whatever they are given, is computed in float64."""
    with pytest.MonkeyPatch.context() as patch:
        for module in modules:
            patch.setattr(module, "torch", _Wide())
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            yield
        finally:
            torch.set_default_dtype(before)


DRAWS = 4


def check_layer(layer, run, x, expected, terms, dtypes=(torch.float64, torch.float32)):
    """run(layer, x) in each dtype is `expected`, of float64, up to the rounding of sums of `terms` terms.

    A rounding within the layer changes its output as much as one of its inputs would: so the budget is budget.c(terms)
    times the change that one rounding of each parameter and of x makes, in the mean of a few draws.
    """
    draw = seeds.generator(17)
    layer, x = layer.double(), x.double()
    assert expected.dtype == torch.float64

    def rounded(values):
        return values * (1 + budget.unit(torch.float32) * (2 * torch.rand(values.shape, generator=draw).double() - 1))

    with torch.no_grad():
        exact, square = run(layer, x), 0.0
        for _ in range(DRAWS):
            other = copies.deepcopy(layer)
            for parameter in other.parameters():
                parameter.copy_(rounded(parameter))
            square += (run(other, rounded(x)) - exact).square().mean().item() / DRAWS
        for dtype in dtypes:
            factor = budget.unit(dtype) / budget.unit(torch.float32)
            allowed = budget.c(terms) * factor * square**0.5
            ours = run(copies.deepcopy(layer).to(dtype), x.to(dtype))
            assert ours.dtype == dtype
            error = (ours.double() - expected).square().mean().sqrt().item()
            assert error <= allowed, f"{dtype}: an error of {error:.3g}, {error / allowed:.3g} times its budget"


def assert_rotated(ours, theirs, x, furthest, magnitude=1.0):
    """Both are x with its pairs rotated by angles up to `furthest` and scaled, in x's dtype.

    The original rounds its frequencies, the angles and their cosines, so that an angle is off by three units of its
    size, and each of a pair's products and their sum once: so is what is added of a pair, at most 2 max |x|.
    """
    allowed = budget.unit(x.dtype) * (3 * furthest + 8) * 2 * magnitude * x.abs().max().item()
    torch.testing.assert_close(ours, theirs, rtol=0, atol=allowed)


def timm_folder():
    """timm is installed beside the environment's packages, as transformers would import all of it."""
    folder = Path(sys.prefix) / "timm" / "timm"
    if folder.is_dir():
        return folder
    found = importlib.util.find_spec("timm")
    if found is None:
        pytest.skip("needs timm")
    return Path(found.submodule_search_locations[0])


def timm_function(model, name):
    """A function of a module of timm.models, without its decorators and what the module imports."""
    nodes = ast.parse((timm_folder() / "models" / f"{model}.py").read_text()).body
    node = next(node for node in nodes if isinstance(node, ast.FunctionDef) and node.name == name)
    node.decorator_list, names = [], {"torch": torch, "List": list}
    exec(compile(ast.Module([node], []), model, "exec"), names)
    return names[name]


def timm_layer(name):
    """A module of timm.layers, without the rest of timm, which needs torchvision."""
    folder = timm_folder()
    with pytest.MonkeyPatch.context() as patch:
        for package, path in (("timm", folder), ("timm.layers", folder / "layers")):
            bare = types.ModuleType(package)
            bare.__path__ = [str(path)]
            patch.setitem(sys.modules, package, bare)
        before = set(sys.modules)
        loaded = importlib.import_module(f"timm.layers.{name}")
        for other in set(sys.modules) - before:  # whoever imports timm next gets all of it
            if other.startswith("timm."):
                del sys.modules[other]
    return loaded
