"""The package that is sent to a cluster: the study's files, the running lns-study code as a wheel,
and a digest of both.

The wheel is built from the running code, whether that is a checkout or an installation. The first
digits of its digest are part of its version (PEP 440's local label), so that pip's cache does not
confuse two builds. It declares no dependencies, because they are part of the nodes' image; a node
that lacks one fails at import instead of downloading another torch.

The package leaves out names that begin with a dot (``.git``, ``.env``), caches, virtual
environments, folders of studies, MLflow's database and its artifacts, linked folders, lns-study's
own packages, and the data (``trial.data.root``, ``$LNS_STUDY_DATA``). :func:`pack` raises for files
that :func:`study.engines.user_files.check_sent` rejects, for files that shadow a module of
lns-study, for code of the study outside the folder, and for more than :data:`MOST_BYTES`.

The folder name contains the digest of the files and the command. So the same launch finds its
package again, and a waiting or running job keeps its own. If files in that folder have changed, the
launch writes another folder beside it.

Format of wheels: https://packaging.python.org/en/latest/specifications/binary-distribution-format/
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import os
import re
import shlex
import shutil
import tempfile
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import lns_ops
import trainers
from study.config import StudyConfig
from study.config.compose import find_study
from study.engines.user_files import check_sent, own_secrets, user_files
from study.ledger.log import FILE
from study.program import NAME, own_version
from study.tracking_uri import MARK, without_password
from trainers.object_store import local_folder

STAGE = ".lns-study"
"""Name of the folder, in the working directory, that contains the packages."""
MOST_BYTES = 32 * 2**20
"""Maximum total size of the study's files, in bytes."""
DIGITS = 12
"""Number of hexadecimal digits of a digest in names."""
DATABASE = "mlflow.db"
"""File name of MLflow's database in a storage; its side files have names that begin with it."""
CACHES = {"__pycache__", "mlruns", "node_modules"}
EPOCH = (1980, 1, 1, 0, 0, 0)
"""Timestamp of every file in the wheel (the earliest in zip), so equal code gives equal wheels."""
SCRIPTS = "lns_study"
"""Module that scripts import."""
OURS = ("study", "trainers", "lns_ops", SCRIPTS)
LONGEST_SLUG = 100
"""Maximum length of the study's name within a folder name, in characters (file systems allow 255
for the whole name)."""
WHEEL = "Wheel-Version: 1.0\nGenerator: lns-study\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
START = """\
#!/usr/bin/env bash
# Runs the study of this folder; the job controller's signals reach it as they are.
cd "$(dirname "${{BASH_SOURCE[0]}}")/folder"
exec {command}
"""


@dataclass(frozen=True, kw_only=True)
class Package:
    """A package to send to a cluster, in its own folder.

    Attributes:
        stage: the folder; it contains ``folder/`` (the study's files), the wheel, ``site/`` (the
            unpacked wheel), ``start.sh`` (runs the study) and ``package.json``.
        wheel: path of the wheel.
        digest: sha256 over the study's files, the wheel and the command, in hexadecimal digits.
        files: number of the study's files.
        links: linked folders, which are left out.
        size: size of the study's files and the wheel, in bytes.
        command: words that run the study on the cluster.
    """

    stage: Path
    wheel: Path
    digest: str
    files: int
    links: tuple[str, ...]
    size: int
    command: tuple[str, ...]

    @property
    def folder(self) -> Path:
        """Folder with the study's files."""
        return self.stage / "folder"


def pack(config: str, words: Sequence[str], loaded: StudyConfig) -> Package:
    """Write a package into ``.lns-study/NAME-DIGEST`` of the working directory.

    Args:
        config: path or name of the study, as the user gave it.
        words: options and overrides of ``lns-study run`` on the cluster.
        loaded: the resulting config.

    Raises:
        ValueError: the storage is a relative path, the words or a file contain a secret, the config
            or code is outside the working directory, a file shadows a module of lns-study, or the
            files are too large.
    """
    _check(config, words, loaded)
    travelling, top = _config_there(config)
    files, links = _study_files(top, loaded)
    modules = _modules()
    here = f"{Path.cwd().resolve()}/"
    told = [re.sub(rf"={re.escape(here)}(?=[^=]*\.py:\w+$)", "=", word) for word in words]
    # -P: files of the folder cannot shadow our modules
    command = ("python", "-P", "-m", "study", "run", travelling, "--job", *told, "address=auto")
    digest = _digest([*files, *modules], *command, loaded.storage)
    place = Path(STAGE).resolve() / f"{loaded.slug[:LONGEST_SLUG]}-{digest[:DIGITS]}"
    stage = _write(place, files, modules, command)
    (wheel,) = stage.glob("*.whl")
    size = sum(path.stat().st_size for _, path in files) + wheel.stat().st_size
    about = {"study": loaded.name, "code": digest, "wheel": wheel.name, "bytes": size}
    (stage / "package.json").write_text(json.dumps({**about, "command": command}, indent=1) + "\n")
    return Package(
        stage=stage,
        wheel=wheel,
        digest=digest,
        files=len(files),
        links=tuple(links),
        size=size,
        command=command,
    )


