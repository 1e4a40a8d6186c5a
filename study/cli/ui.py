"""The command ``lns-study ui``."""

from __future__ import annotations

import argparse
from pathlib import Path

from study.cli.manage import Commands, add_storage
from study.cli.run import say_plainly
from study.errors import UserError, refusals
from study.ledger.storage import check_writable
from study.tracking_uri import WHOLE, reveal, without_password
from trainers.object_store import local_folder


def add_ui(commands: Commands) -> None:
    """Add the command ``ui`` to argparse's subparsers."""
    ui = commands.add_parser(
        "ui",
        help="open the studies in MLflow's web interface",
        description=(
            "Serve MLflow's web interface for a storage folder on 127.0.0.1, until Ctrl-C."
        ),
    )
    add_storage(ui)
    store = (
        "another MLflow database to serve, such as sqlite:////path/mlflow.db (default: the"
        " storage's)"
    )
    ui.add_argument(
        "--tracking-uri", "--backend-store-uri", dest="tracking_uri", metavar="URI", help=store
    )
    ui.add_argument("--port", type=int, default=5000, help="port to listen on (default: 5000)")
    team = ui.add_argument_group("for a team, with logins, see docs/howto/team-mlflow.md")
    team.add_argument(
        "--team", action="store_true", help="require logins; needed by the options below"
    )
    team.add_argument("--workers", type=int, help="processes that answer requests (default: 4)")
    team.add_argument("--host", help="address to listen on (default: 127.0.0.1)")
    team.add_argument(
        "--allow-host",
        action="append",
        metavar="NAME",
        help="a host name that requests may use, in addition to 127.0.0.1; can be repeated",
    )
    team.add_argument(
        "--artifacts",
        metavar="WHERE",
        help="folder, or s3://... , of artifacts (default: the storage's artifacts)",
    )
    ui.set_defaults(command=_ui)


def _ui(options: argparse.Namespace) -> int:
    from study.config import default_tracking_uri
    from study.ops.serve.ui import check_servable, listen, serve
    from study.tracking.address import check_default, pages_of
    from study.tracking.artifacts import Artifacts
    from study.tracking.database_file import refuse_strange

    with refusals():
        if options.tracking_uri:
            refuse_password(options.tracking_uri)
        uri = reveal(options.tracking_uri or default_tracking_uri(options.storage))
        if not options.tracking_uri:
            check_default(uri, options.storage)
        refuse_strange(uri)
    storage = local_folder(options.storage)
    if options.team:
        return _ui_of_team(options, uri, storage)
    with refusals():
        for name in ("workers", "host", "allow_host", "artifacts"):
            if getattr(options, name) is not None:
                raise UserError(
                    f"--{name.replace('_', '-')}: is for a team's server, which asks for logins;"
                    " add --team"
                )
        check_servable(uri)
        check_writable(storage, "storage")
        listen(options.port).close()
    Artifacts(uri, storage / "artifacts").follow()
    pages = pages_of(storage, uri)
    return serve(uri, storage / "artifacts", options.port, say_plainly, pages)


def refuse_password(uri: str) -> None:
    """Check that a database address has no password, because command lines are public.

    Raises:
        ValueError: it has a password.
    """
    shown = without_password(uri)
    if shown != uri:
        raise ValueError(
            f"--backend-store-uri {shown}: holds a password, and every user of the machine can read"
            " command lines; give the address as it is shown here, with ***, and the password in"
            f" PGPASSWORD or ~/.pgpass, or the whole address in {WHOLE}"
        )


def _ui_of_team(options: argparse.Namespace, uri: str, storage: Path) -> int:
    from study.ops.serve.team import WORKERS, Team, check, serve
    from study.ops.serve.ui import check_servable
    from study.tracking.address import HOST

    artifacts = options.artifacts or str(storage / "artifacts")
    file = uri.removeprefix("sqlite:///")
    team = Team(
        uri=uri if file == uri else f"sqlite:///{Path(file).resolve()}",
        storage=storage,
        artifacts=artifacts if "://" in artifacts else str(Path(artifacts).expanduser().resolve()),
        host=options.host or HOST,
        port=options.port,
        workers=WORKERS if options.workers is None else options.workers,
        names=tuple(options.allow_host or ()),
    )
    with refusals():
        check_servable(uri)
        check_writable(storage, "storage")
        check(team)
    return serve(team, say_plainly)
