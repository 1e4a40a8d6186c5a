// The kernels around a matrix product or a convolution with float32 sums: they decode both operands
// and encode the sums. Bound by memory. Arrays are contiguous except where strides are given.
// -D: the format (arithmetic.cuh).
#include "arithmetic.cuh"
#include "encoding.cuh"

constexpr int FRACTIONS = 1 << FRACTION_BITS;
constexpr int LOWEST_EXPONENT = -(BIAS >> FRACTION_BITS);  // BIAS is a multiple of FRACTIONS
constexpr bool SUBNORMAL = LOWEST_EXPONENT < -126;

// bfloat16 of a code in the low half-word: `mantissas` holds round((2^(j / 2^f) - 1) 2^7). Zero may
// keep a sign.
struct Bfloat16 {
    typedef unsigned short Value;
    static constexpr int MANTISSA = 7;

    __device__ __forceinline__ static u32 of(u32 code, const unsigned short* mantissas) {
        int field = code & FIELD_MASK, exponent = (field >> FRACTION_BITS) + LOWEST_EXPONENT;
        int bits = mantissas[field % FRACTIONS] + ((exponent + 127) << MANTISSA);
        if (SUBNORMAL && exponent < -126) {
            int shift = -126 - exponent;  // 1 or 2
            bits = (mantissas[field % FRACTIONS] + (1 << MANTISSA) + (1 << (shift - 1))) >> shift;
        }
        return (field == 0 ? 0 : bits) | (code & 0x8000);
    }
    __device__ __forceinline__ static void put(Value* out, uint4 c,
                                               const unsigned short* mantissas) {
        u32 word[4] = {c.x, c.y, c.z, c.w};
#pragma unroll
        for (int j = 0; j < 4; j++)
            word[j] =
                __byte_perm(of(word[j] & 0xffff, mantissas), of(word[j] >> 16, mantissas), 0x5410);
        *(uint4*)out = make_uint4(word[0], word[1], word[2], word[3]);
    }
    __device__ __forceinline__ static Value one(short code, const unsigned short* mantissas) {
        return (Value)of((unsigned short)code, mantissas);
    }
};

// float32 of a code, its significand rounded to tf32: `mantissas` holds round((2^(j / 2^f) - 1)
// 2^10).
struct Tf32 {
    typedef float Value;
    static constexpr int MANTISSA = 10;

    __device__ __forceinline__ static float of(u32 code, const unsigned short* mantissas) {
        int field = code & FIELD_MASK, exponent = (field >> FRACTION_BITS) + LOWEST_EXPONENT;
        int bits = (mantissas[field % FRACTIONS] << (23 - MANTISSA)) + ((exponent + 127) << 23);
        if (SUBNORMAL && exponent < -126)
            bits = __float_as_int(times(__int_as_float(bits + (64 << 23)), 0x1p-64f));
        return __int_as_float((field == 0 ? 0 : bits) | (code & 0x8000) << 16);
    }
    __device__ __forceinline__ static void put(Value* out, uint4 c,
                                               const unsigned short* mantissas) {
        u32 word[4] = {c.x, c.y, c.z, c.w};
#pragma unroll
        for (int j = 0; j < 4; j += 2)
            ((float4*)out)[j / 2] =
                make_float4(of(word[j] & 0xffff, mantissas), of(word[j] >> 16, mantissas),
                            of(word[j + 1] & 0xffff, mantissas), of(word[j + 1] >> 16, mantissas));
    }
    __device__ __forceinline__ static Value one(short code, const unsigned short* mantissas) {
        return of((unsigned short)code, mantissas);
    }
};

