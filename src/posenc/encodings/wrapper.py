"""An encoding that wraps another one and passes everything through to it."""

from __future__ import annotations

from torch import Tensor

from ..core.encoding import Encoding, Host
from ..core.errors import OptionError
from ..core.plan import Plan
from ..core.positions import Positions
from ..core.rotation import Rotation
from .registry import create


class Wrapper(Encoding):
    """A subclass changes the plan of `self.encoding`: an Encoding, or one that `create` makes from a name and the sizes."""

    def __init__(
        self, encoding: Encoding | str | None, *, d_model: int | None = None, heads: int | None = None,
        head_dim: int | None = None,
    ):  # fmt: skip
        super().__init__()
        if encoding is None or isinstance(encoding, str):
            try:
                encoding = create(encoding or "none", d_model=d_model, heads=heads, head_dim=head_dim)
            except ValueError as error:  # of an unknown name
                raise OptionError(str(error)) from None
        if not isinstance(encoding, Encoding):
            raise OptionError(
                f"encoding={encoding!r} must be an encoding's name or an encoding, such as "
                "posenc.create('rope', head_dim=64)"
            )
        if type(encoding).embed is not Encoding.embed:
            raise OptionError(
                f"{type(encoding).__name__} is added to the input and not inside attention; add it there, with its "
                f"embed, and leave encoding= out of {type(self).__name__}"
            )
        self.encoding = encoding
        self.absolute, self.axes = encoding.absolute, encoding.axes
        self.length_dependent = encoding.length_dependent
        self.causal_only = encoding.causal_only

    def check_causal(self, causal: bool) -> str | None:
        return self.encoding.check_causal(causal)

    def reset_host(self, host: Host) -> None:
        self.encoding.reset_host(host)

    def rotation(self, positions: Positions) -> Rotation | None:
        return self.encoding.rotation(positions)

    def keep(self, x: Tensor) -> Tensor | None:
        return self.encoding.keep(x)

    def terms(self, positions: Positions, *, x: Tensor | None = None, host: Host | None = None, **kept) -> Plan:
        return self.encoding.terms(positions, x=x, host=host, **kept)
