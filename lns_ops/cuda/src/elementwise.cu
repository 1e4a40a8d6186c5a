// Elementwise operations and conversions on codes; memory-bound. Arrays are contiguous;
// a second operand may be repeated: element i of the result takes y[i / y_div % y_mod] (y_mod = 0:
// the scalar `y_code`).
//
// What LNS has no code for is counted (faults.cuh); the result is zero there (the largest magnitude
// for an infinity).
#include "elementwise.cuh"
#include "encoding.cuh"
#include "faults.cuh"

template <class F>
__device__ __forceinline__ void binary(const short* x, const short* y, short* z, i64 n, i64 y_div,
                                       i64 y_mod, int y_code, int aligned, F f) {
    const bool flat = y_mod == n && y_div == 1;
    struct Operands {
        Codes x, y;
    };
    each(
        n, aligned,
        [&](i64 i, auto count) {
            Operands operands = {get(x, i, count)};
            if (flat) operands.y = get(y, i, count);
            return operands;
        },
        [&](i64 i, auto count, const Operands& operands) {
            Codes out;
#pragma unroll
            for (int j = 0; j < count; j++) {
                int other = flat ? operands.y.code[j] : y_mod ? y[(i + j) / y_div % y_mod] : y_code;
                out.code[j] = f(operands.x.code[j], other);
            }
            put(z, i, count, out);
        });
}

#define BINARY(name, ...)                                                                         \
    extern "C" __global__ void __launch_bounds__(512)                                             \
        lns_##name(const short* __restrict__ x, const short* __restrict__ y,                      \
                   short* __restrict__ z, i64 n, i64 y_div, i64 y_mod, int y_code, int aligned,   \
                   const u32* __restrict__ packed, const int2* __restrict__ gauss, int* faults) { \
        __VA_ARGS__                                                                               \
    }

template <class A>
__device__ __forceinline__ int added(A& arithmetic, int x, int y, bool subtract) {
    typename A::Number other = arithmetic.of(y);
    return arithmetic.code(arithmetic.watched(
        arithmetic.sum(arithmetic.of(x), subtract ? arithmetic.negated(other) : other)));
}

__device__ __noinline__ int added_exactly(int x, int y, bool subtract, const int2* gauss) {
    ExactArithmetic exact{gauss};
    return added(exact, x, y, subtract);
}

#define SUM(subtract)                                                                        \
    SETUP binary(x, y, z, n, y_div, y_mod, y_code, aligned, [&](int a, int b) {              \
        Arithmetic arithmetic = ARITHMETIC;                                                  \
        int code = added(arithmetic, a, b, subtract);                                        \
        if (arithmetic.template saturated<0>()) code = added_exactly(a, b, subtract, gauss); \
        return code;                                                                         \
    });
BINARY(add, SUM(false))
BINARY(sub, SUM(true))

BINARY(mul, binary(x, y, z, n, y_div, y_mod, y_code, aligned, [&](int a, int b) {
           int fa = a & FIELD_MASK, fb = b & FIELD_MASK;
           return fa == 0 || fb == 0 ? 0 : packed_code(fa + fb - BIAS, (a ^ b) < 0);
       });)
BINARY(div, binary(x, y, z, n, y_div, y_mod, y_code, aligned, [&](int a, int b) {
           int fa = a & FIELD_MASK, fb = b & FIELD_MASK;
           if (fb == 0) count_fault(faults, ZERO_DIVISOR);
           return fa == 0 || fb == 0 ? 0 : packed_code(fa - fb + BIAS, (a ^ b) < 0);
       });)

extern "C" __global__ void __launch_bounds__(512)
    lns_square_root(const short* __restrict__ x, short* __restrict__ z, i64 n, int aligned,
                    int* faults) {
    each(n, aligned, [&](i64 i, auto count) {
        Codes a = get(x, i, count), out;
#pragma unroll
        for (int j = 0; j < WIDE; j++)
            if (j < count) {
                int field = a.code[j] & FIELD_MASK, log = field - BIAS;
                if (field != 0 && a.code[j] < 0) count_fault(faults, NEGATIVE_ROOT);
                int half = log >> 1;
                half += log & half & 1;  // halfway: to even
                out.code[j] = field == 0 || a.code[j] < 0 ? 0 : packed_code(half + BIAS, 0);
            }
        put(z, i, count, out);
    });
}

// The code nearest to x in logarithm.
extern "C" __global__ void __launch_bounds__(512)
    lns_encode(const float* __restrict__ x, short* __restrict__ out, i64 n, int aligned,
               const int2* __restrict__ cells, int* faults) {
    __shared__ int2 near[Encoder::ROOM];
    const Encoder encoded(cells, near);
    struct Values {
        __align__(16) float v[4];
    };
    each<4>(
        n, aligned,
        [&](i64 i, auto count) {
            Values values;
            if (count == 4)
                *(float4*)values.v = *(const float4*)(x + i);
            else
                values.v[0] = x[i];
            return values;
        },
        [&](i64 i, auto count, const Values& values) {
            const float* v = values.v;
            Codes code;
            int largest = 0;
#pragma unroll
            for (int j = 0; j < count; j++) {
                largest = max(largest, __float_as_int(v[j]) & 0x7fffffff);
                code.code[j] = encoded(v[j]);
            }
            if (largest >= 0x7f800000) {  // an infinity came out saturated, as it should
                int nonfinite = 0;
#pragma unroll
                for (int j = 0; j < count; j++) {
                    int magnitude = __float_as_int(v[j]) & 0x7fffffff;
                    nonfinite += magnitude >= 0x7f800000;
                    if (magnitude > 0x7f800000) code.code[j] = 0;
                }
                count_fault(faults, NON_FINITE, nonfinite);
            }
            put(out, i, count, code);
        });
}

