"""A draw that is no failure and no success."""


class Refused(Exception):
    """The engine says that it cannot run this case, or the original that it is compared with raises; and why."""
