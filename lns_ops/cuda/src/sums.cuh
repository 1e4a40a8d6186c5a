// What sums in the contract's order are made of: running sums, terms, and 64 of them added up.
//
// -D: the format (arithmetic.cuh), FAST and COPIES (elementwise.cuh). Kernels with the fast
// arithmetic have its table at the beginning of dynamic shared memory, and nothing static.
#pragma once
#include "elementwise.cuh"

constexpr i64 LONG_SUM = 4096;

// A running sum on logarithms without the format's bounds, in the accumulator's range.
#if FAST
// FastArithmetic's numbers, but counted from the accumulator's smallest logarithm instead of the
// format's. Sums of codes do not reach its largest. Only where logarithms are beyond 2^15 units,
// that is outside the format, could a sum that cancels exactly look like a number.
struct Total {
    typedef Arithmetic::Add Add;
    static constexpr int PITCH = Add::PITCH, LOWEST = ACC_MIN - 1, BEYOND = (1 << 15) * PITCH;
    static constexpr bool GROWS_BEYOND = SQUARE_BIAS - LOWEST + (13 << FRACTION_BITS) > 1 << 15;
    float n;

    __device__ __forceinline__ static Total zero() { return {Arithmetic::without_underflow(0.0f)}; }
    __device__ __forceinline__ static Total of(int code) {
        const int n = (code & FIELD_MASK) * PITCH + ((u32)code >> 30 & 2);
        return {plus(Arithmetic::without_underflow(__int_as_float(n)),
                     Add::units((-BIAS - LOWEST) * PITCH))};
    }
    __device__ __forceinline__ Exact exact() const {
        const int bits = __float_as_int(larger(n, 0.0f)), log = bits >> Add::PITCH_BITS;
        return {log + LOWEST, bits >> 1 & 1, log == 0};
    }
    __device__ __forceinline__ static Total of(Exact x) {
        return x.zero ? zero() : Total{__int_as_float((x.log - LOWEST) * PITCH + 2 * x.sign)};
    }
    __device__ __noinline__ static Total added_exactly(Total x, Total y, const int2* gauss) {
        return of(Exact::add(x.exact(), y.exact(), gauss).accumulator());
    }
    __device__ __forceinline__ static Total add(Total x, Total y, const int2* gauss) {
        const float top = larger(x.n, y.n);  // NaN, if both are zero, is far beyond 24 bits
        if (GROWS_BEYOND && (u32)(__float_as_int(top) - BEYOND) < 1u << 24)
            return added_exactly(x, y, gauss);
        int at = Add::row(x.n, y.n, threadIdx.x % COPIES * 4), g;
        asm("ld.shared.s16 %0, [%1 + %2];" : "=r"(g) : "r"(at), "n"(SHARED_BASE));
        return {Arithmetic::without_underflow(__int_as_float(g * PITCH + __float_as_int(top)))};
    }
};
#define TOTALS ((Total*)(table + (LAST + 1) * COPIES))
#else
struct Total {
    Exact n;

    __device__ __forceinline__ static Total zero() { return {{0, 0, true}}; }
    __device__ __forceinline__ static Total of(int code) { return of(Exact::of(code)); }
    __device__ __forceinline__ static Total of(Exact x) { return {x.accumulator()}; }
    __device__ __forceinline__ Exact exact() const { return n; }
    __device__ __forceinline__ static Total add(Total x, Total y, const int2* gauss) {
        return {Exact::add(x.n, y.n, gauss).accumulator()};
    }
};
extern __shared__ __align__(16) u32 table[];
#define TOTALS ((Total*)table)
#endif

__device__ __noinline__ int added_exactly(int x, int y, bool subtract, const int2* gauss) {
    ExactArithmetic exact{gauss};
    auto other = exact.of(y);
    return exact.code(exact.sum(exact.of(x), subtract ? exact.negated(other) : other));
}

// x + y and x - y as the format holds them.
template <bool SUBTRACT>
__device__ __forceinline__ int sum_of(int x, int y, const int2* gauss) {
    Arithmetic arithmetic = ARITHMETIC;
    auto other = arithmetic.of(y);
    int code = arithmetic.code(arithmetic.watched(
        arithmetic.sum(arithmetic.of(x), SUBTRACT ? arithmetic.negated(other) : other)));
    if (arithmetic.template saturated<0>()) code = added_exactly(x, y, SUBTRACT, gauss);
    return (short)code;  // with its sign extended, as product_of reads it
}

