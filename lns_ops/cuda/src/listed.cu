// Rounding to a sorted list of values, with the bits of lns_ops.formats.list_rounding. Bound by
// memory, and by the gathers from the tables, which stay in the caches.
typedef long long i64;
typedef unsigned int u32;
#include "rounding.cuh"

// `cells` has, for all numbers with the same leading bits (all but `shift`), the place of the
// smallest of them in the list; `ends` has the number at which the next place begins. A NaN stays a
// NaN. With `not_a_real` an infinity becomes one.
extern "C" __global__ void __launch_bounds__(512)
    lns_quantize_listed(const float* __restrict__ x, float* __restrict__ out, i64 count,
                        const int* __restrict__ cells, const float* __restrict__ ends,
                        const float* __restrict__ levels, int shift, int not_a_real) {
    const u32 most = not_a_real ? 0x7f7fffff : 0x7f800000;
    for (i64 i = blockIdx.x * 512ll + threadIdx.x; i < count; i += gridDim.x * 512ll) {
        const float value = x[i];
        const u32 word = __float_as_uint(value);
        const int cell = cells[word >> shift], place = cell + at_least(value, ends[cell]);
        out[i] = (word & 0x7fffffff) > most ? __uint_as_float(0x7fc00000) : levels[place];
    }
}
