"""LLVM instructions on 32 lanes of int16, as functions that compiled kernels call.

numba has no vector type, so one is registered here: a ``<32 x i16>`` value, one AVX-512 register. Where LLVM has a general
instruction it is used (saturating addition, minimum, multiplication); AVX-512 intrinsics by name only for table look-ups
(vpermb, vpermi2w; the former needs VBMI), the high half of products, and three-operand logic. Constants reach the kernels as
loaded vectors: given literals, LLVM would rewrite multiplications and selections into longer sequences.

:func:`add` is one LNS addition; :mod:`lns_ops._segments` has the formulas, and :mod:`lns_ops._simd` the words. Rows of the constants are named below.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import models, register_model

from lns_ops._jit import intrinsic

(
    REACH, ONE, SCALE, SPREAD, OFFSET_LOW, OFFSET_HIGH, SLOPE_LOW, SLOPE_HIGH, EXACT_0, EXACT_1, TO_DISTANCE, NEAR, UNITS,
    CELL_PLUS, CELL_MINUS, NOTHING, ZONE,
) = range(17)  # fmt: skip
ROWS = 17
"""Rows of the constants: 32 int16 lanes each."""

HIGH_BYTES = -0x5555555555555556
"""Mask of the upper byte of every lane, 0xAAAA..."""

_I16, _I32, _I64 = ir.IntType(16), ir.IntType(32), ir.IntType(64)
_WORDS, _BYTES, _QUADS = ir.VectorType(_I16, 32), ir.VectorType(ir.IntType(8), 64), ir.VectorType(_I32, 16)


class _Lanes(types.Type):  # type: ignore[misc]
    """The type of a ``<32 x i16>`` value."""

    def __init__(self) -> None:
        super().__init__("lns_lanes_i16x32")


lanes_type = _Lanes()


class _LanesModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, fe_type: Any) -> None:
        super().__init__(manager, fe_type, _WORDS)


register_model(_Lanes)(_LanesModel)


class _Emit:
    """Writes vector instructions into one function."""

    def __init__(self, builder: Any) -> None:
        self.builder = builder

    def call(self, name: str, *values: Any, result: Any = _WORDS) -> Any:
        kind = ir.FunctionType(result, [value.type for value in values])
        return self.builder.call(cgutils.get_or_insert_function(self.builder.module, kind, name), values)

    def bytes_of(self, value: Any) -> Any:
        return self.builder.bitcast(value, _BYTES)

    def words_of(self, value: Any) -> Any:
        return self.builder.bitcast(value, _WORDS)

    def logic(self, rule: Callable[[int, int, int], int], a: Any, b: Any, c: Any) -> Any:
        """Any bitwise function of three operands, one instruction."""
        table = sum(bool(rule(i >> 2 & 1, i >> 1 & 1, i & 1)) << i for i in range(8))
        operands = [self.builder.bitcast(value, _QUADS) for value in (a, b, c)]
        done = self.call("llvm.x86.avx512.pternlog.d.512", *operands, ir.Constant(_I32, table), result=_QUADS)
        return self.words_of(done)

    def larger(self, x: Any, y: Any) -> Any:
        return self.call("llvm.smax.v32i16", x, y)

    def add_saturating(self, x: Any, y: Any) -> Any:
        return self.call("llvm.sadd.sat.v32i16", x, y)

    def subtract_to_zero(self, x: Any, y: Any) -> Any:
        return self.call("llvm.usub.sat.v32i16", x, y)

    def high_product(self, x: Any, y: Any) -> Any:
        """Unsigned ``x y >> 16``."""
        return self.call("llvm.x86.avx512.pmulhu.w.512", x, y)

    def rounded_product(self, x: Any, y: Any) -> Any:
        """Signed ``x y + 2^14 >> 15``."""
        return self.call("llvm.x86.avx512.pmul.hr.sw.512", x, y)

    def look_up_bytes(self, table: Any, index: Any) -> Any:
        """A 64-byte table at the low six bits of each byte of ``index``."""
        return self.call("llvm.x86.avx512.permvar.qi.512", self.bytes_of(table), self.bytes_of(index), result=_BYTES)

    def look_up_words(self, low: Any, high: Any, index: Any) -> Any:
        """A 64-word table at the low six bits of each word of ``index``."""
        return self.call("llvm.x86.avx512.vpermi2var.hi.512", low, index, high)

    def look_up_split(self, low: Any, high: Any, index: Any, high_bytes: Any) -> Any:
        """A 64-word table kept as low and high bytes; both bytes of each word of ``index`` hold the same index."""
        merged = self.builder.select(high_bytes, self.look_up_bytes(high, index), self.look_up_bytes(low, index))
        return self.words_of(merged)


def _distance(emit: _Emit, x: Any, y: Any, one: Any) -> tuple[Any, Any]:
    """The larger word, and D: the unit times the distance, plus one where the signs differ."""
    larger = emit.larger(x, y)
    odd = emit.builder.or_(larger, one)
    # x ^ y ^ larger is the smaller word; with `odd` its sign bit becomes "signs agree", so the difference ends in "differ".
    return larger, emit.builder.sub(odd, emit.logic(lambda a, b, c: a ^ b ^ c, x, y, odd))


def _near_exact(emit: _Emit, c: list[Any], distance: Any) -> Any:
    """The exact correction where signs differ and the distance is small, else 0."""
    b = emit.builder
    zero = ir.Constant(_WORDS, None)
    differ = b.icmp_unsigned("!=", b.and_(distance, c[ONE]), zero)
    near = b.and_(b.icmp_unsigned("<", distance, c[NEAR]), differ)
    entry = emit.look_up_words(c[EXACT_0], c[EXACT_1], emit.high_product(distance, c[TO_DISTANCE]))
    return b.select(near, entry, zero)


def _finish(emit: _Emit, c: list[Any], larger: Any, distance: Any, remaining: Any, cell: Any, high_bytes: Any) -> Any:
    """Evaluate the line of ``cell``, or take the exact entry, and add it to the larger word."""
    offset = emit.look_up_split(c[OFFSET_LOW], c[OFFSET_HIGH], cell, high_bytes)
    slope = emit.look_up_split(c[SLOPE_LOW], c[SLOPE_HIGH], cell, high_bytes)
    line = emit.builder.add(offset, emit.rounded_product(slope, remaining))
    # Cells of near, unlike distances hold the zero line, so OR selects.
    value = emit.logic(lambda a, b, e: (a & b) | e, line, c[UNITS], _near_exact(emit, c, distance))
    return emit.add_saturating(larger, value)


def _emit_direct(emit: _Emit, x: Any, y: Any, c: list[Any], high_bytes: Any) -> Any:
    larger, distance = _distance(emit, x, y, c[ONE])
    remaining = emit.subtract_to_zero(c[REACH], distance)
    square = emit.high_product(remaining, remaining)
    index = emit.logic(lambda a, b, one: b if one else a, square, distance, c[ONE])
    return _finish(emit, c, larger, distance, remaining, emit.builder.mul(index, c[SPREAD]), high_bytes)


def _emit_mapped(emit: _Emit, x: Any, y: Any, c: list[Any], high_bytes: Any) -> Any:
    b = emit.builder
    larger, distance = _distance(emit, x, y, c[ONE])
    remaining = b.mul(emit.subtract_to_zero(c[REACH], distance), c[SCALE])
    square = emit.high_product(remaining, remaining)
    spread = [emit.bytes_of(value) for value in (c[SPREAD], square)]
    window = emit.call("llvm.x86.avx512.pmultishift.qb.512", *spread, result=_BYTES)
    like, unlike = (emit.words_of(emit.look_up_bytes(c[row], window)) for row in (CELL_PLUS, CELL_MINUS))
    differ = b.icmp_unsigned("!=", b.and_(distance, c[ONE]), ir.Constant(_WORDS, None))
    return _finish(emit, c, larger, distance, remaining, b.select(differ, unlike, like), high_bytes)


@intrinsic
def add(typing_context: Any, x: Any, y: Any, constants: Any, high_bytes: Any, mapped: Any) -> Any:
    """Sum of two words. The *type* of ``mapped`` chooses at compile time: None for a direct shape, True for a mapped one."""
    emitter = _emit_direct if isinstance(mapped, types.NoneType) else _emit_mapped

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        rows = cgutils.unpack_tuple(builder, args[2])
        mask = builder.bitcast(args[3], ir.VectorType(ir.IntType(1), 64))
        return emitter(_Emit(builder), args[0], args[1], rows, mask)

    return lanes_type(lanes_type, lanes_type, constants, types.int64, mapped), generate


@intrinsic
def add_saturating(typing_context: Any, x: Any, y: Any) -> Any:
    """``x + y``, saturating: a product of words."""
    return lanes_type(lanes_type, lanes_type), lambda context, builder, signature, args: _Emit(builder).add_saturating(*args)


@intrinsic
def settle(typing_context: Any, x: Any, zone: Any, nothing: Any) -> Any:
    """``nothing`` where ``x`` is below ``zone``, else ``x``."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.select(builder.icmp_signed("<", args[0], args[1]), args[2], args[0])

    return lanes_type(lanes_type, lanes_type, lanes_type), generate


def _address(context: Any, builder: Any, array_type: Any, array: Any, offset: Any) -> Any:
    data = context.make_array(array_type)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [offset]), _WORDS.as_pointer())


@intrinsic
def load(typing_context: Any, array: Any, offset: Any) -> Any:
    """32 lanes of a contiguous int16 array from ``offset`` on."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load(_address(context, builder, signature.args[0], *args), align=2)

    return lanes_type(array, types.int64), generate


@intrinsic
def store(typing_context: Any, array: Any, offset: Any, value: Any) -> Any:
    """Write 32 lanes."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store(args[2], _address(context, builder, signature.args[0], args[0], args[1]), align=2)
        return context.get_dummy_value()

    return types.none(array, types.int64, lanes_type), generate


@intrinsic
def spread_pair(typing_context: Any, pair: Any) -> Any:
    """An int32 in all 16 double lanes; with a word in both halves, that word in all lanes, by one load."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        empty = ir.Constant(_QUADS, ir.Undefined)
        first = builder.insert_element(empty, args[0], ir.Constant(_I32, 0))
        return builder.bitcast(builder.shuffle_vector(first, empty, ir.Constant(_QUADS, None)), _WORDS)

    return lanes_type(types.int32), generate
