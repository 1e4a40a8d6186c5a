"""The composed optimizers, averages, norms, max pooling, cumulative sums and powers on a GPU equal
the CPU bit for bit, also in a CUDA graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from lns_ops import LNSTensor, cuda, lns12, lns16, optim
from tests.lns_ops.optimizers import ALL, FLOAT32, ROUNDINGS, gradients, make, run, start_of, values

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        cuda.unavailable() is not None, reason=f"no CUDA backend: {cuda.unavailable()}"
    ),
]


@pytest.mark.parametrize("name", list(ALL))
@pytest.mark.parametrize("rounding", [*ROUNDINGS, *(r | FLOAT32 for r in ROUNDINGS)], ids=str)
def test_the_same_bits_as_on_a_cpu(name: str, rounding: dict[str, Any]) -> None:
    grads, weights, states = gradients(6, 300), [], []
    for device in ("cpu", "cuda"):
        weight = nn.Parameter(LNSTensor.from_float(start_of(300), lns12).to(device))
        optimizer = make(name, [weight], **rounding)
        run(optimizer, weight, [grad.to(device) for grad in grads])
        weights.append(weight.codes.cpu())
        states.append({key: value.cpu() for key, value in values(optimizer.state[weight]).items()})
    assert torch.equal(*weights)
    assert states[0].keys() == states[1].keys()
    for key, value in states[0].items():
        if value.dtype == torch.float64:  # sums of floats: the last bits
            torch.testing.assert_close(states[1][key], value, rtol=1e-12, atol=0)
        # its unit is float32's last bit; each step may differ by about one
        elif key == "weight_residue" and "arithmetic" in rounding:
            torch.testing.assert_close(states[1][key].int(), value.int(), rtol=0, atol=8)
        else:
            assert torch.equal(states[1][key], value), key


@pytest.mark.parametrize("name", list(ALL))
@pytest.mark.parametrize("is_lns", [True, False])
def test_a_graph_takes_the_same_steps(name: str, is_lns: bool) -> None:
    """Captured on zeroed state and replayed for every step; the counter is on the device."""
    grads, ends = [grad.cuda() for grad in gradients(5, 300)], []
    for captured in (False, True):
        start = start_of(300).cuda()
        weight = nn.Parameter(LNSTensor.from_float(start, lns12) if is_lns else start.clone())
        optimizer, before = make(name, [weight], kahan_sum=True), plain(weight).clone()
        weight.grad = LNSTensor.from_float(grads[0], lns12) if is_lns else grads[0].clone()
        if not captured:
            run(optimizer, weight, grads)
        else:
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                optimizer.step()
                optimizer.step()
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                optimizer.step()
            plain(weight).copy_(before)
            for value in values(optimizer.state[weight]).values():
                value.zero_()
            for grad in grads:
                plain(weight.grad).copy_(
                    plain(LNSTensor.from_float(grad, lns12)) if is_lns else grad
                )
                graph.replay()
        ends.append(plain(weight).clone())
    assert torch.equal(*ends)


@pytest.mark.parametrize("name", list(ALL))
@pytest.mark.parametrize(
    ("is_lns", "rounding"),
    [*((True, r) for r in (*ROUNDINGS, FLOAT32)), *((False, r) for r in ROUNDINGS[:2])],
    ids=str,
)
def test_a_rate_on_the_gpu_is_the_number_that_it_holds(
    name: str, rounding: dict[str, Any], is_lns: bool
) -> None:
    grads, ends = [grad.cuda() for grad in gradients(5, 300)], []
    for on_gpu in (False, True):
        start = start_of(300).cuda()
        weight = nn.Parameter(LNSTensor.from_float(start, lns12) if is_lns else start.clone())
        lr: Any = ALL[name]["lr"]
        if on_gpu:
            lr = torch.tensor(lr, dtype=torch.float64, device="cuda")
        if on_gpu and not getattr(optim, name).takes_rate_tensor:
            with pytest.raises(ValueError, match=rf"lr=.* for {name}: must be a number"):
                make(name, [weight], **rounding, lr=lr)
            return
        optimizer = make(name, [weight], **rounding, lr=lr)
        for count, grad in enumerate(grads):
            run(optimizer, weight, [grad])
            if on_gpu:
                lr.fill_(ALL[name]["lr"] / (count + 2))
            else:
                optimizer.param_groups[0]["lr"] = ALL[name]["lr"] / (count + 2)
        ends.append(plain(weight).clone())
    assert torch.equal(*ends)


def plain(tensor: Any) -> torch.Tensor:
    return tensor.codes if isinstance(tensor, LNSTensor) else tensor.detach()


@pytest.mark.parametrize("fmt", [lns12, lns16], ids=str)
def test_operations(fmt: Any) -> None:
    x = LNSTensor.from_float(torch.randn(2, 3, 21, 17), fmt)
    y = LNSTensor.from_float(torch.rand(17) + 0.5, fmt)
    long = LNSTensor.from_float(torch.randn(3, 5000), fmt)
    for function in (
        lambda a, b, c: F.max_pool2d(a, 3, 2, 1, return_indices=True)[0],
        lambda a, b, c: a.cumsum(-1),
        lambda a, b, c: c.cumsum(1),
        lambda a, b, c: a.abs() ** b,
        lambda a, b, c: c @ c.t(),
    ):
        results = [function(*(t.to(device) for t in (x, y, long))) for device in ("cpu", "cuda")]
        assert torch.equal(*(result.codes.cpu() for result in results))
    places = [
        F.max_pool2d(x.to(device), 3, 2, 1, return_indices=True)[1].cpu()
        for device in ("cpu", "cuda")
    ]
    assert torch.equal(*places)
