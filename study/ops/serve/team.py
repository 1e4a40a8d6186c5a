"""MLflow for several people (``lns-study ui --team``): with logins, PostgreSQL and several worker
processes.

It differs from :mod:`study.ops.serve.ui` as follows:

- MLflow's basic-auth app stores users and permissions in the same database, in its own tables.
  Every user can read everything; the creator of an experiment manages it.
- A valid password is cached for :data:`AUTH_CACHE_SECONDS`, because checking it takes about 0.1 s.
- uvloop and httptools are required: without them uvicorn with two or more workers adds 44 ms to
  each response.
- Artifacts go through the server into a separate folder or bucket, and clients cannot choose
  another location (:mod:`study.ops.serve.team_guard`).
- The server runs in a temporary working directory that only contains MLflow's settings and is
  readable by its user only. Passwords and the database's address are not on a command line.

Limits: the server speaks HTTP, so for other machines use a proxy with TLS or an ssh tunnel. After a
change of password, workers may accept the old one for up to :data:`AUTH_CACHE_SECONDS`.
"""

from __future__ import annotations

import configparser
import importlib.util
import ipaddress
import os
import re
import secrets
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from study.ledger.storage import check_writable
from study.ops.serve.mlflow_server import LOGINS, SECRET, STORE
from study.ops.serve.ui import ENVIRONMENT, EVERYWHERE, command, listen, run
from study.tracking.address import FILE, HOST
from study.tracking.database_file import SIDES, check_files
from study.tracking_uri import without_password

PASSWORD = "MLFLOW_AUTH_ADMIN_PASSWORD"
USER = "MLFLOW_AUTH_ADMIN_USERNAME"
SHORTEST_PASSWORD = 12
"""Minimum length of a password in MLflow, in characters."""
AUTH_CACHE_SECONDS = 60
"""Seconds for which a valid password is cached."""
WORKERS = 4
PACKAGES = {
    "psycopg": "psycopg[binary]",
    "uvloop": "uvloop",
    "httptools": "httptools",
    "flask_wtf": "flask-wtf",
}
"""Packages that a team's server needs, by the name of the module."""


