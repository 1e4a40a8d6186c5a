"""Checkpoints in an object store: uploaded when complete, downloaded when a trial resumes.

The manifest is uploaded last and removed first, so an interrupted upload does not count as a
checkpoint. Downloaded files are compared with the digests in the manifest.
"""

from __future__ import annotations

from pathlib import Path

from trainers.checkpoint.manifest import STATE, digest_file, file_digests, parse_state, read_state
from trainers.files import write_whole
from trainers.object_store import Store, check_place, is_url, local_folder


def upload(folder: Path, url: str) -> None:
    """Upload the checkpoint in ``folder`` to ``url``.

    Raises:
        OSError: the store does not answer.
    """
    store = Store(url)
    for name in file_digests(read_state(folder)):
        store.put_file(name, folder / name)
    store.put(STATE, (folder / STATE).read_bytes())


def fetched(place: str) -> Path:
    """Return the local folder of a checkpoint at a path or URL; download it from a URL.

    Raises:
        ValueError: the files do not match their digests, or the URL is malformed.
        OSError: the checkpoint is missing, or the store does not answer.
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
    """Return the URLs of the complete checkpoints of the trial at ``url``, newest first.

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
