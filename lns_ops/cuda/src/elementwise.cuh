// The common part of elementwise kernels: arithmetic clamped to the format, and access to arrays,
// WIDE = 8 codes, 16 bytes, at a time.
//
// -D: the format (arithmetic.cuh); FAST 1: sums through an Adder with COPIES copies of its table,
// 0: from the definition.
#pragma once
#include "arithmetic.cuh"

constexpr int WIDE = 8;
union Codes {
    uint4 vector;
    uint2 half;
    u32 pair[WIDE / 2];
    short code[WIDE];
};

// Arithmetic in which every result is clamped to the format: a value that saturates keeps its sign,
// one below the range is zero. This one follows the definition.
struct ExactArithmetic {
    typedef Exact Number;
    const int2* gauss;

    __device__ __forceinline__ Number of(int code) const { return Exact::of(code); }
    __device__ __forceinline__ Number of(const Codes& codes, int j) const {
        return Exact::of(codes.code[j]);
    }
    __device__ __forceinline__ int code(Number x) const { return x.code(); }
    __device__ __forceinline__ Number negated(Number x) const {
        return {x.log, x.sign ^ 1, x.zero};
    }
    __device__ __forceinline__ Number sum(Number x, Number y) {
        return Exact::of(Exact::add(x, y, gauss).code());
    }
    __device__ __forceinline__ Number product(Number x, Number y) {
        return Exact::of(Exact{x.log + y.log, x.sign ^ y.sign, x.zero || y.zero}.code());
    }
    __device__ __forceinline__ Number quotient(Number x, Number y) {  // y is positive
        return Exact::of(Exact{x.log - y.log, x.sign, x.zero}.code());
    }
    __device__ __forceinline__ Number watched(Number x) { return x; }
    template <int OCTAVES>
    __device__ __forceinline__ bool saturated() const {
        return false;
    }
};

#if FAST
// This one is the Adder's method on fields instead of logarithms: numbers in range are not
// negative, so integer instructions read them too, the table holds G+ and G- themselves (-2^15 for
// exact cancellation), and nothing drifts. Zero is a NaN or anything below one field, which
// `without_underflow` sends so far down that additions ignore it and `code` finds it negative.
// Saturation is rare: the largest numbers that enter a chain of operations are watched, and where
// the chain could saturate the elements at hand are computed again by the definition. A sum is at
// most one octave above its larger operand; products and quotients are watched themselves.
struct FastArithmetic {
    typedef Adder<COPIES> Add;
    typedef float Number;
    static constexpr int PITCH = Add::PITCH, FIELD = FIELD_MASK * PITCH;
    const u32 column = threadIdx.x % COPIES * 4;
    float peak = 0;

    static __device__ __forceinline__ float without_underflow(float n) {
        float below, z;  // units below the smallest field, or 0
        asm("sub.sat.f32 %0, %1, %2;" : "=f"(below) : "f"(__int_as_float(PITCH)), "f"(n));
        asm("fma.rn.f32 %0, %1, %2, %3;" : "=f"(z) : "f"(below), "f"(-0x1p100f), "f"(n));
        return z;
    }
    __device__ __forceinline__ Number of(int code) const {
        return without_underflow(__int_as_float((code & FIELD_MASK) * PITCH + (code >> 14 & 2)));
    }
    // Straight from the pair that holds it; sign-extended codes have their sign in bit 15.
    __device__ __forceinline__ Number of(const Codes& codes, int j) const {
        const u32 pair = codes.pair[j / 2];
        const u32 n = j % 2 ? (pair >> (16 - Add::PITCH_BITS) & FIELD) | (pair >> 30 & 2)
                            : (pair << Add::PITCH_BITS & FIELD) | (pair >> 14 & 2);
        return without_underflow(__int_as_float(n));
    }
    __device__ __forceinline__ int code(Number n) const {
        const int bits = __float_as_int(larger(n, 0.0f));
        return (bits & 2) * ((SIGN_MASK & 0xffff) / 2) + (bits >> Add::PITCH_BITS);
    }
    __device__ __forceinline__ Number negated(Number n) const { return plus(n, __int_as_float(2)); }
    __device__ __forceinline__ Number watched(Number n) {
        peak = larger(peak, n);
        return n;
    }
    __device__ __forceinline__ Number sum(Number x, Number y) const {
        int at = Add::row(x, y, column), g;
        asm("ld.shared.s16 %0, [%1 + %2];" : "=r"(g) : "r"(at), "n"(SHARED_BASE));
        return without_underflow(__int_as_float(g * PITCH + __float_as_int(larger(x, y))));
    }
    __device__ __forceinline__ Number product(Number x, Number y) {
        return without_underflow(watched(plus(x, plus(y, Add::units(-BIAS * PITCH)))));
    }
    __device__ __forceinline__ Number quotient(Number x, Number y) {  // y is positive
        return without_underflow(watched(plus(minus(x, y), Add::units(BIAS * PITCH))));
    }
    // Whether a chain of sums that can grow by so many octaves from what was watched may have left
    // the range.
    template <int OCTAVES>
    __device__ __forceinline__ bool saturated() const {
        return __float_as_int(peak) >= (FIELD_MASK + 1 - (OCTAVES << FRACTION_BITS)) * PITCH;
    }
};
typedef FastArithmetic Arithmetic;
extern __shared__ __align__(16) u32 table[];
#define SETUP                             \
    Arithmetic::Add::fill(table, packed); \
    __syncthreads();
