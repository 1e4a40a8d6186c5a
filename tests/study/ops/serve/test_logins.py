"""Limits on password checks: what a flood of wrong passwords may delay, and what it may not. A
check lasts until the test lets it end, so nothing is timed."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from study.ops.serve import logins
from study.ops.serve.logins import (
    CHECKS,
    MOST_OF_A_NAME,
    MOST_WAITING,
    FileSet,
    Logins,
    TooManyLoginsError,
)

ADA = ("ada", "secret")


class Checked:
    """A slow password check: each check except ``ADA``'s lasts until :meth:`open`."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []
        self._gate = threading.Event()

    def __call__(self, user: str, password: str) -> bool:
        """Return whether this is Ada's login."""
        self.asked.append((user, password))
        if (user, password) != ADA:
            assert self._gate.wait(60)
        return (user, password) == ADA

    def open(self) -> None:
        """Let all checks end."""
        self._gate.set()


def run(scene: Callable[[Checked, Logins], Awaitable[None]], **options: Any) -> Checked:
    """Run a scene; its checks end with it."""
    checked = Checked()

    async def play() -> None:
        try:
            await scene(checked, Logins(checked, **options))
        finally:
            checked.open()

    asyncio.run(play())
    return checked


async def flood(limited: Logins, names: list[str]) -> list[asyncio.Task[bool]]:
    tasks = [
        asyncio.create_task(limited.check(name, f"wrong {number}"))
        for number, name in enumerate(names)
    ]
    await asyncio.sleep(0)  # each has asked
    return tasks


def test_a_login_that_was_valid_does_not_wait_behind_wrong_passwords() -> None:
    async def scene(checked: Checked, limited: Logins) -> None:
        assert await limited.check(*ADA)
        tasks = await flood(limited, ["ada"] * MOST_OF_A_NAME + ["bob"] * MOST_OF_A_NAME)
        for _ in range(3):
            assert await limited.check(*ADA)
        assert not any(task.done() for task in tasks)
        checked.open()
        assert await asyncio.gather(*tasks) == [False] * len(tasks)

    checked = run(scene)
    assert checked.asked.count(ADA) == 4


def test_a_login_that_another_worker_found_valid_does_not_wait(tmp_path: Path) -> None:
    shared: dict[str, Any] = {"known": FileSet(tmp_path / "known"), "key": b"k"}

    async def logs_in(checked: Checked, limited: Logins) -> None:
        assert await limited.check(*ADA)

    async def is_flooded(checked: Checked, limited: Logins) -> None:
        await flood(limited, ["ada"] * MOST_OF_A_NAME)
        assert await limited.check(*ADA)

    run(logs_in, **shared)
    run(is_flooded, **shared)
    (file,) = (tmp_path / "known").iterdir()
    assert "secret" not in file.name
    assert (file.read_bytes(), file.stat().st_mode & 0o077) == (b"", 0)
    assert (tmp_path / "known").stat().st_mode & 0o077 == 0


def test_few_passwords_are_checked_at_once_and_further_ones_are_refused() -> None:
    names = [f"user {number}" for number in range(MOST_WAITING + 10)]

    async def scene(checked: Checked, limited: Logins) -> None:
        tasks = await flood(limited, names)
        await asyncio.sleep(0)
        assert len(checked.asked) <= CHECKS
        refused = [task for task in tasks if task.done()]
        assert len(refused) == 10
        assert all(isinstance(task.exception(), TooManyLoginsError) for task in refused)
        checked.open()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert not await limited.check("one more", "wrong")

    run(scene)


def test_wrong_passwords_for_one_name_are_limited_and_others_log_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    async def scene(checked: Checked, limited: Logins) -> None:
        checked.open()
        for number in range(MOST_OF_A_NAME):
            assert not await limited.check("bob", f"wrong {number}")
        for password in ("wrong 0", "another"):
            with pytest.raises(TooManyLoginsError):
                await limited.check("bob", password)
        assert await limited.check(*ADA)
        now[0] += logins.WRONG_SECONDS
        assert not await limited.check("bob", "another")

    run(scene)


def test_requests_with_one_login_share_a_check() -> None:
    async def scene(checked: Checked, limited: Logins) -> None:
        tasks = [asyncio.create_task(limited.check("bob", "wrong")) for _ in range(50)]
        await asyncio.sleep(0)
        tasks[0].cancel()
        checked.open()
        assert await asyncio.gather(*tasks[1:]) == [False] * 49

    assert run(scene).asked == [("bob", "wrong")]


def test_a_check_for_which_nobody_waits_is_dropped() -> None:
    async def scene(checked: Checked, limited: Logins) -> None:
        tasks = await flood(limited, [f"user {number}" for number in range(MOST_WAITING)])
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        later = asyncio.create_task(limited.check("bob", "wrong"))  # there is room again
        await asyncio.sleep(0)
        checked.open()
        assert not await later

    assert len(run(scene).asked) <= CHECKS + 1


def test_a_changed_password_is_forgotten() -> None:
    valid = [ADA]
    known: set[str] = set()
    limited = Logins(lambda user, password: (user, password) in valid, known=known)
    assert asyncio.run(limited.check(*ADA))
    assert len(known) == 1
    valid.clear()
    assert not asyncio.run(limited.check(*ADA))
    assert not known


def test_an_error_of_the_database_ends_its_check_only() -> None:
    fails = [True]

    def is_login(user: str, password: str) -> bool:
        if fails:
            fails.clear()
            raise OSError("no database")
        return True

    limited = Logins(is_login)
    with pytest.raises(OSError, match="no database"):
        asyncio.run(limited.check(*ADA))
    assert asyncio.run(limited.check(*ADA))


def test_a_name_with_a_zero_byte_is_nobodys() -> None:
    assert not asyncio.run(Logins(lambda user, password: True).check("a\0da", "secret"))
