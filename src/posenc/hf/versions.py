"""Which transformers releases posenc.hf knows: tested at both ends, checked when it is first used."""

from __future__ import annotations

LOWEST = (5, 16)
HIGHEST = (5, 22)


def check() -> None:
    """Raise ImportError, in plain words, outside the range."""
    wanted = f"{'.'.join(map(str, LOWEST))} to {'.'.join(map(str, HIGHEST))}"
    try:
        import transformers
    except ImportError as error:
        raise ImportError(f"posenc.hf needs transformers {wanted}: pip install 'posenc[hf]'") from error
    found = tuple(int(part) for part in transformers.__version__.split(".")[:2])
    if not LOWEST <= found <= HIGHEST:
        raise ImportError(
            f"posenc.hf knows the models of transformers {wanted}, found {transformers.__version__}; "
            f"install one of those: pip install 'transformers>={LOWEST[0]}.{LOWEST[1]},<{HIGHEST[0]}.{HIGHEST[1] + 1}'"
        )