def _write(
    place: Path,
    files: list[tuple[str, Path]],
    modules: list[tuple[str, Path]],
    command: Sequence[str],
) -> Path:
    """Write a package to a temporary folder, then rename it, so that it is never incomplete.

    Returns:
        Its folder: ``place``, or a numbered one beside it if ``place`` exists with other contents
        (a job that ran there may have changed it).
    """
    place.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place.parent, prefix=".new-") as scratch:
        new = Path(scratch) / "package"
        (new / "folder").mkdir(parents=True)
        for name, path in files:
            target = new / "folder" / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, target)
        with zipfile.ZipFile(_write_wheel(new, modules)) as archive:
            archive.extractall(new / "site")
        (new / "start.sh").write_text(START.format(command=shlex.join(command)))
        stage, number = place, 1
        while not _moved(new, stage):
            number += 1
            stage = place.with_name(f"{place.name}-{number}")
        return stage


def _moved(new: Path, stage: Path) -> bool:
    """Rename a package's folder to ``stage``; return whether ``stage`` now has this package."""
    try:
        new.rename(stage)
    except OSError:
        if not stage.is_dir():
            raise
        with contextlib.suppress(OSError):  # a job may be changing it
            return _contents(stage) == _contents(new)
        return False
    return True


def _contents(stage: Path) -> str:
    """Return the digest of a package's files, including the names of folders and links but without
    bytecode."""
    patterns = ("*.whl", "start.sh", "site/**/*", "folder/**/*")
    found = sorted(
        (path.relative_to(stage).as_posix() + "@" * path.is_symlink(), path)
        for pattern in patterns
        for path in stage.glob(pattern)
        if "__pycache__" not in path.relative_to(stage).parts
    )
    return _digest([each for each in found if each[1].is_file()], *(name for name, _ in found))


def _check(config: str, words: Sequence[str], loaded: StudyConfig) -> None:
    """Check that the command reveals no password and that the storage can be reached from nodes.

    Raises:
        ValueError: a word contains a password, or the storage is a relative path.
    """
    for word in (config, *words):
        shown = without_password(word)
        for secret in own_secrets().values():
            shown = shown.replace(secret, MARK)
        if shown != word:
            raise ValueError(
                f"{shown}: must contain no password, because every user of the cluster can read the"
                " job's command; leave it out, and set the variable of its user and password in the"
                " environment of the nodes (docs/howto/cluster.md)"
            )
    if not os.path.isabs(loaded.storage) and "://" not in loaded.storage:
        raise ValueError(
            f"storage={loaded.storage!r}: must not be a relative path, which would be deleted with"
            " the job's folder; use an absolute path that every node sees, for example"
            " storage=/shared/studies, or s3:// or gs://bucket/prefix"
        )


def _config_there(config: str) -> tuple[str, Path]:
    """Return the config's path or name on the cluster, and the folder whose files are sent.

    This folder is the working directory, or its ``conf`` if ``config`` is a name in ``conf/study``.
    The path is relative to it.
    """
    here = Path.cwd().resolve()
    place, colon, attribute = config.partition(".py:")
    file = f"{place}.py" if colon else config
    if not any(Path(name).is_file() for name in (file, f"{file}.yaml")):
        find_study(config)
        return config, here / "conf"
    given = Path(file if Path(file).is_file() else f"{file}.yaml").absolute()
    path = Path(os.path.normpath(given))
    path = path if path.is_relative_to(here) else path.resolve()
    if not path.is_relative_to(here):
        raise ValueError(
            f"config {config!r}: must be in the current folder {here}, whose files are sent;"
            " change to its folder first"
        )
    return path.relative_to(here).as_posix() + (f":{attribute}" if colon else ""), here


