"""The LNS addition on vectors for processors with AVX2 but not AVX-512.

The method is as in :mod:`lns_ops.cpu.simd.avx512`, with byte permutations of 16 entries.

A vector of 32 lanes is two registers here. LLVM splits instructions that both instruction sets
have; :func:`add` works on the halves. Their windows are packed into the bytes of one register, so
one look-up serves 32 additions, and the low and high bytes of the result are interleaved to words
again. :mod:`lns_ops.cpu.simd.piecewise_avx2` has the formulas. 32 products take 68 instructions at
f <= 6 and 87 at f = 7, not counting loads and stores.

Sixteen registers cannot hold the sums and the tables, so both are in memory. Several additions are
interleaved, so that each loaded table serves all of them. Otherwise, or if the tables' address were
not hidden once per group, LLVM would load all tables before the loop and then load them again from
the stack.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from lns_ops.cpu.compiler.intrinsics import intrinsic
from lns_ops.cpu.simd import avx512
from lns_ops.cpu.simd.piecewise_avx2 import ENTRIES, Cut

MULTIPLIER = avx512.SPREAD
"""The row of the constants with the window's multiplier.

The rows REACH, ONE, SCALE, UNITS, NOTHING and ZONE are defined in :mod:`lns_ops.cpu.simd.avx512`.
"""
SIDE_BY_SIDE = 4
"""Number of additions of 32 products whose instructions are interleaved.

Interleaving hides their latency and shares the loads of tables.
"""
FORMS = {large: Cut(1 if large else 2, 0, 0, 0, 64 if large else 32) for large in (False, True)}
"""The facts of a cut for which one form of the addition is compiled."""

COARSE, SIXTEEN, HALVES, BASE, MASK, CHANGE, CELLS = 0, 1, 2, 4, 6, 8, 10
"""The start of each constant and table, in registers of 32 bytes.

