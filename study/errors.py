"""User errors, which end a command with exit code 2, as opposed to bugs (traceback)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from study.tracking_uri import without_password


class UserError(ValueError):
    """Invalid input from the user.

    The message has the value, the rule and the remedy. Passwords in addresses are masked.
    """

    def __init__(self, message: str) -> None:
        super().__init__(without_password(message))


class StorageError(UserError):
    """A write to the storage failed while a study ran.

    The study has stopped cleanly with trials left.
    """


class OutOfSightError(Exception):
    """A launched study cannot be followed any longer; it may still be running."""


@contextmanager
def refusals() -> Iterator[None]:
    """Convert a ``ValueError`` or ``OSError`` of the checks before a run to a :class:`UserError`.

    A ``BrokenPipeError`` or ``InterruptedError`` is not converted.
    """
    try:
        yield
    except UserError:
        raise
    except (BrokenPipeError, InterruptedError):
        raise
    except OSError as error:  # a link loop, a folder in a file's place, no permission
        named = f"{error.filename}: " if error.filename else ""
        raise UserError(f"{named}{error.strerror or error}; nothing was done") from error
    except ValueError as error:
        raise UserError(str(error)) from error
