// Sums in the contract's order, and the elementwise part of normalizations. Bound by memory.
//
// -D: the format (arithmetic.cuh), FAST and COPIES (elementwise.cuh). Kernels with the fast
// arithmetic have its table at the beginning of dynamic shared memory, and nothing static.
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
    static constexpr bool GROWS_BEYOND = BIAS - LOWEST + (13 << FRACTION_BITS) > 1 << 15;
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
    __device__ __forceinline__ static Total of(int code) {
        return {Exact::of(code).accumulator()};
    }
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
};

enum Kind { PLAIN, PRODUCTS, SQUARES };

// Adds terms begin .. end - 1 up, one after the other: x, x y, or the square of x less `about`.
template <int KIND>
__device__ __forceinline__ Total added_up(const short* x, const short* y, int about,
                                          const Terms& terms, i64 begin, i64 end, bool wide,
                                          const int2* gauss) {
    Total total = Total::zero();
    const bool flat = terms.inner >= terms.K;
    auto place = [&](i64 k) {
        return flat ? k * terms.stride
                    : (u32)k / (u32)terms.inner * terms.outer +
                          (u32)k % (u32)terms.inner * terms.stride;
    };
    auto take = [&](int a, int b) {
        if (KIND == PRODUCTS) a = product_of(a, b);
        if (KIND == SQUARES) {
            a = sum_of<true>(a, about, gauss);
            a = product_of(a, a);
        }
        total = Total::add(total, Total::of(a), gauss);
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
                if (KIND == PRODUCTS) b[v].vector = *(const uint4*)(y + at);
            }
#pragma unroll
            for (int v = 0; v < AHEAD; v++)
#pragma unroll
                for (int j = 0; j < WIDE; j++)
                    take(a[v].code[j], KIND == PRODUCTS ? b[v].code[j] : 0);
        }
    }
    constexpr int SINGLE = 16;
    for (; k + SINGLE <= end; k += SINGLE) {
        short a[SINGLE], b[SINGLE];
#pragma unroll
        for (int j = 0; j < SINGLE; j++) {
            const i64 at = place(k + j);
            a[j] = x[at];
            if (KIND == PRODUCTS) b[j] = y[at];
        }
#pragma unroll
        for (int j = 0; j < SINGLE; j++) take(a[j], KIND == PRODUCTS ? b[j] : 0);
    }
    for (; k < end; k++) {
        const i64 at = place(k);
        take(x[at], KIND == PRODUCTS ? y[at] : 0);
    }
    return total;
}

// out[piece][n]: a thread takes one block of 64 terms of one sum; `columns` (a power of two) of
// them and 512 / columns blocks at a time in a thread block. In SQUARES y holds what is subtracted:
// y[i / y_div % y_mod] for element i of x. `shift` ulps are added to the logarithm before it is
// stored in the format. `wide`: vectors of 8 terms are aligned.
template <int KIND>
__device__ __forceinline__ void sums(const short* x, const short* y, short* out, const Terms& terms,
                                     i64 y_div, i64 y_mod, int columns, int shift, bool wide,
                                     const int2* gauss) {
    Total* totals = TOTALS;
    const int column = threadIdx.x % columns, slot = threadIdx.x / columns, slots = 512 / columns;
    const i64 pieces = (terms.K + LONG_SUM - 1) / LONG_SUM, M = pieces * terms.N;
    const i64 blocks = (min(terms.K, LONG_SUM) + BLOCK - 1) / BLOCK;
    for (i64 group = blockIdx.x; group * columns < M; group += gridDim.x) {
        const i64 m = group * columns + column, n = m % terms.N, first = m / terms.N * LONG_SUM;
        const i64 base = n / terms.kept_inner * terms.kept_outer +
                         n % terms.kept_inner * terms.kept_stride;
        const i64 last = m < M ? min(terms.K, first + LONG_SUM) : 0;
        const int about = KIND == SQUARES && m < M ? y[base / y_div % y_mod] : 0;
        Total total = Total::zero();
        for (i64 b = 0; b < blocks; b += slots) {
            const i64 begin = first + (b + slot) * BLOCK, end = min(last, begin + BLOCK);
            totals[threadIdx.x] = added_up<KIND>(x + base, KIND == PRODUCTS ? y + base : y, about,
                                                 terms, begin, end, wide, gauss);
            __syncthreads();
            if (slot == 0)
                for (int s = 0; s < slots && b + s < blocks; s++)
                    total = Total::add(total, totals[s * columns + column], gauss);
            __syncthreads();
        }
        Exact sum = total.exact();
        sum.log += shift;
        if (slot == 0 && m < M) out[m] = sum.code();
    }
}

