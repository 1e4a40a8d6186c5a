// Matrix products whose running sums are rounded to a binary float after every addition: what
// lns_ops.nn.products.rounded_sums.reference is, with the same bits. Bound by arithmetic.
//
// A product of two float32 numbers is exact in float64, so a fused multiply-add rounds what the
// reference rounds. A thread computes WIDE x WIDE results, 16 rows and 16 columns apart.
//
// -D: WIDE; TREE, whether the terms of a block are added in pairs, else one after the other.
typedef long long i64;
typedef unsigned int u32;
#include "rounding.cuh"

constexpr int SIDE = 16, TILE = SIDE * WIDE, SLAB = 16, THREADS = SIDE * SIDE;

#define EACH                                         \
    _Pragma("unroll") for (int i = 0; i < WIDE; i++) \
        _Pragma("unroll") for (int j = 0; j < WIDE; j++)

typedef double Sums[WIDE][WIDE];

// Rounds to the nearest value of a binary float, ties to even; a larger one than `limit` becomes
// `beyond`. A NaN stays one. `shift` is 52 less the bits of the mantissa, and `lowest` float64's
// exponent field of the smallest normal number, both where float64's upper word has its exponent.
struct Rounder {
    double limit, beyond;
    u32 shift, lowest;

    __device__ __forceinline__ void operator()(Sums& sums) const {
        u32 most = 0;
        EACH {
            const u32 field = __double2hiint(sums[i][j]) & 0x7ff00000;
            // 1.5 * 2^52 steps: what is added to it is rounded to whole steps. What is not finite
            // meets a small number.
            const double rounder =
                __hiloint2double(max(field, lowest) + (shift + 0x80000), 0);
            sums[i][j] = __dsub_rn(__dadd_rn(sums[i][j], rounder), rounder);
            most = max(most, field);
        }
        if (most < (__double2hiint(limit) & 0x7ff00000)) return;
        EACH {
            if (sums[i][j] > limit) sums[i][j] = beyond;
            if (sums[i][j] < -limit) sums[i][j] = -beyond;
        }
    }
};

typedef double Terms[SLAB][TILE + 1];

// Products of terms `k` of a thread's rows and columns.
__device__ __forceinline__ void add_products(Sums& sums, const Terms& x, const Terms& y, int k) {
    const int r = threadIdx.x / SIDE, c = threadIdx.x % SIDE;
    EACH sums[i][j] = __fma_rn(x[k][r + SIDE * i], y[k][c + SIDE * j], sums[i][j]);
}

// The running sums of a block of terms.
#if TREE
struct Block {
    static constexpr int TOGETHER = 8, LEVELS = 33;  // for up to 2^32 terms
    Sums part;
    Sums waiting[LEVELS];  // a sum of 2^level terms waits at each one of the binary number `count`
    i64 count;

    __device__ __forceinline__ void start() { count = 0; }
    // Adds terms `k` to `stop`, TOGETHER of them in registers where they are a whole branch.
    __device__ __forceinline__ void add(const Terms& x, const Terms& y, int k, int stop,
                                        const Rounder& round) {
        while (k < stop) {
            const bool whole = count % TOGETHER == 0 && stop - k >= TOGETHER;
            if (whole) {
                branch<TOGETHER>(part, x, y, k, round);
            } else {
                branch<1>(part, x, y, k, round);
            }
            const int terms = whole ? TOGETHER : 1;
            int level = whole ? 3 : 0;
            for (; count >> level & 1; level++) add_waiting(level, round);
            EACH waiting[level][i][j] = part[i][j];
            k += terms, count += terms;
        }
    }
    // Adds what waits, the smallest first.
    __device__ __forceinline__ void finish(const Rounder& round) {
        int level = __ffsll(count) - 1;
        EACH part[i][j] = waiting[level][i][j];
        while (count >> ++level)
            if (count >> level & 1) add_waiting(level, round);
    }

   private:
    __device__ __forceinline__ void add_waiting(int level, const Rounder& round) {
        EACH part[i][j] = __dadd_rn(waiting[level][i][j], part[i][j]);
        round(part);
    }
    template <int N>
    static __device__ __forceinline__ void branch(Sums& sums, const Terms& x, const Terms& y, int k,
                                                  const Rounder& round) {
        if constexpr (N == 1) {
            EACH sums[i][j] = 0.0;
            add_products(sums, x, y, k);
        } else {
            Sums first;
            branch<N / 2>(first, x, y, k, round);
            branch<N / 2>(sums, x, y, k + N / 2, round);
            EACH sums[i][j] = __dadd_rn(first[i][j], sums[i][j]);
        }
        round(sums);
    }
};
#else
struct Block {
    Sums part;

    __device__ __forceinline__ void start() { EACH part[i][j] = 0.0; }
    __device__ __forceinline__ void add(const Terms& x, const Terms& y, int k, int stop,
                                        const Rounder& round) {
#pragma unroll 4
        for (; k < stop; k++) {
            add_products(part, x, y, k);
            round(part);
        }
    }
    __device__ __forceinline__ void finish(const Rounder& round) {}
};
#endif