// Two arrays in one launch, 8 codes an access where an array is aligned. Codes are not needed
// again, values are, by the product that follows: the loads are marked so that they leave the L2
// first.
template <class T>
__device__ __forceinline__ void decode_both(const short* __restrict__ x,
                                            typename T::Value* __restrict__ x_out, i64 x_n,
                                            const short* __restrict__ y,
                                            typename T::Value* __restrict__ y_out, i64 y_n,
                                            const unsigned short* __restrict__ significands,
                                            bool x_aligned, bool y_aligned) {
    __shared__ unsigned short
        mantissas[FRACTIONS];  // 64 half-words fill the 32 banks: no conflicts up to f = 6
    for (int i = threadIdx.x; i < FRACTIONS; i += blockDim.x) mantissas[i] = significands[i];
    __syncthreads();
    const i64 first = blockIdx.x * (i64)blockDim.x + threadIdx.x,
              stride = (i64)gridDim.x * blockDim.x;
    const i64 x_vectors = x_aligned ? x_n / 8 : 0, y_vectors = y_aligned ? y_n / 8 : 0;
    auto in = [&](i64 i) {
        return __ldcs((const uint4*)(i < x_vectors ? x + i * 8 : y + (i - x_vectors) * 8));
    };
    auto out = [&](i64 i) { return i < x_vectors ? x_out + i * 8 : y_out + (i - x_vectors) * 8; };
    for (i64 i = first; i < x_vectors + y_vectors; i += 2 * stride) {
        const bool another = i + stride < x_vectors + y_vectors;
        uint4 here = in(i), there;  // both loads under way before either is needed
        if (another) there = in(i + stride);
        T::put(out(i), here, mantissas);
        if (another) T::put(out(i + stride), there, mantissas);
    }
    for (i64 i = x_vectors * 8 + first; i < x_n; i += stride) x_out[i] = T::one(x[i], mantissas);
    for (i64 i = y_vectors * 8 + first; i < y_n; i += stride) y_out[i] = T::one(y[i], mantissas);
}

#define DECODE(name, T)                                                                   \
    extern "C" __global__ void __launch_bounds__(512, 4) lns_decode_##name(               \
        const short* __restrict__ x, T::Value* __restrict__ x_out, i64 x_n,               \
        const short* __restrict__ y, T::Value* __restrict__ y_out, i64 y_n,               \
        const unsigned short* __restrict__ significands, int x_aligned, int y_aligned) {  \
        decode_both<T>(x, x_out, x_n, y, y_out, y_n, significands, x_aligned, y_aligned); \
    }
DECODE(bf16, Bfloat16)
DECODE(tf32, Tf32)

// What follows takes sums again that left float32 on their way: in float64, which no sum of
// products of codes leaves.
__device__ __forceinline__ double value(int code, const double* significands) {
    int field = code & FIELD_MASK, exponent = (field >> FRACTION_BITS) + LOWEST_EXPONENT;
    double v = __ldg(significands + field % FRACTIONS);
    v = __hiloint2double(__double2hiint(v) + (exponent << 20), __double2loint(v));
    return field == 0 ? 0.0 : code < 0 ? -v : v;
}

// A matrix product's operands; `sum(i)` is element i of the product.
struct Matrices {
    const short *x, *y;
    const double* significands;
    i64 M, N, K, x_b, x_m, x_k, y_b, y_k, y_n;

    __device__ double sum(i64 i) const {
        const short* row = x + i / (M * N) * x_b + i / N % M * x_m;
        const short* column = y + i / (M * N) * y_b + i % N * y_n;
        double total = 0;
        for (i64 k = 0; k < K; k++)
            total += value(row[k * x_k], significands) * value(column[k * y_k], significands);
        return total;
    }
};

// Two of a convolution's images [images, groups channels, size], filters [groups outputs, channels,
// kernel] and outputs [images, groups outputs, positions]; `sum(i)` is element i of the third.
struct Convolution {
    const short *x, *y;  // kind 0: images, filters; 1: outputs, filters; 2: outputs, images
    const double* significands;
    i64 kind, images, groups, channels, outputs;
    i64 size[3], kernel[3], positions[3], stride[3], padding[3], dilation[3];

    __device__ static i64 count(const i64 (&sizes)[3]) { return sizes[0] * sizes[1] * sizes[2]; }

