// Normalizations: kernels for the elementwise part alone, and kernels for all of one, where a
// thread block can take a group (what is averaged together) of it.
//
// -D: as sums.cuh; MOST_CODES: codes that a thread block keeps.
#include "sums.cuh"

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

// y = (x - mean) scale and y weight + bias of `count` elements of x.
template <class C>
__device__ __forceinline__ void normalize(Codes& normal, Codes& affine, C count, bool centred,
                                          const Codes& mean, const Codes& scale, bool weighted,
                                          const Codes& weight, bool biased, const Codes& bias,
                                          const int2* gauss) {
#pragma unroll
    for (int j = 0; j < count; j++) {
        int code = normal.code[j];
        if (centred) code = sum_of<true>(code, mean.code[j], gauss);
        normal.code[j] = code = product_of(code, scale.code[j]);
        if (weighted) code = product_of(code, weight.code[j]);
        if (biased) code = sum_of<false>(code, bias.code[j], gauss);
        affine.code[j] = code;
    }
}

// (grad - y along) scale of `count` elements of grad.
template <class C>
__device__ __forceinline__ void descend(Codes& grad, C count, const Codes& y, const Codes& along,
                                        const Codes& scale, const int2* gauss) {
#pragma unroll
    for (int j = 0; j < count; j++) {
        const int part = product_of(y.code[j], along.code[j]);
        grad.code[j] = product_of(sum_of<true>(grad.code[j], part, gauss), scale.code[j]);
    }
}

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
        normalize(normal, affine, count, mean.codes, about, by, weight.codes, w, bias.codes, b,
                  gauss);
        put(y, i, count, normal);
        if (out) put(out, i, count, affine);
    });
}

// (grad - y along) scale.
extern "C" __global__ void __launch_bounds__(512)
    lns_normalize_backward(const short* __restrict__ grad, const short* __restrict__ y,
                           short* __restrict__ out, i64 n, const __grid_constant__ Repeated along,
                           const __grid_constant__ Repeated scale, int aligned,
                           const u32* __restrict__ packed, const int2* __restrict__ gauss) {
    FILL
    each(n, aligned, [&](i64 i, auto count) {
        Codes g = get(grad, i, count);
        const Codes normal = get(y, i, count), part = along.at(i, count), by = scale.at(i, count);
        descend(g, count, normal, part, by, gauss);
        put(out, i, count, g);
    });
}

// --- all of a normalization, group by group

// How groups are cut. A thread block takes `columns` (a power of two) of them at a time. Means are
// those of `length` terms, moved by `inner_shift` ulps before they are stored, and where there are
// several of them their mean, moved by `outer_shift`. `wide`: vectors of 8 terms are aligned.
struct Groups {
    Terms terms;
    int length, inner_shift, outer_shift, columns, wide;
};

// A thread's place among those that take a group together: threads beside each other take elements
// beside each other. Behind the sums' shared memory lie MOST_CODES codes, and one a group.
struct Team {
    int columns, slots, column, slot;
    i64 group, base;
    bool live;

    __device__ __forceinline__ Team(const Groups& groups, i64 first)
        : columns(groups.columns),
          slots(512 / groups.columns),
          column(groups.terms.stride == 1 ? threadIdx.x / slots : threadIdx.x % columns),
          slot(groups.terms.stride == 1 ? threadIdx.x % slots : threadIdx.x / columns),
          group(min(first + column, groups.terms.N - 1)),
          base(groups.terms.begin(group)),
          live(first + column < groups.terms.N) {}
    __device__ __forceinline__ int place(int slot) const { return slot * columns + column; }
    // The code of one number, as many times as elements are taken together.
    __device__ __forceinline__ static Codes all(int code) {
        Codes c;
#pragma unroll
        for (int j = 0; j < WIDE; j++) c.code[j] = code;
        return c;
    }
};

