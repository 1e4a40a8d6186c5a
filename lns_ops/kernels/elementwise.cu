// Elementwise operations, reductions and conversions on codes; memory-bound. Arrays are contiguous; a second operand may be repeated:
// element i of the result takes y[i / y_div % y_mod] (y_mod = 0: the scalar `y_code`). WIDE = 8 codes, 16 bytes, an access.
//
// -D: the format (arithmetic.cuh); FAST 1: sums through an Adder with COPIES copies of its table, 0: from the definition.
// What LNS has no code for is counted in `faults` (0: NaN or infinity encoded, 1: zero divisor, 2: root of a negative) and read later
// by the host, so that no kernel waits for it; the result is zero there (the largest magnitude for an infinity).
#include "arithmetic.cuh"

constexpr int WIDE = 8;
union Codes {
    uint4 vector;
    uint2 half;
    short code[WIDE];
};

// Arithmetic in which every result is clamped to the format: a value that saturates keeps its sign, one below the range is zero.
// This one follows the definition.
struct ExactArithmetic {
    typedef Exact Number;
    const int2* gauss;

    __device__ __forceinline__ Number of(int code) const { return Exact::of(code); }
    __device__ __forceinline__ int code(Number x) const { return x.code(); }
    __device__ __forceinline__ Number negated(Number x) const { return {x.log, x.sign ^ 1, x.zero}; }
    __device__ __forceinline__ Number sum(Number x, Number y) { return Exact::of(Exact::add(x, y, gauss).code()); }
    __device__ __forceinline__ Number product(Number x, Number y) {
        return Exact::of(Exact{x.log + y.log, x.sign ^ y.sign, x.zero || y.zero}.code());
    }
    __device__ __forceinline__ bool saturated() const { return false; }
};

#if FAST
// This one is the Adder's method on fields instead of logarithms: numbers in range are not negative, so integer instructions read
// them too, the table holds G+ and G- themselves (-2^15 for exact cancellation), and nothing drifts. Zero is a NaN or anything below one
// field, which `without_underflow` sends so far down that additions ignore it. Saturation is rare: it is only noticed, and the elements
// at hand are computed again by the definition.
struct FastArithmetic {
    typedef Adder<COPIES> Add;
    typedef float Number;
    static constexpr int PITCH = Add::PITCH;
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
    __device__ __forceinline__ int code(Number n) const {
        int bits = __float_as_int(larger(n, -0x1p-49f)), field = bits >> Add::PITCH_BITS;
        return field <= 0 ? 0 : (bits & 2) * ((SIGN_MASK & 0xffff) / 2) + field;
    }
    __device__ __forceinline__ Number negated(Number n) const { return plus(n, __int_as_float(2)); }
    __device__ __forceinline__ Number clamped(Number n) {
        peak = larger(peak, n);
        return without_underflow(n);
    }
    __device__ __forceinline__ Number sum(Number x, Number y) {
        int at = Add::row(x, y, column), g;
        asm("ld.shared.s16 %0, [%1 + %2];" : "=r"(g) : "r"(at), "n"(SHARED_BASE));
        return clamped(__int_as_float(g * PITCH + __float_as_int(larger(x, y))));
    }
    __device__ __forceinline__ Number product(Number x, Number y) { return clamped(plus(x, plus(y, Add::units(-BIAS * PITCH)))); }
    __device__ __forceinline__ bool saturated() const { return __float_as_int(peak) >= (FIELD_MASK + 1) * PITCH; }
};
typedef FastArithmetic Arithmetic;
#define SETUP                                    \
    extern __shared__ __align__(16) u32 table[]; \
    Arithmetic::Add::fill(table, packed);        \
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

// f(i, Count<N>) for runs of N elements from i on that cover 0 .. n - 1: N = W where memory is aligned, then 1.
template <int W = WIDE, class F>
__device__ __forceinline__ void each(i64 n, bool aligned, F f) {
    const i64 first = blockIdx.x * (i64)blockDim.x + threadIdx.x, stride = (i64)gridDim.x * blockDim.x;
    const i64 vectors = aligned ? n / W : 0;
#pragma unroll 2
    for (i64 i = first; i < vectors; i += stride) f(i * W, Count<W>());
    for (i64 i = vectors * W + first; i < n; i += stride) f(i, Count<1>());
}

