// Rounding to formats with a scale for each group of values: the largest magnitude of a group, the
// scale that brings it into the format's range, and each value over the scale, rounded, times it:
// what lns_ops.formats.Scaled and Integer are in torch's operations, with the same bits. And the
// random integers of rounding at random.
//
// Values are rows of `width`, cut into groups of `length`, of which a row's last may be shorter.
//
// -D: KIND, one of those below, with LOGARITHMS the format (arithmetic.cuh) and none for others;
// CHUNK, the values that a thread block takes of a row that several share.
#define FLOATS 0
#define LOGARITHMS 1
#define INTEGERS 2

typedef unsigned int u32;
typedef long long i64;
#include "rounding.cuh"

constexpr int THREADS = 512, LANES = 32, INFINITE = 0x7f800000;

// What a value is multiplied by before it is rounded, and after; of integers it is divided before.
struct Scale {
    float up, down;
};

__device__ __forceinline__ int magnitude_of(float x) { return __float_as_int(x) & 0x7fffffff; }

#if KIND != INTEGERS
// The largest power of two, of 2^-126 to 2^126, by which `largest` comes to lie at most at `limit`,
// both bits of floats, and its inverse; 1 for zeros and for a NaN. As fractions follow exponents in
// a float's bits, the exponents' difference, less one where the fraction is the larger, is the
// bits' difference by one shift. An infinity has the exponent 0 that torch.frexp gives it.
__device__ __forceinline__ Scale power_below(int largest, int limit) {
    const int raised = largest < 0x800000 ? __clz(largest) - 8 : 0;  // of a subnormal number
    int power = ((limit - (largest << raised)) >> 23) + raised;
    if (largest == INFINITE) power = (limit >> 23) - 127;
    if (largest == 0 || largest > INFINITE) power = 0;
    power = max(min(power, 126), -126);
    return {__int_as_float((127 + power) << 23), __int_as_float((127 - power) << 23)};
}
#endif

#if KIND == FLOATS
// The nearest of binary floats with `mantissa_bits`, ties to even, whose smallest normal number has
// the exponent field `lowest`; `beyond` is what those above `limit` become. A NaN stays one.
struct Rounder {
    int limit, beyond, mantissa_bits, lowest;

    __device__ __forceinline__ Scale scale_of(int largest) const {
        return power_below(largest, limit);
    }
    __device__ __forceinline__ float operator()(float x, Scale scale) const {
        const int magnitude = magnitude_of(x), sign = __float_as_int(x) & 0x80000000;
        if (magnitude > INFINITE) return x;
        int y = __float_as_int(rounded_product(__int_as_float(magnitude), scale.up));
        y = min(y, limit + 0x800000);
        // 1.5 * 2^23 steps: what is added to it is rounded to whole steps.
        const int field = max(y >> 23, lowest);
        const float rounder = __int_as_float(((field - mantissa_bits + 23) << 23) + 0x400000);
        y = __float_as_int(rounded_difference(rounded_sum(__int_as_float(y), rounder), rounder));
        if (y > limit) y = beyond;
        return __int_as_float(__float_as_int(rounded_product(__int_as_float(y), scale.down)) |
                              sign);
    }
};
#define FORMAT int limit, int beyond, int mantissa_bits, int lowest
#define ROUNDER const Rounder rounder = {limit, beyond, mantissa_bits, lowest};

#elif KIND == LOGARITHMS
#include "arithmetic.cuh"
#include "encoding.cuh"
#include "faults.cuh"
// The nearest of an LNS format's values; what is not finite is counted, and comes out as anything.
struct Rounder {
    Encoder encode;
    Decoder decode;
    int limit;
    int* faults;

    __device__ __forceinline__ Scale scale_of(int largest) const {
        return power_below(largest, limit);
    }
    __device__ __forceinline__ float operator()(float x, Scale scale) const {
        if (magnitude_of(x) >= INFINITE) count_fault(faults, NON_FINITE);
        return rounded_product(decode(encode(rounded_product(x, scale.up))), scale.down);
    }
};
#define FORMAT \
    int limit, const int2 *__restrict__ cells, const float *__restrict__ significands, int *faults
#define ROUNDER                                                                 \
    __shared__ int2 near_cells[Encoder::ROOM];                                  \
    __shared__ float near_significands[Decoder::ROOM];                          \
    const Rounder rounder = {                                                   \
        {cells, near_cells}, {significands, near_significands}, limit, faults}; \
    __syncthreads();

#else
// Whole numbers of at most `most` times a scale that is kept to 24 - `drop` significant bits.
struct Rounder {
    float most;
    int drop;

