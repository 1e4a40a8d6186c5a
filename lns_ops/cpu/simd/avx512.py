"""LLVM instructions on 32 lanes of int16, as functions that compiled kernels call.

numba has no vector type, so one is registered here: a ``<32 x i16>`` value, one AVX-512 register.
General LLVM instructions are used where they exist (saturating addition, minimum, multiplication).
AVX-512 intrinsics are used only for table look-ups (vpermb, vpermi2w; the former needs VBMI), the
high half of products, and three-operand logic. Constants reach the kernels as loaded vectors. If
they were literals, LLVM would rewrite multiplications and selections into longer sequences.

:func:`add` is the LNS addition of several vectors side by side. The formulas are in
:mod:`lns_ops.cpu.simd.piecewise_avx512`, the words are defined in :mod:`lns_ops.cpu.simd.gemm`.
Rows of the constants are named below.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import int16, int32, int64, types
from numba.core import cgutils
from numba.extending import models, register_model
from numpy.typing import NDArray

from lns_ops.cpu.compiler.intrinsics import get, helper, intrinsic, put, scratch
from lns_ops.cpu.compiler.object_cache import Kernel, kernel

(
    REACH, ONE, SCALE, SPREAD, OFFSET_LOW, OFFSET_HIGH, SLOPE_LOW, SLOPE_HIGH, EXACT_0, EXACT_1,
    TO_DISTANCE, NEAR, UNITS, CELL_PLUS, CELL_MINUS, NOTHING, ZONE,
) = range(17)  # fmt: skip
ROWS = 17
"""Number of rows of the constants, 32 int16 lanes each."""

PANEL = 256
"""Number of columns of a panel: eight vectors, enough independent additions to hide latency."""
SIDE_BY_SIDE = 2
"""Number of additions whose instructions are interleaved.

With more, instructions of one kind wait for the single port that executes them.
"""
ROWS_AT_ONCE = 8
"""Number of rows that share a panel's block while it is in the first-level cache."""
LOWEST_WORD = -32768
"""The word of zero."""

HIGH_BYTES = -0x5555555555555556
"""The mask of the upper byte of every lane, 0xAAAA..."""

_I16, _I32 = ir.IntType(16), ir.IntType(32)
WORDS, _BYTES, _QUADS = (
    ir.VectorType(_I16, 32),
    ir.VectorType(ir.IntType(8), 64),
    ir.VectorType(_I32, 16),
)


class _Lanes(types.Type):  # type: ignore[misc]
    """The type of a ``<32 x i16>`` value."""

    def __init__(self) -> None:
        super().__init__("lns_lanes_i16x32")


lanes_type = _Lanes()


class _LanesModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, fe_type: Any) -> None:
        super().__init__(manager, fe_type, WORDS)


register_model(_Lanes)(_LanesModel)


class _Emit:
    """Emits vector instructions into one function."""

    def __init__(self, builder: Any) -> None:
        self.builder = builder

    def call(self, name: str, *values: Any, result: Any = WORDS) -> Any:
        kind = ir.FunctionType(result, [value.type for value in values])
        return self.builder.call(
            cgutils.get_or_insert_function(self.builder.module, kind, name), values
        )

    def bytes_of(self, value: Any) -> Any:
        return self.builder.bitcast(value, _BYTES)

    def words_of(self, value: Any) -> Any:
        return self.builder.bitcast(value, WORDS)

    def logic(self, rule: Callable[[int, int, int], int], a: Any, b: Any, c: Any) -> Any:
        """Compute any bitwise function of three operands in one instruction."""
        table = sum(bool(rule(i >> 2 & 1, i >> 1 & 1, i & 1)) << i for i in range(8))
        operands = [self.builder.bitcast(value, _QUADS) for value in (a, b, c)]
        done = self.call(
            "llvm.x86.avx512.pternlog.d.512", *operands, ir.Constant(_I32, table), result=_QUADS
        )
        return self.words_of(done)

    @property
    def zero(self) -> Any:
        return ir.Constant(WORDS, None)

    def eight_bits_from(self, positions: Any, value: Any) -> Any:
        """Set each byte to eight bits of its quadword of ``value``, starting at the given bit."""
        operands = (self.bytes_of(positions), self.bytes_of(value))
        return self.call("llvm.x86.avx512.pmultishift.qb.512", *operands, result=_BYTES)

    def larger(self, x: Any, y: Any) -> Any:
        return self.call("llvm.smax.v32i16", x, y)

    def add_saturating(self, x: Any, y: Any) -> Any:
        return self.call("llvm.sadd.sat.v32i16", x, y)

    def subtract_to_zero(self, x: Any, y: Any) -> Any:
        return self.call("llvm.usub.sat.v32i16", x, y)

    def high_product(self, x: Any, y: Any) -> Any:
        """Return the unsigned ``x y >> 16``."""
        return self.call("llvm.x86.avx512.pmulhu.w.512", x, y)

    def rounded_product(self, x: Any, y: Any) -> Any:
        """Return the signed ``x y + 2^14 >> 15``."""
        return self.call("llvm.x86.avx512.pmul.hr.sw.512", x, y)

    def look_up_bytes(self, table: Any, index: Any) -> Any:
        """Look up a 64-byte table at the low six bits of each byte of ``index``."""
        return self.call(
            "llvm.x86.avx512.permvar.qi.512",
            self.bytes_of(table),
            self.bytes_of(index),
            result=_BYTES,
        )

    def look_up_words(self, low: Any, high: Any, index: Any) -> Any:
        """Look up a 64-word table at the low six bits of each word of ``index``."""
        return self.call("llvm.x86.avx512.vpermi2var.hi.512", low, index, high)

    def look_up_split(self, low: Any, high: Any, index: Any, high_bytes: Any) -> Any:
        """Look up a 64-word table stored as low and high bytes.

        Both bytes of each word of ``index`` contain the same index.
        """
        merged = self.builder.select(
            high_bytes, self.look_up_bytes(high, index), self.look_up_bytes(low, index)
        )
        return self.words_of(merged)


