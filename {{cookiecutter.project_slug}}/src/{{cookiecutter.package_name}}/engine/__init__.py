"""What a training run needs and its owner rarely edits; knows neither the model nor the data."""


class UserError(ValueError):
    """A mistake that its maker can mend: shown as one clear line, without a traceback."""

    agreed = False
    """Whether every rank raised it, so that one of them need say it."""
