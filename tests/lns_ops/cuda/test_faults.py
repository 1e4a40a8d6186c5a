"""On a GPU the same faults stop a user's own loop as on a CPU: a NaN to encode, a zero divisor, a
function without a value."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

import lns_ops
from lns_ops import LNSTensor, convert_, cuda, lns12
from lns_ops.cuda import faults

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        cuda.unavailable() is not None, reason=f"no CUDA backend: {cuda.unavailable()}"
    ),
]
QUEUED = 2000
"""Steps within which a fault is raised if the host never waits; CUDA queues fewer launches than
this."""


@pytest.fixture(autouse=True)
def no_faults(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(faults, "_asked_only", False)
    torch.cuda.synchronize()
    lns_ops.check_faults()
    yield
    torch.cuda.synchronize()
    try:
        lns_ops.check_faults()
    except ValueError:
        pytest.fail("the test left a fault that nothing raised")


def net() -> nn.Module:
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)).cuda()
    return convert_(made, lns12, scope="everywhere")


def batch(bad: bool) -> torch.Tensor:
    x = torch.randn(4, 8, device="cuda")
    return x / 0 if bad else x


def test_a_loop_that_reads_its_loss_is_stopped_in_the_step_of_the_fault() -> None:
    model = net()
    optimizer = lns_ops.optim.SGD(model.parameters(), lr=0.01)

    def step(bad: bool) -> None:
        optimizer.zero_grad()
        loss = model(batch(bad)).square().sum()
        loss.backward()
        loss.item()
        optimizer.step()

    for _ in range(3):
        step(bad=False)
    with pytest.raises(lns_ops.NonFiniteError, match=r"\(32 values on cuda:0, in "):
        step(bad=True)


@pytest.mark.parametrize("scope", ["everywhere", "matmul"])
def test_a_loop_that_never_waits_is_stopped(scope: str) -> None:
    model = nn.Linear(8, 1).cuda()
    convert_(model, lns12, scope=scope)
    optimizer = (
        torch.optim.SGD(model.parameters(), lr=0.01)
        if scope == "matmul"
        else lns_ops.optim.SGD(model.parameters(), lr=0.01)
    )

    def train() -> None:
        for step in range(QUEUED):
            optimizer.zero_grad()
            model(batch(bad=step == 0)).square().sum().backward()
            optimizer.step()

    with pytest.raises(lns_ops.NonFiniteError):
        train()


def test_an_optimizers_step_raises() -> None:
    model = net()
    optimizer = lns_ops.optim.SGD(model.parameters(), lr=0.01)
    model(batch(bad=False)).square().sum().backward()
    model(batch(bad=True))
    torch.cuda.synchronize()
    with pytest.raises(lns_ops.NonFiniteError):
        optimizer.step()


def test_a_copy_to_the_cpu_raises() -> None:
    x = LNSTensor.from_float(torch.tensor([1.0, float("nan")], device="cuda"), lns12)
    with pytest.raises(lns_ops.NonFiniteError):
        x.cpu()


def test_a_replay_raises_what_one_before_has_met() -> None:
    step = lns_ops.cuda_graph(lambda x: lns_ops.encode(x, lns12), warmup=1)
    x = torch.ones(3, device="cuda")
    step(x)
    step(x)
    step(x / 0)
    torch.cuda.synchronize()
    with pytest.raises(lns_ops.NonFiniteError):
        step(x)


def test_a_fault_is_raised_once_and_a_later_one_again() -> None:
    zero = LNSTensor.from_float(torch.zeros(3, device="cuda"), lns12)
    one = LNSTensor.from_float(torch.ones(3, device="cuda"), lns12)
    for _ in range(2):
        one / zero
        with pytest.raises(ValueError, match=r"division by zero.*\(3 values on cuda:0, in div"):
            lns_ops.check_faults()
        lns_ops.check_faults()


def test_functions_without_a_value_are_named() -> None:
    zero = LNSTensor.from_float(torch.zeros(3, device="cuda"), lns12)
    zero.log()
    with pytest.raises(ValueError, match=r"no finite real value.*in log\)"):
        lns_ops.check_faults()


def test_a_program_that_asks_itself_is_not_interrupted() -> None:
    cuda.raise_only_when_asked()
    x = LNSTensor.from_float(torch.tensor([float("nan")], device="cuda"), lns12)
    assert (x + 1).item() == 1
    with pytest.raises(lns_ops.NonFiniteError):
        lns_ops.check_faults()


def test_more_operations_than_rows_are_counted_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "_operations", dict(faults._operations))
    for number in range(2 * faults._ROWS):
        faults.row_for(0, f"operation {number}")
    x = torch.tensor([float("nan")], device="cuda")
    lns_ops.encode(x, lns12)
    with pytest.raises(lns_ops.NonFiniteError):
        lns_ops.check_faults()


@pytest.mark.parametrize("scope", ["everywhere", "matmul"])
def test_the_module_is_named(scope: str) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8)))
    convert_(model.cuda(), lns12, scope=scope)

    def checked(run: Callable[[torch.Tensor], object]) -> None:
        """The host may notice the fault during the call or after it."""
        run(batch(bad=True))
        lns_ops.check_faults()

    with pytest.raises(lns_ops.NonFiniteError, match=r"^NaN.* in encode of module '1\.0'\)"):
        checked(model[1])
    with pytest.raises(lns_ops.NonFiniteError, match=r"^NaN.* in encode of module '0'"):
        checked(model)
    with pytest.raises(lns_ops.NonFiniteError, match=r"^NaN.* in encode\)"):
        checked(lambda x: lns_ops.encode(x, lns12))
