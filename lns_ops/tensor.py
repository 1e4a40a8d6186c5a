"""LNSTensor: a torch.Tensor whose values are LNS codes, two bytes each, and whose arithmetic is LNS arithmetic.

A wrapper subclass: torch sees a float32 tensor of the same shape, autograd runs its own formulas, and each aten operation
that reaches ``__torch_dispatch__`` is looked up in a table of LNS kernels. nn.Module parameters, hooks, ``state_dict`` and deepcopy
work unmodified. There is no hidden conversion: an operation without an LNS kernel raises with its name, and mixing
with a float tensor raises too. Two exceptions, both at the edge of a network: Python numbers are encoded, and the
classification losses (``cross_entropy``, ``log_softmax``, ``softmax``) take the values out to float32 first, so that the gradient of
the loss is computed in float32 and enters the network as LNS codes.

Two functions cross the border, differentiable both ways: :meth:`LNSTensor.from_float` and :meth:`LNSTensor.to_float`; the gradient crosses
in the opposite direction by the opposite conversion.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from lns_ops import functional as lns
from lns_ops.accumulation import get_matmul_accumulation
from lns_ops.format import LNSFormat, lns16


class LNSTensor(torch.Tensor):
    """A tensor of LNS values.

    Attributes:
        codes: int16 codes, the tensor's shape and strides.
        fmt: their format.
    """

    codes: Tensor
    fmt: LNSFormat

    @staticmethod
    def __new__(cls, codes: Tensor, fmt: LNSFormat) -> LNSTensor:
        return torch.Tensor._make_wrapper_subclass(
            cls,
            codes.shape,
            strides=codes.stride(),
            storage_offset=codes.storage_offset(),
            dtype=torch.float32,
            device=codes.device,
        )

    def __init__(self, codes: Tensor, fmt: LNSFormat) -> None:
        if codes.dtype != torch.int16:
            raise ValueError(f"codes of dtype {codes.dtype}: LNS codes are int16; use LNSTensor.from_float for values")
        self.codes = codes
        self.fmt = fmt

    @staticmethod
    def from_float(x: Tensor, fmt: LNSFormat | str = lns16) -> LNSTensor:
        """Encode ``x`` (any real dtype) in ``fmt`` (a format or its name); differentiable, the gradient comes back as float32.

        Raises:
            ValueError: ``x`` holds a NaN or an infinity.
        """
        return _FromFloat.apply(x, LNSFormat.of(fmt))  # type: ignore[no-untyped-call, no-any-return]

    def to_float(self) -> Tensor:
        """The values as float32; differentiable, the gradient is encoded in this tensor's format."""
        return _ToFloat.apply(self)  # type: ignore[no-untyped-call, no-any-return]

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        if type(self.codes) is not Tensor:  # traced by torch.compile: there are no values to show
            return f"LNSTensor(shape={tuple(self.shape)}, fmt={self.fmt})"
        values = lns.decode(self.codes, self.fmt)
        grad = ", requires_grad=True" if self.requires_grad else ""
        return f"LNSTensor({torch._tensor_str._tensor_str(values, 10)}, fmt={self.fmt}{grad})"

    def __tensor_flatten__(self) -> tuple[list[str], LNSFormat]:
        return ["codes"], self.fmt

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], fmt: LNSFormat, size: object, stride: object) -> LNSTensor:
        return LNSTensor(inner["codes"], fmt)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _FLOAT_LOSSES:
            args = [a.to_float() if isinstance(a, LNSTensor) else a for a in args]
            kwargs = {k: v.to_float() if isinstance(v, LNSTensor) else v for k, v in (kwargs or {}).items()}
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        handler = _HANDLERS.get(func)
        if handler is None:
            raise NotImplementedError(
                f"{func} has no LNS kernel. Compute it in float32 with x.to_float() and go back with LNSTensor.from_float(y, x.fmt), "
                "or leave the module that calls it unconverted (filter_fn of lns_ops.convert_)"
            )
        return handler(func, *args, **(kwargs or {}))


