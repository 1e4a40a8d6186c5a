"""Ray's tokens: which clusters require one, and to which cluster this process sends its own.

Every client of a Ray cluster can run code as its user.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from study import _compat
from study.errors import UserError

CHECK_ALIVE = "/ray.rpc.NodeInfoGcsService/CheckAlive"
ANSWER_SECONDS = 10.0
TOKEN = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN")
"""Variables by which a Ray of our own admits only our processes, which inherit them."""


def asks_nobody(address: str, headers: Mapping[str, str] | None = None) -> bool:
    """Tell whether the Ray whose control store is at ``address`` (host:port) requires no token
    beyond ``headers``.

    Raises:
        ConnectionError: neither a Ray that lets us in nor one that asks for a token answers.
    """
    import grpc

    with _channel(address) as channel:
        try:
            channel.unary_unary(CHECK_ALIVE)(
                b"", timeout=ANSWER_SECONDS, metadata=list((headers or {}).items())
            )
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.UNAUTHENTICATED:
                return False
            raise ConnectionError(f"{error.code().name}: {error.details()}") from None
    return True


def _channel(address: str) -> Any:
    """Return a gRPC channel like Ray's: with TLS if Ray uses it, and without a proxy."""
    import grpc

    options = [("grpc.enable_http_proxy", 0)]
    if os.environ.get("RAY_USE_TLS", "0").lower() not in ("1", "true"):
        return grpc.insecure_channel(address, options)
    chain, key, authority = _compat.ray_certificates()
    return grpc.secure_channel(
        address, grpc.ssl_channel_credentials(authority, key, chain), options
    )


def check_token(address: str, insecure: bool) -> None:
    """Refuse a cluster that requires no token, unless ``insecure``, or not one that we have.

    Raises:
        ConnectionError: no cluster answers there.
        UserError: it is refused.
    """
    place = _compat.ray_head(address)
    here = address == "auto" and not os.environ.get("RAY_ADDRESS")
    if here and not (owners := users_of(place)):
        raise ConnectionError(f"no node of the Ray at {place} runs on this machine")
    if here and os.getuid() not in owners:
        raise UserError(
            f"address='auto': the Ray of this machine, at {place}, is another user's, who would get"
            " this user's token; to join it all the same give its address"
        )
    mode = os.environ.get(TOKEN[0])
    if asks_nobody(place):
        if not insecure:
            raise UserError(
                f"address={address!r}: this Ray cluster asks nobody for a token, so everybody with"
                " network access can run code as its user and read the study's files; start it with"
                " RAY_AUTH_MODE=token (`ray get-auth-token --generate` makes the token), or use"
                " insecure=true if only you can reach it"
            )
    # as in ray.init: to a cluster by address, which may be another's, no token goes unasked
    elif not asks_nobody(place, _login(address == "auto" and mode is None)):
        raise UserError(
            f"address={address!r}: this Ray cluster asks for a token, and this process has no valid"
            f" one (RAY_AUTH_MODE={mode or ''}); set RAY_AUTH_MODE=token, and put the cluster's"
            " token into ~/.ray/auth_token, or its file's name into RAY_AUTH_TOKEN_PATH"
        )


def users_of(place: str) -> set[int]:
    """Return the users whose raylets on this machine belong to the cluster at ``host:port``."""
    return {
        process.info["uids"].real
        for process in psutil.process_iter(["uids", "cmdline"])
        if process.info["uids"] and f"--gcs-address={place}" in (process.info["cmdline"] or ())
    }


def _login(unasked: bool) -> dict[str, str]:
    """Return the headers with this process's token for Ray; none if it has no token.

    Args:
        unasked: whether to take one although RAY_AUTH_MODE does not say so.
    """
    from ray.exceptions import AuthenticationError

    loader = _compat.ray_token_loader()
    with contextlib.suppress(AuthenticationError):
        if loader.has_token(ignore_auth_mode=unasked):
            return dict(loader.get_token_for_http_header(ignore_auth_mode=unasked))
    return {}


def keep_token(path: Path) -> None:
    """Make Ray's token file, which Ray lets everybody on the machine read, its user's alone."""
    for place, mode in ((path.parent, 0o700), (path, 0o600)):
        if place.exists() and place.stat().st_uid == os.getuid():
            place.chmod(mode)
