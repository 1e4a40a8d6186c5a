"""Products with float32 sums on the CPU: their bound, exact cases, saturation; and the setting that
chooses the accumulation."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from hypothesis import given
from hypothesis import strategies as st
from sklearn.datasets import load_digits
from torch import Tensor, nn

import lns_ops
from lns_ops import LNSFormat, LNSTensor, convert_, lns12, lns16, reference
from lns_ops import functional as lns
from tests.lns_ops.float32_sums import outside
from tests.lns_ops.lns_formats import FORMATS, IDS, half_ulp

UNIT = 2.0**-24
"""float32's unit roundoff: e and u of the CPU."""
SHAPES = [(1, 1, 1), (3, 1, 5), (4, 7, 3), (17, 130, 9), (5, 1000, 4), (64, 64, 64), (1, 4096, 2)]


@pytest.fixture(autouse=True)
def contract_afterwards() -> Iterator[None]:
    yield
    lns_ops.set_matmul_accumulation("contract")


def codes(shape: tuple[int, ...], fmt: LNSFormat, seed: int, spread: float = 1.0) -> Tensor:
    """Codes over the whole range (spread 1) or close to one, with zeros and extremes."""
    rng = np.random.default_rng(seed)
    field = rng.integers(1, fmt.field_mask + 1, shape)
    field = np.clip(fmt.bias + ((field - fmt.bias) * spread).astype(np.int64), 1, fmt.field_mask)
    field = np.where(
        rng.random(shape) < 0.02, 1, np.where(rng.random(shape) < 0.02, fmt.field_mask, field)
    )
    signed = np.where(rng.random(shape) < 0.5, field | fmt.sign_mask, field)
    return torch.from_numpy(np.where(rng.random(shape) < 0.1, 0, signed).astype(np.int16))


def product(x: Tensor, y: Tensor, fmt: LNSFormat) -> Tensor:
    return lns.matmul(x, y, fmt, accumulation="float32")