__device__ __forceinline__ int product_of(int x, int y) {
    int fx = x & FIELD_MASK, fy = y & FIELD_MASK, field = min(fx + fy - BIAS, FIELD_MASK);
    return fx == 0 || fy == 0 || field <= 0 ? 0 : (x ^ y) < 0 ? field | SIGN_MASK : field;
}

// Where the terms of a sum lie. Sum n of N begins at n / kept_inner * kept_outer + n % kept_inner *
// kept_stride, its term k of K at k / inner * outer + k % inner * stride behind it. Terms are taken
// in pieces of LONG_SUM.
struct Terms {
    i64 K, N, inner, stride, outer, kept_inner, kept_stride, kept_outer;

    __device__ __forceinline__ i64 begin(i64 n) const {
        return n / kept_inner * kept_outer + n % kept_inner * kept_stride;
    }
    // `flat`: terms have one stride.
    __device__ __forceinline__ i64 place(i64 k, bool flat) const {
        return flat ? k * stride : (u32)k / (u32)inner * outer + (u32)k % (u32)inner * stride;
    }
};

// Terms are x, x y, the square of x less a number that all terms of a sum share, x times that
// number, or x times that number times y. Squares and their sums are in the format of squares.
enum Kind { PLAIN, PRODUCTS, SQUARES, WEIGHTED, WEIGHTED_PRODUCTS };
template <int KIND>
constexpr int BITS_OF_SUM = KIND == SQUARES ? SQUARE_BITS : BITS;

// Adds terms begin .. end - 1 up, one after the other; `common` is the number that they share.
template <int KIND>
__device__ __forceinline__ Total added_up(const short* x, const short* y, int common,
                                          const Terms& terms, i64 begin, i64 end, bool wide,
                                          const int2* gauss) {
    constexpr bool PAIRED = KIND == PRODUCTS || KIND == WEIGHTED_PRODUCTS;
    Total total = Total::zero();
    const bool flat = terms.inner >= terms.K;
    auto place = [&](i64 k) { return terms.place(k, flat); };
    auto take = [&](int a, int b) {
        if (KIND == WEIGHTED || KIND == WEIGHTED_PRODUCTS) a = product_of(a, common);
        if (PAIRED) a = product_of(a, b);
        if (KIND == SQUARES && common) a = sum_of<true>(a, common, gauss);
        const Total term = KIND == SQUARES ? Total::of(Exact::square_of(a)) : Total::of(a);
        total = Total::add(total, term, gauss);
    };
    constexpr int AHEAD = 4;  // vectors loaded together: else each addition would wait for memory
    i64 k = begin;
    if (wide) {
        for (; k + AHEAD * WIDE <= end; k += AHEAD * WIDE) {
            Codes a[AHEAD], b[AHEAD];
#pragma unroll
            for (int v = 0; v < AHEAD; v++) {
                const i64 at = place(k + v * WIDE);
                a[v].vector = *(const uint4*)(x + at);
                if (PAIRED) b[v].vector = *(const uint4*)(y + at);
            }
#pragma unroll
            for (int v = 0; v < AHEAD; v++)
#pragma unroll
                for (int j = 0; j < WIDE; j++)
                    take(a[v].code[j], PAIRED ? b[v].code[j] : 0);
        }
    }
    constexpr int SINGLE = 16;
    for (; k + SINGLE <= end; k += SINGLE) {
        short a[SINGLE], b[SINGLE];
#pragma unroll
        for (int j = 0; j < SINGLE; j++) {
            const i64 at = place(k + j);
            a[j] = x[at];
            if (PAIRED) b[j] = y[at];
        }
#pragma unroll
        for (int j = 0; j < SINGLE; j++) take(a[j], PAIRED ? b[j] : 0);
    }
    for (; k < end; k++) {
        const i64 at = place(k);
        take(x[at], PAIRED ? y[at] : 0);
    }
    return total;
}

// The code of WIDTH bits of a sum whose logarithm is moved by `shift` ulps before it is stored.
template <int WIDTH>
__device__ __forceinline__ short stored(const Total& total, int shift) {
    Exact sum = total.exact();
    sum.log += shift;
    return (short)sum.code<WIDTH>();
}

#if FAST
#define FILL SETUP
#else
#define FILL
#endif