template <int W>
__device__ __forceinline__ Codes get(const short* p, i64 i, Count<W>) {
    Codes c;
    if (W == WIDE) c.vector = *(const uint4*)(p + i);
    else if (W == WIDE / 2) c.half = *(const uint2*)(p + i);
    else c.code[0] = p[i];
    return c;
}

template <int W>
__device__ __forceinline__ void put(short* p, i64 i, Count<W>, const Codes& c) {
    if (W == WIDE) *(uint4*)(p + i) = c.vector;
    else if (W == WIDE / 2) *(uint2*)(p + i) = c.half;
    else p[i] = c.code[0];
}

template <class F>
__device__ __forceinline__ void binary(const short* x, const short* y, short* z, i64 n, i64 y_div, i64 y_mod, int y_code, int aligned, F f) {
    const bool flat = y_mod == n && y_div == 1;
    each(n, aligned, [&](i64 i, auto count) {
        Codes a = get(x, i, count), b, out;
        if (flat) b = get(y, i, count);
#pragma unroll
        for (int j = 0; j < WIDE; j++)
            if (j < count) {
                int other = flat ? b.code[j] : y_mod ? y[(i + j) / y_div % y_mod] : y_code;
                out.code[j] = f(a.code[j], other);
            }
        put(z, i, count, out);
    });
}

#define BINARY(name, ...)                                                                                                              \
    extern "C" __global__ void __launch_bounds__(512)                                                                                  \
    lns_##name(const short* __restrict__ x, const short* __restrict__ y, short* __restrict__ z, i64 n, i64 y_div, i64 y_mod, int y_code,     \
         int aligned, const u32* __restrict__ packed, const int2* __restrict__ gauss, int* faults) {                                   \
        __VA_ARGS__                                                                                                                    \
    }

template <class A>
__device__ __forceinline__ int added(A& arithmetic, int x, int y, bool subtract) {
    typename A::Number other = arithmetic.of(y);
    return arithmetic.code(arithmetic.sum(arithmetic.of(x), subtract ? arithmetic.negated(other) : other));
}

__device__ __noinline__ int added_exactly(int x, int y, bool subtract, const int2* gauss) {
    ExactArithmetic exact{gauss};
    return added(exact, x, y, subtract);
}

#define SUM(subtract)                                                                        \
    SETUP binary(x, y, z, n, y_div, y_mod, y_code, aligned, [&](int a, int b) {              \
        Arithmetic arithmetic = ARITHMETIC;                                                  \
        int code = added(arithmetic, a, b, subtract);                                        \
        if (arithmetic.saturated()) code = added_exactly(a, b, subtract, gauss);             \
        return code;                                                                         \
    });
BINARY(add, SUM(false))
BINARY(sub, SUM(true))

__device__ __forceinline__ int packed_code(int field, int sign) {
    field = min(field, FIELD_MASK);
    return field <= 0 ? 0 : sign ? field | SIGN_MASK : field;
}

BINARY(mul, binary(x, y, z, n, y_div, y_mod, y_code, aligned, [&](int a, int b) {
           int fa = a & FIELD_MASK, fb = b & FIELD_MASK;
           return fa == 0 || fb == 0 ? 0 : packed_code(fa + fb - BIAS, (a ^ b) < 0);
       });)
BINARY(div, binary(x, y, z, n, y_div, y_mod, y_code, aligned, [&](int a, int b) {
           int fa = a & FIELD_MASK, fb = b & FIELD_MASK;
           if (fb == 0) atomicAdd(faults + 1, 1);
           return fa == 0 || fb == 0 ? 0 : packed_code(fa - fb + BIAS, (a ^ b) < 0);
       });)

