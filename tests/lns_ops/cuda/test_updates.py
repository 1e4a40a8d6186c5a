"""Updates on the GPU equal the reference bit for bit, in a CUDA graph too."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import lns_ops
from lns_ops import LNSFormat, cuda, lns12, reference
from lns_ops import functional as lns
from tests.lns_ops.cuda.codes import FORMATS, assert_same, gpu, random_codes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        cuda.unavailable() is not None, reason=f"no CUDA backend: {cuda.unavailable()}"
    ),
]


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
@pytest.mark.parametrize("kahan", [False, True])
@pytest.mark.parametrize("momentum", [None, 0.9])
@pytest.mark.parametrize("size", [1, 1000, 4096, 100_003])
def test_sgd_update_equals_the_reference(
    fmt: LNSFormat, kahan: bool, momentum: float | None, size: int
) -> None:
    for spread in (1.0, 0.2):
        weight, grad, buffer, compensation = (
            random_codes((size,), fmt, 16 + i, spread) for i in range(4)
        )
        rate = reference.encode(np.array(-0.05), fmt)
        decay = None if momentum is None else reference.encode(np.array(momentum), fmt)
        wanted = reference.sgd_update(
            weight, grad, fmt, negative_lr=rate, momentum=decay,
            buffer=buffer if momentum else None, compensation=compensation if kahan else None,
        )  # fmt: skip
        state = [
            gpu(weight),
            gpu(buffer) if momentum else None,
            gpu(compensation) if kahan else None,
        ]
        lns.sgd_update_(
            state[0], gpu(grad), fmt, negative_lr=int(rate),
            momentum=None if decay is None else int(decay), buffer=state[1], compensation=state[2],
        )  # fmt: skip
        for got, codes in zip(state, wanted, strict=True):
            if got is not None:
                assert_same(got, codes)


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
@pytest.mark.parametrize("momentum", [None, 0.9])
@pytest.mark.parametrize("size", [1, 1000, 100_003])
def test_stochastic_sgd_equals_the_reference(
    fmt: LNSFormat, momentum: float | None, size: int
) -> None:
    for spread, step in ((1.0, 1), (0.2, 7)):
        weight, grad, buffer = (random_codes((size,), fmt, 16 + i, spread) for i in range(3))
        rate = reference.encode(np.array(-0.05), fmt)
        decay = None if momentum is None else reference.encode(np.array(momentum), fmt)
        options = {
            "negative_lr": rate,
            "momentum": decay,
            "buffer": buffer if momentum else None,
            "key": 3 << 32 | 9,
        }
        wanted = reference.sgd_update(weight, grad, fmt, step=step, **options)
        state = [gpu(weight), gpu(buffer) if momentum else None]
        lns.sgd_update_(
            state[0], gpu(grad), fmt, negative_lr=int(rate),
            momentum=None if decay is None else int(decay), buffer=state[1],
            step=torch.tensor(step, device="cuda"), key=3 << 32 | 9,
        )  # fmt: skip
        assert_same(state[0], wanted[0])
        if momentum:
            assert_same(state[1], wanted[1])


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
@pytest.mark.parametrize("rounding", ["nearest", "kahan", "stochastic"])
@pytest.mark.parametrize("decay", [None, "into the gradient", "decoupled"])
@pytest.mark.parametrize("size", [1, 1001, 40_000])
def test_adam_equals_the_reference(
    fmt: LNSFormat, rounding: str, decay: str | None, size: int
) -> None:
    for spread, step in ((1.0, 1), (0.2, 100_000)):
        weight, grad, average, compensation = (
            random_codes((size,), fmt, 30 + i, spread) for i in range(4)
        )
        root = reference.absolute(random_codes((size,), fmt, 35, spread), fmt)
        residue = np.where(
            root == 0, 0, np.random.default_rng(36).integers(-(1 << 15), 1 << 15, size)
        ).astype(np.int16)
        rate, decay_code = (int(reference.encode(np.array(value), fmt)) for value in (-0.1, 0.3))
        common = {"beta1": 0.3, "beta2": 0.99, "eps": 1e-8, "decoupled": decay == "decoupled"}
        common["key"] = 5 << 32 | 77 if rounding == "stochastic" else None
        arrays = {
            "exp_avg": average,
            "root": root,
            "residue": None if rounding == "stochastic" else residue,
        }
        arrays["compensation"] = compensation if rounding == "kahan" else None
        wanted = reference.adam_update(
            weight, grad, fmt, step=step, negative_lr=np.int16(rate),
            weight_decay=None if decay is None else np.int16(decay_code), **common, **arrays,
        )  # fmt: skip
        state = {
            "weight": gpu(weight),
            **{name: None if array is None else gpu(array) for name, array in arrays.items()},
        }
        lns.adam_update_(
            state["weight"], gpu(grad), fmt, step=torch.tensor(step, device="cuda"),
            negative_lr=rate, weight_decay=None if decay is None else decay_code, **common,
            **{name: tensor for name, tensor in state.items() if name != "weight"},
        )  # fmt: skip
        for got, codes in zip(state.values(), wanted, strict=True):
            if got is not None:
                assert_same(got, codes)


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
@pytest.mark.parametrize("rounding", ["nearest", "kahan", "stochastic"])
@pytest.mark.parametrize("form", ["sgd", "momentum", "adam", "adam l2", "adamw"])
@pytest.mark.parametrize("size", [1, 40_001])
def test_updates_in_float32_equal_the_reference(
    fmt: LNSFormat, rounding: str, form: str, size: int
) -> None:
    for spread, step in ((1.0, 1), (0.2, 9)):
        weight, grad, average, compensation, residue = (
            random_codes((size,), fmt, 50 + i, spread) for i in range(5)
        )
        options = {"lr": 0.05, "key": 5 << 32 | 77 if rounding == "stochastic" else None}
        arrays = {"compensation": compensation if rounding == "kahan" else None}
        if form in ("sgd", "momentum"):
            options["momentum"] = 0.9 if form == "momentum" else None
            arrays["buffer"] = average if form == "momentum" else None
            names, ours, theirs = (
                ("buffer", "compensation"),
                lns.sgd_update_float32_,
                reference.sgd_update_float32,
            )
        else:
            options |= {"beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "decoupled": form == "adamw"}
            options["weight_decay"] = None if form == "adam" else 0.3
            arrays |= {
                "exp_avg": average,
                "root": reference.absolute(random_codes((size,), fmt, 56, spread), fmt),
            }
            arrays["residue"] = None if rounding == "stochastic" else residue
            names = ("exp_avg", "root", "residue", "compensation")
            ours, theirs = lns.adam_update_float32_, reference.adam_update_float32
        wanted = theirs(weight, grad, fmt, step=step, **options, **arrays)
        state = {name: None if array is None else gpu(array) for name, array in arrays.items()}
        got, counter = gpu(weight), torch.tensor(step, device="cuda")
        needs_step = rounding == "stochastic" or form.startswith("adam")
        ours(got, gpu(grad), fmt, step=counter if needs_step else None, **options, **state)
        assert_same(got, wanted[0])
        for name, codes in zip(names, wanted[1:], strict=True):
            if state[name] is not None:
                assert_same(state[name], codes)


@pytest.mark.parametrize("options", [{"kahan_sum": True}, {"stochastic_rounding": True}], ids=str)
def test_adam_in_a_cuda_graph_takes_the_same_steps(options: dict[str, bool]) -> None:
    """The step counter is on the device, so bias correction and random bits advance with every
    replay."""
    torch.manual_seed(0)
    start, grads = torch.randn(1000), [torch.randn(1000) for _ in range(6)]
    ended = []
    for device in ("cpu", "cuda"):
        weight = torch.nn.Parameter(lns_ops.LNSTensor.from_float(start.to(device), lns12))
        optimizer = lns_ops.optim.AdamW([weight], lr=0.01, **options)
        grad = lns_ops.LNSTensor.from_float(grads[0].to(device), lns12)
        weight.grad = grad
        graph = None
        for i, each in enumerate(grads):
            grad.codes.copy_(lns.encode(each.to(device), lns12))
            if device == "cuda" and i == 2:
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    optimizer.step()
            if graph is None:
                optimizer.step()
            else:
                graph.replay()
        ended.append(weight.codes.cpu())
    assert torch.equal(*ended)


@pytest.mark.parametrize("fmt", ["lns12", "lns16"])
@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW"])
@pytest.mark.parametrize("rounding", ["nearest", "kahan_sum", "stochastic_rounding"])
def test_parameters_that_are_updated_together_have_the_bits_of_a_cpu(
    rounding: str, name: str, fmt: str
) -> None:
    sizes = [(1,), (7,), (33, 5), (8, 64), (300, 40)] * 21  # more than one launch takes
    options: dict[str, Any] = {"momentum": 0.9} if name == "SGD" else {}
    options |= {} if rounding == "nearest" else {rounding: True}

    def trained(device: str) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(0)
        parameters = []
        for size in sizes:
            value = torch.randn(size, generator=generator)
            x = lns_ops.LNSTensor.from_float(value, fmt).to(device)
            parameters.append(x.requires_grad_())
        optimizer = getattr(lns_ops.optim, name)(parameters, lr=0.03, **options)
        for _ in range(3):
            for x in parameters:
                value = torch.randn(x.shape, generator=generator)
                x.grad = lns_ops.LNSTensor.from_float(value, fmt).to(device)
            optimizer.step()
        return [x.codes.cpu() for x in parameters]

    for got, wanted in zip(trained("cuda"), trained("cpu"), strict=True):
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("name", ["SGD", "AdamW"])
def test_a_compiled_step_updates_as_an_eager_one(name: str) -> None:
    """The compiler relies on the operator's writes when it returns."""

    def trained(compiles: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        parameters = [
            lns_ops.LNSTensor.from_float(torch.randn(9, 5), "lns12").cuda().requires_grad_()
            for _ in range(3)
        ]
        optimizer = getattr(lns_ops.optim, name)(parameters, lr=0.1, kahan_sum=True)
        step = torch.compile(optimizer.step, backend="aot_eager") if compiles else optimizer.step
        for _ in range(3):
            for x in parameters:
                x.grad = lns_ops.LNSTensor.from_float(torch.randn(9, 5), "lns12").cuda()
            step()
        return [x.codes for x in parameters]

    torch.compiler.reset()
    for got, wanted in zip(trained(compiles=True), trained(compiles=False), strict=True):
        assert torch.equal(got, wanted)
