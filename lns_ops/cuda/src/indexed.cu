// Functions read from a table of results, and sums of the terms that share a destination. Arrays
// are contiguous.
//
// -D: the format (arithmetic.cuh), FAST 0, UNDEFINED: the table's entry for arguments without a
// value, which gives zero and is counted.
#include "elementwise.cuh"
#include "faults.cuh"

extern "C" __global__ void __launch_bounds__(512)
    lns_lookup(const short* __restrict__ x, short* __restrict__ z, i64 n, int aligned,
               const short* __restrict__ results, int* faults) {
    each(
        n, aligned, [&](i64 i, auto count) { return get(x, i, count); },
        [&](i64 i, auto count, const Codes& c) {
            Codes out;
#pragma unroll
            for (int j = 0; j < count; j++) {
                short value = __ldg(results + (c.code[j] & (2 * FIELD_MASK + 1)));
                if (value == UNDEFINED) count_fault(faults, NO_VALUE), value = 0;
                out.code[j] = value;
            }
            put(z, i, count, out);
        });
}

// out[r][c] = sum over k in starts[r] .. starts[r + 1] of x[order[k]][c], in the contract's order;
// a thread takes one of them.
extern "C" __global__ void __launch_bounds__(512)
    lns_segment_sum(const short* __restrict__ x, short* __restrict__ out,
                    const i64* __restrict__ order, const i64* __restrict__ starts, i64 rows,
                    i64 width, const int2* __restrict__ gauss) {
    const i64 stride = (i64)gridDim.x * blockDim.x;
    for (i64 i = blockIdx.x * (i64)blockDim.x + threadIdx.x; i < rows * width; i += stride) {
        const i64 r = i / width, c = i % width, stop = starts[r + 1];
        ExactSum sum;
        for (i64 k = starts[r]; k < stop; k++) sum.add(Exact::of(x[order[k] * width + c]), gauss);
        sum.flush(gauss);
        out[i] = sum.total.code();
    }
}