extern "C" __global__ void __launch_bounds__(512)
lns_square_root(const short* __restrict__ x, short* __restrict__ z, i64 n, int aligned, int* faults) {
    each(n, aligned, [&](i64 i, auto count) {
        Codes a = get(x, i, count), out;
#pragma unroll
        for (int j = 0; j < WIDE; j++)
            if (j < count) {
                int field = a.code[j] & FIELD_MASK, log = field - BIAS;
                if (field != 0 && a.code[j] < 0) atomicAdd(faults + 2, 1);
                int half = log >> 1;
                half += log & half & 1;  // halfway: to even
                out.code[j] = field == 0 || a.code[j] < 0 ? 0 : packed_code(half + BIAS, 0);
            }
        put(z, i, count, out);
    });
}

// One SGD step of one element, every operation an LNS operation; see lns_ops.reference.sgd_update.
template <bool MOMENTUM, bool KAHAN, class A>
__device__ __forceinline__ void sgd(A& arithmetic, int rate, int decay, short& weight, short grad, short& buffer, short& compensation) {
    typename A::Number step = arithmetic.of(grad), old = arithmetic.of(weight);
    if (MOMENTUM) {
        step = arithmetic.sum(arithmetic.product(arithmetic.of(buffer), arithmetic.of(decay)), step);
        buffer = arithmetic.code(step);
    }
    typename A::Number update = arithmetic.product(step, arithmetic.of(rate));
    if (KAHAN) {
        typename A::Number kept = arithmetic.sum(arithmetic.of(compensation), update), fresh = arithmetic.sum(old, kept);
        weight = arithmetic.code(fresh);
        typename A::Number taken = arithmetic.sum(fresh, arithmetic.negated(old));
        compensation = arithmetic.code(arithmetic.sum(kept, arithmetic.negated(taken)));
    } else {
        weight = arithmetic.code(arithmetic.sum(old, update));
    }
}

template <bool MOMENTUM, bool KAHAN>
__device__ __noinline__ void sgd_exactly(int count, int rate, int decay, short* weight, const short* grad, short* buffer, short* compensation,
                                         const int2* gauss) {
    ExactArithmetic exact{gauss};
    for (int j = 0; j < count; j++) {
        short w = weight[j], b = MOMENTUM ? buffer[j] : (short)0, c = KAHAN ? compensation[j] : (short)0;
        sgd<MOMENTUM, KAHAN>(exact, rate, decay, w, grad[j], b, c);
        weight[j] = w;
        if (MOMENTUM) buffer[j] = b;
        if (KAHAN) compensation[j] = c;
    }
}

template <bool MOMENTUM, bool KAHAN>
__device__ __forceinline__ void sgd_update(short* weight, const short* grad, short* buffer, short* compensation, i64 n, int rate, int decay,
                                           int aligned, const int2* gauss) {
    each(n, aligned, [&](i64 i, auto count) {
        Codes g = get(grad, i, count), w = get(weight, i, count), b, c;
        if (MOMENTUM) b = get(buffer, i, count);
        if (KAHAN) c = get(compensation, i, count);
        Arithmetic arithmetic = ARITHMETIC;
#pragma unroll
        for (int j = 0; j < count; j++)
            sgd<MOMENTUM, KAHAN>(arithmetic, rate, decay, w.code[j], g.code[j], b.code[j], c.code[j]);
        if (arithmetic.saturated()) {  // nothing is written yet
            sgd_exactly<MOMENTUM, KAHAN>(count, rate, decay, weight + i, grad + i, buffer + i, compensation + i, gauss);
            return;
        }
        put(weight, i, count, w);
        if (MOMENTUM) put(buffer, i, count, b);
        if (KAHAN) put(compensation, i, count, c);
    });
}

#define SGD(name, momentum, kahan)                                                                                                  \
    extern "C" __global__ void __launch_bounds__(512, SGD_BLOCKS)                                                                    \
    lns_##name(short* __restrict__ weight, const short* __restrict__ grad, short* __restrict__ buffer,                              \
               short* __restrict__ compensation, i64 n, int rate, int decay, int aligned, const u32* __restrict__ packed,           \
               const int2* __restrict__ gauss) {                                                                                    \
        SETUP sgd_update<momentum, kahan>(weight, grad, buffer, compensation, n, rate, decay, aligned, gauss);                      \
    }
