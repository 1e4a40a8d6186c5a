"""Checkpoints in an object store: sent when they are whole, fetched where a trial goes on.

A checkpoint's manifest is its last file to be sent and its first to be removed, so that one whose
upload broke off is none. What was fetched is compared with the digests in its manifest.
"""

from __future__ import annotations

from pathlib import Path

from trainers.checkpoint.manifest import STATE, digest_file, file_digests, parse_state, read_state
from trainers.files import write_whole
from trainers.object_store import Store, check_place, is_url, local_folder


def upload(folder: Path, url: str) -> None:
    """Send the checkpoint in ``folder`` to ``url``.

    Raises:
        OSError: the store does not answer.
    """
    store = Store(url)
    for name in file_digests(read_state(folder)):
        store.put_file(name, folder / name)
    store.put(STATE, (folder / STATE).read_bytes())


def fetched(place: str) -> Path:
    """Return the folder of a checkpoint, a path or a URL, whose files are fetched first.

    Raises:
        ValueError: they do not match their digests, or the URL is none that checkpoints have.
        OSError: there is no checkpoint, or the store does not answer.
    """
    check_place("checkpoint", place)
    folder = local_folder(place)
    if not is_url(place):
        return folder
    store = Store(place)
    manifest = store.get(STATE)
    folder.mkdir(parents=True, exist_ok=True)
    for name, digest in file_digests(parse_state(manifest, folder)).items():
        path = folder / name
        if not path.is_file() or digest_file(path) != digest:
            path.parent.mkdir(parents=True, exist_ok=True)
            store.get_file(name, path)
            if digest_file(path) != digest:
                raise ValueError(
                    f"{place}: {name} does not match its digest; the checkpoint is damaged, use an"
                    " earlier one"
                )
    write_whole(folder / STATE, manifest)
    return folder


def remote_checkpoints(url: str) -> list[str]:
    """Return the URLs of the whole checkpoints of the trial at ``url``, the newest first.

    Raises:
        OSError: the store does not answer.
    """
    found = Store(url).names()
    return [
        f"{url}/{name.removesuffix(f'/{STATE}')}"
        for name in reversed(found)
        if name.endswith(f"/{STATE}") and name.count("/") == 1
    ]


def remove(url: str) -> None:
    """Remove the checkpoint at ``url``.

    Raises:
        OSError: the store does not answer.
    """
    store = Store(url)
    store.remove(STATE)
    for name in store.names():
        store.remove(name)
