// Sums in the contract's order. Bound by memory.
#include "sums.cuh"

// out[piece][n]: a thread takes one block of 64 terms of one sum; `columns` (a power of two) of
// them and 512 / columns blocks at a time in a thread block. In SQUARES y holds what is subtracted,
// if anything is: y[i / y_div % y_mod] for element i of x. `shift` ulps are added to the logarithm
// before it is stored. `wide`: vectors of 8 terms are aligned.
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
        const i64 base = terms.begin(n);
        const i64 last = m < M ? min(terms.K, first + LONG_SUM) : 0;
        const int about = KIND == SQUARES && y && m < M ? y[base / y_div % y_mod] : 0;
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
        if (slot == 0 && m < M) out[m] = stored<BITS_OF_SUM<KIND>>(total, shift);
    }
}

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
