"""A new study to start from: a commented YAML file, and a Python file with its data."""

from __future__ import annotations

import re
from pathlib import Path

from study.errors import UserError

NAME = re.compile(r"[A-Za-z_][\w-]*")
STUDY = """\
# Each row trains the network with every seed; the report compares the rows.
#   lns-study plan {name}.yaml    what a run would do, and how long it would take
#   lns-study run {name}.yaml     run it, or continue it; changes follow: epochs=3
name: {name}
question: Does my network lose accuracy in a 12-bit logarithmic number system?

trial:
  data: {{name: "{name}.py:examples"}}  # a function beside this file: replace it by your data
  model: {{name: mlp, hidden: [64]}}  # or a network of yours: "net.py:make_net"
  optimizer: {{name: sgd, lr: 0.1}}
  batch_size: 50
  epochs: 5

baseline: float32  # the row with which the others are compared
rows:
  - {{label: float32}}
  - {{label: lns12, overrides: {{precision.format: lns12, precision.kahan_sum: true}}}}
seeds: [0, 1, 2]

# To search the learning rate of each row, remove the # of these lines:
# space: {{optimizer.lr: {{loguniform: [0.01, 1.0]}}}}
# search: {{algorithm: tpe, num_samples: 8}}
"""
CODE = '''\
"""The data of the study {name}."""

import numpy as np


def examples(train):
    """Return the training or the test examples: inputs (N, ...) and classes (N,), from 0.

    Replace this by your data, for example
    ``table = np.loadtxt("train.csv" if train else "test.csv", delimiter=",")``. The study takes a
    tenth of the training examples for validation.
    """
    random = np.random.default_rng(0 if train else 1)
    x = random.normal(size=(2000 if train else 500, 20)).astype(np.float32)
    y = (x[:, 0] + x[:, 1] > 0).astype(np.int64)
    return x, y
'''


def write_study(path: Path) -> tuple[Path, Path]:
    """Write a study that runs as it stands, to ``NAME.yaml`` and ``NAME.py``; return both paths.

    Args:
        path: the YAML file; its ending may be left out.

    Raises:
        UserError: the name is not one of a study, or a file exists.
    """
    study = path if path.suffix == ".yaml" else path.with_name(f"{path.name}.yaml")
    name = study.stem
    if not NAME.fullmatch(name):
        raise UserError(
            f"init {path}: a name must have letters, digits, - and _ only, and begin with a letter;"
            " use for example mine.yaml"
        )
    code = study.with_suffix(".py")
    for file in (study, code):
        if file.exists() or file.is_symlink():
            raise UserError(f"{file}: exists; choose another name, for example {name}2.yaml")
    study.write_text(STUDY.format(name=name))
    code.write_text(CODE.format(name=name))
    return study, code