// The sum of a group's terms in pieces of `length`, whose sums are summed in turn where there are
// several; every thread of the team has it. Sums of SQUARES are in their format. A piece has at
// most BLOCK * slots terms.
template <int KIND>
__device__ __forceinline__ int summed(const short* x, const short* y, int common,
                                      const Groups& groups, const Team& team, int length,
                                      int inner_shift, int outer_shift, const int2* gauss) {
    constexpr int WIDTH = BITS_OF_SUM<KIND>;
    Total* totals = TOTALS;
    short *codes = (short*)(TOTALS + 512), *results = codes + MOST_CODES;
    const int K = groups.terms.K, pieces = (K + length - 1) / length;
    const int blocks = (min(K, length) + BLOCK - 1) / BLOCK, at_once = team.slots / blocks;
    for (int first = 0; first < pieces; first += at_once) {
        const int piece = first + team.slot / blocks;
        const int begin = piece * length + team.slot % blocks * BLOCK;
        const int end = min(min(begin + BLOCK, (piece + 1) * length), K);
        Total total = Total::zero();
        if (team.live && team.slot < at_once * blocks && piece < pieces)
            total = added_up<KIND>(x + team.base, y + team.base, common, groups.terms, begin, end,
                                   groups.wide, gauss);
        totals[team.place(team.slot)] = total;
        __syncthreads();
        if (team.slot < at_once && first + team.slot < pieces) {
            Total sum = Total::zero();
            for (int b = 0; b < blocks; b++)
                sum = Total::add(sum, totals[team.place(team.slot * blocks + b)], gauss);
            codes[team.place(first + team.slot)] = stored<WIDTH>(sum, inner_shift);
        }
        __syncthreads();
    }
    if (pieces == 1) return codes[team.column];
    const int parts = (pieces + BLOCK - 1) / BLOCK;
    if (team.slot < parts) {
        Total total = Total::zero();
        for (int k = team.slot * BLOCK; k < min(pieces, (team.slot + 1) * BLOCK); k++)
            total = Total::add(total, Total::of(Exact::of<WIDTH>(codes[team.place(k)])), gauss);
        totals[team.place(team.slot)] = total;
    }
    __syncthreads();
    if (team.slot == 0) {
        Total sum = Total::zero();
        for (int b = 0; b < parts; b++) sum = Total::add(sum, totals[team.place(b)], gauss);
        results[team.column] = stored<WIDTH>(sum, outer_shift);
    }
    __syncthreads();
    return results[team.column];
}

template <int KIND>
__device__ __forceinline__ int mean_of(const short* x, const short* y, int common,
                                       const Groups& groups, const Team& team, const int2* gauss) {
    return summed<KIND>(x, y, common, groups, team, groups.length, groups.inner_shift,
                        groups.outer_shift, gauss);
}

// f(i, Count<N>) for runs of N elements that cover the group: 8 where vectors are aligned, or 1.
template <class F>
__device__ __forceinline__ void each_of(const Groups& groups, const Team& team, F f) {
    const Terms& terms = groups.terms;
    const bool flat = terms.inner >= terms.K;
    const i64 vectors = groups.wide ? terms.K / WIDE : 0;
    if (!team.live) return;
    for (i64 v = team.slot; v < vectors; v += team.slots)
        f(team.base + terms.place(v * WIDE, flat), Count<WIDE>());
    for (i64 k = vectors * WIDE + team.slot; k < terms.K; k += team.slots)
        f(team.base + terms.place(k, flat), Count<1>());
}

// to = from - number, element by element of the group, for every thread of the team to read.
__device__ __forceinline__ void subtract(const short* from, int number, short* to,
                                         const Groups& groups, const Team& team,
                                         const int2* gauss) {
    each_of(groups, team, [&](i64 i, auto count) {
        Codes c = get(from, i, count);
#pragma unroll
        for (int j = 0; j < count; j++) c.code[j] = sum_of<true>(c.code[j], number, gauss);
        put(to, i, count, c);
    });
    __syncthreads();
}

// (variance + eps)^(-1/2), the format's smallest magnitude at least. `powers`: x^(-1/2) of each
// code of the format of squares, in which the variance and eps are.
__device__ __forceinline__ int inverse_root(int variance, int eps, const short* powers,
                                            const int2* gauss) {
    typedef Exact E;
    const E total = E::add(E::of<SQUARE_BITS>(variance), E::of<SQUARE_BITS>(eps), gauss);
    E root = E::of<SQUARE_BITS>(powers[total.code<SQUARE_BITS>()]);
    root.log = max(root.log, 1 - BIAS);
    return root.code();
}

