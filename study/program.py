"""``lns-study ...`` as the user's shell finds it: messages that name a command to give next take it
from here.

The scripts put the venv on the PATH of what they start, but not on that of the shell that called
them, and they work in the checkout. So they say in ``$LNS_STUDY_COMMAND`` how that shell gets
there. Where it is not set, the bare name is enough if it is on the PATH; otherwise it is the
program beside this interpreter.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path

from study.tracking_uri import without_password

NAME = "lns-study"
VARIABLE = "LNS_STUDY_COMMAND"
"""Shell text that words can be added to, such as ``cd /checkout && .venv/bin/lns-study``."""
STORAGE = "studies"
"""Where commands look for studies unless they are told otherwise."""


def lns_study(*words: str, storage: str = STORAGE) -> str:
    """The command line for ``lns-study WORDS``, to be pasted into the shell that this process was
    started from, without passwords.

    Args:
        words: not quoted yet.
        storage: folder of the studies that the command is about; named in it unless it is the usual
            one.
    """
    where = () if storage == STORAGE else ("--storage", storage)
    return " ".join(
        [_program(), *(shlex.quote(without_password(word)) for word in (*words, *where))]
    )


def _program() -> str:
    if told := os.environ.get(VARIABLE):
        return told
    if shutil.which(NAME):
        return NAME
    beside = Path(sys.executable).with_name(NAME)
    return (
        shlex.quote(str(beside)) if beside.exists() else f"{shlex.quote(sys.executable)} -m study"
    )
