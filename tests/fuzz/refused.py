"""A draw that is no failure and no success."""


class Refused(Exception):
    """The engine refuses this case, or the original that it is compared with raises; with the reason."""