#if FAST
#define FILL SETUP
#else
#define FILL
#endif

extern "C" __global__ void __launch_bounds__(512)
    lns_sum(const short* __restrict__ x, const short* __restrict__ y, short* __restrict__ out,
            const __grid_constant__ Terms terms, i64 y_div, i64 y_mod, int kind, int columns,
            int shift, int wide, const u32* __restrict__ packed, const int2* __restrict__ gauss) {
    FILL
    if (kind == PLAIN)
        sums<PLAIN>(x, y, out, terms, y_div, y_mod, columns, shift, wide, gauss);
    else if (kind == PRODUCTS)
        sums<PRODUCTS>(x, y, out, terms, y_div, y_mod, columns, shift, wide, gauss);
    else
        sums<SQUARES>(x, y, out, terms, y_div, y_mod, columns, shift, wide, gauss);
}

// An operand that is repeated: element i meets codes[i / div % mod]. Absent if there are no codes.
struct Repeated {
    const short* codes;
    i64 div, mod;

    __device__ __forceinline__ i64 place(i64 i) const {
        return i >> 32 ? i / div % mod : (u32)i / (u32)div % (u32)mod;
    }
    template <int W>
    __device__ __forceinline__ Codes at(i64 i, Count<W>) const {
        Codes c;
        const bool same = div % W == 0, run = div == 1 && mod % W == 0;
        const i64 first = place(i);
#pragma unroll
        for (int j = 0; j < W; j++)
            c.code[j] = codes[same ? first : run ? first + j : place(i + j)];
        return c;
    }
};

// y = (x - mean) scale; out = y weight + bias, each of which may be absent.
extern "C" __global__ void __launch_bounds__(512)
    lns_normalize(const short* __restrict__ x, short* __restrict__ y, short* __restrict__ out,
                  i64 n, const __grid_constant__ Repeated mean,
                  const __grid_constant__ Repeated scale, const __grid_constant__ Repeated weight,
                  const __grid_constant__ Repeated bias, int aligned,
                  const u32* __restrict__ packed, const int2* __restrict__ gauss) {
    FILL
    each(n, aligned, [&](i64 i, auto count) {
        Codes normal = get(x, i, count), affine;
        const Codes about = mean.codes ? mean.at(i, count) : normal, by = scale.at(i, count);
        const Codes w = weight.codes ? weight.at(i, count) : normal;
        const Codes b = bias.codes ? bias.at(i, count) : normal;
#pragma unroll
        for (int j = 0; j < count; j++) {
            int code = normal.code[j];
            if (mean.codes) code = sum_of<true>(code, about.code[j], gauss);
            normal.code[j] = code = product_of(code, by.code[j]);
            if (weight.codes) code = product_of(code, w.code[j]);
            if (bias.codes) code = sum_of<false>(code, b.code[j], gauss);
            affine.code[j] = code;
        }
        put(y, i, count, normal);
        if (out) put(out, i, count, affine);
    });
}

// ((grad - mean) - y along) scale; `mean` may be absent.
extern "C" __global__ void __launch_bounds__(512)
    lns_normalize_backward(const short* __restrict__ grad, const short* __restrict__ y,
                           short* __restrict__ out, i64 n, const __grid_constant__ Repeated mean,
                           const __grid_constant__ Repeated along,
                           const __grid_constant__ Repeated scale, int aligned,
                           const u32* __restrict__ packed, const int2* __restrict__ gauss) {
    FILL
    each(n, aligned, [&](i64 i, auto count) {
        Codes g = get(grad, i, count);
        const Codes normal = get(y, i, count), part = along.at(i, count), by = scale.at(i, count);
        const Codes about = mean.codes ? mean.at(i, count) : g;
#pragma unroll
        for (int j = 0; j < count; j++) {
            int code = g.code[j];
            if (mean.codes) code = sum_of<true>(code, about.code[j], gauss);
            code = sum_of<true>(code, product_of(normal.code[j], part.code[j]), gauss);
            g.code[j] = product_of(code, by.code[j]);
        }
        put(out, i, count, g);
    });
}
