"""What the user can put right, told apart from what is our mistake: the first ends with exit code
2, the second with a traceback."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from study.tracking_uri import without_password


class UserError(ValueError):
    """The user's input cannot work; the message names the value, the rule and the remedy, and no
    password of an address."""

    def __init__(self, message: str) -> None:
        super().__init__(without_password(message))


@contextmanager
def refusals() -> Iterator[None]:
    """Around the checks before any work: their ``ValueError`` becomes a :class:`UserError`."""
    try:
        yield
    except UserError:
        raise
    except ValueError as error:
        raise UserError(str(error)) from error
