"""No positional encoding at all."""

from ..scheme import Scheme


class NoPosition(Scheme):
    """Nothing added (NoPE). A causal mask alone tells a stack some order; without one, attention sees a set.

    s = q·k / sqrt(d)
    """
