"""Errors that several packages raise and catch; each has the exit code of the command."""


def first_line(error: Exception) -> str:
    """The first line of the message, or the type of an error that has no message."""
    return (str(error).splitlines() or [type(error).__name__])[0]


class NonFiniteError(ValueError):
    """A model's outputs are NaN or Inf, so there is nothing to score; the command ends with exit code 4."""

    exit_code, raised_by_all = 4, True  # all processes of a run raise it

    def __init__(self, message: str, images: int = 0) -> None:
        super().__init__(message)
        self.images = images  # how many have such outputs, where that is known
