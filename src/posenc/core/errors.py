"""The library's own exceptions. Each also is the built-in error a caller would expect."""


class UnsupportedPlan(NotImplementedError):
    """No engine that was allowed to run can run this plan; the message gives the reason of each.

    `posenc.explain` gives the same reasons without raising.

        >>> issubclass(posenc.UnsupportedPlan, NotImplementedError)
        True
    """


class OptionError(ValueError, TypeError):
    """An encoding was given an option it does not have, or a value it cannot take.

    A ValueError, so that callers may catch either.

        >>> issubclass(posenc.OptionError, ValueError)
        True
    """
