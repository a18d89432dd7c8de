"""The library's own exceptions. Each also is the built-in error a caller would expect."""


class UnsupportedPlan(NotImplementedError):
    """No engine that was allowed to run can run this plan; the message gives the reason of each."""


class OptionError(ValueError, TypeError):
    """An encoding was given an option it does not have, or a value it cannot take."""
