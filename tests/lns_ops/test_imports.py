"""What importing lns_ops needs, and the names that stay where they were."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

from lns_ops import spec


def test_the_specification_needs_no_torch() -> None:
    files = list(Path(str(spec.__file__)).parent.glob("*.py"))
    assert len(files) > 4
    for path in files:
        tree = ast.walk(ast.parse(path.read_text()))
        assert "torch" not in {
            (node.module or "").partition(".")[0]
            for node in tree
            if isinstance(node, ast.ImportFrom)
        }


def test_old_names_stay() -> None:
    """Where documents, checkpoints and programs look for them."""
    code = (
        "import lns_ops, pickle; from lns_ops import accumulation, format, indexed, reference; from"
        " lns_ops.tensor import _rebuilt; print(format.LNSFormat is lns_ops.LNSFormat,"
        " reference.adam_update.__name__, indexed.lookup.__name__, accumulation.ACCUMULATIONS,"
        " b'lns_ops.format' in pickle.dumps(lns_ops.lns12), _rebuilt.__module__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (
        done.stdout.strip() == "True adam_update lookup ('contract', 'float32') True lns_ops.tensor"
    )