#define ARITHMETIC \
    Arithmetic {}
#else
typedef ExactArithmetic Arithmetic;
#define SETUP
#define ARITHMETIC \
    Arithmetic { gauss }
#endif

template <int N>
struct Count {
    __device__ constexpr operator int() const { return N; }
};

// Which of the thread blocks that share an array this one is, and of how many.
struct Share {
    i64 block, blocks;
};

// f(i, Count<N>) for runs of N elements from i on that cover 0 .. n - 1: N = W where memory is
// aligned, then 1.
template <int W = WIDE, class F>
__device__ __forceinline__ void each(i64 n, bool aligned, F f) {
    const i64 first = blockIdx.x * (i64)blockDim.x + threadIdx.x,
              stride = (i64)gridDim.x * blockDim.x;
    const i64 vectors = aligned ? n / W : 0;
#pragma unroll 2
    for (i64 i = first; i < vectors; i += stride) f(i * W, Count<W>());
    for (i64 i = vectors * W + first; i < n; i += stride) f(i, Count<1>());
}

// load(i, Count<N>) and then work(i, Count<N>, what it returned) for the same runs, a run ahead: a
// thread's next loads are on their way while it computes, so that few threads keep the memory busy.
template <int W = WIDE, class L, class F>
__device__ __forceinline__ void each(i64 n, bool aligned, L load, F work,
                                     Share share = {blockIdx.x, gridDim.x}) {
    const i64 first = share.block * blockDim.x + threadIdx.x, stride = share.blocks * blockDim.x;
    const i64 vectors = aligned ? n / W : 0;
    if (first < vectors) {
        auto now = load(first * W, Count<W>());
        for (i64 i = first; i < vectors;) {
            const i64 next = i + stride;
            auto then = now;
            if (next < vectors) then = load(next * W, Count<W>());
            work(i * W, Count<W>(), now);
            now = then;
            i = next;
        }
    }
    for (i64 i = vectors * W + first; i < n; i += stride) work(i, Count<1>(), load(i, Count<1>()));
}

template <int W>
__device__ __forceinline__ Codes get(const short* p, i64 i, Count<W>) {
    Codes c;
    if (W == WIDE)
        c.vector = *(const uint4*)(p + i);
    else if (W == WIDE / 2)
        c.half = *(const uint2*)(p + i);
    else
        c.code[0] = p[i];
    return c;
}

template <int W>
__device__ __forceinline__ void put(short* p, i64 i, Count<W>, const Codes& c) {
    if (W == WIDE)
        *(uint4*)(p + i) = c.vector;
    else if (W == WIDE / 2)
        *(uint2*)(p + i) = c.half;
    else
        p[i] = c.code[0];
}