    __device__ __forceinline__ Scale scale_of(int largest) const {
        const int ratio = __float_as_int(over(__int_as_float(largest), most));
        const int kept = (ratio + (1 << (drop - 1))) & -(1 << drop);
        const float scale = ratio >= 0x800000 && ratio < INFINITE ? __int_as_float(kept) : 1.0f;
        return {scale, scale};
    }
    __device__ __forceinline__ float operator()(float x, Scale scale) const {
        float steps;
        asm("cvt.rni.f32.f32 %0, %1;" : "=f"(steps) : "f"(over(x, scale.up)));
        if (steps > most) steps = most;
        if (steps < -most) steps = -most;
        return rounded_product(steps, scale.down);
    }
};
#define FORMAT int most, int drop
#define ROUNDER const Rounder rounder = {(float)most, drop};
#endif

// The largest magnitude of a group, as bits, to each of the SIZE threads that it is given to.
template <int SIZE>
__device__ __forceinline__ int largest_of(const float* __restrict__ x, i64 count, int lane) {
    int found = 0;
    for (i64 i = lane; i < count; i += SIZE) found = max(found, magnitude_of(x[i]));
#pragma unroll
    for (int d = LANES / 2; d > 0; d /= 2) found = max(found, __shfl_xor_sync(~0u, found, d));
    if (SIZE == LANES) return found;
    constexpr int WARPS = SIZE / LANES;
    __shared__ int of_warps[WARPS];
    if (lane % LANES == 0) of_warps[lane / LANES] = found;
    __syncthreads();
    found = of_warps[lane % WARPS];
    __syncthreads();  // before the next group's are written
#pragma unroll
    for (int d = WARPS / 2; d > 0; d /= 2) found = max(found, __shfl_xor_sync(~0u, found, d));
    return found;
}

// Each group by SIZE threads, those of a warp or of a thread block.
template <int SIZE>
__device__ __forceinline__ void quantize(const float* __restrict__ x, float* __restrict__ out,
                                         i64 width, i64 length, i64 a_row, i64 groups,
                                         const Rounder& rounder) {
    constexpr int TOGETHER = THREADS / SIZE;
    const int lane = threadIdx.x % SIZE;
    for (i64 g = blockIdx.x * (i64)TOGETHER + threadIdx.x / SIZE; g < groups;
         g += (i64)gridDim.x * TOGETHER) {
        const i64 within = g % a_row * length, first = g / a_row * width + within;
        const i64 count = min(length, width - within);
        const Scale scale = rounder.scale_of(largest_of<SIZE>(x + first, count, lane));
        for (i64 i = first + lane; i < first + count; i += SIZE) out[i] = rounder(x[i], scale);
    }
}

#define QUANTIZE(name, size)                                                                 \
    extern "C" __global__ void __launch_bounds__(THREADS)                                    \
        lns_quantize_##name(const float* __restrict__ x, float* __restrict__ out, i64 width, \
                            i64 length, i64 a_row, i64 groups, FORMAT) {                     \
        ROUNDER                                                                              \
        quantize<size>(x, out, width, length, a_row, groups, rounder);                       \
    }
QUANTIZE(by_warps, LANES)
QUANTIZE(by_blocks, THREADS)

// Rows whose largest magnitudes are given, CHUNK values by a thread block; without any the scale
// is 1.
extern "C" __global__ void __launch_bounds__(THREADS)
    lns_quantize_by_chunks(const float* __restrict__ x, float* __restrict__ out,
                           const float* __restrict__ largest, i64 width, i64 chunks, FORMAT) {
    ROUNDER
    const i64 row = blockIdx.x / chunks, start = blockIdx.x % chunks * CHUNK;
    const Scale scale = largest ? rounder.scale_of(magnitude_of(largest[row])) : Scale{1.0f, 1.0f};
    const i64 stop = row * width + min(start + CHUNK, width);
    for (i64 i = row * width + start + threadIdx.x; i < stop; i += THREADS)
        out[i] = rounder(x[i], scale);
}

#if KIND == FLOATS
// Uniform 16-bit integers, eight from each block of Philox.
extern "C" __global__ void __launch_bounds__(THREADS)
    lns_random_bits(int* __restrict__ out, const i64* __restrict__ step, i64 blocks, i64 key,
                    u32 slot) {
    const i64 block = blockIdx.x * (i64)THREADS + threadIdx.x;
    if (block >= blocks) return;
    const Random random(key, *step, slot, block);
    int4* to = (int4*)(out + 8 * block);
    to[0] = make_int4(random[0], random[1], random[2], random[3]);
    to[1] = make_int4(random[4], random[5], random[6], random[7]);
}
#endif
