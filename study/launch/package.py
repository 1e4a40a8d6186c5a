"""What travels to a cluster: the study's files, this very version of the package as a wheel, and
one digest of both.

The wheel is written from the code that is running, be it a checkout or an installation, with the
first digits of its digest in its version (PEP 440's local label) so that no cache of pip confuses
two of them. It names no dependencies: the nodes' image has them, and a node that lacks one fails at
import instead of fetching a torch of its own.

Left out are names that begin with a dot (``.git``, ``.env``), caches, virtual environments, folders
of studies, MLflow's database and artifacts beside them, linked folders, this package's own, and the
data (``trial.data.root``, ``$LNS_STUDY_DATA``). Refused are what
:func:`study.execution.user_files.check_sent` refuses, what would be imported in place of this
package, code of the study that would stay here, and a folder of more than :data:`MOST_BYTES`.

The package's folder is named by all that it holds, the command included: a job that waits or runs
keeps its own, and the same launch again finds it, unless something in it has changed: then it makes
another one beside it.

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
from study.execution.user_files import check_sent, own_secrets, user_files
from study.ledger.log import FILE
from study.program import NAME, own_version
from study.tracking_uri import MARK, without_password
from trainers.object_store import local_folder

STAGE = ".lns-study"
"""Folder, in the current one, in which what is launched is put together."""
MOST_BYTES = 32 * 2**20
"""Largest size of the study's files, in bytes."""
DIGITS = 12
"""Number of digits of a digest in names."""
DATABASE = "mlflow.db"
"""MLflow's database of a storage, beside its artifacts; files that it keeps begin likewise."""
CACHES = {"__pycache__", "mlruns", "node_modules"}
EPOCH = (1980, 1, 1, 0, 0, 0)
"""Time of every file in the wheel, the earliest that zip has: equal code makes an equal wheel."""
SCRIPTS = "lns_study"
"""Module that scripts import."""
OURS = ("study", "trainers", "lns_ops", SCRIPTS)
LONGEST_SLUG = 100
"""Most characters of a study's name in that of its package, of which a file system takes 255."""
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
        digest: sha256 over the study's files, the wheel and the command, in hexadecimal digits.
        files: number of the study's files.
        links: linked folders, which do not travel.
        size: bytes of the study's files and the wheel.
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
    """Put together what travels, in ``.lns-study/NAME-DIGEST`` of the current folder.

    Args:
        config: path or name of the study, as the user gave it.
        words: options and overrides of ``lns-study run`` on the cluster.
        loaded: the config that they make.

    Raises:
        ValueError: a relative storage; a secret in the words or a file; a config or code outside
            the current folder; a file in the place of our own; too large a folder.
    """
    _check(config, words, loaded)
    travelling, top = _config_there(config)
    files, links = _study_files(top, loaded)
    modules = _modules()
    here = f"{Path.cwd().resolve()}/"
    told = [re.sub(rf"={re.escape(here)}(?=[^=]*\.py:\w+$)", "=", word) for word in words]
    # -P: no file of the folder is imported in our place
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
    """Write a package beside its place, then move it there: what is there is always whole. Return
    where it is: in a place of its own if what is there was changed, as by a job that runs there."""
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
    """Move a package to its place; tell whether it, or an equal one, is there."""
    try:
        new.rename(stage)
    except OSError:
        if not stage.is_dir():
            raise
        with contextlib.suppress(OSError):  # a job changes it meanwhile
            return _contents(stage) == _contents(new)
        return False
    return True


def _contents(stage: Path) -> str:
    """Return the digest of what travels of a package, names of folders and links included, without
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
    """Refuse what would not work on the cluster, or would tell it a password."""
    for word in (config, *words):
        shown = without_password(word)
        for secret in own_secrets().values():
            shown = shown.replace(secret, MARK)
        if shown != word:
            raise ValueError(
                f"{shown}: holds a password, which every user of the cluster could read in the"
                " job's command; leave it out, and set the variable of its user and password in the"
                " environment of the nodes (docs/howto/cluster.md)"
            )
    if not os.path.isabs(loaded.storage) and "://" not in loaded.storage:
        raise ValueError(
            f"storage={loaded.storage!r}: a relative path ends with the job's folder; use an"
            " absolute path that every node sees, for example storage=/shared/studies, or"
            " s3:// or gs://bucket/prefix"
        )


def _config_there(config: str) -> tuple[str, Path]:
    """Return the study's name on the cluster, relative to the folder that travels, and that folder.

    It is the current one, or its ``conf`` if ``config`` is a name in ``conf/study``.
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
            f"config {config!r}: lies outside the current folder {here}, which is what travels;"
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
    """Refuse a file of code that the study names and that would stay here."""
    for path in user_files(loaded):
        if Path(os.path.normpath(path)) not in found and path.resolve() not in found:
            raise ValueError(
                f"{path}: the study names its code, and it does not travel, which the files of"
                f" {top} do (docs/howto/cluster.md); move it there, hidden folders excepted, and"
                " launch the study's file from its folder"
            )


def _check_name(name: str) -> None:
    """Refuse a file that the job would import in our place, or of a name that is no text."""
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
            f"{os.fsencode(name)!r}: this name of a file is not UTF-8, which every node would read"
            " in its own way; rename it"
        ) from None


def _elsewhere(loaded: StudyConfig) -> set[Path]:
    """Return the folders that do not travel: the storage, the data, and our own, as the wheel."""
    named = (loaded.storage, loaded.trial.data.root, os.environ.get("LNS_STUDY_DATA"))
    return {local_folder(name) for name in named if name} | set(_packages())


def _packages() -> list[Path]:
    """Return the folders of the three packages that are running."""
    others = [Path(str(module.__file__)).resolve().parent for module in (trainers, lns_ops)]
    return [Path(__file__).resolve().parents[1], *others]


def _walk(top: Path, left_out: set[Path], links: list[Path] | None = None) -> Iterator[Path]:
    """Yield the files that travel; add to ``links`` the linked folders that do not."""
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
    """Tell whether a folder travels: neither hidden, cache, environment, study, MLflow's artifacts
    nor left out."""
    return not (
        folder.name.startswith(".")
        or folder.name in CACHES
        or folder.resolve() in left_out
        or (folder / "pyvenv.cfg").exists()
        or (folder / FILE).exists()
        or (folder.name == "artifacts" and (folder.parent / DATABASE).exists())
    )


def _modules() -> list[tuple[str, Path]]:
    """Return name and path of every file of the three packages, ``conf`` as the wheel has it, and
    of the module for scripts.

    Pages for readers are left out, as in the wheel that is installed.
    """
    name = f"{SCRIPTS}.py"
    found = {name: Path(__file__).resolve().parents[2] / name}
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
    """Return the sha256 of the files' names, whether they are programs, and contents, and of words,
    in order."""
    total = hashlib.sha256("\0".join(words).encode())
    for name, path in files:
        runs = "x" if os.access(path, os.X_OK) else ""
        total.update(f"{name}\0{runs}{hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return total.hexdigest()


def _write_wheel(folder: Path, modules: list[tuple[str, Path]]) -> Path:
    """Write the wheel of the running code; return its path."""
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
