"""The LNS addition of :mod:`lns_ops._vector` for processors with AVX2 but not AVX-512: byte permutations of 16 entries.

A vector of 32 lanes is two registers here. LLVM splits what is common to both instruction sets; :func:`add` works on the halves. Their
windows are packed into the bytes of one register, so that each look-up serves 32 additions, and the low and high bytes that it finds
are interleaved to words again. :mod:`lns_ops._pieces` has the formulas. About 76 vector instructions for 32 products at f = 6, 94 at
f = 7.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from lns_ops import _vector
from lns_ops._jit import intrinsic
from lns_ops._pieces import ENTRIES, FINE_BITS

MULTIPLIER = _vector.SPREAD
"""This row of the constants holds the window's multiplier; the rows REACH, ONE, SCALE, UNITS, NOTHING and ZONE are as there."""
SIDE_BY_SIDE = 2
"""Additions of 32 products whose instructions are interleaved."""
LAG = 13
"""How far the second one starts behind the first, in pauses: then multiplications of one meet look-ups of the other."""
CELLS = {True: 64, False: 32}
"""Cells by whether the shape is mapped, the word for large ones."""

COARSE, SIXTEEN, FAR, BASE, MASK, CHANGE, OFFSET = 0, 1, 2, 3, 5, 7, 9
"""Where tables start, in registers of 32 bytes. BASE, MASK, CHANGE: two tables; OFFSET: two bytes of the cells, then two of the slope."""

_HALF, _BYTES = ir.VectorType(ir.IntType(16), 16), ir.VectorType(ir.IntType(8), 32)