def _each(step: Callable[..., Any], *columns: list[Any]) -> list[Any]:
    """Emit one step of several independent additions side by side, to hide their latency."""
    return [step(*values) for values in zip(*columns, strict=True)]


def _distances(emit: _Emit, x: list[Any], y: list[Any], one: Any) -> tuple[list[Any], list[Any]]:
    """Return the larger words, and D: the unit times the distance, plus one if signs differ."""
    larger = _each(emit.larger, x, y)
    odd = _each(lambda word: emit.builder.or_(word, one), larger)
    # x ^ y ^ larger is the smaller word; with `odd` its sign bit becomes "signs agree", so the
    # difference ends in "differ".
    smaller = _each(lambda a, b, c: emit.logic(lambda i, j, k: i ^ j ^ k, a, b, c), x, y, odd)
    return larger, _each(emit.builder.sub, odd, smaller)


def _direct_cells(emit: _Emit, c: list[Any], distance: list[Any]) -> tuple[list[Any], list[Any]]:
    """Return remaining distances, and the cell's number in both bytes of each word."""
    remaining = _each(lambda d: emit.subtract_to_zero(c[REACH], d), distance)
    square = _each(emit.high_product, remaining, remaining)
    index = _each(
        lambda s, d: emit.logic(lambda i, j, one: j if one else i, s, d, c[ONE]), square, distance
    )
    return remaining, _each(lambda i: emit.builder.mul(i, c[SPREAD]), index)


def _mapped_cells(emit: _Emit, c: list[Any], distance: list[Any]) -> tuple[list[Any], list[Any]]:
    """Return the result of :func:`_direct_cells`, with cells from the byte tables."""
    b = emit.builder
    remaining = _each(lambda d: emit.subtract_to_zero(c[REACH], d), distance)
    remaining = _each(lambda r: b.mul(r, c[SCALE]), remaining)
    square = _each(emit.high_product, remaining, remaining)
    window = _each(lambda s: emit.eight_bits_from(c[SPREAD], s), square)
    like, unlike = (
        _each(lambda w, row=row: emit.look_up_bytes(c[row], w), window)
        for row in (CELL_PLUS, CELL_MINUS)
    )
    differ = _each(lambda d: b.icmp_unsigned("!=", b.and_(d, c[ONE]), emit.zero), distance)
    return remaining, _each(
        lambda k, u, v: b.select(k, emit.words_of(u), emit.words_of(v)), differ, unlike, like
    )


def _near_exact(emit: _Emit, c: list[Any], distance: list[Any]) -> list[Any]:
    """Return the exact corrections if signs differ and the distance is small, else 0."""
    b = emit.builder
    differ = _each(lambda d: b.icmp_unsigned("!=", b.and_(d, c[ONE]), emit.zero), distance)
    near = _each(lambda d, k: b.and_(b.icmp_unsigned("<", d, c[NEAR]), k), distance, differ)
    index = _each(lambda d: emit.high_product(d, c[TO_DISTANCE]), distance)
    return _each(
        lambda k, i: b.select(k, emit.look_up_words(c[EXACT_0], c[EXACT_1], i), emit.zero),
        near,
        index,
    )


