"""Decorators and array accesses for kernels: numba intrinsics.

A ``@kernel`` is an entry point: Python calls it through :mod:`lns_ops.cpu.compiler.object_cache`,
which stores its machine code on disk. A ``@helper`` is called only by kernels and other helpers.
Neither may allocate or raise; :func:`scratch` gives kernels their working memory. Tables are
arguments.

:func:`get`, :func:`put` and :func:`look_up` replace ``x[i]``, ``out[i] = v`` and ``table[i]`` in
loops with table look-ups. LLVM vectorizes such a loop only if it knows that ``out`` and ``table``
do not overlap, which it cannot see from their addresses; these accesses declare it. They also allow
gather instructions, which LLVM's tuning tables disable for most processors (it prefers one load per
lane, at a third of the speed unless microcode slows down gathers).

Limits: the target features are set by a string that llvmlite does not check; they apply only to x86
with AVX2.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from llvmlite import binding as llvm
from llvmlite import ir
from numba import config, njit, types
from numba.core import cgutils
from numba.extending import intrinsic as _intrinsic

from lns_ops._compat import NO_REFERENCE_COUNTS, struct_value

ARRAY_HEADER = object.__basicsize__
"""Number of bytes of an array object before numpy's part."""

F = TypeVar("F", bound=Callable[..., Any])


def helper(function: F) -> F:
    """Mark a function that kernels call; it is compiled into them."""
    compiled: F = njit(nogil=True, **NO_REFERENCE_COUNTS)(function)
    return compiled