class _Emit:
    """Writes AVX2 instructions into one function."""

    def __init__(self, builder: Any, tables: Any) -> None:
        self.builder = builder
        self.tables = builder.inttoptr(tables, _BYTES.as_pointer())

    def call(self, name: str, *values: Any, result: Any = _HALF) -> Any:
        kind = ir.FunctionType(result, [value.type for value in values])
        return self.builder.call(cgutils.get_or_insert_function(self.builder.module, kind, name), values)

    def table(self, index: int) -> Any:
        """32 bytes: a table of 16 twice, or a constant."""
        return self.builder.load(self.builder.gep(self.tables, [ir.Constant(ir.IntType(64), index)]), align=1)

    def halves(self, value: Any) -> list[Any]:
        """The two registers of a vector of 32 words."""
        parts = (ir.Constant(ir.VectorType(ir.IntType(32), 16), list(range(16 * i, 16 * i + 16))) for i in (0, 1))
        return [self.builder.shuffle_vector(value, ir.Constant(value.type, ir.Undefined), part) for part in parts]

    def joined(self, low: Any, high: Any) -> Any:
        """The inverse of :meth:`halves`."""
        return self.builder.shuffle_vector(low, high, ir.Constant(ir.VectorType(ir.IntType(32), 32), list(range(32))))

    def packed(self, low: Any, high: Any) -> Any:
        """Words of two registers as bytes, saturating: from each 128 bits of both in turn."""
        return self.call("llvm.x86.avx2.packuswb", low, high, result=_BYTES)

    def words(self, low: Any, high: Any) -> list[Any]:
        """Two registers of words, in the order of :meth:`packed`, from their low and high bytes."""
        orders = ([16 * lane + 8 * half + i // 2 + 32 * (i % 2) for lane in (0, 1) for i in range(16)] for half in (0, 1))
        kind = ir.VectorType(ir.IntType(32), 32)
        return [self.builder.bitcast(self.builder.shuffle_vector(low, high, ir.Constant(kind, o)), _HALF) for o in orders]

    def shifted(self, value: Any, bits: int) -> Any:
        """Words in bytes' clothing shifted right, or left if negative; bits cross from byte to byte."""
        b, words = self.builder, self.builder.bitcast(value, _HALF)
        count = ir.Constant(_HALF, [abs(bits)] * 16)
        return b.bitcast(b.lshr(words, count) if bits > 0 else b.shl(words, count), _BYTES)

    def look_up(self, first: int, indices: list[Any]) -> Any:
        """An entry of a table of as many registers as there are indices, which count on from one to the next."""
        found = None
        for i, index in enumerate(indices):
            part = self.call("llvm.x86.avx2.pshuf.b", self.table(first + i), index, result=_BYTES)
            found = part if found is None else self.builder.xor(found, part)
        return found

    def counted(self, index: Any, registers: int) -> list[Any]:
        """Indices into each register of a table."""
        indices = [index]
        for _ in range(registers - 1):
            indices.append(self.builder.sub(indices[-1], self.table(SIXTEEN)))
        return indices


def _addition(emit: _Emit, x: Any, y: Any, c: dict[int, Any], cells: int) -> Iterator[Any]:
    """Sums of 32 words; pauses after every few instructions, and gives the sums at last."""
    b = emit.builder
    larger, distance, curves, windows = [], [], [], []
    odd, small = [], []
    for u, v in zip(emit.halves(x), emit.halves(y), strict=True):
        larger.append(emit.call("llvm.smax.v16i16", u, v))
        odd.append(b.or_(larger[-1], c[_vector.ONE]))
        small.append(b.xor(b.xor(u, v), odd[-1]))
        distance.append(b.sub(odd[-1], small[-1]))
        yield None
    r = []
    for d in distance:
        r.append(emit.call("llvm.usub.sat.v16i16", c[_vector.REACH], d))
        yield None
    for i in (0, 1):
        r[i] = b.mul(r[i], c[_vector.SCALE])
        yield None
    for i in (0, 1):
        r[i] = emit.call("llvm.x86.avx2.pmulhu.w", r[i], r[i])
        yield None
    differ = emit.packed(*(b.and_(d, c[_vector.ONE]) for d in distance))
    yield None
    for i in (0, 1):
        r[i] = emit.call("llvm.x86.avx2.pmulhu.w", r[i], r[i])
        yield None
    near = emit.packed(*(emit.call("llvm.x86.avx2.pmulhu.w", d, c[_vector.TO_DISTANCE]) for d in distance))
    yield None
    windows = [emit.call("llvm.x86.avx2.pmulhu.w", f, c[MULTIPLIER]) for f in r]
    yield None
    curves = [emit.call("llvm.x86.avx2.pmulhu.w", f, f) for f in r]
    yield None
    window = emit.packed(*windows)
    near = b.or_(near, b.add(differ, ir.Constant(_BYTES, [-1] * 32)))
    near = emit.call("llvm.uadd.sat.v32i8", near, emit.table(FAR), result=_BYTES)
    yield None
    coarse = b.and_(emit.shifted(window, FINE_BITS), emit.table(COARSE))
    coarse = b.or_(coarse, emit.shifted(differ, -4))
    index = emit.counted(coarse, 2)
    yield None
    base = emit.look_up(BASE, index)
    yield None
    mask = emit.look_up(MASK, index)
    yield None
    registers = cells // ENTRIES
    index = emit.counted(b.add(base, b.and_(window, mask)), registers)
    yield None
    found = []
    for i in (2, 3, 0, 1):
        bytes_ = emit.look_up(OFFSET + i * registers, index)
        yield None
        if i < 2:
            bytes_ = b.xor(bytes_, emit.look_up(CHANGE + i, [near]))
        found.append(bytes_)
        if i == 3:
            slopes = emit.words(*found)
            found = []
            lines = [emit.call("llvm.x86.avx2.pmul.hr.sw", slope, curve) for slope, curve in zip(slopes, curves, strict=True)]
        yield None
    sums = []
    for top, line, offset in zip(larger, lines, emit.words(*found), strict=True):
        value = b.and_(b.add(offset, line), c[_vector.UNITS])
        sums.append(emit.call("llvm.sadd.sat.v16i16", top, value))
    yield emit.joined(*sums)


def _interleaved(parts: list[Iterator[Any]]) -> list[Any]:
    """Advance SIDE_BY_SIDE additions in turn, each LAG pauses behind the one before; their results."""
    results: dict[int, Any] = {}
    waiting, since = list(range(len(parts))), LAG
    live: list[int] = []
    while waiting or live:
        if waiting and len(live) < SIDE_BY_SIDE and (not live or since >= LAG):
            live.append(waiting.pop(0))
            since = 0
        since += 1
        for i in list(live):
            if (value := next(parts[i])) is not None:
                results[i] = value
                live.remove(i)
    return [results[i] for i in range(len(parts))]


@intrinsic
def add(typing_context: Any, x: Any, y: Any, constants: Any, tables: Any, mapped: Any) -> Any:
    """As :func:`lns_ops._vector.add`; ``tables`` is the address of the tables."""
    large = not isinstance(mapped, types.NoneType)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        left, right, rows = (cgutils.unpack_tuple(builder, value) for value in args[:3])
        emit = _Emit(builder, args[3])
        used = (_vector.REACH, _vector.ONE, _vector.SCALE, MULTIPLIER, _vector.TO_DISTANCE, _vector.UNITS)
        c = {row: emit.halves(rows[row])[0] for row in used}
        sums = _interleaved([_addition(emit, a, b, c, CELLS[large]) for a, b in zip(left, right, strict=True)])
        return context.make_tuple(builder, signature.return_type, sums)

    return x(x, y, constants, types.int64, mapped), generate


matmul = _vector.product(add, "matmul_avx2")
