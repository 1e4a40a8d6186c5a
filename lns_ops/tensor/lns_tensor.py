"""LNSTensor: the wrapper subclass, its dispatch, and conversion from and to float tensors.

:mod:`lns_ops.tensor` describes how operators without an LNS kernel are handled.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any, NoReturn, cast

import torch
from torch import Tensor

from lns_ops import functional as lns
from lns_ops._compat import (
    COLLECTIVES,
    LEAVES,
    DisableTorchFunction,
    make_wrapper_subclass,
    no_dispatch,
    tensor_text,
    tree_leaves,
    tree_map,
    version_of,
    written_arguments,
)
from lns_ops.functional.library import cached_format
from lns_ops.spec.format import LNSFormat, lns16
from lns_ops.tensor import collectives, draws, fallback, foreach, integers, promotion
from lns_ops.tensor.decoded import COMPARED, compares, is_decoded, rounds
from lns_ops.tensor.dynamo import allow_in_graph
from lns_ops.tensor.limits import underflow
from lns_ops.tensor.registry import HANDLERS, PAIRS, REPLACEMENTS, VIEWS, parts_of

_READS = {
    Tensor.dim,
    Tensor.numel,
    *(
        getattr(Tensor, name).__get__
        for name in ("shape", "dtype", "device", "requires_grad", "grad", "is_leaf", "ndim")
    ),
    version_of,
}
"""Torch functions that only inspect a tensor; the most frequent ones of a training step."""
_OWN = {"codes", "fmt", "_sum"}
"""Attributes of LNSTensors that are not set by users."""


class LNSTensor(torch.Tensor):
    """A tensor of LNS values.

    >>> import torch
    >>> x = LNSTensor.from_float(torch.tensor([1.0, 2.0, 3.0]), "lns12")
    >>> x * x
    LNSTensor([1.0000, 4.0000, 8.9151], fmt=lns12)
    >>> (x * x).to_float()
    tensor([1.0000, 4.0000, 8.9151])

    Attributes:
        codes: int16 codes, with the tensor's shape and strides.
        fmt: the format of the codes.
    """

    codes: Tensor
    fmt: LNSFormat

    @staticmethod
    def __new__(cls, codes: Tensor, fmt: LNSFormat) -> LNSTensor:
        # in inference mode, codes from outside it keep an ordinary LNSTensor (a view needs that)
        if torch.is_inference_mode_enabled() and not codes.is_inference():
            with torch.inference_mode(False):
                return LNSTensor.__new__(cls, codes, fmt)
        if codes.dtype is not torch.int16:
            raise ValueError(
                f"codes of dtype {codes.dtype}: LNS codes are int16; use LNSTensor.from_float for"
                " values"
            )
        self: LNSTensor = make_wrapper_subclass(
            cls, codes.shape, strides=codes.stride(), storage_offset=codes.storage_offset(),
            dtype=torch.float32, device=codes.device,
        )  # fmt: skip
        self.codes, self.fmt = codes, fmt
        return self

    @staticmethod
    def from_float(x: Tensor, fmt: LNSFormat | str = lns16) -> LNSTensor:
        """Encode ``x`` (any real dtype) in ``fmt`` (a format or its name).

        Differentiable; the gradient is float32.

        >>> import torch
        >>> LNSTensor.from_float(torch.tensor([1.0, 3.0]), "lns16").codes
        tensor([16384, 16587], dtype=torch.int16)

        Raises:
            ValueError: ``x`` contains a NaN or an infinity.
            NotImplementedError: within a transform of ``torch.func`` or in forward mode.
        """
        promotion.refuse_transforms(x)
        apply: Callable[..., LNSTensor] = _FromFloat.apply
        return apply(x, LNSFormat.of(fmt))

    def to_float(self) -> Tensor:
        """Return the values as float32.

        Differentiable; the gradient is encoded in this tensor's format.
        """
        return _ToFloat.apply(self, lns.decode)  # type: ignore[no-untyped-call, no-any-return]

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        if type(self.codes) is not Tensor:  # traced by torch.compile, so the values are unknown
            return f"LNSTensor(shape={tuple(self.shape)}, fmt={self.fmt})"
        values = lns.decode(self.codes, self.fmt)
        grad = ", requires_grad=True" if self.requires_grad else ""
        return f"LNSTensor({tensor_text(values, 10)}, fmt={self.fmt}{grad})"

    def __deepcopy__(self, memo: dict[int, Any]) -> LNSTensor:
        """Return a copy with its own codes.

        If tensors share memory, their copies share memory, too.
        """
        if id(self) in memo:
            return cast(LNSTensor, memo[id(self)])
        if not self.is_leaf:
            raise RuntimeError(
                "deepcopy of an LNSTensor that is the result of a computation: only leaves of the"
                " graph can be copied; use x.detach()"
            )
        rest = {name: value for name, value in self.__dict__.items() if name not in _OWN}
        made = _rebuilt(
            deepcopy(self.codes, memo), self.fmt, self.requires_grad, deepcopy(rest, memo)
        )
        memo[id(self)] = made
        made.grad = deepcopy(self.grad, memo)
        return made

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Return what pickle and torch.save store: codes with shared memory, format, attributes."""
        rest = {name: value for name, value in self.__dict__.items() if name not in _OWN}
        return _rebuilt, (self.codes, self.fmt, self.requires_grad, rest)

    @property
    def fsdp_pre_all_gather(self) -> NoReturn:
        """Reject ``fully_shard``, which looks up this method when it starts.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(collectives.SHARDS)

    def __tensor_flatten__(self) -> tuple[list[str], LNSFormat]:
        return ["codes"], self.fmt

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], fmt: LNSFormat, size: object, stride: object
    ) -> LNSTensor:
        return LNSTensor(inner["codes"], fmt)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _READS:
            with DisableTorchFunction():
                return func(*args)
        pair = PAIRS.get(func) if not kwargs and len(args) == 2 else None
        if pair is not None and (result := pair(*args)) is not None:
            return result
        kwargs = kwargs or {}
        if kwargs.get("out") is not None:
            return promotion.written_to(func, args, kwargs)
        replacement = REPLACEMENTS.get(func)
        name = getattr(func, "__name__", "")
        if name == "flex_attention":
            promotion.refuse_flex_attention()
        if name in promotion.CONVERTED and kwargs.get("dtype") not in (None, torch.float32):
            x, *others = args or (kwargs.pop("input"),)
            return func(x.to(kwargs.pop("dtype")), *others, **kwargs)
        if replacement is None and is_decoded(name) and (name[-1] != "_" or name[:2] == "__"):
            return _in_float32(func, args, kwargs)
        if func not in promotion.KEPT and _meets_floats(args, kwargs):
            if promotion.any_leaf(_is_complex, (*args, *kwargs.values())) or (
                promotion.writes(name) and args and _is_plain(args[0])
            ):
                return func(*tree_map(_decoded, args), **tree_map(_decoded, kwargs))
            args, kwargs = _encoded_leaves(name, args, kwargs)
        if replacement is not None:
            return replacement(*args, **kwargs)
        with DisableTorchFunction():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in VIEWS and type(args[0]) is LNSTensor:
            return HANDLERS[func](func, *args, **(kwargs or {}))
        kwargs = kwargs or {}
        if args and isinstance(args[0], (list, tuple)) and foreach.is_foreach(func):
            return foreach.one_by_one(func, args, kwargs)
        if _meets_floats(args, kwargs) and func not in promotion.KEPT:
            if promotion.any_leaf(_is_complex, (*args, *kwargs.values())) or (
                args and _is_plain(args[0]) and written_arguments(func)
            ):
                return func(*tree_map(_value, args), **tree_map(_value, kwargs))
            args, kwargs = _encode_floats(func, args, kwargs)
        handler = HANDLERS.get(func)
        if handler is None:
            return _unhandled(func, args, kwargs)
        return handler(func, *args, **kwargs)


def _is_plain(x: Any) -> bool:
    """Return whether ``x`` is a complex number, or a float or complex tensor but no LNSTensor."""
    return (
        type(x) is not LNSTensor
        and isinstance(x, Tensor)
        and not isinstance(x, LNSTensor)
        and (x.dtype.is_floating_point or x.dtype.is_complex)
    ) or type(x) is complex


def _meets_floats(args: Any, kwargs: dict[str, Any]) -> bool:
    """Return whether there is a float or complex tensor among the arguments."""
    return promotion.any_leaf(_is_plain, args) or (
        bool(kwargs) and promotion.any_leaf(_is_plain, kwargs.values())
    )


def _wants_gradient(x: Any) -> bool:
    return isinstance(x, Tensor) and _is_plain(x) and x.requires_grad


def _is_complex(x: Any) -> bool:
    if isinstance(x, Tensor):
        return not isinstance(x, LNSTensor) and x.dtype.is_complex
    return type(x) is complex


def _value(x: Any) -> Any:
    """Return the values of an LNSTensor, without a gradient."""
    return lns.decode(x.codes, x.fmt) if isinstance(x, LNSTensor) else x


def _decoded(x: Any) -> Any:
    return in_float32(x) if isinstance(x, LNSTensor) else x


def _whole(x: Any) -> Any:
    return with_integers(x) if isinstance(x, LNSTensor) else x


def _whole_value(x: Any) -> Any:
    return integers.restored(x.codes, x.fmt) if isinstance(x, LNSTensor) else x


def _format_of(args: Any, kwargs: Any) -> LNSFormat | None:
    """Return the format of the first LNSTensor among the arguments, or None."""
    return next((x.fmt for x in tree_leaves((args, kwargs)) if isinstance(x, LNSTensor)), None)


def _encode_floats(func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Encode the float tensors among an operator's arguments."""
    fmt = _format_of(args, kwargs)
    assert fmt is not None

    def encoded(leaf: Any) -> Any:
        if not _is_plain(leaf):
            return leaf
        promotion.count(func.overloadpacket.__name__)
        with promotion.named(func.overloadpacket.__name__):
            return LNSTensor(promotion.encoded(leaf, fmt), fmt)

    return promotion.mapped(encoded, args, kwargs)