def _additions(
    emit: _Emit, cells_of: Callable[..., Any], x: list[Any], y: list[Any], c: list[Any], high: Any
) -> list[Any]:
    """Return the sums of words, several side by side."""
    larger, distance = _distances(emit, x, y, c[ONE])
    remaining, cell = cells_of(emit, c, distance)
    slope = _each(lambda i: emit.look_up_split(c[SLOPE_LOW], c[SLOPE_HIGH], i, high), cell)
    offset = _each(lambda i: emit.look_up_split(c[OFFSET_LOW], c[OFFSET_HIGH], i, high), cell)
    line = _each(emit.builder.add, offset, _each(emit.rounded_product, slope, remaining))
    # For small distances and different signs, cells hold a zero line, so OR selects.
    exact = _near_exact(emit, c, distance)
    value = _each(lambda v, e: emit.logic(lambda i, j, k: (i & j) | k, v, c[UNITS], e), line, exact)
    return _each(emit.add_saturating, larger, value)


@intrinsic
def add(typing_context: Any, x: Any, y: Any, constants: Any, high_bytes: Any, mapped: Any) -> Any:
    """Return the sums of two tuples of words.

    The *type* of ``mapped`` selects the form at compile time: None for direct, else mapped.
    """
    cells_of = _direct_cells if isinstance(mapped, types.NoneType) else _mapped_cells

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        left, right, rows = (cgutils.unpack_tuple(builder, value) for value in args[:3])
        mask = builder.bitcast(args[3], ir.VectorType(ir.IntType(1), 64))
        sums = []
        for i in range(0, len(left), SIDE_BY_SIDE):
            sums += _additions(
                _Emit(builder),
                cells_of,
                left[i : i + SIDE_BY_SIDE],
                right[i : i + SIDE_BY_SIDE],
                rows,
                mask,
            )
        return context.make_tuple(builder, signature.return_type, sums)

    return x(x, y, constants, types.int64, mapped), generate


def _address(
    context: Any, builder: Any, array_type: Any, array: Any, offset: Any, vector: int
) -> Any:
    """Return the address of the 32 lanes that start ``vector`` vectors after ``offset``."""
    data = context.make_array(array_type)(context, builder, array).data
    start = builder.add(offset, ir.Constant(offset.type, 32 * vector))
    return builder.bitcast(builder.gep(data, [start]), WORDS.as_pointer())


@intrinsic
def load(typing_context: Any, array: Any, offset: Any) -> Any:
    """Load 32 lanes of a contiguous int16 array, starting at ``offset``."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load(
            _address(context, builder, signature.args[0], args[0], args[1], 0), align=2
        )

    return lanes_type(array, types.int64), generate


@intrinsic
def load_like(typing_context: Any, array: Any, offset: Any, like: Any) -> Any:
    """Load as many consecutive vectors as the tuple ``like`` has."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        places = (
            _address(context, builder, signature.args[0], args[0], args[1], i)
            for i in range(signature.args[2].count)
        )
        return context.make_tuple(
            builder, signature.return_type, [builder.load(place, align=2) for place in places]
        )

    return like(array, types.int64, like), generate


@intrinsic
def store_all(typing_context: Any, array: Any, offset: Any, values: Any) -> Any:
    """Write the vectors of a tuple one after another."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        for i, value in enumerate(cgutils.unpack_tuple(builder, args[2])):
            builder.store(
                value, _address(context, builder, signature.args[0], args[0], args[1], i), align=2
            )
        return context.get_dummy_value()

    return types.none(array, types.int64, values), generate


@intrinsic
def products(typing_context: Any, pair: Any, y: Any) -> Any:
    """Return the products of one word and each vector of a tuple.

    An int32 contains the word in both halves; a product is a saturating sum.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        empty = ir.Constant(_QUADS, ir.Undefined)
        first = builder.insert_element(empty, args[0], ir.Constant(_I32, 0))
        x = builder.bitcast(builder.shuffle_vector(first, empty, ir.Constant(_QUADS, None)), WORDS)
        emit = _Emit(builder)
        values = [emit.add_saturating(x, value) for value in cgutils.unpack_tuple(builder, args[1])]
        return context.make_tuple(builder, signature.return_type, values)

    return y(types.int32, y), generate


