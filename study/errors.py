"""Errors that the user can correct, told apart from our own mistakes: the former end with exit code
2, the latter with a traceback."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from study.tracking_uri import without_password


class UserError(ValueError):
    """Input of the user's that cannot work.

    The message names the value, the rule and the remedy, and no password of an address.
    """

    def __init__(self, message: str) -> None:
        super().__init__(without_password(message))


class StorageError(UserError):
    """The storage of a study took no more writes while the study ran: it ended in order, with
    trials left."""


class OutOfSightError(Exception):
    """A study that was launched can no longer be followed, for the reason given; it may go on."""


@contextmanager
def refusals() -> Iterator[None]:
    """Turn an error of the checks before any work, a ``ValueError`` or one of the system, into a
    :class:`UserError`."""
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
