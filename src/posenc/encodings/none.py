"""No positional encoding at all."""

from ..core.encoding import Encoding


class NoPosition(Encoding):
    """No positions (NoPE). A causal mask gives a stack of layers some order; without one, attention is over a set.

    s = q·k / sqrt(d)

    q, k [B, H, L, D]. Raises nothing.

        >>> posenc.NoPosition().plan(posenc.Positions(8)).lookups
        ()
    """