// Rows `row` ... of x (rows, terms), SLAB terms of them, by way of registers.
struct Slab {
    static constexpr int EACH_THREAD = TILE * SLAB / THREADS;
    float held[EACH_THREAD];

    static __device__ __forceinline__ int2 place(int e, bool by_terms) {
        return by_terms ? make_int2(e / SLAB, e % SLAB) : make_int2(e % TILE, e / TILE);
    }
    __device__ __forceinline__ void load(const float* __restrict__ x, i64 row, i64 rows, i64 k0,
                                         i64 terms, i64 by_row, i64 by_term) {
#pragma unroll
        for (int n = 0; n < EACH_THREAD; n++) {
            const int2 at = place(threadIdx.x + n * THREADS, by_term == 1);
            const i64 m = row + at.x, k = k0 + at.y;
            held[n] = m < rows && k < terms ? x[m * by_row + k * by_term] : 0.0f;
        }
    }
    __device__ __forceinline__ void store(Terms& slab, i64 by_term) const {
#pragma unroll
        for (int n = 0; n < EACH_THREAD; n++) {
            const int2 at = place(threadIdx.x + n * THREADS, by_term == 1);
            slab[at.y][at.x] = as_double(held[n]);
        }
    }
};

// How sums of blocks are added: in float32, or in the format of sums.
struct Total {
    bool promote;

    __device__ __forceinline__ void add(Sums& total, const Sums& part, const Rounder& round) const {
        EACH total[i][j] = __dadd_rn(total[i][j], part[i][j]);
        if (promote) {
            EACH total[i][j] = as_double(nearest_float(total[i][j]));
        } else {
            round(total);
        }
    }
};

// out (M, N) = x (M, K) @ y (K, N), a tile of it by a thread block. With `parts` (blocks, M, N),
// the sums of blocks, a thread block takes `share` terms, whole blocks, and writes their sums.
extern "C" __global__ void __launch_bounds__(THREADS)
    lns_rounded_product(const float* __restrict__ x, const float* __restrict__ y,
                        float* __restrict__ out, float* __restrict__ parts, i64 M, i64 N, i64 K,
                        i64 x_row, i64 x_term, i64 y_term, i64 y_column, i64 block, i64 share,
                        double limit, double beyond, u32 shift, u32 lowest, int promote) {
    __shared__ Terms left, right;
    const Rounder round = {limit, beyond, shift, lowest};
    const Total totals = {promote != 0};
    const i64 tiles = (N + TILE - 1) / TILE;
    const i64 row = blockIdx.x / tiles * TILE, column = blockIdx.x % tiles * TILE;
    const i64 begin = blockIdx.y * share, end = min(K, begin + share);
    const int r = threadIdx.x / SIDE, c = threadIdx.x % SIDE;
    Block sums;
    sums.start();
    Sums total;
    EACH total[i][j] = 0.0;
    i64 b = begin / block, room = block;
    Slab of_x, of_y;
    of_x.load(x, row, M, begin, end, x_row, x_term);
    of_y.load(y, column, N, begin, end, y_column, y_term);
    for (i64 k0 = begin; k0 < end; k0 += SLAB) {
        __syncthreads();
        of_x.store(left, x_term);
        of_y.store(right, y_term);
        __syncthreads();
        of_x.load(x, row, M, k0 + SLAB, end, x_row, x_term);
        of_y.load(y, column, N, k0 + SLAB, end, y_column, y_term);
        const int terms = min((i64)SLAB, end - k0);
        for (int k = 0; k < terms;) {
            const int stop = min((i64)terms, k + room);
            room -= stop - k;
            sums.add(left, right, k, stop, round);
            k = stop;
            if (room > 0 && k0 + k < end) continue;
            sums.finish(round);
            if (parts) {
                EACH {
                    const i64 m = row + r + SIDE * i, n = column + c + SIDE * j;
                    if (m < M && n < N) parts[(b * M + m) * N + n] = nearest_float(sums.part[i][j]);
                }
            } else {
                totals.add(total, sums.part, round);
            }
            sums.start();
            room = block, b++;
        }
    }
    if (parts) return;
    EACH {
        const i64 m = row + r + SIDE * i, n = column + c + SIDE * j;
        if (m < M && n < N) out[m * N + n] = nearest_float(total[i][j]);
    }
}

#if WIDE == 1
// The sums of the sums of blocks (blocks, count), in ascending order.
extern "C" __global__ void __launch_bounds__(THREADS)
    lns_add_parts(const float* __restrict__ parts, float* __restrict__ out, i64 blocks, i64 count,
                  double limit, double beyond, u32 shift, u32 lowest, int promote) {
    const Rounder round = {limit, beyond, shift, lowest};
    const Total totals = {promote != 0};
    const i64 n = blockIdx.x * (i64)THREADS + threadIdx.x;
    if (n >= count) return;
    Sums total = {{0.0}};
    for (i64 b = 0; b < blocks; b++) {
        const Sums part = {{as_double(parts[b * count + n])}};
        totals.add(total, part, round);
    }
    out[n] = nearest_float(total[0][0]);
}
#endif