// The code nearest to a float64 x in logarithm; thresholds in units of 2^-52.
extern "C" __global__ void __launch_bounds__(512)
    lns_encode_double(const double* __restrict__ x, short* __restrict__ out, i64 n,
                      const i64* __restrict__ thresholds, int* faults) {
    each(n, false, [&](i64 i, auto) {
        int exponent;
        double fraction = frexp(fabs(x[i]), &exponent);
        int code = 0;
        if (!isfinite(x[i])) count_fault(faults, NON_FINITE);
        if (x[i] != 0 && !isnan(x[i])) {
            i64 significand = (i64)ldexp(fraction, 53);
            int low = 0, high = 1 << FRACTION_BITS;  // thresholds strictly below the significand
            while (low < high) {
                int middle = (low + high) / 2;
                if (__ldg(thresholds + middle) < significand)
                    low = middle + 1;
                else
                    high = middle;
            }
            code = isinf(x[i]) ? FIELD_MASK
                               : packed_code(((exponent - 1) << FRACTION_BITS) + low + BIAS, 0);
            if (x[i] < 0 && code != 0) code |= SIGN_MASK;
        }
        out[i] = code;
    });
}

// sign 2^(log / 2^f): the significand from a table, rounded to the type, times a power of two.
template <class T, class F>
__device__ __forceinline__ void decoded(const short* codes, T* out, i64 n, bool aligned, F value) {
    each<4>(
        n, aligned, [&](i64 i, auto count) { return get(codes, i, count); },
        [&](i64 i, auto count, const Codes& c) {
            __align__(16) T v[4];
#pragma unroll
            for (int j = 0; j < count; j++) v[j] = value(c.code[j]);
            if (count == 4) {
#pragma unroll
                for (int j = 0; j < (int)sizeof(T) / 4; j++)
                    ((float4*)(out + i))[j] = ((float4*)v)[j];
            } else {
                out[i] = v[0];
            }
        });
}

extern "C" __global__ void __launch_bounds__(512)
    lns_decode(const short* __restrict__ codes, float* __restrict__ out, i64 n, int aligned,
               const float* __restrict__ significands) {
    __shared__ float near[Decoder::ROOM];
    const Decoder decoder(significands, near);
    __syncthreads();
    decoded(codes, out, n, aligned, decoder);
}

extern "C" __global__ void __launch_bounds__(512)
    lns_decode_double(const short* __restrict__ codes, double* __restrict__ out, i64 n, int aligned,
                      const double* __restrict__ significands) {
    decoded(codes, out, n, aligned, [&](int code) {
        int field = code & FIELD_MASK, log = field - BIAS;
        double v = field == 0 ? 0.0
                              : ldexp(__ldg(significands + (log & ((1 << FRACTION_BITS) - 1))),
                                      log >> FRACTION_BITS);
        return code < 0 && field != 0 ? -v : v;
    });
}

// average keep + value take; the product is rounded, the rest is fused, as torch's mul and its add
// with alpha are.
__device__ __forceinline__ void follow(float* average, float value, float keep, float take) {
    float kept, moved;
    asm("mul.rn.f32 %0, %1, %2;" : "=f"(kept) : "f"(*average), "f"(keep));
    asm("fma.rn.f32 %0, %1, %2, %3;" : "=f"(moved) : "f"(value), "f"(take), "f"(kept));
    *average = moved;
}

// Running averages of a mean and a variance, the latter times the code `unbiased`; either may be
// absent. Codes of the variance and of its factor are those of the format of squares.
extern "C" __global__ void __launch_bounds__(512)
    lns_track(const short* __restrict__ mean, const short* __restrict__ rest,
              const short* __restrict__ variance, float* __restrict__ mean_average,
              float* __restrict__ variance_average, i64 n, int unbiased, float keep, float take,
              const float* __restrict__ significands) {
    typedef DecoderOf<SQUARE_BITS> Decoder;
    __shared__ float near[Decoder::ROOM];
    const Decoder significand_of(significands, near);
    __syncthreads();
    auto decoded = [&](Exact x) { return significand_of(x.code<SQUARE_BITS>()); };
    const Exact by = Exact::of<SQUARE_BITS>(unbiased);
    each(n, false, [&](i64 i, auto) {
        if (mean_average) {
            const float value = __fadd_rn(decoded(Exact::of(mean[i])), decoded(Exact::of(rest[i])));
            follow(mean_average + i, value, keep, take);
        }
        if (variance_average) {
            const Exact x = Exact::of<SQUARE_BITS>(variance[i]);
            const Exact product = {x.log + by.log, x.sign ^ by.sign, x.zero || by.zero};
            follow(variance_average + i, decoded(product), keep, take);
        }
    });
}
