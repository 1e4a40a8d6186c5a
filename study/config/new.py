"""Checks of the names of new studies; existing studies keep their names."""

from __future__ import annotations

from study.config.study import StudyConfig
from trainers.user_code import find_source

NAME_BYTES = 250
"""Maximum length of a study's name and a row's label in bytes, for file systems and MLflow."""
RESERVED = ("artifacts",)
"""Folder names that a study may not have, in addition to names that begin with ``mlflow.db``."""


def check_new(study: StudyConfig) -> StudyConfig:
    """Check a new study's name, row labels and claims; return the study.

    Existing studies are not checked.

    Raises:
        ValueError: a name or label is too long, reserved, or has characters that are not allowed,
            or the file of a claim's ``check`` does not exist.
    """
    for claim in study.claims:
        if claim.check:
            find_source(f"claim {claim.name}: check", claim.check)
    for key, name in [
        ("name", study.name),
        *((f"row {row.label!r}: label", row.label) for row in study.rows),
    ]:
        if not name.isprintable():
            raise ValueError(
                f"{key}={name!r}: must not hold control characters, it is shown on terminals; leave"
                " them out"
            )
        if (size := len(name.encode())) > NAME_BYTES:
            raise ValueError(
                f"{key}={name[:40]!r}...: has {size} bytes, at most {NAME_BYTES} fit a file's name;"
                " use a shorter one"
            )
    if set(study.name) & set("/\\"):
        raise ValueError(
            f"name={study.name!r}: must not hold / or \\, it names one folder in the storage; use"
            f" for example name={study.slug}"
        )
    if study.slug.lower() in RESERVED or study.slug.lower().startswith("mlflow.db"):
        raise ValueError(
            f"name={study.name!r}: the storage has a folder or file of that name for all studies;"
            f" use for example name=my-{study.slug}"
        )
    return study