class _FromFloat(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, fmt: LNSFormat) -> LNSTensor:
        return LNSTensor(lns.encode(x.detach(), fmt), fmt)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.to_float() if isinstance(grad, LNSTensor) else grad, None


class _ToFloat(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: LNSTensor) -> Tensor:
        ctx.fmt = x.fmt
        return lns.decode(x.codes, x.fmt)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> LNSTensor:
        return LNSTensor(lns.encode(grad, ctx.fmt), ctx.fmt)


_FLOAT_LOSSES = {
    torch.nn.functional.cross_entropy,
    torch.nn.functional.log_softmax,
    torch.nn.functional.softmax,
    torch.log_softmax,
    torch.softmax,
    torch.Tensor.log_softmax,
    torch.Tensor.softmax,
}

aten = torch.ops.aten
_HANDLERS: dict[Any, Callable[..., Any]] = {}


_Handler = TypeVar("_Handler", bound=Callable[..., Any])


def _handles(*operators: Any) -> Callable[[_Handler], _Handler]:
    """Register the decorated function as the LNS implementation of aten ``operators``."""

    def register(handler: _Handler) -> _Handler:
        _HANDLERS.update(dict.fromkeys(operators, handler))
        return handler

    return register


def _operands(name: Any, x: Any, y: Any) -> tuple[Tensor, Tensor, LNSFormat]:
    """Codes of two operands in one format; Python numbers and 0-dim CPU tensors are encoded."""
    fmt = x.fmt if isinstance(x, LNSTensor) else y.fmt
    codes = []
    for operand in (x, y):
        if isinstance(operand, LNSTensor):
            if operand.fmt != fmt:
                raise ValueError(
                    f"{name} of {x.fmt} and {y.fmt}: both operands need one format; convert one with from_float(x.to_float(), fmt)"
                )
            codes.append(operand.codes)
        elif isinstance(operand, Tensor) and operand.dim() > 0:
            raise ValueError(
                f"{name} of an LNSTensor and a {operand.dtype} tensor: convert it first with LNSTensor.from_float(x, {fmt})"
            )
        else:
            codes.append(lns.encode(torch.as_tensor(operand, dtype=torch.float64), fmt))
    return codes[0], codes[1], fmt


def _check_broadcast(name: str, x: Tensor, y: Tensor) -> None:
    try:
        torch.broadcast_shapes(x.shape, y.shape)
    except RuntimeError:
        raise ValueError(
            f"{name} of shapes {tuple(x.shape)} and {tuple(y.shape)}: they do not broadcast; sizes must agree or be 1, from the last on"
        ) from None


@_handles(
    aten.t.default, aten.transpose.int, aten.permute.default, aten.view.default, aten._unsafe_view.default, aten.expand.default,
    aten.detach.default, aten.alias.default, aten.clone.default, aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.default,
    aten.select.int, aten.slice.Tensor, aten.index.Tensor, aten.index_select.default, aten.as_strided.default, aten.lift_fresh.default,
)  # fmt: skip
def _structural(func: Any, x: LNSTensor, *args: Any, **kwargs: Any) -> LNSTensor:
    return LNSTensor(func(x.codes, *args, **kwargs), x.fmt)


@_handles(aten.cat.default, aten.stack.default)
def _joined(func: Any, tensors: list[LNSTensor], dim: int = 0) -> LNSTensor:
    for other in tensors[1:]:
        _operands(func, tensors[0], other)
    return LNSTensor(func([t.codes for t in tensors], dim), tensors[0].fmt)


@_handles(aten._to_copy.default)
def _to_copy(func: Any, x: LNSTensor, *, dtype: torch.dtype | None = None, **kwargs: Any) -> LNSTensor:
    if dtype not in (None, torch.float32):
        raise ValueError(f"LNSTensor to {dtype}: its dtype is its format ({x.fmt}); use x.to_float().to({dtype})")
    return LNSTensor(func(x.codes, **kwargs), x.fmt)