@pytest.mark.parametrize("fmt", FORMATS, ids=IDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("spread", [1.0, 0.05])
def test_sums_keep_the_bound(fmt: LNSFormat, shape: tuple[int, int, int], spread: float) -> None:
    M, K, N = shape
    x, y = codes((M, K), fmt, 1, spread), codes((K, N), fmt, 2, spread)
    assert not outside(product(x, y, fmt).numpy(), x.numpy(), y.numpy(), fmt, UNIT, UNIT).any()


@given(
    m=st.integers(0, 9),
    k=st.integers(0, 150),
    n=st.integers(0, 9),
    turned=st.tuples(st.booleans(), st.booleans()),
)
def test_views_cost_no_accuracy_and_empty_products_are_zero(
    m: int, k: int, n: int, turned: tuple[bool, bool]
) -> None:
    x = codes((k, m), lns12, 1, 0.1).t() if turned[0] else codes((m, k), lns12, 1, 0.1)
    y = codes((n, k), lns12, 2, 0.1).t() if turned[1] else codes((k, n), lns12, 2, 0.1)
    z = product(x, y, lns12)
    assert z.shape == (m, n)
    assert z.dtype == torch.int16
    assert z.is_contiguous()
    assert not outside(z.numpy(), x.numpy(), y.numpy(), lns12, UNIT, UNIT).any()
    if k == 0:
        assert not z.any()


def test_strided_and_batched_operands() -> None:
    x, y = codes((5, 12, 40), lns16, 1, 0.1), codes((5, 40, 6), lns16, 2, 0.1)
    z = product(x, y, lns16)
    assert not outside(z.numpy(), x.numpy(), y.numpy(), lns16, UNIT, UNIT).any()
    assert not outside(
        product(x[:, ::2, 3:], y[:, 3:], lns16).numpy(),
        x[:, ::2, 3:].numpy(),
        y[:, 3:].numpy(),
        lns16,
        UNIT,
        UNIT,
    ).any()
    turned = x.mT.contiguous().mT
    assert not outside(
        product(turned, y, lns16).numpy(), x.numpy(), y.numpy(), lns16, UNIT, UNIT
    ).any()


@pytest.mark.parametrize("fmt", FORMATS, ids=IDS)
def test_one_product_is_the_lns_product(fmt: LNSFormat) -> None:
    """With K = 1 the encoded product equals the sum of the logarithms, saturation and underflow
    included."""
    x, y = codes((200, 1), fmt, 3), codes((1, 200), fmt, 4)
    assert torch.equal(product(x, y, fmt), lns.mul(x, y, fmt))


@pytest.mark.parametrize("fmt", FORMATS, ids=IDS)
def test_identity_and_permutation_matrices_are_exact(fmt: LNSFormat) -> None:
    x = codes((30, 50), fmt, 5)
    order = torch.randperm(50, generator=torch.Generator().manual_seed(0))
    eye = torch.eye(50, dtype=torch.int16) * fmt.bias
    assert torch.equal(product(x, eye, fmt), x)
    assert torch.equal(product(x, eye[:, order], fmt), x[:, order])
    assert torch.equal(
        product(x, -eye if fmt.bits == 16 else lns.neg(eye, fmt), fmt), lns.neg(x, fmt)
    )


@pytest.mark.parametrize("fmt", [lns16, LNSFormat(15, 6), LNSFormat(9, 0)], ids=str)
def test_sums_that_leave_float32_saturate_with_their_sign(fmt: LNSFormat) -> None:
    """Products reach 2^256. float32 would give infinities, and NaN if both signs meet. If the
    largest terms cancel, only the bound is promised: a processor that fuses multiplication and
    addition leaves a rounding error of the products, unless they are powers of two."""
    top, one, zero = fmt.field_mask, fmt.bias, 0
    bottom, minus = top | fmt.sign_mask, one | fmt.sign_mask
    x = torch.tensor(
        [[top, top, one], [bottom, top, one], [top, bottom, minus], [top, zero, one]],
        dtype=torch.int16,
    )
    y = torch.tensor(
        [[top, bottom, top, zero], [top, top, bottom, top], [one, minus, one, minus]],
        dtype=torch.int16,
    )
    z = product(x, y, fmt)
    assert not outside(z.numpy(), x.numpy(), y.numpy(), fmt, UNIT, UNIT).any()
    assert z[0, [0, 3]].tolist() == [top, top]
    assert z[1, 1:].tolist() == [top, bottom, top]
    assert z[3].tolist() == [top, bottom, top, minus]
    if not fmt.fraction_bits:
        assert z[0, 1:3].tolist() == [minus, one]
        assert z[1, 0] == one


def test_autocast_leaves_the_sums_alone() -> None:
    x, y = codes((6, 700), LNSFormat(16, 10), 6, 0.1), codes((700, 8), LNSFormat(16, 10), 7, 0.1)
    wanted = product(x, y, LNSFormat(16, 10))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(product(x, y, LNSFormat(16, 10)), wanted)


def test_linear_adds_its_bias_in_lns() -> None:
    x, y, bias = (
        codes((6, 70), lns12, 6, 0.1),
        codes((70, 8), lns12, 7, 0.1),
        codes((8,), lns12, 8, 0.3),
    )
    got = lns.linear(x, y, bias, lns12, accumulation="float32")
    assert torch.equal(got, lns.add(product(x, y, lns12), bias, lns12))


def test_operator_passes_torchs_own_checks() -> None:
    x, y = codes((6, 70), lns12, 6, 0.1), codes((70, 8), lns12, 7, 0.1)
    batch = codes((2, 3, 4), lns12, 9), codes((2, 4, 5), lns12, 10)
    for arguments in ((x, y, 12, 6), (x, y.t().contiguous().t(), 12, 6), (*batch, 12, 6)):
        torch.library.opcheck(torch.ops.lns_ops.matmul_float32.default, arguments)


@pytest.mark.parametrize(
    "call",
    [lns_ops.set_matmul_accumulation, lambda name: lns_ops.matmul_accumulation(name).__enter__()],
)
def test_unknown_accumulations_are_refused(call: object) -> None:
    said = "accumulation='float64': must be one of contract, float32; use for example 'contract'"
    with pytest.raises(ValueError, match=said):
        call("float64")  # type: ignore[operator]
    x = codes((2, 2), lns12, 0)
    with pytest.raises(ValueError, match=said):
        lns.matmul(x, x, lns12, accumulation="float64")
    with pytest.raises(ValueError, match=said):
        lns.linear(x, x, x[0], lns12, accumulation="float64")
    assert lns_ops.get_matmul_accumulation() == "contract"


def test_setting_holds_in_all_threads_and_a_block_ends_it() -> None:
    seen: list[str] = []
    with lns_ops.matmul_accumulation("float32"):
        thread = threading.Thread(target=lambda: seen.append(lns_ops.get_matmul_accumulation()))
        thread.start()
        thread.join()
    assert seen == ["float32"]
    assert lns_ops.get_matmul_accumulation() == "contract"


def test_setting_governs_products_of_tensors() -> None:
    x, y, bias = (
        LNSTensor(codes(s, lns12, i, 0.1), lns12) for i, s in enumerate([(4, 300), (300, 5), (5,)])
    )
    xs, ys = (
        LNSTensor(codes(s, lns12, i, 0.1), lns12) for i, s in enumerate([(2, 4, 300), (2, 300, 5)])
    )
    for accumulation in ("float32", "contract"):
        lns_ops.set_matmul_accumulation(accumulation)
        assert torch.equal(
            (x @ y).codes, lns.matmul(x.codes, y.codes, lns12, accumulation=accumulation)
        )
        assert torch.equal(
            (xs @ ys).codes, lns.matmul(xs.codes, ys.codes, lns12, accumulation=accumulation)
        )
        wanted = lns.linear(x.codes, y.codes, bias.codes, lns12, accumulation=accumulation)
        assert torch.equal(F.linear(x, y.t(), bias).codes, wanted)
        assert torch.equal(torch.addmm(bias, x, y).codes, wanted)
        assert torch.equal(
            torch.addmm(LNSTensor(bias.codes.expand(4, 5).contiguous(), lns12), x, y).codes, wanted
        )
    assert not torch.equal(lns.matmul(x.codes, y.codes, lns12), product(x.codes, y.codes, lns12))


def small_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 5))