def intrinsic(function: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a function that generates LLVM instructions."""
    compiled: Callable[..., Any] = _intrinsic(function)
    return compiled


def processor() -> tuple[str, str]:
    """Return name and features of the processor that numba compiles for, including numba's
    settings."""
    features = llvm.get_host_cpu_features()
    if not config.ENABLE_AVX:
        features = type(features)(
            {name: on and not name.startswith("avx") for name, on in features.items()}
        )
    chosen = config.CPU_FEATURES
    return (
        config.CPU_NAME or llvm.get_host_cpu_name(),
        features.flatten() if chosen is None else chosen,
    )


def _label(module: Any, instruction: Any, kind: str) -> None:
    """Mark an access as one to tables (``alias.scope``) or as never to tables (``noalias``)."""
    domain = module.add_metadata([ir.MetaDataString(module, "lns_ops")])
    scope = module.add_metadata([ir.MetaDataString(module, "lns_ops tables"), domain])
    instruction.set_metadata(kind, module.add_metadata([scope]))


def _allow_gathers(context: Any, builder: Any) -> None:
    _, features = processor()
    if "+avx2" in features.split(","):
        # llvmlite's own `add` does not support attributes with values.
        set.add(
            builder.function.attributes,
            f'"target-features"="{features},+fast-gather,-prefer-no-gather"',
        )


def _address(context: Any, builder: Any, array_type: Any, array: Any, index: Any) -> Any:
    return builder.gep(context.make_array(array_type)(context, builder, array).data, [index])


@intrinsic
def get(typing_context: Any, array: Any, index: Any) -> Any:
    """Return ``array[index]`` of an array that is not a table; no negative indices."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        value = builder.load(_address(context, builder, signature.args[0], *args))
        _label(builder.module, value, "noalias")
        return value

    return array.dtype(array, types.int64), generate


@intrinsic
def put(typing_context: Any, array: Any, index: Any, value: Any) -> Any:
    """Store ``array[index] = value`` in an array that is not a table; no negative indices."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _allow_gathers(context, builder)
        stored = builder.store(
            args[2], _address(context, builder, signature.args[0], args[0], args[1])
        )
        _label(builder.module, stored, "noalias")
        return context.get_dummy_value()

    return types.none(array, types.int64, array.dtype), generate


@intrinsic
def look_up(typing_context: Any, table: Any, index: Any) -> Any:
    """Return ``table[index]`` for an index in ``0 .. 2^31 - 1``."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        # Clearing the sign shows LLVM that 32 bits are enough for the address.
        positive = builder.and_(args[1], ir.Constant(ir.IntType(32), 0x7FFFFFFF))
        address = _address(
            context, builder, signature.args[0], args[0], builder.zext(positive, ir.IntType(64))
        )
        value = builder.load(address)
        _label(builder.module, value, "alias.scope")
        return value

    return table.dtype(table, types.int32), generate


def _bits_as(kind: Any) -> Any:
    """Return code that reinterprets the bits of its argument as another type."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], kind)

    return generate


@intrinsic
def float_of(typing_context: Any, pattern: Any) -> Any:
    """Return the float32 with the bits of an int32."""
    return types.float32(types.int32), _bits_as(ir.FloatType())


@intrinsic
def pattern_of(typing_context: Any, value: Any) -> Any:
    """Return the bits of a float32 as an int32."""
    return types.int32(types.float32), _bits_as(ir.IntType(32))


@intrinsic
def double_of(typing_context: Any, pattern: Any) -> Any:
    """Return the float64 with the bits of an int64."""
    return types.float64(types.int64), _bits_as(ir.DoubleType())


@intrinsic
def pattern_of_double(typing_context: Any, value: Any) -> Any:
    """Return the bits of a float64 as an int64."""
    return types.int64(types.float64), _bits_as(ir.IntType(64))


def _flat_array(context: Any, builder: Any, array_type: Any, address: Any, size: Any) -> Any:
    """Return a contiguous array of ``size`` elements at ``address``; it does not own the memory."""
    array = context.make_array(array_type)(context, builder)
    array.data, array.nitems = builder.bitcast(address, array.data.type), size
    array.itemsize = ir.Constant(
        size.type, context.get_abi_sizeof(context.get_data_type(array_type.dtype))
    )
    array.shape, array.strides = (
        cgutils.pack_array(builder, [size]),
        cgutils.pack_array(builder, [array.itemsize]),
    )
    return struct_value(array)


@intrinsic
def scratch(typing_context: Any, size: Any, dtype: Any) -> Any:
    """Return an uninitialized array on the stack, like ``numpy.empty(size, dtype)``.

    Call it once, outside loops.
    """
    array_type = types.Array(dtype.instance_type, 1, "C")

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        memory = builder.alloca(context.get_data_type(array_type.dtype), args[0])
        memory.align = 64
        return _flat_array(context, builder, array_type, memory, args[0])

    return array_type(types.int64, dtype), generate


def _word(builder: Any, address: Any, index: int) -> Any:
    """Load a 64-bit word from memory."""
    pointer = builder.inttoptr(address, ir.IntType(64).as_pointer())
    return builder.load(builder.gep(pointer, [ir.Constant(ir.IntType(64), index)]))


def _array_parts(builder: Any, address: Any) -> tuple[Any, Any, Any, Any]:
    """Load data address, number of dimensions, first size and first stride from an array object."""
    fields = builder.add(address, ir.Constant(address.type, ARRAY_HEADER))
    data, dimensions, shape, strides = (_word(builder, fields, i) for i in range(4))
    return (
        data,
        builder.trunc(dimensions, ir.IntType(32)),
        _word(builder, shape, 0),
        _word(builder, strides, 0),
    )


def argument_readers(kinds: list[Any]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return two functions that check and read a kernel's packed arguments.

    Both take a pointer to the words that :mod:`lns_ops.cpu.compiler.object_cache` packs: the array
    objects, then the numbers. The first function returns whether all arrays are contiguous and
    one-dimensional, the second returns values of the types ``kinds``.
    """
    return _contiguity_check(kinds), _values_reader(kinds)


def _contiguity_check(kinds: list[Any]) -> Callable[..., Any]:
    @intrinsic
    def fit(typing_context: Any, words: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            fits = ir.Constant(ir.IntType(1), 1)
            sizes = [
                context.get_abi_sizeof(context.get_data_type(kind.dtype))
                for kind in kinds
                if isinstance(kind, types.Array)
            ]
            for i, item in enumerate(sizes):
                _, dimensions, size, stride = _array_parts(
                    builder, builder.load(cgutils.gep(builder, args[0], i))
                )
                dense = builder.icmp_signed("==", stride, ir.Constant(stride.type, item))
                dense = builder.or_(
                    dense, builder.icmp_signed("<", size, ir.Constant(size.type, 2))
                )
                flat = builder.icmp_signed("==", dimensions, ir.Constant(dimensions.type, 1))
                fits = builder.and_(fits, builder.and_(flat, dense))
            return fits

        return types.boolean(words), generate

    return fit


def _values_reader(kinds: list[Any]) -> Callable[..., Any]:
    arrays = sum(isinstance(kind, types.Array) for kind in kinds)

    @intrinsic
    def arguments(typing_context: Any, words: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            loaded = [builder.load(cgutils.gep(builder, args[0], i)) for i in range(len(kinds))]
            objects, numbers = iter(loaded[:arrays]), iter(loaded[arrays:])
            values = []
            for kind in kinds:
                if isinstance(kind, types.Array):
                    data, _, size, _ = _array_parts(builder, next(objects))
                    pointer = builder.inttoptr(data, context.get_data_type(kind.dtype).as_pointer())
                    values.append(_flat_array(context, builder, kind, pointer, size))
                elif isinstance(kind, types.NoneType):
                    values.append(context.get_dummy_value())
                else:
                    values.append(context.cast(builder, next(numbers), types.int64, kind))
            return context.make_tuple(builder, signature.return_type, values)

        return types.Tuple(kinds)(words), generate

    return arguments