@_handles(aten.zeros_like.default, aten.empty_like.default, aten.new_zeros.default)
def _zeros(func: Any, x: LNSTensor, *args: Any, dtype: Any = None, **kwargs: Any) -> LNSTensor:
    zeros = aten.zeros_like.default if func is aten.empty_like.default else func
    return LNSTensor(zeros(x.codes, *args, dtype=torch.int16, **kwargs), x.fmt)


@_handles(aten.ones_like.default)
def _ones(func: Any, x: LNSTensor, **kwargs: Any) -> LNSTensor:
    return LNSTensor(torch.full_like(x.codes, x.fmt.bias), x.fmt)


@_handles(aten.copy_.default)
def _copy(func: Any, x: LNSTensor, source: Tensor, non_blocking: bool = False) -> LNSTensor:
    same = isinstance(source, LNSTensor) and source.fmt == x.fmt
    value = source.to_float() if isinstance(source, LNSTensor) and not same else source
    x.codes.copy_(value.codes if isinstance(value, LNSTensor) else lns.encode(value, x.fmt))
    return x


@_handles(aten.zero_.default)
def _zero(func: Any, x: LNSTensor) -> LNSTensor:
    x.codes.zero_()
    return x


_BINARY: dict[str, Callable[[Tensor, Tensor, LNSFormat], Tensor]] = {
    "add": lns.add,
    "sub": lns.sub,
    "mul": lns.mul,
    "div": lns.div,
}


@_handles(*(getattr(getattr(aten, n), o) for n in _BINARY for o in ("Tensor", "Scalar")))
def _binary(func: Any, x: Any, y: Any, alpha: Any = 1) -> LNSTensor:
    name = func._schema.name.removeprefix("aten::")
    x_codes, y_codes, fmt = _operands(name, x, y)
    if x_codes.shape != y_codes.shape:
        _check_broadcast(name, x_codes, y_codes)
    if alpha != 1:
        y_codes = lns.mul(*_operands(name, LNSTensor(y_codes, fmt), alpha))
    return LNSTensor(_BINARY[name](x_codes, y_codes, fmt), fmt)


@_handles(*(getattr(getattr(aten, n + "_"), o) for n in _BINARY for o in ("Tensor", "Scalar")))
def _binary_in_place(func: Any, x: LNSTensor, y: Any, alpha: Any = 1) -> LNSTensor:
    name = func._schema.name.removeprefix("aten::").removesuffix("_")
    x.codes.copy_(_binary(getattr(getattr(aten, name), func._overloadname), x, y, alpha).codes)
    return x


@_handles(aten.rsub.Scalar, aten.rsub.Tensor)
def _rsub(func: Any, x: LNSTensor, y: Any, alpha: Any = 1) -> LNSTensor:
    return _binary(aten.sub.Tensor, y, x, alpha)


@_handles(aten.reciprocal.default)
def _reciprocal(func: Any, x: LNSTensor) -> LNSTensor:
    return _binary(aten.div.Tensor, 1.0, x)


@_handles(aten.neg.default)
def _neg(func: Any, x: LNSTensor) -> LNSTensor:
    return LNSTensor(lns.neg(x.codes, x.fmt), x.fmt)


@_handles(aten.abs.default)
def _abs(func: Any, x: LNSTensor) -> LNSTensor:
    return LNSTensor(lns.absolute(x.codes, x.fmt), x.fmt)


@_handles(aten.sgn.default, aten.sign.default)
def _sign(func: Any, x: LNSTensor) -> LNSTensor:
    return LNSTensor(lns.sign(x.codes, x.fmt), x.fmt)


@_handles(aten.sqrt.default)
def _sqrt(func: Any, x: LNSTensor) -> LNSTensor:
    return LNSTensor(lns.sqrt(x.codes, x.fmt), x.fmt)


@_handles(aten.relu.default)
def _relu(func: Any, x: LNSTensor) -> LNSTensor:
    return LNSTensor(lns.relu(x.codes), x.fmt)