constexpr int SGD_BLOCKS = 2;
SGD(sgd, false, false)
SGD(sgd_kahan, false, true)
SGD(sgd_momentum, true, false)
SGD(sgd_momentum_kahan, true, true)

// out[n] = sum over k of x[k][n] in the contract's order. A thread takes one block of 64 of one column; `columns` (a power of two) of
// them and 512 / columns blocks at a time in a thread block.
extern "C" __global__ void __launch_bounds__(512)
lns_sum(const short* __restrict__ x, short* __restrict__ out, i64 K, i64 N, int columns, const int2* __restrict__ gauss) {
    __shared__ Exact totals[512];
    const int column = threadIdx.x % columns, slot = threadIdx.x / columns, slots = 512 / columns;
    const i64 n = blockIdx.x * (i64)columns + column, blocks = (K + BLOCK - 1) / BLOCK;
    Exact total = {0, 0, true};
    for (i64 first = 0; first < blocks; first += slots) {
        Exact block = {0, 0, true};
        const i64 end = min(K, (first + slot + 1) * BLOCK);
        if (n < N)
            for (i64 k = (first + slot) * BLOCK; k < end; k++)
                block = Exact::add(block, Exact::of(x[k * N + n]).accumulator(), gauss).accumulator();
        totals[threadIdx.x] = block;
        __syncthreads();
        if (slot == 0)
            for (int s = 0; s < slots && first + s < blocks; s++)
                total = Exact::add(total, totals[s * columns + column], gauss).accumulator();
        __syncthreads();
    }
    if (slot == 0 && n < N) out[n] = total.code();
}

// The code nearest to x in logarithm. A cell of 2^-(f+1) of the significand holds at most one threshold; `cells` gives the rounded
// logarithm at the cell's start and the threshold's float32 mantissa.
constexpr int CELL_SHIFT = 22 - FRACTION_BITS, CELLS = 1 << (FRACTION_BITS + 1);
extern "C" __global__ void __launch_bounds__(512)
lns_encode(const float* __restrict__ x, short* __restrict__ out, i64 n, int aligned, const int2* __restrict__ cells, int* faults) {
    constexpr bool SHARED = FRACTION_BITS <= 9, SUBNORMAL = BIAS > 126 << FRACTION_BITS;
    __shared__ int2 near[SHARED ? CELLS : 1];
    if (SHARED) {
        for (int i = threadIdx.x; i < CELLS; i += blockDim.x) near[i] = cells[i];
        __syncthreads();
    }
    each<4>(n, aligned, [&](i64 i, auto count) {
        __align__(16) float v[4];
        if (count == 4) *(float4*)v = *(const float4*)(x + i);
        else v[0] = x[i];
        Codes code;
        int largest = 0;
#pragma unroll
        for (int j = 0; j < 4; j++)
            if (j < count) {
                int bits = __float_as_int(v[j]), magnitude = bits & 0x7fffffff, shift = 0;
                largest = max(largest, magnitude);
                if (SUBNORMAL && magnitude < 0x800000) {
                    magnitude = __float_as_int(times(v[j], 0x1p64f)) & 0x7fffffff;
                    shift = magnitude == 0 ? 1 << 12 : 64;
                }
                int mantissa = magnitude & 0x7fffff;
                int2 cell = SHARED ? near[mantissa >> CELL_SHIFT] : __ldg(cells + (mantissa >> CELL_SHIFT));
                int log = (((magnitude >> 23) - 127 - shift) << FRACTION_BITS) + cell.x + (mantissa > cell.y);
                code.code[j] = packed_code(log + BIAS, bits < 0);
            }
        if (largest >= 0x7f800000) {  // an infinity came out saturated, as it should
            int nonfinite = 0;
#pragma unroll
            for (int j = 0; j < 4; j++)
                if (j < count) {
                    int magnitude = __float_as_int(v[j]) & 0x7fffffff;
                    nonfinite += magnitude >= 0x7f800000;
                    if (magnitude > 0x7f800000) code.code[j] = 0;
                }
            atomicAdd(faults, nonfinite);
        }
        put(out, i, count, code);
    });
}

