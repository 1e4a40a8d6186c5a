"""Passwords in addresses of tracking stores: addresses are stored and shown without the password,
which is added back when connecting.

:func:`hide` removes the password when an address is read, so configs, ledgers and everything made
from them only contain ``https://ada:***@host``. Code that connects calls :func:`reveal`, which
returns the address that this process was given, or takes the password from the environment. Texts
that may quote an address, such as an error or a command for the user, go through
:func:`without_password`.

Limits: in a query string, a value counts as secret because of its name (``password=``, ``token=``,
``auth=``). A user name without password counts as a token for web servers (except ``git``), and not
elsewhere. The syntax of passwords, which may contain slashes and @, follows SQLAlchemy for
databases and RFC 3986 for servers.

Other values of a study must not contain a password (:func:`refuse_passwords`), because it would be
stored in the ledger, checkpoints, reports and MLflow.
"""

from __future__ import annotations

import os
import re
import urllib.parse
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

MARK = "***"
"""Replacement of a password; SQLAlchemy shows the same."""
WHOLE = "MLFLOW_TRACKING_URI"
"""Environment variable that may contain an address with its password."""
USER, PASSWORD, TOKEN = (
    "MLFLOW_TRACKING_USERNAME",
    "MLFLOW_TRACKING_PASSWORD",
    "MLFLOW_TRACKING_TOKEN",
)
"""Environment variables that MLflow's client uses to log in."""
CREDENTIALS, PGPASS = "~/.mlflow/credentials", "~/.pgpass"
"""Password files of MLflow's and PostgreSQL's clients."""

REMEDY = (
    "earlier versions wrote it there, into report.html and into MLflow's copies; change the"
    " password, give the new one in the environment (docs/tracking.md), and make report and copies"
    " again with `lns-study report STUDY`"
)
"""Remedy for a ledger that contains a password."""

_LOGIN = re.compile(
    r"""(?<![\w+.-]) (?P<before> (?: https?://
                                   (?![^\s:/?#\[]* : \d+ (?:[/?#]|$))  # a port, and no password
                                 | (?!https?:) [a-zA-Z][\w+.-]*:// )
                               [^\s:/?#\[]* :)
        [^@\s]* (?:@[^@/?#\s]*)* @""",
    re.VERBOSE,
)
_USER = re.compile(
    r"""(?<![\w+.-]) (?P<before> https?://) (?! git@ | [^\s/?#]*:\*\*\*@) [^\s:/?\#@\[\]'"]+ @""",
    re.VERBOSE,
)
_QUERY = re.compile(
    r"""(?P<before> [?&;#]
            (?! base64, [a-z0-9+/]*+ =* ["')\s])  # a picture in a page
            (?= [^=&;\s?#]*+ =)  # what follows looks at every character once
            (?: sig | pass | (?:[^=&;\s?#]*?[_-])?auth(?:orization)?
              | [^=&;\s?#]*? (?:password|passwd|pwd|token(?!s|i[sz])|secret|signature|credential
                                |(?:api|access)[_-]?key)
                [^=&;\s?#]*+
            ) =) [^&\s]+""",
    re.IGNORECASE | re.VERBOSE,
)
_WORD = re.compile(r"(?<!\S)[^\s@]*+@\S*")  # a word with @ may contain a login
_VARIABLE = re.compile(r"\$\w+|\$\{\w+\}")
_MARKED = re.compile(r"(?:(?<=//)|:)\*\*\*(?=@)|(?<==)\*\*\*")
_COMMAND = re.compile(
    r"""(?P<before> (?:^|\s) (?:-u|--user|--proxy-user) [\s=]* ["']? [^\s:"']+ : (?!\d+(?:\s|$))
          | (?:proxy-)?authorization ["']? \s* [:=] \s* (?:(?:basic|bearer|token) \s+)?
          | hooks\.slack\.com/(?:services|workflows|triggers)/
          | discord(?:app)?\.com/api/webhooks/
          | [\w-]* (?:password|passwd|token(?!s|i[sz])|secret|(?:api|access)[_-]?key)
            ["']? (?:\s*[=:]\s*|(?<=password)\s+) ["']?
        ) (?![$`]) [^\s"'&]+""",
    re.IGNORECASE | re.VERBOSE,
)
"""Matches passwords in commands of ``alerts``, other than passwords in addresses."""

_given: dict[str, str] = {}
"""Addresses with passwords that this process was given, by their form without password."""
_named: set[str] = set()
"""Addresses of servers and databases that the user of this process has given explicitly."""


def without_password(text: str) -> str:
    """Return ``text`` with ``***`` in place of the password of each address in it.

    >>> without_password("https://ada:secret@mlflow.example.org/")
    'https://ada:***@mlflow.example.org/'
    """
    return _QUERY.sub(rf"\g<before>{MARK}", _WORD.sub(_without_login, text))


def _without_login(word: re.Match[str]) -> str:
    """Return a word with ``***`` for the password of each login.

    Only the part up to the last @ is searched; otherwise each possible start of a login would scan
    the rest of the word.
    """
    end = word[0].rfind("@") + 1
    logins, rest = word[0][:end], word[0][end:]
    for login in (_LOGIN, _USER):
        logins = login.sub(rf"\g<before>{MARK}@", logins)
    return logins + rest


