"""Linear layers of eight bits (torchao's, and PyTorch's own), quantised before or after `accelerate`.

torchao lies beside the environment (Makefile): transformers would import it in every process.
"""

import copy
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from posenc import hf
from tests.hf.uses.tiny import FAMILIES, inputs, logits_at_tokens, make, run_engines

FOLDER = Path(sys.prefix) / "torchao"


@pytest.mark.filterwarnings("ignore:.*deprecated")
@pytest.mark.parametrize("accelerated_first", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_layers_without_parameters(family, accelerated_first):
    """torch.ao's dynamically quantised layers have a method in place of the weight."""
    quantise = partial(torch.ao.quantization.quantize_dynamic, qconfig_spec={torch.nn.Linear}, dtype=torch.qint8)
    exact, given = make(family), inputs(family)
    theirs, ours = quantise(exact), copy.deepcopy(exact)
    ours = hf.accelerate(quantise(hf.accelerate(ours) if accelerated_first else ours))
    assert "run on posenc" in str(hf.report(ours))
    with torch.no_grad():
        wanted, found, true = (logits_at_tokens(family, one, given) for one in (theirs, ours, exact))
    # activations are rounded to eight bits, and a rounding error may move one to the next number
    assert (found - true).norm() < 2 * (wanted - true).norm()
    hf.restore(ours)
    with torch.no_grad():
        assert torch.equal(logits_at_tokens(family, ours, given), wanted)


@pytest.mark.slow
@pytest.mark.skipif(not FOLDER.exists(), reason="torchao is not installed; make test does that")
def test_quantised_layers():
    root = Path(__file__).parents[3]
    paths = [str(root / "src"), str(root), str(FOLDER)]
    done = subprocess.run(
        [sys.executable, "-m", "tests.hf.uses.test_quantised"], capture_output=True, text=True, timeout=600,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}, cwd=root,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split().count("agrees") == 4 * len(FAMILIES)


def main():
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, Int8WeightOnlyConfig, quantize_

    run_engines()
    for family in FAMILIES:
        exact, given = make(family), inputs(family)
        for config in (Int8WeightOnlyConfig(), Int8DynamicActivationInt8WeightConfig()):
            theirs = copy.deepcopy(exact)
            quantize_(theirs, config)
            for accelerated_first in (True, False):
                ours = copy.deepcopy(exact)
                if accelerated_first:
                    hf.accelerate(ours)
                quantize_(ours, config)
                hf.accelerate(ours)
                assert hf.report(ours).layers
                with torch.no_grad():
                    wanted, found, true = (logits_at_tokens(family, one, given) for one in (theirs, ours, exact))
                if isinstance(config, Int8WeightOnlyConfig):
                    assert (found - wanted).abs().max() < 1e-4, family
                else:  # activations are rounded to eight bits, and a rounding error may move one to the next number
                    assert (found - true).norm() < 2 * (wanted - true).norm(), family
                print(family, "agrees")


if __name__ == "__main__":
    main()
