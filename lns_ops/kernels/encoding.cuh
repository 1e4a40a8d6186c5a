// From float32 to codes. A cell of 2^-(f+1) of the significand holds at most one threshold; `cells` gives the rounded logarithm at the
// cell's start and the threshold's float32 mantissa. Include after arithmetic.cuh.
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
    __device__ __forceinline__ Encoder(const int2* __restrict__ cells, int2* shared) : cells(cells), near(shared) {
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
        int log = (((magnitude >> 23) - 127 - shift) << FRACTION_BITS) + cell.x + (mantissa > cell.y);
        return packed_code(log + BIAS, bits < 0);
    }
};
