"""What the user can put right, told apart from what is our mistake: the first ends with exit code 2, the second with a traceback."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class UserError(ValueError):
    """The user's input cannot work; the message names the value, the rule and the remedy."""


@contextmanager
def refusals() -> Iterator[None]:
    """Around the checks before any work: their ``ValueError`` becomes a :class:`UserError`."""
    try:
        yield
    except UserError:
        raise
    except ValueError as error:
        raise UserError(str(error)) from error