    // Where tap t meets the image at a position of the output; -1 in the padding.
    __device__ i64 met_from(i64 position, i64 t) const {
        i64 at = 0, scale = 1;
        for (int d = 2; d >= 0; d--) {
            i64 here = position % positions[d] * stride[d] + t % kernel[d] * dilation[d];
            here -= padding[d];
            if (here < 0 || here >= size[d]) return -1;
            at += here * scale;
            scale *= size[d];
            position /= positions[d];
            t /= kernel[d];
        }
        return at;
    }
    // The position of the output whose tap t meets the image there; -1 if there is none.
    __device__ i64 meets_from(i64 at, i64 t) const {
        i64 position = 0, scale = 1;
        for (int d = 2; d >= 0; d--) {
            i64 reach = at % size[d] + padding[d] - t % kernel[d] * dilation[d];
            if (reach < 0 || reach % stride[d] || reach / stride[d] >= positions[d]) return -1;
            position += reach / stride[d] * scale;
            scale *= positions[d];
            at /= size[d];
            t /= kernel[d];
        }
        return position;
    }
    __device__ double term(i64 i, i64 j) const {
        return value(x[i], significands) * value(y[j], significands);
    }
    __device__ double sum(i64 i) const {
        const i64 S = count(size), T = count(kernel), P = count(positions);
        double total = 0;
        if (kind == 0) {
            const i64 position = i % P, o = i / P % (groups * outputs);
            const i64 n = i / P / (groups * outputs);
            for (i64 c = 0; c < channels; c++)
                for (i64 t = 0; t < T; t++) {
                    i64 at = met_from(position, t);
                    i64 image = (n * groups + o / outputs) * channels + c;
                    if (at >= 0) total += term(image * S + at, (o * channels + c) * T + t);
                }
        } else if (kind == 1) {
            const i64 at = i % S, c = i / S % (groups * channels), n = i / S / (groups * channels);
            for (i64 k = 0; k < outputs; k++)
                for (i64 t = 0; t < T; t++) {
                    i64 position = meets_from(at, t), o = c / channels * outputs + k;
                    if (position >= 0)
                        total += term((n * groups * outputs + o) * P + position,
                                      (o * channels + c % channels) * T + t);
                }
        } else {
            const i64 t = i % T, c = i / T % channels, o = i / T / channels;
            for (i64 n = 0; n < images; n++)
                for (i64 position = 0; position < P; position++) {
                    i64 at = met_from(position, t);
                    i64 image = (n * groups + o / outputs) * channels + c;
                    if (at >= 0)
                        total += term((n * groups * outputs + o) * P + position, image * S + at);
                }
        }
        return total;
    }
};

__device__ __forceinline__ bool finite(float v) {
    return (__float_as_int(v) & 0x7f800000) != 0x7f800000;
}

// Computes the elements of one thread again that overflowed float32 on their way. It is rare, and a
// function of its own so as not to cost the kernel registers.
template <class Operands>
__device__ __noinline__ void encode_again(const float* sums, short* out, i64 n, i64 first,
                                          i64 stride, Encoder encoded, const Operands& operands) {
    constexpr double LARGEST = 0x1.fffffep127;
    auto again = [&](i64 i) {
        if (!finite(sums[i]))
            out[i] = encoded((float)fmin(fmax(operands.sum(i), -LARGEST), LARGEST));
    };
    for (i64 i = first; i < n / 4; i += stride)
        for (i64 j = 4 * i; j < 4 * i + 4; j++) again(j);
    for (i64 i = n / 4 * 4 + first; i < n; i += stride) again(i);
}

// As lns_encode of elementwise.cu, of memory aligned to 16 bytes; but what is not finite is no
// fault.
template <class Operands>
__device__ __forceinline__ void encode_all(const float* __restrict__ sums, short* __restrict__ out,
                                           i64 n, const int2* __restrict__ cells,
                                           const Operands& operands) {
    __shared__ int2 near[Encoder::ROOM];
    const Encoder encoded(cells, near);
    const i64 first = blockIdx.x * (i64)blockDim.x + threadIdx.x,
              stride = (i64)gridDim.x * blockDim.x;
    bool all_finite = true;
#pragma unroll 2
    for (i64 i = first; i < n / 4; i += stride) {
        float4 v = ((const float4*)sums)[i];
        ((short4*)out)[i] = make_short4(encoded(v.x), encoded(v.y), encoded(v.z), encoded(v.w));
        all_finite &= finite(v.x) & finite(v.y) & finite(v.z) & finite(v.w);
    }
    for (i64 i = n / 4 * 4 + first; i < n; i += stride) {
        out[i] = encoded(sums[i]);
        all_finite &= finite(sums[i]);
    }
    if (!all_finite) encode_again(sums, out, n, first, stride, encoded, operands);
}

#define ENCODE(name, Operands)                                                              \
    extern "C" __global__ void __launch_bounds__(512, 4)                                    \
        lns_encode_##name(const float* __restrict__ sums, short* __restrict__ out, i64 n,   \
                          const int2* __restrict__ cells,                                   \
                          const __grid_constant__ Operands operands) {                      \
        encode_all(sums, out, n, cells, operands);                                          \
    }
ENCODE(sums, Matrices)
ENCODE(convolution, Convolution)
