"""What travels to a cluster: the study's files, this very version of the package as a wheel, and
one digest of both.

The wheel is written from the code that is running, be it a checkout or an installation, with the
first digits of its digest in its version (PEP 440's local label) so that no cache of pip confuses
two of them. It names no dependencies: the nodes' image has them, and a node that lacks one fails at
import instead of fetching a torch of its own.

Left out are names that begin with a dot (``.git``, ``.env``), caches, virtual environments, folders
of studies, and the data (``trial.data.root``, ``$LNS_STUDY_DATA``). A file with a password or
what :data:`KEY` matches is refused, and so are a link to a hidden file and a folder of more than
:data:`MOST_BYTES`.

Format of wheels: https://packaging.python.org/en/latest/specifications/binary-distribution-format/
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import shlex
import shutil
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import lns_ops
import trainers
from study.config import StudyConfig
from study.config.compose import find_study
from study.ledger.log import FILE
from study.program import NAME
from study.tracking_uri import without_password
from trainers.object_store import local_folder

STAGE = ".lns-study"
"""Folder, in the current one, in which what is launched is put together."""
MOST_BYTES = 32 * 2**20
"""Largest size of the study's files, in bytes."""
DIGITS = 12
"""Number of digits of a digest in names."""
CACHES = {"__pycache__", "mlruns", "node_modules"}
EPOCH = (1980, 1, 1, 0, 0, 0)
"""Time of every file in the wheel, the earliest that zip has: equal code makes an equal wheel."""
KEY = re.compile(
    rb"""-----BEGIN\ [A-Z ]*PRIVATE\ KEY-----
      | aws_secret_access_key["']?\s*[=:]\s*["']?[a-z0-9/+]{40}
      | "refresh_token"\s*:\s*"[^"]{20}""",
    re.IGNORECASE | re.VERBOSE,
)
"""Private keys in PEM form, and the secrets that the tools of object stores write to files."""
WHEEL = "Wheel-Version: 1.0\nGenerator: lns-study\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
START = """\
#!/usr/bin/env bash
# Runs the study of this folder; the job controller's signals reach it as they are.
cd "$(dirname "${{BASH_SOURCE[0]}}")/folder"
exec {command}
"""


@dataclass(frozen=True, kw_only=True)
class Package:
    """What travels, in a folder of its own.

    Attributes:
        stage: the folder; it holds ``folder/`` (the study's files), the wheel, ``site/`` (the wheel
            unpacked), ``start.sh`` (runs the study there) and ``package.json``.
        wheel: path of the wheel.
        digest: sha256 over the study's files and the wheel, in hexadecimal digits.
        files: number of the study's files.
        size: bytes of the study's files and the wheel.
        command: words that run the study on the cluster.
    """

    stage: Path
    wheel: Path
    digest: str
    files: int
    size: int
    command: tuple[str, ...]

    @property
    def folder(self) -> Path:
        """Folder with the study's files."""
        return self.stage / "folder"


def pack(config: str, words: Sequence[str], loaded: StudyConfig) -> Package:
    """Put together what travels, in ``.lns-study/NAME-DIGEST`` of the current folder.

    Args:
        config: path or name of the study, as the user gave it.
        words: options and overrides of ``lns-study run`` on the cluster.
        loaded: the config that they make.

    Raises:
        ValueError: a relative storage; a password in the words or a file; a config outside the
            current folder; too large a folder.
    """
    _check(config, words, loaded)
    files = _study_files(config, loaded)
    modules = _modules()
    digest = _digest([*files, *modules])
    stage = Path(STAGE).resolve() / f"{loaded.slug}-{digest[:DIGITS]}"
    shutil.rmtree(stage, ignore_errors=True)
    for name, path in files:
        target = stage / "folder" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
    (stage / "folder").mkdir(parents=True, exist_ok=True)
    wheel = _write_wheel(stage, modules)
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(stage / "site")
    command = ("python", "-m", "study", "run", config, "--job", *words, "address=auto")
    (stage / "start.sh").write_text(START.format(command=shlex.join(command)))
    size = sum(path.stat().st_size for _, path in files) + wheel.stat().st_size
    about = {"study": loaded.name, "code": digest, "wheel": wheel.name, "bytes": size}
    (stage / "package.json").write_text(json.dumps({**about, "command": command}, indent=1) + "\n")
    return Package(
        stage=stage, wheel=wheel, digest=digest, files=len(files), size=size, command=command
    )


def _check(config: str, words: Sequence[str], loaded: StudyConfig) -> None:
    """Refuse what would not work on the cluster, or would tell it a password."""
    for word in (config, *words):
        if without_password(word) != word:
            raise ValueError(
                f"{without_password(word)}: holds a password, which every user of the cluster could"
                " read in the job's command; leave it out, and set the variable of its user and"
                " password in the environment of the nodes (docs/howto/cluster.md)"
            )
    if not os.path.isabs(loaded.storage) and "://" not in loaded.storage:
        raise ValueError(
            f"storage={loaded.storage!r}: a relative path ends with the job's folder; use an"
            " absolute path that every node sees, for example storage=/shared/studies, or"
            " s3:// or gs://bucket/prefix"
        )


