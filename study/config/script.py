"""Studies defined in Python: files that contain a :class:`~study.config.StudyConfig`.

The file is loaded by its path under a private module name (:func:`trainers.user_code.load_file`).
The study is the only ``StudyConfig`` at the file's top level, under any name; with several,
``file.py:name`` chooses. With a ``main`` guard, a file can be both a script and a config::

    from study import ModelConfig, StudyConfig, TrialConfig

    small = StudyConfig(name="small", trial=TrialConfig(epochs=3, model=ModelConfig(hidden=[32])))

Trial processes load the file only if a config refers to code in it.
"""

from __future__ import annotations

import re
from pathlib import Path

from study.config.study import StudyConfig
from trainers.text import describe_error
from trainers.user_code import load_file

_SCRIPT = re.compile(r"(?P<file>.+\.py)(:(?P<name>[A-Za-z_]\w*))?")


def is_script(path: Path) -> bool:
    """Return whether ``path`` is a Python file, or a study in one: ``file.py:name``."""
    return _SCRIPT.fullmatch(str(path)) is not None


def read_script(path: Path) -> StudyConfig:
    """Return the study that a Python file defines.

    Args:
        path: path of the file, or ``file.py:name`` for one study of several.

    Raises:
        ValueError: the file does not exist, raises an error, or does not define exactly one study;
            the message has the file and, for an error in it, the line.
    """
    found = _SCRIPT.fullmatch(str(path))
    assert found is not None
    file, name = Path(found["file"]), found["name"]
    if not file.is_file():
        raise ValueError(
            f"config {str(path)!r}: there is no file {file}; give its path relative to the working"
            " folder, or an absolute one"
        )
    try:
        module = load_file(file.resolve())
    except Exception as error:
        raise ValueError(
            f"{file}: cannot be run: {describe_error(error, file.resolve())}; mend it there"
        ) from error
    studies = {key: value for key, value in vars(module).items() if isinstance(value, StudyConfig)}
    if name in studies:
        return studies[name]
    if name is None and len(studies) == 1:
        return next(iter(studies.values()))
    listed = ", ".join(f"{file}:{key}" for key in studies)
    if not studies:
        raise ValueError(
            f"{file}: defines no study; one name at its top level must hold a StudyConfig: write"
            " for example small = StudyConfig(name='small')"
        )
    raise ValueError(
        f"config {str(path)!r}: {file} has {len(studies)} studies"
        f"{f', none of them {name}' if name else ''}; choose one: {listed}"
    )