@intrinsic
def settle(typing_context: Any, x: Any, zone: Any, nothing: Any) -> Any:
    """Return the words of the tuple ``x``, with ``nothing`` for words below ``zone``."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        words = cgutils.unpack_tuple(builder, args[0])
        kept = [
            builder.select(builder.icmp_signed("<", word, args[1]), args[2], word) for word in words
        ]
        return context.make_tuple(builder, signature.return_type, kept)

    return x(x, lanes_type, lanes_type), generate


@helper
def _unpack(
    words: Any, at: Any, out: Any, to: Any, count: Any, zone: Any, top: Any, unit_shift: Any,
    mask: Any
) -> None:  # fmt: skip
    """Store the codes of ``count`` result words: saturated above the range, zero below it."""
    zone_, top_, shift_, mask_ = int16(zone), int32(top), int32(unit_shift), int32(mask)
    for j in range(count):
        short = get(words, at + j)
        word = int32(short)
        field = int32((word >> shift_) + top_)
        code = int32(min(field, mask_) | (~mask_ if word & 1 else int32(0)))
        put(out, to + j, int16(code) if (short >= zone_) & (field > 0) else int16(0))


def product(addition: Callable[..., Any], name: str) -> Kernel:
    """Return the kernel of matrix products for a function that adds two tuples of words."""

    @helper
    def row(
        steps: Any, words: Any, first: Any, last: Any, panels: Any, base: Any, totals: Any, at: Any,
        empty: Any, floor: Any, c: Any, extra: Any, mapped: Any,
    ) -> None:  # fmt: skip
        """Add one row's terms of one block, and the block's total to ``totals`` at ``at``.

        The tuple ``empty`` sets the width.
        """
        sums = empty
        for e in range(first, last):
            y = load_like(panels, base + int64(get(steps, e)), sums)
            sums = addition(sums, products(get(words, e), y), c, extra, mapped)
        sums = addition(
            load_like(totals, at, sums), settle(sums, floor, empty[0]), c, extra, mapped
        )
        store_all(totals, at, settle(sums, floor, empty[0]))

    def matmul(
        counts: NDArray[np.int32], steps: NDArray[np.int32], words: NDArray[np.int32],
        panels: NDArray[np.int16], constants: NDArray[np.int16], extra: int, mapped: bool | None,
        out: NDArray[np.int16], M: int, K: int, N: int, block: int, zone: int, top: int,
        unit_shift: int, mask: int, start: int, stop: int,
    ) -> int:  # fmt: skip
        """Compute codes (M, N) of packed operands; a unit is one panel times ROWS_AT_ONCE rows.

        Packing is in :mod:`lns_ops.cpu.simd.gemm`.
        """
        blocks = (K + block - 1) // block
        chunks = (M + ROWS_AT_ONCE - 1) // ROWS_AT_ONCE
        c = (
            load(constants, 0), load(constants, 32), load(constants, 64), load(constants, 96),
            load(constants, 128), load(constants, 160), load(constants, 192), load(constants, 224),
            load(constants, 256), load(constants, 288), load(constants, 320), load(constants, 352),
            load(constants, 384), load(constants, 416), load(constants, 448),
        )  # fmt: skip
        none, floor = load(constants, 480), load(constants, 512)
        totals = scratch(ROWS_AT_ONCE * PANEL, int16)
        for unit in range(start, stop):
            panel, first = unit // chunks, unit % chunks * ROWS_AT_ONCE
            rows, width, base = (
                min(ROWS_AT_ONCE, M - first),
                min(PANEL, N - panel * PANEL),
                panel * K * 2 * PANEL,
            )
            totals[:] = LOWEST_WORD
            for b in range(blocks):
                for i in range(rows):
                    e0 = (first + i) * K + b * block
                    e1, t = e0 + counts[(first + i) * blocks + b], i * PANEL
                    if width > 128:
                        empty = (none, none, none, none, none, none, none, none)
                        row(
                            steps, words, e0, e1, panels, base, totals, t, empty, floor, c, extra,
                            mapped,
                        )  # fmt: skip
                    elif width > 32:
                        row(
                            steps, words, e0, e1, panels, base, totals, t, (none, none, none, none),
                            floor, c, extra, mapped,
                        )  # fmt: skip
                    else:
                        row(
                            steps, words, e0, e1, panels, base, totals, t, (none,), floor, c, extra,
                            mapped,
                        )  # fmt: skip
            for i in range(rows):
                _unpack(
                    totals, i * PANEL, out, (first + i) * N + panel * PANEL, width, zone, top,
                    unit_shift, mask,
                )  # fmt: skip
        return 0

    matmul.__qualname__ = name
    return kernel(matmul)


matmul = product(add, "matmul")
