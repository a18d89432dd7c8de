"""Attention whose positions depend on its own scores: contextual counts, stick-breaking, products along the path.

    cope             positions are counts of gates: "the third verb back" (Golovneva et al. 2024, arXiv:2405.18719)
    stick_breaking   the nearest key takes its share first, the next a share of the rest (Tan et al. 2024, arXiv:2410.17980)
    path             keys are reflected by every token between them and the query (Yang et al. 2025, arXiv:2505.16381)

A position that depends on all scores of a row is not a plan, so these are separate functions. All are causal; q
[B, H, Lq, D] are the last of the Lk tokens of k and v [B, Hkv, Lk, D], so that a decoding step is a call with one query.
They run on kernels of their own on a GPU; elsewhere `cope` and `stick_breaking` go over blocks of queries, and `path` calls
`attend` for halves of the text (products.py). None holds the scores of all pairs.
"""

from .counts import cope
from .path_decoding import path_keys, path_step
from .products import path
from .sticks import stick_breaking

__all__ = ["cope", "path", "path_keys", "path_step", "stick_breaking"]