def refuse_passwords(study: Mapping[str, Any]) -> None:
    """Check that no value except ``tracking_uri`` contains an address with a password.

    A variable in place of a password, ``$NAME``, is allowed.

    Args:
        study: nested values of the study's keys.

    Raises:
        ValueError: a value contains a password; the message has the key and masks the password.
    """
    for key, text in _texts({name: study[name] for name in study if name != "tracking_uri"}):
        known = _VARIABLE.sub(MARK, text)
        shown = without_password(known)
        if key.startswith("alerts"):
            shown = _COMMAND.sub(rf"\g<before>{MARK}", shown)
            if shown != known:
                raise ValueError(
                    f"{key}={shown!r}: holds a password, which ledger and packages would show; put"
                    " it into a variable of the environment and name that, $VARIABLE, in the"
                    " command: its shell puts the value in"
                )
        if shown != known:
            raise ValueError(
                f"{key}={shown!r}: holds a password, which ledger, reports and MLflow would show;"
                " leave it out, and give it to the client in the environment or its file of"
                " credentials (AWS_SECRET_ACCESS_KEY, ~/.aws/credentials, PGPASSWORD, ~/.netrc)"
            )


def without_passwords(values: Any) -> Any:
    """Return nested values with ``***`` in place of the password of each address."""
    if isinstance(values, Mapping):
        return {without_password(str(k)): without_passwords(v) for k, v in values.items()}
    if isinstance(values, list | tuple):
        return [without_passwords(value) for value in values]
    return without_password(values) if isinstance(values, str) else values


def _texts(values: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield dotted key and text for each text in nested values, including the names of keys."""
    if isinstance(values, Mapping):
        for name, value in values.items():
            yield key or "study", str(name)
            yield from _texts(value, f"{key}.{name}" if key else str(name))
    elif isinstance(values, list | tuple):
        for value in values:
            yield from _texts(value, key)
    elif isinstance(values, str):
        yield key, values


def without_login(uri: str) -> str:
    """Return a server's address without user and password, to be shown as a link."""
    shown = without_password(uri)
    return re.sub(r"(?<=://)[^/?#]*@", "", shown, count=1)


def hide(uri: str) -> str:
    """Return an address without its password, and remember the password for :func:`reveal`.

    The password stays in the memory of this process.
    """
    shown = without_password(uri)
    if shown != uri:
        _given[shown] = uri
    return shown


def name_address(uri: str) -> None:
    """Record that the user of this process has given an address explicitly, in a study to run."""
    _named.add(_place(uri))


def is_named(uri: str) -> bool:
    """Return whether the user gave an address explicitly, in a study or in :data:`WHOLE`."""
    return _place(uri) in {*_named, _place(os.environ.get(WHOLE, ""))}


def _place(uri: str) -> str:
    """Return an address in a canonical form, without login and trailing slash."""
    return without_login(uri).rstrip("/")


def reveal(uri: str) -> str:
    """Return the address to connect to, with its password.

    Args:
        uri: the address as stored and shown, or complete.

    Raises:
        ValueError: the password is neither known to this process nor in the environment.
    """
    if not _MARKED.search(uri):
        return uri
    found = (
        _given.get(uri)
        or _whole(uri)
        or (_of_server(uri) if uri.startswith("http") else _of_database(uri))
    )
    if not found:
        raise ValueError(
            f"tracking_uri={uri!r}: its password is not stored; set {_variables(uri)} in the"
            " environment"
        )
    return found


def stored(events: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the masked addresses whose passwords a ledger contains.

    Earlier versions stored passwords in the ledger.
    """
    uris = [
        text
        for event in events
        if event["event"] == "planned" and "study" in event
        for _, text in _texts(event["study"])
    ]
    return list(dict.fromkeys(shown for uri in uris if (shown := without_password(uri)) != uri))


def _whole(uri: str) -> str:
    whole = os.environ.get(WHOLE, "")
    return whole if whole and without_password(whole) == uri and not _MARKED.search(whole) else ""


def _of_server(uri: str) -> str:
    """Return a server's address with the login from MLflow's environment variables.

    The address has no login if MLflow's client gets it from a token or a credentials file. Returns
    "" if no login is known.
    """
    parts = urllib.parse.urlsplit(uri)
    if password := os.environ.get(PASSWORD):
        user = urllib.parse.quote(
            os.environ.get(USER) or urllib.parse.unquote(parts.username or ""), safe=""
        )
        if not os.environ.get(USER) and parts.username == MARK:
            return ""  # the user name was a token, which is not known
        return uri.replace(
            f"//{MARK}@" if parts.username == MARK else f"//{parts.username or ''}:{MARK}@",
            f"//{user}:{urllib.parse.quote(password, safe='')}@",
            1,
        )
    return (
        without_login(uri)
        if os.environ.get(TOKEN) or Path(CREDENTIALS).expanduser().exists()
        else ""
    )


def _of_database(uri: str) -> str:
    """Return the address without password if PostgreSQL's client knows the password, else ""."""
    files = os.environ.get("PGPASSFILE") or Path(PGPASS).expanduser().exists()
    if uri.startswith("postgresql") and (os.environ.get("PGPASSWORD") or files):
        return re.sub(r"(?<=[?&])[^=&]*=\*\*\*&?", "", uri.replace(f":{MARK}@", "@", 1)).rstrip(
            "?&"
        )
    return ""


def _variables(uri: str) -> str:
    own = {"http": f"{USER} and {PASSWORD}", "postgresql": "PGPASSWORD (or ~/.pgpass)"}
    return " or ".join(
        [
            *(text for scheme, text in own.items() if uri.startswith(scheme)),
            f"{WHOLE}=<the whole address>",
        ]
    )