@dataclass(frozen=True, kw_only=True)
class Team:
    """A server for a team.

    Attributes:
        uri: database of the tracking store and of the users.
        storage: folder of the studies; must not be inside ``artifacts``, which the server serves.
        artifacts: folder, or address such as ``s3://bucket/folder``, for artifacts.
        host: host to listen on.
        port: port to listen on.
        workers: number of worker processes.
        names: host names of the server in addresses of browsers and clients, besides 127.0.0.1 and
            localhost.
    """

    uri: str
    storage: Path
    artifacts: str
    host: str
    port: int
    workers: int = WORKERS
    names: tuple[str, ...] = ()

    @property
    def local(self) -> bool:
        """Whether only this machine can connect to the server."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"


def check(team: Team) -> None:
    """Check packages, database, names, artifacts, port and password before the server starts.

    Raises:
        ValueError: a check fails; the message has the value, the rule and the remedy.
    """
    missing = [
        package for module, package in PACKAGES.items() if importlib.util.find_spec(module) is None
    ]
    if missing:
        raise ValueError(
            f"--team: needs {', '.join(missing)}, not installed; pip install 'lns-study[team]'"
        )
    _check_store(team)
    _check_names(team)
    _check_artifacts(team)
    listen(team.port, team.host).close()
    _check_password(team)


def serve(team: Team, say: Callable[[str], None]) -> int:
    """Run the server in the foreground until Ctrl-C or SIGTERM; return its exit code.

    The exit code is 0 if it was asked to end.
    """
    if not team.local:
        say(
            f"Listening on {team.host}: passwords are sent unencrypted unless a proxy with TLS is"
            " in front of it."
        )
    with tempfile.TemporaryDirectory(prefix="lns-study-team-") as folder:
        settings = Path(folder) / "basic_auth.ini"
        with open(settings, "w", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
            auth_settings(team.uri).write(file)
        with listen(team.port, team.host) as listening:
            words = command(team.artifacts, listening, workers=team.workers, names=team.names)
            where = HOST if team.host == EVERYWHERE else team.host
            address = f"http://{where}:{team.port}"
            return run(
                words, environment(team.uri, settings), listening, say, address, folder=folder
            )


def environment(uri: str, settings: Path) -> dict[str, str]:
    """Return the server's additional environment variables.

    The secret key of its web forms is generated at every start unless the user has set one.
    """
    return {
        **ENVIRONMENT,
        STORE: uri,
        LOGINS: str(settings),
        "MLFLOW_BASIC_AUTH_FAIL_CLOSED": "true",
        SECRET: os.environ.get(SECRET) or secrets.token_hex(32),
    }


def auth_settings(uri: str) -> configparser.ConfigParser:
    """Return MLflow's login settings.

    They do not contain the first admin's password, which MLflow reads from the environment.
    """
    settings = configparser.ConfigParser()
    settings["mlflow"] = {
        "default_permission": "READ",
        # MLflow reads the file with interpolation, so escape % as configparser does
        "database_uri": uri.replace("%", "%%"),
        "admin_username": os.environ.get(USER) or "admin",
        "authorization_function": "study.ops.serve.team_guard:authenticate",
        "auth_cache_ttl_seconds": str(AUTH_CACHE_SECONDS),
    }
    return settings


def _check_store(team: Team) -> None:
    if team.workers < 1:
        raise ValueError(
            f"--workers {team.workers}: must be at least 1; leave it out for {WORKERS}"
        )
    if team.uri.startswith("sqlite:") and team.workers > 1:
        raise ValueError(
            f"--workers {team.workers} over {team.uri}: sqlite lets one process write at a time and"
            " makes the others wait and fail (database is locked); use PostgreSQL,"
            " --backend-store-uri postgresql://user@host/database, or --workers 1"
        )
    if not team.uri.startswith(("sqlite:", "postgresql")):
        raise ValueError(
            f"--backend-store-uri {without_password(team.uri)}: must be a PostgreSQL database for a"
            " team; use postgresql://user@host/database"
        )
    if team.uri.startswith(FILE):
        _make_private(Path(team.uri.removeprefix(FILE)))


def _make_private(path: Path) -> None:
    """Make a database file, which contains password hashes, readable by its owner only.

    A file that does not exist is left to the server, which creates it with these permissions.

    Raises:
        ValueError: the permissions cannot be changed, because another user owns the file.
    """
    check_files(path)
    for side in SIDES:
        file = Path(f"{path.resolve()}{side}")
        try:
            if file.exists() and file.stat().st_mode & 0o077:
                file.chmod(0o600)
        except OSError as error:
            raise ValueError(
                f"--backend-store-uri {FILE}{path}: {file} has the hashes of passwords, and its"
                f" permissions cannot be set to 0600 ({error.strerror}); start the server as its"
                " owner"
            ) from None


def _check_names(team: Team) -> None:
    wrong = [
        name for name in team.names if not re.fullmatch(r"[A-Za-z0-9.-]+|\[[0-9A-Fa-f:]+\]", name)
    ]
    if wrong:
        raise ValueError(
            f"--allow-host {wrong[0]!r}: must be a host's name or address, without scheme, port or"
            " *; for example --allow-host mlflow.example.org"
        )
    if not team.local and not team.names:
        raise ValueError(
            f"--host {team.host}: the server must know the host name that others use, because it"
            " rejects other names (DNS rebinding); add --allow-host NAME, as in the address that"
            " browsers show"
        )


def _check_artifacts(team: Team) -> None:
    if team.artifacts.startswith("s3://") and importlib.util.find_spec("boto3") is None:
        raise ValueError(
            f"--artifacts {team.artifacts}: needs boto3, not installed; pip install"
            " 'lns-study[aws]'"
        )
    place = team.artifacts.removeprefix("file://")
    if "://" in place:
        return
    folder = Path(place)
    if team.storage.is_relative_to(folder):
        raise ValueError(
            f"--artifacts {team.artifacts}: must not hold the storage {team.storage}, because its"
            " files could be fetched from the server; use a folder of its own"
        )
    database = Path(team.uri.removeprefix("sqlite:///"))
    if team.uri.startswith("sqlite:///") and database.resolve().is_relative_to(folder.resolve()):
        raise ValueError(
            f"--artifacts {team.artifacts}: must not hold the database {database}, which has the"
            " users' passwords and could be fetched from the server; use a folder of its own"
        )
    check_writable(folder, "artifacts", "choose another with --artifacts /path/to/folder")


def _check_password(team: Team) -> None:
    """Check that the first admin has a password if the database has no users yet.

    Raises:
        ValueError: the password is missing or too short.
    """
    if _has_users(team.uri):
        return
    password = os.environ.get(PASSWORD, "")
    if len(password) < SHORTEST_PASSWORD:
        state = f"has {len(password)} characters" if password else "is not set"
        raise ValueError(
            f"{PASSWORD}: {state}, and the first start creates the user"
            f" {os.environ.get(USER) or 'admin'} with that password, of at least"
            f" {SHORTEST_PASSWORD} characters; set it in the environment"
        )


def _has_users(uri: str) -> bool:
    """Return whether the database already has users.

    Raises:
        ValueError: the database does not answer.
    """
    import sqlalchemy as sql

    if uri.startswith("sqlite:") and not Path(uri.removeprefix("sqlite:///")).exists():
        return False
    engine = sql.create_engine(uri, poolclass=sql.NullPool)
    try:
        with engine.connect() as database:
            known = sql.inspect(database).has_table("users")
            return (
                known
                and database.execute(sql.text("SELECT 1 FROM users LIMIT 1")).first() is not None
            )
    except sql.exc.SQLAlchemyError as error:
        cause = " ".join(str(getattr(error, "orig", None) or error).split())[:200]
        raise ValueError(
            f"--backend-store-uri {without_password(uri)}: the database does not answer ({cause});"
            " start it, correct the address, or give the password in PGPASSWORD or ~/.pgpass"
        ) from None
