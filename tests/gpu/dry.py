"""The GPU cases without a GPU: under Triton's interpreter, with the tiles of an H200 and bfloat16's rounding.

    python -m tests.gpu.dry [--only fuzz,strides] [--every 10] [--arch 90]

Fresh memory is filled with NaN, and memory accesses are checked (tests/engines/triton_memory.py). `--every 10`: a tenth of
the fuzz's draws; all of them take an hour.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"

import argparse
import sys
import time

import torch

from tests import seeds
from tests.engines import interpreter, triton_memory
from tests.gpu.elsewhere import Elsewhere, use_tiles_of

LEFT_OUT = (
    "compile without graph breaks",
    "a CUDA graph replays",
    "offsets past two billion elements",
    "ten runs give the same bits",
    "token positions give the same bits",
)
LONGEST = 300  # tokens of the cases for each slot and head size: three far tiles


def main() -> None:
    from tests.gpu import cases

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", type=lambda text: text.split(","), default=[""])
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--arch", type=int, default=90)
    args = parser.parse_args()
    interpreter.mend()
    use_tiles_of(args.arch)
    bmm = torch.bmm
    torch.bmm = lambda a, b: bmm(a.float(), b.float())  # a GPU does not round this product
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    cases.EVERY = args.every
    check, worst = cases.check, []

    def noted(*inputs, **options):
        worst.append(check(*inputs, **options))

    cases.check = noted
    tensors = cases.tensors

    def fewer(batch, heads, kv_heads, lq, lk, *rest):
        return tensors(1, min(heads, 2), 1, min(lq, LONGEST), min(lk, LONGEST), *rest)

    failed = 0
    for name, case in cases.CASES.items():
        if name in LEFT_OUT or not any(part in name for part in args.only):
            continue
        began = time.time()
        worst.clear()
        cases.tensors = fewer if name.startswith(("slot", "head")) else tensors
        torch.manual_seed(seeds.of(name))
        try:
            with Elsewhere("cpu"), triton_memory.watched():
                case()
            text = f"at most {max(worst, default=0.0):.3f} of the error that is allowed"
        except Exception as error:
            failed += 1
            text = f"FAILED {type(error).__name__} {str(error)[:400]}"
        print(f"{name}: {text} ({time.time() - began:.0f} s)", flush=True)
    sys.exit(min(failed, 1))


if __name__ == "__main__":
    main()