def gradients(net: nn.Module, x: Tensor, after_forward: str) -> list[Tensor]:
    """Gradients of a float32 loop whose backward pass starts under another setting; accumulated
    gradients are zeroed first."""
    net.zero_grad()
    output = net(x)
    lns_ops.set_matmul_accumulation(after_forward)
    F.cross_entropy(output, torch.arange(len(x)) % 5, reduction="sum").backward()
    return [p.grad.clone() for p in net.parameters()]  # type: ignore[union-attr]


def test_scope_matmul_rounds_each_product_to_the_format_and_goes_back_as_it_came() -> None:
    net, x = convert_(small_net(), lns12), torch.randn(40, 20)
    contract = gradients(net, x, "contract")
    lns_ops.set_matmul_accumulation("float32")
    w_codes, x_codes = (lns.encode(t.detach(), lns12) for t in (net[0].weight, x))
    assert torch.equal(
        net[0](x), lns.decode(product(x_codes, w_codes.t(), lns12), lns12) + net[0].bias
    )
    unchanged = gradients(net, x, "float32")
    changed = gradients(net, x, "contract")
    assert all(torch.equal(a, b) for a, b in zip(unchanged, changed, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(unchanged, contract, strict=True))


@pytest.mark.parametrize("fmt", [lns16, LNSFormat(16, 10)], ids=str)
@pytest.mark.parametrize("scope", ["matmul", "everywhere"])
def test_gradients_agree_with_float64_within_the_formats_error(fmt: LNSFormat, scope: str) -> None:
    """Weights behind two linear layers; their gradient has some five roundings of half an ulp. A
    bias's gradient is an LNS sum over the batch."""
    lns_ops.set_matmul_accumulation("float32")
    net, exact = (
        nn.Sequential(*[m for m in small_net() if isinstance(m, nn.Linear)]) for _ in range(2)
    )
    convert_(net, fmt, scope=scope)
    x, y = torch.randn(64, 20), torch.randint(0, 5, (64,))
    for model, inputs in ((net, x), (exact.double(), x.double())):
        F.cross_entropy(model(inputs), y, reduction="sum").backward()
    for layer, true_layer in zip(net, exact, strict=True):
        got, truth = layer.weight.grad, true_layer.weight.grad
        gradient = got.to_float() if isinstance(got, LNSTensor) else got
        assert (gradient - truth).norm() / truth.norm() < 5 * half_ulp(fmt)


@pytest.mark.parametrize("scope", ["matmul", "everywhere"])
def test_a_compiled_network_computes_the_same(scope: str) -> None:
    lns_ops.set_matmul_accumulation("float32")
    net, x = convert_(small_net(), lns12, scope=scope), torch.randn(8, 20)
    compiled = torch.compile(net, backend="aot_eager", fullgraph=True)
    results = []
    for module in (compiled, net):
        net.zero_grad()
        output = module(x)
        F.cross_entropy(output, torch.arange(8) % 5).backward()
        tensors = [output, *(p.grad for p in net.parameters())]
        results.append([t.to_float() if isinstance(t, LNSTensor) else t for t in tensors])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("scope", ["matmul", "everywhere"])
def test_a_network_trains(scope: str) -> None:
    pixels, labels = load_digits(return_X_y=True)
    x, y = torch.from_numpy(pixels).float() / 16, torch.from_numpy(labels)
    torch.manual_seed(0)
    with lns_ops.matmul_accumulation("float32"):
        model = convert_(
            nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)), lns12, scope=scope
        )
        optimizer = lns_ops.optim.SGD(model.parameters(), lr=0.5, momentum=0.5, kahan_sum=True)
        for _ in range(8):
            for rows in torch.randperm(1500).split(50):
                optimizer.zero_grad()
                F.cross_entropy(model(x[rows]), y[rows]).backward()
                optimizer.step()
        wrong = (model(x[1500:]).argmax(1) != y[1500:]).float().mean()
    assert wrong < 0.15


def test_contract_is_still_the_reference() -> None:
    x, y = codes((6, 70), lns12, 6, 0.1), codes((70, 8), lns12, 7, 0.1)
    assert np.array_equal(
        lns.matmul(x, y, lns12).numpy(), reference.matmul(x.numpy(), y.numpy(), lns12)
    )
