"""Random examinations: `python -m tests.fuzz --help`.

    __main__.py   draws, checks, shrinks and reports
    case.py       a case of attention as plain data, and how one is drawn
    render.py     a case as a Python script, which is what runs
    engines.py    part 1: an engine on a case, against budgets
    layers.py     part 2: posenc.Attention with caches, against one prefill in float64
    models.py     part 3: accelerated models, against the originals
    shrink.py     a failing case made as simple as it can be while it fails

A part is a module with draw(random), features(case), check(case, engine, device), simpler(case) and
script(case, engine, device); check raises Refused where there is nothing to compare. A case is drawn from (seed, number) alone, on every machine alike.
"""

import os

if os.environ.get("TRITON_INTERPRET") == "1":
    from tests.engines.interpreter import mend

    mend()
