"""Dtypes, lazy layers and assigned states of converted modules work, or the error names the
remedy."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import lns_ops
from lns_ops import LNSTensor, convert_, revert_, simulate_

KINDS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "everywhere": lambda m: convert_(m, "lns16", scope="everywhere"),
    "matmul": lambda m: convert_(m, "lns16", scope="matmul"),
    "simulated": lambda m: simulate_(m, "bfloat16"),
}
DTYPES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "double": lambda m: m.double(),
    "half": lambda m: m.half(),
    "to": lambda m: m.to("cpu", torch.float64),
}


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.LayerNorm(6), nn.Linear(6, 2))


def values(x: torch.Tensor) -> torch.Tensor:
    return x.detach().to_float() if isinstance(x, LNSTensor) else x.detach()


@pytest.mark.parametrize("change", DTYPES.values(), ids=DTYPES)
def test_another_dtype_of_an_lns_module_is_refused(change: Callable[[nn.Module], Any]) -> None:
    model = KINDS["everywhere"](network())
    with pytest.raises(ValueError, match=r"lns16 to a torch\.float\d+ tensor.*revert_"):
        change(model)
    assert all(isinstance(p, LNSTensor) for p in model.parameters())
    assert all(p.dtype != torch.float32 for p in change(revert_(model)).parameters())


@pytest.mark.parametrize("change", DTYPES.values(), ids=DTYPES)
def test_another_dtype_of_a_simulated_module_says_how_to_go_back(
    change: Callable[[nn.Module], Any],
) -> None:
    model = KINDS["simulated"](network())
    expected = model(torch.ones(3, 4))
    change(model)
    with pytest.raises(ValueError, match=r"is torch\.float\d+.*module\.float\(\)"):
        model(torch.ones(3, 4))
    assert torch.equal(model.float()(torch.ones(3, 4)), expected)
    with pytest.raises(ValueError, match=r"layer '0'.*is torch\.float\d+.*module\.float\(\)"):
        KINDS["simulated"](change(network()))


def test_products_in_lns_take_and_return_float64_after_double() -> None:
    model = KINDS["matmul"](nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2)))
    x = torch.randn(3, 4)
    expected = model(x)
    found = model.double()(x.double())
    assert found.dtype == torch.float64
    assert torch.equal(found.float(), expected)


def lazy() -> nn.Sequential:
    return nn.Sequential(nn.LazyLinear(6), nn.LazyBatchNorm1d(), nn.LazyLinear(2))


@pytest.mark.parametrize("convert", KINDS.values(), ids=KINDS)
def test_lazy_layers_are_converted_after_their_first_batch(
    convert: Callable[[nn.Module], nn.Module],
) -> None:
    model, x = lazy(), torch.randn(5, 4)
    with pytest.raises(ValueError, match=r"layer '0' is a LazyLinear.*run a batch through"):
        convert(model)
    model(x)
    convert(model)(x).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_analyze_names_the_lazy_layer() -> None:
    batch = torch.randn(5, 4), torch.zeros(5, dtype=torch.long)
    with pytest.raises(ValueError, match=r"layer '0' is a LazyLinear.*run a batch through"):
        lns_ops.analyze(lazy(), batch, "lns12")


def test_a_lazy_layer_behind_converted_ones_takes_the_shape_of_their_output() -> None:
    model = KINDS["everywhere"](network())
    model.append(nn.LazyLinear(3))
    model(torch.randn(5, 4)).sum().backward()
    assert model[-1].weight.shape == (3, 2)


STATES: dict[str, Callable[[], dict[str, Any]]] = {
    "float32": lambda: network(1).state_dict(),
    "float64": lambda: network(1).double().state_dict(),
    "lns16": lambda: KINDS["everywhere"](network(1)).state_dict(),
    "lns12": lambda: convert_(network(1), "lns12", scope="everywhere").state_dict(),
}


PAIRS = [(k, s) for k in KINDS for s in STATES if k == "everywhere" or s != "float64"]
"""An assigned float64 is float64 where parameters are floats, as in torch."""


@pytest.mark.parametrize(("kind", "state"), PAIRS)
def test_assigned_values_are_of_the_kind_of_the_parameters_before(kind: str, state: str) -> None:
    """They were float32 in scope everywhere and LNS in the others, and the weights did not
    train."""
    assigned, copied = KINDS[kind](network()), KINDS[kind](network())
    given = STATES[state]()
    kept = dict(given)
    assigned.load_state_dict(given, assign=True)
    copied.load_state_dict(given)
    assert all(given[name] is x for name, x in kept.items())
    x = torch.randn(5, 4)
    for p, q in zip(assigned.parameters(), copied.parameters(), strict=True):
        assert type(p) is type(q)
        assert p.requires_grad
        assert torch.equal(values(p), values(q))
    found = assigned(x)
    assert torch.equal(values(found), values(copied(x)))
    found.sum().backward()
    assert all(p.grad is not None for p in assigned.parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_copies_assign_alike_and_a_reverted_module_as_torch_does(kind: str) -> None:
    model = KINDS[kind](network())
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        other.load_state_dict(STATES["float32"](), assign=True)
        for p, q in zip(other.parameters(), model.parameters(), strict=True):
            assert type(p) is type(q)
    for module in revert_(model).modules():
        assert not module._load_state_dict_pre_hooks
    model.load_state_dict(STATES["lns16"](), assign=True)
    assert all(isinstance(p, LNSTensor) for p in model.parameters())