def _encoded_leaves(name: str, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Encode the float tensors that require a gradient, which will be float32.

    The others are encoded when operators are dispatched.
    """
    if not promotion.any_leaf(_wants_gradient, (*args, *kwargs.values())):
        return args, kwargs
    fmt = _format_of(args, kwargs)

    def encoded(leaf: Any) -> Any:
        if fmt is None or not _wants_gradient(leaf) or leaf.layout is not torch.strided:
            return leaf  # the entries of a sparse matrix are encoded later, see ops.linear.mm
        promotion.count(name)
        return in_format(leaf, fmt.bits, fmt.fraction_bits)

    return promotion.mapped(encoded, args, kwargs)


def _in_float32(func: Any, args: Any, kwargs: Any) -> Any:
    """Compute a function in float32 and encode its results (:mod:`lns_ops.tensor.decoded`)."""
    fmt, name = _format_of(args, kwargs), func.__name__
    if fmt is not None and compares(name):
        at = next(x.device for x in tree_leaves((args, kwargs)) if isinstance(x, LNSTensor))
        args = tuple(_on_the_grid(x, fmt, at) if i < 2 else x for i, x in enumerate(args))
        kwargs = {k: _on_the_grid(x, fmt, at) if k in COMPARED else x for k, x in kwargs.items()}
    if name.removesuffix("_") in integers.PERIODIC and args and isinstance(args[-1], LNSTensor):
        integers.warn_of_angles(name, args[-1].codes, args[-1].fmt)
    value = _whole if rounds(name) or compares(name) else _decoded
    args, kwargs = tree_map(value, args), tree_map(value, kwargs)
    promotion.note(name, args)
    result = func(*args, **kwargs)
    if fmt is None or kwargs.get("dtype") not in (None, torch.float32):
        return result
    bits, fraction_bits = fmt.bits, fmt.fraction_bits
    if name in draws.DRAWS:
        result = draws.bounded(result, fmt, name)
    with promotion.named(name):
        return tree_map(
            lambda leaf: in_format(leaf, bits, fraction_bits) if _is_real(leaf) else leaf, result
        )


def _on_the_grid(x: Any, fmt: LNSFormat, device: torch.device) -> Any:
    """Return numbers rounded to a format, to compare them with LNS values on ``device``."""
    if not isinstance(x, Tensor | float | int) or isinstance(x, LNSTensor):
        return x
    x = x if isinstance(x, Tensor) else torch.as_tensor(x, device=device)
    return integers.restored(promotion.encoded(x, fmt), fmt)


def _rebuilt(codes: Tensor, fmt: LNSFormat, requires_grad: bool, rest: dict[str, Any]) -> LNSTensor:
    """Rebuild the leaf that :meth:`LNSTensor.__reduce_ex__` describes."""
    made = LNSTensor(codes, fmt)
    made.requires_grad = requires_grad
    made.__dict__ |= rest
    return made


def _unhandled(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operator without a handler of its own.

    Use its out-of-place form, torch's decomposition, or float32 if that is allowed.
    """
    if func.namespace in COLLECTIVES:
        collectives.refuse(str(func))
    if torch.Tag.inplace_view in func.tags:
        func(args[0].codes, *args[1:], **kwargs)
        with no_dispatch():
            func(*args, **kwargs)  # updates shape and strides of the wrapper
        return args[0]
    name, overload, out_of_place = parts_of(func)
    if out_of_place in HANDLERS:
        return write(args[0], HANDLERS[out_of_place](out_of_place, *args, **kwargs), name)
    if any(map(is_decoded, (name, f"{name}.{overload}", name.removesuffix("_")))):
        return _computed_in_float32(func, args, kwargs)
    decomposed = func.decompose(*args, **kwargs)
    if decomposed is not NotImplemented:
        return decomposed
    if fallback.active() is not None:
        fallback.count(str(func))
        return _computed_in_float32(func, args, kwargs)
    promotion.refuse_forward_mode(str(func))
    raise NotImplementedError(
        f"{func} has no LNS kernel. Compute it in float32 with x.to_float() and go back with"
        " LNSTensor.from_float(y, x.fmt), or leave the module that calls it unconverted (filter_fn"
        " of lns_ops.convert_); `with lns_ops.allow_float_fallback():` does the former for every"
        " such operation and counts them"
    )


def _computed_in_float32(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run ``func`` on decoded arguments and encode its floating-point results.

    Raises:
        NotImplementedError: ``func`` returns a view, or writes to an ``out=`` argument.
        ValueError: a result is a NaN or an infinity (``NonFiniteError``).
    """
    written = written_arguments(func)
    if func.is_view or any(a.kwarg_only for a in written):
        raise NotImplementedError(
            f"{func} has no LNS kernel and"
            f" {'returns a view' if func.is_view else 'writes to out='}, so it cannot be computed"
            " in float32 here: call it on x.to_float(), or leave the module that calls it"
            " unconverted (filter_fn of lns_ops.convert_)"
        )
    fmt = _format_of(args, kwargs)
    assert fmt is not None
    value = _whole_value if rounds(func.name().removeprefix("aten::")) else _value
    values = tree_map(value, args)
    result = func(*values, **tree_map(value, kwargs))
    own = func.overloadpacket.__name__
    if written:
        for x, y in zip(tree_leaves(args[0]), tree_leaves(values[0]), strict=True):
            x.copy_(_encoded_result(y, x.fmt, own) if own in draws.DRAWS else y)
        return result if result is None else args[0]
    with promotion.named(own):
        return tree_map(lambda x: _encoded_result(x, fmt, own) if _is_real(x) else x, result)


def _encoded_result(x: Tensor, fmt: LNSFormat, name: str) -> LNSTensor:
    """Encode a result of the function ``name``; draws stay within the bounds that it guarantees."""
    codes = draws.encoded(x, fmt, name) if name in draws.DRAWS else lns.encode(x, fmt)
    return LNSTensor(codes, fmt)


def _is_real(x: object) -> bool:
    return isinstance(x, Tensor) and x.dtype.is_floating_point and x.layout is torch.strided


def write(x: Any, result: LNSTensor, name: str) -> Any:
    """Store the result of an in-place operation in ``x``.

    Raises:
        ValueError: ``x`` is not an LNSTensor with the result's format and shape.
    """
    if not isinstance(x, LNSTensor) or x.fmt != result.fmt:
        kind = str(x.fmt) if isinstance(x, LNSTensor) else f"a {x.dtype} tensor"
        raise ValueError(
            f"{name} on {kind} with a result in {result.fmt}: writing in place keeps the format;"
            " convert one of them first"
        )
    if x.shape != result.shape:
        raise ValueError(
            f"{name} on shape {tuple(x.shape)} with a result of shape {tuple(result.shape)}:"
            " writing in place keeps the shape; use the operation out of place"
        )
    x.codes.copy_(result.codes)
    return x


class _FromFloat(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, fmt: LNSFormat) -> LNSTensor:
        return LNSTensor(lns.encode(x.detach(), fmt), fmt)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.to_float() if isinstance(grad, LNSTensor) else grad, None


class _ToFloat(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: LNSTensor, values: Callable[[Tensor, LNSFormat], Tensor]) -> Tensor:
        ctx.fmt = x.fmt
        return values(x.codes, x.fmt)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[LNSTensor, None]:
        promotion.refuse_transforms()
        if torch.is_grad_enabled():  # the gradient itself needs a gradient (double backward)
            return _FromFloat.apply(grad, ctx.fmt), None  # type: ignore[no-untyped-call]
        underflow.warn_of_underflow(grad, ctx.fmt)
        with promotion.named(promotion.noted(ctx)):
            return LNSTensor(lns.encode(grad, ctx.fmt), ctx.fmt), None


def in_format(x: Tensor, bits: int, fraction_bits: int) -> Tensor:
    """Return ``x`` in the format with these parameters, differentiably; for traced code.

    ``x`` is a float tensor or an LNSTensor of any format.
    """
    fmt = cached_format(bits, fraction_bits)
    if isinstance(x, LNSTensor):
        return x if x.fmt == fmt else LNSTensor.from_float(x.to_float(), fmt)
    return LNSTensor.from_float(x, fmt)


def gradient(grad: Tensor, fmt: LNSFormat) -> LNSTensor:
    """Convert a gradient that foreign code (a hook or a Function) returned to a format."""
    if isinstance(grad, LNSTensor) and grad.fmt == fmt:
        return grad
    return in_format(grad, fmt.bits, fmt.fraction_bits)  # type: ignore[return-value]


def in_float32(x: Tensor) -> Tensor:
    """Return :meth:`LNSTensor.to_float`; for traced code."""
    return x.to_float() if isinstance(x, LNSTensor) else x


def with_integers(x: LNSTensor) -> Tensor:
    """Return ``x.to_float()`` with integers restored (:mod:`.integers`); for traced code."""
    return _ToFloat.apply(x, integers.restored)  # type: ignore[no-untyped-call, no-any-return]


for _traced in (in_format, in_float32, with_integers):
    allow_in_graph(_traced)


def storage_of(tensor: Tensor) -> Tensor:
    """Return the memory of a parameter or optimizer state: the codes, or the tensor itself."""
    return tensor.codes if isinstance(tensor, LNSTensor) else tensor


def operands(name: Any, x: Any, y: Any) -> tuple[Tensor, Tensor, LNSFormat]:
    """Return the codes of two operands in one format.

    Python numbers, booleans, integers and float tensors are encoded.

    Raises:
        ValueError: the operands have different formats.
    """
    fmt = x.fmt if isinstance(x, LNSTensor) else y.fmt
    codes = []
    for operand in (x, y):
        if isinstance(operand, LNSTensor):
            if operand.fmt != fmt:
                raise ValueError(
                    f"{name} of {x.fmt} and {y.fmt}: both operands need one format; convert one"
                    " with from_float(x.to_float(), fmt)"
                )
            codes.append(operand.codes)
        elif isinstance(operand, Tensor) and operand.dtype.is_floating_point:
            codes.append(promotion.encoded(operand, fmt))
        elif type(operand) is float or type(operand) is int:
            codes.append(lns.encode_number(operand, fmt))
        else:
            codes.append(lns.encode(torch.as_tensor(operand, dtype=torch.float64), fmt))
    return codes[0], codes[1], fmt


promotion.WITHOUT.add(LNSTensor)
LEAVES.add(LNSTensor)
# Saved files refer to these classes by their public module, not by the defining one.
LNSTensor.__module__ = _rebuilt.__module__ = "lns_ops.tensor"
torch.serialization.add_safe_globals([LNSTensor, LNSFormat, _rebuilt])
