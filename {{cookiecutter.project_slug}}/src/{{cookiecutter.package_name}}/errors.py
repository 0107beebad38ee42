"""Errors that are told in one line, without a traceback."""


class UserError(ValueError):
    """A mistake that its maker can mend: shown as one clear line, without a traceback."""

    agreed = False
    """Whether every rank raised it, so that one of them need say it."""


class RankError(RuntimeError):
    """Something failed on one rank or more; raised on all of them."""

    agreed = False
    """Whether every rank raised it, so that one of them need say it."""