@_handles(aten.threshold_backward.default)
def _relu_backward(func: Any, grad: LNSTensor, x: LNSTensor, threshold: float) -> LNSTensor:
    if threshold != 0:
        raise NotImplementedError(f"threshold_backward at {threshold}: LNS has relu's only, at 0")
    return LNSTensor(torch.where(x.codes > 0, grad.codes, 0), x.fmt)


@_handles(*(getattr(getattr(aten, n), o) for n in ("eq", "ne", "lt", "le", "gt", "ge") for o in ("Tensor", "Scalar")))
def _compare(func: Any, x: Any, y: Any) -> Tensor:
    x_codes, y_codes, fmt = _operands(func, x, y)
    comparison = getattr(func.overloadpacket, "Tensor")  # noqa: B009
    return comparison(lns.order_key(x_codes, fmt), lns.order_key(y_codes, fmt))  # type: ignore[no-any-return]


@_handles(aten.where.self)
def _where(func: Any, condition: Tensor, x: Any, y: Any) -> LNSTensor:
    x_codes, y_codes, fmt = _operands("where", x, y)
    return LNSTensor(torch.where(condition, x_codes, y_codes), fmt)


@_handles(aten.argmax.default, aten.argmin.default)
def _argument(func: Any, x: LNSTensor, *args: Any, **kwargs: Any) -> Tensor:
    return func(lns.order_key(x.codes, x.fmt), *args, **kwargs)  # type: ignore[no-any-return]


@_handles(aten.sum.default)
def _sum_all(func: Any, x: LNSTensor, *, dtype: Any = None) -> LNSTensor:
    return LNSTensor(lns.sum(x.codes, range(x.dim()), x.fmt), x.fmt)


@_handles(aten.sum.dim_IntList)
def _sum(func: Any, x: LNSTensor, dim: Any, keepdim: bool = False, *, dtype: Any = None) -> LNSTensor:
    return LNSTensor(lns.sum(x.codes, dim or range(x.dim()), x.fmt, keepdim=keepdim), x.fmt)


@_handles(aten.mean.default)
def _mean_all(func: Any, x: LNSTensor, *, dtype: Any = None) -> LNSTensor:
    return _binary(aten.div.Scalar, _sum_all(func, x), x.numel())


@_handles(aten.mean.dim)
def _mean(func: Any, x: LNSTensor, dim: Any, keepdim: bool = False, *, dtype: Any = None) -> LNSTensor:
    total = _sum(func, x, dim, keepdim)
    return _binary(aten.div.Scalar, total, x.numel() // max(1, total.numel()))


@_handles(aten.mm.default, aten.bmm.default)
def _matmul(func: Any, x: Any, y: Any) -> LNSTensor:
    x_codes, y_codes, fmt = _operands("matmul", x, y)
    return LNSTensor(lns.matmul(x_codes, y_codes, fmt, accumulation=get_matmul_accumulation()), fmt)


@_handles(aten.addmm.default)
def _addmm(func: Any, bias: Any, x: Any, y: Any, *, beta: Any = 1, alpha: Any = 1) -> LNSTensor:
    if beta != 1 or alpha != 1:
        raise NotImplementedError(f"addmm with beta={beta}, alpha={alpha}: LNS has bias + x @ y only; scale the operands")
    x_codes, y_codes, fmt = _operands("addmm", x, y)
    if isinstance(bias, LNSTensor) and bias.shape == y.shape[1:]:
        bias_codes, _, _ = _operands("addmm", bias, LNSTensor(x_codes, fmt))
        return LNSTensor(lns.linear(x_codes, y_codes, bias_codes, fmt, accumulation=get_matmul_accumulation()), fmt)
    return _binary(aten.add.Tensor, bias, _matmul(func, x, y))


@_handles(aten._local_scalar_dense.default)
def _item(func: Any, x: LNSTensor) -> float:
    return lns.decode(x.codes, x.fmt).item()


@_handles(aten.is_same_size.default)
def _is_same_size(func: Any, x: Tensor, y: Tensor) -> bool:
    return x.shape == y.shape


torch.serialization.add_safe_globals([LNSTensor, LNSFormat])