// The same for float64; thresholds in units of 2^-52.
extern "C" __global__ void __launch_bounds__(512)
lns_encode_double(const double* __restrict__ x, short* __restrict__ out, i64 n, const i64* __restrict__ thresholds, int* faults) {
    each(n, false, [&](i64 i, auto) {
        int exponent;
        double fraction = frexp(fabs(x[i]), &exponent);
        int code = 0;
        if (!isfinite(x[i])) atomicAdd(faults, 1);
        if (x[i] != 0 && !isnan(x[i])) {
            i64 significand = (i64)ldexp(fraction, 53);
            int low = 0, high = 1 << FRACTION_BITS;  // thresholds strictly below the significand
            while (low < high) {
                int middle = (low + high) / 2;
                if (__ldg(thresholds + middle) < significand) low = middle + 1;
                else high = middle;
            }
            code = isinf(x[i]) ? FIELD_MASK : packed_code(((exponent - 1) << FRACTION_BITS) + low + BIAS, 0);
            if (x[i] < 0 && code != 0) code |= SIGN_MASK;
        }
        out[i] = code;
    });
}

// sign 2^(log / 2^f): the significand from a table, rounded to the type, times a power of two.
template <class T, class F>
__device__ __forceinline__ void decoded(const short* codes, T* out, i64 n, bool aligned, F value) {
    each<4>(n, aligned, [&](i64 i, auto count) {
        Codes c = get(codes, i, count);
        __align__(16) T v[4];
#pragma unroll
        for (int j = 0; j < 4; j++)
            if (j < count) v[j] = value(c.code[j]);
        if (count == 4) {
#pragma unroll
            for (int j = 0; j < (int)sizeof(T) / 4; j++) ((float4*)(out + i))[j] = ((float4*)v)[j];
        } else {
            out[i] = v[0];
        }
    });
}

extern "C" __global__ void __launch_bounds__(512)
lns_decode(const short* __restrict__ codes, float* __restrict__ out, i64 n, int aligned, const float* __restrict__ significands) {
    constexpr bool SHARED = FRACTION_BITS <= 9, SUBNORMAL = BIAS > 126 << FRACTION_BITS;
    __shared__ int near[SHARED ? 1 << FRACTION_BITS : 1];
    if (SHARED) {
        for (int i = threadIdx.x; i < 1 << FRACTION_BITS; i += blockDim.x) near[i] = __float_as_int(significands[i]);
        __syncthreads();
    }
    decoded(codes, out, n, aligned, [&](int code) {
        int field = code & FIELD_MASK, log = field - BIAS, exponent = log >> FRACTION_BITS;
        int bits = SHARED ? near[log & ((1 << FRACTION_BITS) - 1)] : __float_as_int(__ldg(significands + (log & ((1 << FRACTION_BITS) - 1))));
        float v;
        if (SUBNORMAL && exponent < -126) v = times(__int_as_float(bits + ((exponent + 64) << 23)), 0x1p-64f);
        else v = __int_as_float(bits + (exponent << 23));
        return field == 0 ? 0.0f : __int_as_float(__float_as_int(v) | (code & 0x80000000));
    });
}

extern "C" __global__ void __launch_bounds__(512)
lns_decode_double(const short* __restrict__ codes, double* __restrict__ out, i64 n, int aligned, const double* __restrict__ significands) {
    decoded(codes, out, n, aligned, [&](int code) {
        int field = code & FIELD_MASK, log = field - BIAS;
        double v = field == 0 ? 0.0 : ldexp(__ldg(significands + (log & ((1 << FRACTION_BITS) - 1))), log >> FRACTION_BITS);
        return code < 0 && field != 0 ? -v : v;
    });
}
