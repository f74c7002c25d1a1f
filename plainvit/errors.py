"""Exit codes of errors (listed in cli.py), and errors that several packages raise and catch."""

import errno

# A full, read-only or failing disk, or too many open files: resource errors (5), not usage errors (2)
RESOURCES = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EMFILE, errno.ENFILE, errno.ENOMEM}


def exit_code(error: Exception) -> int:
    """Exit code of a command that ends with this error: its own `exit_code`, 5 for resources, otherwise 2."""
    is_resource_error = isinstance(error, OSError) and error.errno in RESOURCES
    return getattr(error, "exit_code", 5 if is_resource_error else 2)


def first_line(error: BaseException) -> str:
    """The first line of the message, or the type of an error that has no message."""
    return next(filter(None, str(error).splitlines()), type(error).__name__)


class NonFiniteError(ValueError):
    """A model's outputs are NaN or Inf, so there is nothing to score; the command ends with exit code 4."""

    exit_code, raised_by_all = 4, True  # all processes of a run raise it

    def __init__(self, message: str, images: int = 0) -> None:
        super().__init__(message)
        self.images = images  # how many have such outputs, where that is known
