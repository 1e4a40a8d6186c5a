// From float32 to codes. A cell of 2^-(f+1) of the significand holds at most one threshold; `cells`
// gives the rounded logarithm at the cell's start and the threshold's float32 mantissa. Include
// after arithmetic.cuh.
#pragma once

constexpr int CELL_SHIFT = 22 - FRACTION_BITS, CELLS = 1 << (FRACTION_BITS + 1);

__device__ __forceinline__ int packed_code(int field, int sign) {
    field = min(field, FIELD_MASK);
    return field <= 0 ? 0 : sign ? field | SIGN_MASK : field;
}

// The code nearest to x in logarithm; an infinity saturates, a NaN comes out as anything.
struct Encoder {
    static constexpr bool SHARED = FRACTION_BITS <= 9, SUBNORMAL = BIAS > 126 << FRACTION_BITS;
    static constexpr int ROOM = SHARED ? CELLS : 1;
    const int2 *cells, *near;

    // `shared`: ROOM elements of shared memory, filled here.
    __device__ __forceinline__ Encoder(const int2* __restrict__ cells, int2* shared)
        : cells(cells), near(shared) {
        if (SHARED) {
            for (int i = threadIdx.x; i < CELLS; i += blockDim.x) shared[i] = cells[i];
            __syncthreads();
        }
    }
    __device__ __forceinline__ short operator()(float x) const {
        int bits = __float_as_int(x), magnitude = bits & 0x7fffffff, shift = 0;
        if (SUBNORMAL && magnitude < 0x800000) {
            magnitude = __float_as_int(times(x, 0x1p64f)) & 0x7fffffff;
            shift = magnitude == 0 ? 1 << 12 : 64;
        }
        int mantissa = magnitude & 0x7fffff;
        int2 cell = SHARED ? near[mantissa >> CELL_SHIFT] : __ldg(cells + (mantissa >> CELL_SHIFT));
        int log =
            (((magnitude >> 23) - 127 - shift) << FRACTION_BITS) + cell.x + (mantissa > cell.y);
        return packed_code(log + BIAS, bits < 0);
    }
};

// float32 of a code of WIDTH bits: its significand from a table, rounded to float32, times a power
// of two. What is subnormal has entries of its own, of the exponents -128 and -127, rounded once
// (lns_ops.format.single_significands).
template <int WIDTH>
struct DecoderOf {
    static constexpr int OFFSET = BIAS_OF<WIDTH>, MASK = 2 * OFFSET - 1;
    static constexpr bool SHARED = FRACTION_BITS <= 9, SUBNORMAL = OFFSET > 126 << FRACTION_BITS;
    static constexpr int FRACTIONS = 1 << FRACTION_BITS,
                         ENTRIES = SUBNORMAL ? 3 * FRACTIONS : FRACTIONS,
                         ROOM = SHARED ? ENTRIES : 1;
    const float *significands, *near;

    // `shared`: ROOM elements of shared memory, filled here; the caller synchronises.
    __device__ __forceinline__ DecoderOf(const float* __restrict__ significands, float* shared)
        : significands(significands), near(shared) {
        if (SHARED)
            for (int i = threadIdx.x; i < ENTRIES; i += blockDim.x) shared[i] = significands[i];
    }
    __device__ __forceinline__ float operator()(int code) const {
        const int field = code & MASK, log = field - OFFSET, exponent = log >> FRACTION_BITS,
                  fraction = log & (FRACTIONS - 1);
        const bool subnormal = SUBNORMAL && exponent < -126;
        const int entry = subnormal ? fraction + (exponent + 129) * FRACTIONS : fraction;
        const int bits = __float_as_int(SHARED ? near[entry] : __ldg(significands + entry)) +
                         (subnormal ? 0 : exponent << 23);
        return field == 0 ? 0.0f : __int_as_float(bits | (code & 0x80000000));
    }
};
typedef DecoderOf<BITS> Decoder;

// The code below or above a float32 in magnitude, at random: lns_ops.reference.encode_stochastic.
// An infinity saturates. `base` gives the last significand at or below the start of a cell, `steps`
// each significand's mantissa and the reciprocal of the distance to the next.
struct StochasticEncoder {
    const int* __restrict__ base;
    const int2* __restrict__ steps;

    __device__ __forceinline__ short operator()(float x, int bits) const {
        int magnitude = __float_as_int(x) & 0x7fffffff, shift = 0;
        const int sign = __float_as_int(x) < 0;
        if (magnitude < 0x800000) {
            magnitude = __float_as_int(times(x, 0x1p64f)) & 0x7fffffff;
            shift = magnitude == 0 ? 1 << 12 : 64;
        }
        const int mantissa = magnitude & 0x7fffff;
        int j = __ldg(base + (mantissa >> CELL_SHIFT));
        int2 step = __ldg(steps + j), next = __ldg(steps + j + 1);
        if (mantissa >= next.x) j++, step = next;
        const int chance = (int)((i64)(mantissa - step.x) * (u32)step.y >> 24);
        return packed_code((((magnitude >> 23) - 127 - shift) << FRACTION_BITS) + j +
                               ((chance + bits) >> 16) + BIAS,
                           sign);
    }
};