def _study_files(top: Path, loaded: StudyConfig) -> tuple[list[tuple[str, Path]], list[str]]:
    """Return name and path of the files in ``top`` that travel, sorted by name, and the linked
    folders, which do not."""
    here, elsewhere = Path.cwd().resolve(), _elsewhere(loaded)
    links: list[Path] = []
    found = sorted(
        (path.relative_to(here).as_posix(), path) for path in _walk(top, elsewhere, links)
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
        _check_name(name)
        check_sent(name, path, here)
    _check_code(loaded, {path for _, path in found}, top)
    return found, sorted(os.path.relpath(link, here) for link in links)


def _check_code(loaded: StudyConfig, found: set[Path], top: Path) -> None:
    """Check that every code file of the study is among the files that are sent.

    Raises:
        ValueError: one is not.
    """
    for path in user_files(loaded):
        if Path(os.path.normpath(path)) not in found and path.resolve() not in found:
            raise ValueError(
                f"{path}: the study uses this code, and only files in {top} are sent"
                " (docs/howto/cluster.md); move it there, but not into a hidden folder, and launch"
                " the study's file from its folder"
            )


def _check_name(name: str) -> None:
    """Check the name of a file that is sent.

    Raises:
        ValueError: the file would shadow a module of lns-study, or its name is not UTF-8.
    """
    if re.fullmatch(
        rf"({'|'.join(OURS)})(\.(py|so|pyc|abi3\.so)|\.cpython-.*|/__init__\..*)", name
    ):
        raise ValueError(
            f"{name}: would be imported on the cluster in place of lns-study's own"
            f" {re.split('[./]', name)[0]}; give it another name"
        )
    try:
        name.encode()
    except UnicodeEncodeError:
        raise ValueError(
            f"{os.fsencode(name)!r}: this file name is not UTF-8, so each node could decode it"
            " differently; rename it"
        ) from None


def _elsewhere(loaded: StudyConfig) -> set[Path]:
    """Return the folders that are not copied: storage, data, and our packages (the wheel has
    them)."""
    named = (loaded.storage, loaded.trial.data.root, os.environ.get("LNS_STUDY_DATA"))
    return {local_folder(name) for name in named if name} | set(_packages())


def _packages() -> list[Path]:
    """Return the folders of our three packages, as imported by this process."""
    others = [Path(str(module.__file__)).resolve().parent for module in (trainers, lns_ops)]
    return [Path(__file__).resolve().parents[2], *others]


def _walk(top: Path, left_out: set[Path], links: list[Path] | None = None) -> Iterator[Path]:
    """Yield the files to send; append the linked folders, which are left out, to ``links``."""
    for folder, folders, names in os.walk(top):
        kept = [path for name in folders if _travels(path := Path(folder) / name, left_out)]
        if links is not None:
            links += [path for path in kept if path.is_symlink()]
        folders[:] = sorted(path.name for path in kept if not path.is_symlink())
        yield from (
            path
            for name in names
            if not name.startswith((".", DATABASE)) and (path := Path(folder) / name).is_file()
        )


def _travels(folder: Path, left_out: set[Path]) -> bool:
    """Return whether a folder is sent.

    Hidden folders, caches, virtual environments, folders of studies, MLflow's artifacts and the
    folders in ``left_out`` are not.
    """
    return not (
        folder.name.startswith(".")
        or folder.name in CACHES
        or folder.resolve() in left_out
        or (folder / "pyvenv.cfg").exists()
        or (folder / FILE).exists()
        or (folder.name == "artifacts" and (folder.parent / DATABASE).exists())
    )


def _modules() -> list[tuple[str, Path]]:
    """Return name and path of each file in the wheel.

    These are the files of our three packages, ``conf`` as ``study/conf``, and the module
    :data:`SCRIPTS`. Markdown pages are left out, as in the published wheel.
    """
    name = f"{SCRIPTS}.py"
    found = {name: Path(__file__).resolve().parents[3] / name}
    for top in _packages():
        found |= {
            f"{top.name}/{path.relative_to(top).as_posix()}": path
            for path in _walk(top, set())
            if path.suffix != ".md"
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


def _digest(files: Iterable[tuple[str, Path]], *words: str) -> str:
    """Return the sha256, in hexadecimal digits, of ``words`` and of each file's name, executable
    bit and contents, in order."""
    total = hashlib.sha256("\0".join(words).encode())
    for name, path in files:
        runs = "x" if os.access(path, os.X_OK) else ""
        total.update(f"{name}\0{runs}{hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return total.hexdigest()


def _write_wheel(folder: Path, modules: list[tuple[str, Path]]) -> Path:
    """Build a wheel of the running code; return its path."""
    public = own_version().partition("+")[0]
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
