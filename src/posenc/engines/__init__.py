"""Engines run lowered plans and know no encoding: see base.py (what an engine is), lowering.py (plan + mask -> LoweredPlan) and
choose.py (which engine runs a call).

    triton      fused kernels on GPUs
    sdpa        PyTorch's attention as it is, for plans without terms
    cpu         PyTorch's fused CPU attention with terms by distance, and biases of any pairs
    blocked     the formula in blocks of queries: any plan, any device
    reference   the formula, dense: the oracle of all others
"""
