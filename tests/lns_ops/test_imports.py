"""Requirements for importing lns_ops, and names that must stay."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import lns_ops
from lns_ops import spec

SAVED = Path(__file__).parents[1] / "golden" / "lns_tensor.pt"
"""A state dict of LNSTensors, as ``torch.save`` wrote it."""


def printed(code: str) -> str:
    """Return the output of a program in a separate process."""
    words = [sys.executable, "-c", code]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()


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


@pytest.mark.parametrize(
    "first",
    [
        "import torch, lns_ops",
        "import lns_ops, torch",
        "from lns_ops.formats import parse; parse('lns12'); import torch",
        "from lns_ops.spec.format import lns12; import torch.nn",
        "import lns_ops; lns_ops.convert_",
        "import lns_ops; dir(lns_ops)",
        "from lns_ops import *; convert_",
        "from lns_ops import cpu",
        "from lns_ops.functional import encode",
        "from lns_ops.tensor.ops import linear",
        "import lns_ops.serialization",
    ],
)
def test_the_package_is_whole_with_torch(first: str) -> None:
    """In any import order files of tensors can be read, operators exist, and every public name
    exists."""
    code = (
        f"{first}; import lns_ops, torch; names = set(vars(lns_ops));"
        " print(hasattr(torch.ops.lns_ops, 'encode'), set(lns_ops.__all__) <= names,"
        f" type(torch.load({str(SAVED)!r})['weight']).__name__)"
    )
    assert printed(code) == "True True LNSTensor"


def test_formats_and_the_specification_need_no_torch() -> None:
    code = (
        "import sys, pickle; from lns_ops import formats, spec, format, reference;"
        " made = [formats.parse(name) for name in ('lns12', 'int8/channel', 'float8_e4m3fn/tensor',"
        " 'fixed(16,8)', 'bfloat16', 'tf32', 'float(4,3)', 'posit(8)', 'takum(16)/tensor',"
        " 'bfp(8,32)', 'mxint8', 'nvfp4', 'binary8p3')];"
        " said = [(fmt.bits, fmt.error, fmt.overflows, fmt.compensation) for fmt in made];"
        " assert pickle.loads(pickle.dumps([*made, format.lns12])) == [*made, format.lns12];"
        " print({'torch', 'numba'} & set(sys.modules))"
    )
    assert printed(code) == "set()"


def test_torch_is_there_whatever_this_package_lacks() -> None:
    """A second import of torch in a process would hide missing parts of the first."""
    code = (
        "import sys, lns_ops; sys.modules['numba'] = None; import torch; print(torch.ones(1))"
        "\ntry: lns_ops.convert_\nexcept ImportError as error: print(error)"
    )
    made, error = printed(code).splitlines()
    assert made == "tensor([1.])"
    assert "numba" in error


def test_no_names_but_the_public_ones() -> None:
    with pytest.raises(AttributeError, match="module 'lns_ops' has no attribute 'nonsense'"):
        lns_ops.nonsense  # type: ignore[attr-defined]  # noqa: B018
    assert not hasattr(lns_ops, "no.module")
    code = "import sys, lns_ops; hasattr(lns_ops, '__wrapped__'); print('torch' in sys.modules)"
    assert printed(code) == "False"


def test_old_names_stay() -> None:
    """Documents, checkpoints and programs look for them there."""
    code = (
        "import lns_ops, pickle; from lns_ops import accumulation, format, indexed, reference; from"
        " lns_ops.tensor import _rebuilt; print(format.LNSFormat is lns_ops.LNSFormat,"
        " reference.adam_update.__name__, indexed.lookup.__name__, accumulation.ACCUMULATIONS,"
        " b'lns_ops.format' in pickle.dumps(lns_ops.lns12), _rebuilt.__module__)"
    )
    assert printed(code) == "True adam_update lookup ('contract', 'float32') True lns_ops.tensor"
