"""Operators on codes: the layouts predicted by tracing equal those returned by kernels."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from lns_ops import convert_, lns12
from lns_ops import functional as lns

OPS = torch.ops.lns_ops
FORMAT = (12, 6)
LAYOUTS = {
    "transposed": lambda x: x.transpose(0, 1),
    "expanded": lambda x: x[:, :1].expand(x.shape),
    "channels last": lambda x: x.to(memory_format=torch.channels_last),
    "every second": lambda x: x[..., ::2],
    "one row": lambda x: x[:, :1].transpose(0, 1)[:, :, :, :1],
}


def values() -> Tensor:
    return torch.rand(2, 3, 4, 5, generator=torch.Generator().manual_seed(0)) + 0.5


def arguments(name: str, layout: str) -> tuple[Any, ...]:
    x = LAYOUTS[layout](values())
    codes = LAYOUTS[layout](lns.encode(values(), lns12))
    own = {"encode": (x, *FORMAT), "sqrt": (codes, *FORMAT)}
    own["decode"] = (codes, *FORMAT, torch.float32)
    return own.get(name, (codes, codes, *FORMAT))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["encode", "decode", "sqrt", "add", "sub", "mul", "div"])
def test_a_traced_result_has_the_strides_of_the_real_one(name: str, layout: str) -> None:
    operator, given = getattr(OPS, name).default, arguments(name, layout)
    torch.library.opcheck(operator, given)
    real = operator(*given)
    with FakeTensorMode() as mode:
        fake = operator(*(mode.from_tensor(a) if isinstance(a, Tensor) else a for a in given))
    assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype)


@pytest.mark.slow
def test_a_net_of_products_trains_when_inductor_compiles_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    if shutil.which("g++") is None:
        pytest.skip("no C++ compiler, which inductor needs")
    torch.manual_seed(0)
    model = convert_(nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 4)), lns12)
    x = torch.randn(16, 8)
    found = []
    for call in (model, torch.compile(model)):
        model.zero_grad()
        call(x).square().sum().backward()
        found.append([p.grad for p in model.parameters()])
    for plain, compiled in zip(*found, strict=True):
        torch.testing.assert_close(plain, compiled, rtol=2e-2, atol=1e-3)