// Statistics of each group, y = ((x - mean) - rest) scale, and out = y weight + bias. `mean` and
// `rest` are absent where x is not centred, `out` without weight and bias. Until it is made, y
// holds x - mean.
extern "C" __global__ void __launch_bounds__(512)
    lns_normalization(const short* __restrict__ x, short* __restrict__ y, short* __restrict__ out,
                      short* __restrict__ mean, short* __restrict__ rest,
                      short* __restrict__ variance, short* __restrict__ scale,
                      const __grid_constant__ Groups groups,
                      const __grid_constant__ Repeated weight,
                      const __grid_constant__ Repeated bias, const short* __restrict__ powers,
                      int eps, const u32* __restrict__ packed, const int2* __restrict__ gauss) {
    FILL
    const i64 columns = groups.columns;
    for (i64 first = blockIdx.x * columns; first < groups.terms.N; first += gridDim.x * columns) {
        const Team team(groups, first);
        const short* from = x;
        int about = 0;
        if (mean) {
            const int centre = mean_of<PLAIN>(x, x, 0, groups, team, gauss);
            if (team.live && team.slot == 0) mean[team.group] = centre;
            subtract(x, centre, y, groups, team, gauss);
            from = y;
            about = mean_of<PLAIN>(y, y, 0, groups, team, gauss);
        }
        const int spread = mean_of<SQUARES>(from, from, about, groups, team, gauss);
        const int by = inverse_root(spread, eps, powers, gauss);
        if (team.live && team.slot == 0) {
            if (rest) rest[team.group] = about;
            variance[team.group] = spread;
            scale[team.group] = by;
        }
        const Codes means = Team::all(about), scales = Team::all(by);
        each_of(groups, team, [&](i64 i, auto count) {
            Codes normal = get(from, i, count), affine;
            const Codes w = weight.codes ? weight.at(i, count) : normal;
            const Codes b = bias.codes ? bias.at(i, count) : normal;
            normalize(normal, affine, count, mean, means, scales, weight.codes, w, bias.codes, b,
                      gauss);
            put(y, i, count, normal);
            if (out) put(out, i, count, affine);
        });
    }
}

// The gradients of x, weight and bias, each of which may be absent; weight and bias have an element
// for each group. Until it is made, of_x holds what is left of grad weight.
extern "C" __global__ void __launch_bounds__(512)
    lns_normalization_backward(const short* __restrict__ grad, const short* __restrict__ y,
                               short* __restrict__ of_x, const short* __restrict__ scale,
                               short* __restrict__ of_weight, short* __restrict__ of_bias,
                               const short* __restrict__ weight,
                               const __grid_constant__ Groups groups, int centred,
                               const u32* __restrict__ packed, const int2* __restrict__ gauss) {
    FILL
    const i64 columns = groups.columns;
    for (i64 first = blockIdx.x * columns; first < groups.terms.N; first += gridDim.x * columns) {
        const Team team(groups, first);
        const bool says = team.live && team.slot == 0;
        if (of_weight) {
            const int sum = summed<PRODUCTS>(grad, y, 0, groups, team, LONG_SUM, 0, 0, gauss);
            if (says) of_weight[team.group] = sum;
        }
        if (of_bias) {
            const int sum = summed<PLAIN>(grad, y, 0, groups, team, LONG_SUM, 0, 0, gauss);
            if (says) of_bias[team.group] = sum;
        }
        if (!of_x) continue;
        const int w = weight ? weight[team.group] : 0;
        int along;
        if (centred) {
            const int mean = weight ? mean_of<WEIGHTED>(grad, y, w, groups, team, gauss)
                                    : mean_of<PLAIN>(grad, y, 0, groups, team, gauss);
            each_of(groups, team, [&](i64 i, auto count) {
                Codes g = get(grad, i, count);
#pragma unroll
                for (int j = 0; j < count; j++) {
                    const int term = weight ? product_of(g.code[j], w) : g.code[j];
                    g.code[j] = sum_of<true>(term, mean, gauss);
                }
                put(of_x, i, count, g);
            });
            __syncthreads();
            const int rest = mean_of<PLAIN>(of_x, of_x, 0, groups, team, gauss);
            subtract(of_x, rest, of_x, groups, team, gauss);
            along = mean_of<PRODUCTS>(of_x, y, 0, groups, team, gauss);
        } else if (weight)
            along = mean_of<WEIGHTED_PRODUCTS>(grad, y, w, groups, team, gauss);
        else
            along = mean_of<PRODUCTS>(grad, y, 0, groups, team, gauss);
        const Codes alongs = Team::all(along), scales = Team::all(scale[team.group]);
        each_of(groups, team, [&](i64 i, auto count) {
            Codes g = get(centred ? of_x : grad, i, count);
            if (weight && !centred)
#pragma unroll
                for (int j = 0; j < count; j++) g.code[j] = product_of(g.code[j], w);
            descend(g, count, get(y, i, count), alongs, scales, gauss);
            put(of_x, i, count, g);
        });
    }
}