CELLS is the start of the low bytes of A, its high bytes, and both bytes of B.
"""
OFFSET_HIGH = 1

_HALF, _BYTES = ir.VectorType(ir.IntType(16), 16), ir.VectorType(ir.IntType(8), 32)


def _halves(builder: Any, value: Any) -> list[Any]:
    """Return the two registers of a vector of 32 words."""
    parts = (
        ir.Constant(ir.VectorType(ir.IntType(32), 16), list(range(16 * i, 16 * i + 16)))
        for i in (0, 1)
    )
    return [
        builder.shuffle_vector(value, ir.Constant(value.type, ir.Undefined), part) for part in parts
    ]


class _Emit:
    """Emits AVX2 instructions into one function."""

    def __init__(self, builder: Any, tables: Any) -> None:
        self.builder = builder
        # Empty assembly, so that LLVM cannot know its result.
        number = ir.IntType(64)
        hidden = ir.InlineAsm(ir.FunctionType(number, [number]), "", "=r,0", side_effect=True)
        self.tables = builder.inttoptr(builder.call(hidden, [tables]), _BYTES.as_pointer())
        self.loaded: dict[int, Any] = {}

    def call(self, name: str, *values: Any, result: Any = _HALF) -> Any:
        kind = ir.FunctionType(result, [value.type for value in values])
        return self.builder.call(
            cgutils.get_or_insert_function(self.builder.module, kind, name), values
        )

    def table(self, index: int) -> Any:
        """Load 32 bytes once: a table of 16 bytes twice, or a constant."""
        if index not in self.loaded:
            self.loaded[index] = self.builder.load(
                self.builder.gep(self.tables, [ir.Constant(ir.IntType(64), index)]), align=1
            )
        return self.loaded[index]

    def joined(self, low: Any, high: Any) -> Any:
        """Join two registers to a vector of 32 words, the inverse of :func:`_halves`."""
        return self.builder.shuffle_vector(
            low, high, ir.Constant(ir.VectorType(ir.IntType(32), 32), list(range(32)))
        )

    def packed(self, low: Any, high: Any) -> Any:
        """Pack the words of two registers to bytes, saturating, alternating 128 bits of each."""
        return self.call("llvm.x86.avx2.packuswb", low, high, result=_BYTES)

    def words(self, low: Any, high: Any) -> list[Any]:
        """Interleave low and high bytes to two registers of words, ordered as in :meth:`packed`."""
        orders = (
            [16 * lane + 8 * half + i // 2 + 32 * (i % 2) for lane in (0, 1) for i in range(16)]
            for half in (0, 1)
        )
        kind = ir.VectorType(ir.IntType(32), 32)
        return [
            self.builder.bitcast(
                self.builder.shuffle_vector(low, high, ir.Constant(kind, o)), _HALF
            )
            for o in orders
        ]

    def shifted(self, value: Any, bits: int) -> Any:
        """Shift bytes right as words: bits cross byte boundaries."""
        words = self.builder.lshr(
            self.builder.bitcast(value, _HALF), ir.Constant(_HALF, [bits] * 16)
        )
        return self.builder.bitcast(words, _BYTES)

    def look_up(self, table: int, index: Any, found: Any = None) -> Any:
        """Look up bytes in a table of 16, zero for a negative index; XOR them with ``found``."""
        part = self.call("llvm.x86.avx2.pshuf.b", self.table(table), index, result=_BYTES)
        return part if found is None else self.builder.xor(found, part)


def _addition(emit: _Emit, x: Any, y: Any, c: dict[int, Any], form: Cut) -> Iterator[Any]:
    """Emit the sums of 32 words; yield None after every few instructions, and finally the sums."""
    b, halves = emit.builder, (0, 1)

    def high_product(u: Any, v: Any) -> Any:
        return emit.call("llvm.x86.avx2.pmulhu.w", u, v)

    larger, distance = [], []
    for u, v in zip(_halves(b, x), _halves(b, y), strict=True):
        larger.append(emit.call("llvm.smax.v16i16", u, v))
        odd = b.or_(larger[-1], c[avx512.ONE])
        # x ^ y ^ larger is the smaller word; with `odd` its sign bit becomes "signs agree", so the
        # difference ends in "differ".
        distance.append(b.sub(odd, b.xor(b.xor(u, v), odd)))
        yield None
    power = []
    for d in distance:
        power.append(emit.call("llvm.usub.sat.v16i16", c[avx512.REACH], d))
        yield None
    for i in halves:
        power[i] = b.mul(power[i], c[avx512.SCALE])
        yield None
    for i in halves:
        power[i] = high_product(power[i], power[i])
        yield None
    # Bytes: 0 if the signs differ, else 255.
    agree = b.add(
        emit.packed(*(b.and_(d, c[avx512.ONE]) for d in distance)), ir.Constant(_BYTES, [-1] * 32)
    )
    yield None
    for i in halves:
        power[i] = high_product(power[i], power[i])
        yield None
    near = b.or_(emit.packed(*distance), agree)
    for i in range(form.unit_shift):
        near = emit.call("llvm.x86.avx2.pavg.b", near, emit.table(HALVES + i), result=_BYTES)
    yield None
    window = [high_product(p, c[MULTIPLIER]) for p in power]
    yield None
    curve = [high_product(p, p) for p in power]
    yield None
    window = emit.packed(*window)
    coarse = b.and_(emit.shifted(window, 3), emit.table(COARSE))
    yield None
    # A small cut has one register for the coarse windows: even numbers for different signs, each
    # followed by the window for equal signs. A large cut has the windows for equal signs in the
    # first register. For equal signs the index into the second one finds nothing (255 is negative);
    # for different signs its entry is XORed to give their window.
    indices = [coarse, b.or_(coarse, agree)] if form.large else [b.sub(coarse, agree)]
    yield None
    base = mask = None
    for i, index in enumerate(indices):
        base = emit.look_up(BASE + i, index, base)
        yield None
        mask = emit.look_up(MASK + i, index, mask)
        yield None
    index = b.add(base, b.and_(window, mask))
    yield None
    registers = form.cells // ENTRIES
    found: list[Any] = [None] * 4
    for r in range(registers):
        index = b.sub(index, emit.table(SIXTEEN)) if r else index
        for part in range(4):
            if part != OFFSET_HIGH or r * ENTRIES >= form.plain:
                found[part] = emit.look_up(CELLS + part * registers + r, index, found[part])
                yield None
    offset_low, offset_high, *slope = found
    line = [
        emit.call("llvm.x86.avx2.pmul.hr.sw", w, p)
        for w, p in zip(emit.words(*slope), curve, strict=True)
    ]
    yield None
    offset_low = emit.look_up(CHANGE, near, offset_low)
    yield None
    offset_high = emit.look_up(CHANGE + 1, near, offset_high)
    yield None
    sums: list[Any] = []
    for i, offset in zip(halves, emit.words(offset_low, offset_high), strict=True):
        value = b.and_(b.add(offset, line[i]), c[avx512.UNITS])
        sums.append(emit.call("llvm.sadd.sat.v16i16", larger[i], value))
    yield emit.joined(*sums)


@intrinsic
def add(typing_context: Any, x: Any, y: Any, constants: Any, tables: Any, mapped: Any) -> Any:
    """Add two tuples of words as :func:`lns_ops.cpu.simd.avx512.add` does.

    ``tables`` is the address of the tables.
    """
    large = not isinstance(mapped, types.NoneType)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        left, right, rows = (cgutils.unpack_tuple(builder, value) for value in args[:3])
        used = (avx512.REACH, avx512.ONE, avx512.SCALE, MULTIPLIER, avx512.UNITS)
        c = {row: _halves(builder, rows[row])[0] for row in used}
        sums: list[Any] = []
        for i in range(0, len(left), SIDE_BY_SIDE):
            emit = _Emit(builder, args[3])
            pairs = zip(left[i : i + SIDE_BY_SIDE], right[i : i + SIDE_BY_SIDE], strict=True)
            turns = zip(*(_addition(emit, a, b, c, FORMS[large]) for a, b in pairs), strict=True)
            sums += deque(turns, maxlen=1).pop()
        return context.make_tuple(builder, signature.return_type, sums)

    return x(x, y, constants, types.int64, mapped), generate


matmul = avx512.product(add, "matmul_avx2")
