"""numba's decorators and array accesses as this package uses them.

:func:`kernel` releases the GIL and keeps machine code on disk. numba notices that a kernel's own file has changed and nothing
else, so helpers live in the file of their kernels, and tables are arguments.

:func:`get`, :func:`put` and :func:`look_up` replace ``x[i]``, ``out[i] = v`` and ``table[i]`` in loops that look into a table.
LLVM turns such a loop into vector code only if it knows that ``out`` and ``table`` do not overlap, which it cannot see from
their addresses; these accesses say so. They also allow gather instructions, which LLVM's tuning tables rule out for most
processors (it prefers one load per lane, at a third of the speed where gathers are not slowed down by microcode).

Limits: the target features are set by a string that llvmlite does not check; they apply to x86 with AVX2 only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic as _intrinsic

F = TypeVar("F", bound=Callable[..., Any])


def kernel(function: F) -> F:
    """Compile on first call, without the GIL, cached on disk."""
    compiled: F = njit(nogil=True, cache=True)(function)
    return compiled


def intrinsic(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that writes LLVM instructions of its own."""
    compiled: Callable[..., Any] = _intrinsic(function)
    return compiled


def _label(module: Any, instruction: Any, kind: str) -> None:
    """Mark an access as one of tables (``alias.scope``) or as never touching tables (``noalias``)."""
    domain = module.add_metadata([ir.MetaDataString(module, "lns_ops")])
    scope = module.add_metadata([ir.MetaDataString(module, "lns_ops tables"), domain])
    instruction.set_metadata(kind, module.add_metadata([scope]))


def _allow_gathers(context: Any, builder: Any) -> None:
    features = context.codegen()._tm_features
    if "+avx2" in features.split(","):
        # llvmlite's own `add` knows no attributes with values.
        set.add(builder.function.attributes, f'"target-features"="{features},+fast-gather,-prefer-no-gather"')


def _address(context: Any, builder: Any, array_type: Any, array: Any, index: Any) -> Any:
    return builder.gep(context.make_array(array_type)(context, builder, array).data, [index])


@intrinsic
def get(typing_context: Any, array: Any, index: Any) -> Any:
    """``array[index]``, not a table; no negative indices."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        value = builder.load(_address(context, builder, signature.args[0], *args))
        _label(builder.module, value, "noalias")
        return value

    return array.dtype(array, types.int64), generate


@intrinsic
def put(typing_context: Any, array: Any, index: Any, value: Any) -> Any:
    """``array[index] = value``, not a table; no negative indices."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _allow_gathers(context, builder)
        stored = builder.store(args[2], _address(context, builder, signature.args[0], args[0], args[1]))
        _label(builder.module, stored, "noalias")
        return context.get_dummy_value()

    return types.none(array, types.int64, array.dtype), generate


@intrinsic
def look_up(typing_context: Any, table: Any, index: Any) -> Any:
    """``table[index]`` with an index in ``0 .. 2^31 - 1``."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        # Clearing the sign lets LLVM see that 32 bits are enough for the address.
        positive = builder.and_(args[1], ir.Constant(ir.IntType(32), 0x7FFFFFFF))
        address = _address(context, builder, signature.args[0], args[0], builder.zext(positive, ir.IntType(64)))
        value = builder.load(address)
        _label(builder.module, value, "alias.scope")
        return value

    return table.dtype(table, types.int32), generate