def _study_files(config: str, loaded: StudyConfig) -> list[tuple[str, Path]]:
    """Return name and path of the files that travel, sorted by name.

    Those are the files of the current folder, or of its ``conf`` alone if ``config`` is a name in
    ``conf/study``.
    """
    here = Path.cwd().resolve()
    path = find_study(config).resolve()
    by_name = not Path(config).is_file() and not Path(f"{config}.yaml").is_file()
    if not by_name and not path.is_relative_to(here):
        raise ValueError(
            f"config {config!r}: lies outside the current folder {here}, which is what travels;"
            " change to its folder first"
        )
    top = here / "conf" if by_name else here
    found = sorted(
        (path.relative_to(here).as_posix(), path) for path in _walk(top, _elsewhere(loaded))
    )
    size = sum(path.stat().st_size for _, path in found)
    if size > MOST_BYTES:
        largest = max(found, key=lambda entry: entry[1].stat().st_size)
        raise ValueError(
            f"{top}: its files are {size / 2**20:.0f} MiB, the largest {largest[0]}; at most"
            f" {MOST_BYTES >> 20} MiB travel: keep data and results elsewhere, or launch from a"
            " folder with the study alone"
        )
    for name, path in found:
        _check_link(name, path, here)
        _check_file(name, path)
    return found


def _elsewhere(loaded: StudyConfig) -> set[Path]:
    """Return the folders that do not travel: the storage and the data."""
    named = (loaded.storage, loaded.trial.data.root, os.environ.get("LNS_STUDY_DATA"))
    return {local_folder(name) for name in named if name}


def _walk(top: Path, left_out: set[Path]) -> Iterator[Path]:
    for folder, folders, names in os.walk(top):
        kept = [name for name in folders if _travels(Path(folder) / name, left_out)]
        folders[:] = sorted(kept)
        yield from (
            path
            for name in names
            if not name.startswith(".") and (path := Path(folder) / name).is_file()
        )


def _travels(folder: Path, left_out: set[Path]) -> bool:
    """Tell whether a folder travels: neither hidden, cache, environment, study nor left out."""
    return not (
        folder.name.startswith(".")
        or folder.name in CACHES
        or folder.is_symlink()
        or folder.resolve() in left_out
        or (folder / "pyvenv.cfg").exists()
        or (folder / FILE).exists()
    )


def _check_link(name: str, path: Path, here: Path) -> None:
    """Refuse a link whose target would not travel by its own name, as files of secrets do not."""
    way = os.path.relpath(path.resolve(), here)
    if any(part.startswith(".") and part != ".." for part in Path(way).parts):
        raise ValueError(
            f"{name}: is a link to {way}, a hidden file, of which none travels to the cluster;"
            " remove the link, or put a copy of the file in its place"
        )


def _check_file(name: str, path: Path) -> None:
    content = path.read_bytes()
    text = content.decode(errors="replace")
    if KEY.search(content) or without_password(text) != text:
        raise ValueError(
            f"{name}: holds a password or a secret key, and would travel to the cluster; move it"
            " out of the study's folder, and give it to the nodes as a variable of their"
            " environment (docs/howto/cluster.md)"
        )


def _modules() -> list[tuple[str, Path]]:
    """Return name and path of every file of the three packages, ``conf`` as the wheel has it."""
    found: dict[str, Path] = {}
    for top in (
        Path(__file__).resolve().parents[1],
        *(Path(str(module.__file__)).resolve().parent for module in (trainers, lns_ops)),
    ):
        found |= {
            f"{top.name}/{path.relative_to(top).as_posix()}": path for path in _walk(top, set())
        }
        if (
            top.name == "study"
            and (beside := top.parent / "conf").is_dir()
            and not (top / "conf").is_dir()
        ):
            found |= {
                f"study/conf/{path.relative_to(beside).as_posix()}": path
                for path in _walk(beside, set())
            }
    return sorted(found.items())


def _digest(files: Iterable[tuple[str, Path]]) -> str:
    """Return the sha256 of names and contents, in order."""
    total = hashlib.sha256()
    for name, path in files:
        total.update(f"{name}\0{hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return total.hexdigest()


def _write_wheel(folder: Path, modules: list[tuple[str, Path]]) -> Path:
    """Write the wheel of the running code; return its path."""
    public = metadata.version(NAME).partition("+")[0]
    version = f"{public}+code.{_digest(modules)[:DIGITS]}"
    info = f"lns_study-{version}.dist-info"
    about = f"Metadata-Version: 2.1\nName: {NAME}\nVersion: {version}\n"
    points = f"[console_scripts]\n{NAME} = study.cli:main\n"
    contents = {name: path.read_bytes() for name, path in modules} | {
        f"{info}/METADATA": about.encode(),
        f"{info}/WHEEL": WHEEL.encode(),
        f"{info}/entry_points.txt": points.encode(),
    }
    record = "".join(f"{name},{_hash(text)},{len(text)}\n" for name, text in contents.items())
    contents[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n".encode()
    path = folder / f"lns_study-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in contents.items():
            archive.writestr(zipfile.ZipInfo(name, EPOCH), text, zipfile.ZIP_DEFLATED)
    return path


def _hash(content: bytes) -> str:
    encoded = base64.urlsafe_b64encode(hashlib.sha256(content).digest())
    return f"sha256={encoded.rstrip(b'=').decode()}"
