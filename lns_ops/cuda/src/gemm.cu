// C = A B in the contract's order: k in blocks of 64, ascending inside a block, block totals
// ascending.
//
// A thread block of 16 warps holds KG groups. Each group computes the same BM x BN tile for every
// KG-th block of k; block totals meet in shared memory and are added up in order, so splitting k
// changes no bit. A warp computes 32 x (4 TN) outputs, a lane 4 x TN. Operands are widened once, on
// their way to shared memory, with the drift of their k folded into A.
//
// -D: the format (arithmetic.cuh), TN (4 or 8), WM x WN warps a tile, A_K and B_K (1: k is the
// contiguous index of that operand). Formats with 15 or 16 bits can underflow the accumulator; a
// tile whose operands come near that is computed again, exactly and slowly.
#include "arithmetic.cuh"

typedef Adder<32> Add;
constexpr int UNROLL_K = 4;
constexpr int WARPS = 16, THREADS = 32 * WARPS, TM = 4;
constexpr int GROUP = WM * WN, KG = WARPS / GROUP, GROUP_THREADS = 32 * GROUP;
constexpr int BM = 32 * WM, BN = 4 * TN * WN, BK = 8 * WN;
constexpr int EA = BM * BK / GROUP_THREADS, EB = BN * BK / GROUP_THREADS;
constexpr int SLAB = BK * (BM + BN);  // floats a buffer
constexpr bool CAN_UNDERFLOW = 2 * (BIAS - 1) + 2 * DRIFT > -ACC_MIN;
static_assert(EA == 8 && (EB == 4 || EB == 8) && BLOCK % BK == 0, "tile shape");

// N codes that lie next to each other; those at or beyond `valid` read as zero.
template <int N>
__device__ __forceinline__ void fetch(short (&r)[N], const short* __restrict__ p, int valid,
                                      bool aligned) {
    if (aligned && valid >= N) {
        if (N == 8)
            *(uint4*)r = *(const uint4*)p;
        else
            *(uint2*)r = *(const uint2*)p;
    } else {
#pragma unroll
        for (int i = 0; i < N; i++) r[i] = i < valid ? p[i] : (short)0;
    }
}

// One output computed straight from the definition.
__device__ __noinline__ int exact(const short* A, const short* B, i64 a_k, i64 b_k, int K,
                                  const int2* gauss) {
    ExactSum sum;
    for (int k = 0; k < K; k++) {
        Exact a = Exact::of(A[k * a_k]), b = Exact::of(B[k * b_k]);
        sum.add({a.log + b.log, a.sign ^ b.sign, a.zero || b.zero}, gauss);
    }
    sum.flush(gauss);
    return sum.total.code();
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    lns_gemm(const short* __restrict__ A, const short* __restrict__ B, short* __restrict__ C,
             const short* __restrict__ bias, const u32* __restrict__ packed,
             const int2* __restrict__ gauss, int M, int N, int K, i64 lda, i64 ldb, i64 batch_a,
             i64 batch_b, int aligned, int relu) {
    extern __shared__ __align__(16) float memory[];
    u32* table = (u32*)memory;
    float* staged = memory + (LAST + 1) * 32;
    A += batch_a * blockIdx.z;
    B += batch_b * blockIdx.z;
    C += (i64)M * N * blockIdx.z;
    const Add add;

    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int group = warp / GROUP, in_group = warp % GROUP, tid = threadIdx.x % GROUP_THREADS;
    const int wm = in_group % WM * 32 + lane / 4 * 4, wn = in_group / WM * 4 * TN + lane % 4 * 4;
    const int m0 = blockIdx.y * BM, n0 = blockIdx.x * BN;
    const bool align_a = aligned & 1, align_b = aligned & 2;

    // Where this thread's piece of a slab comes from and goes to.
    const int am = A_K ? tid % BM : tid % (BM / EA) * EA,
              ak = A_K ? tid / BM * EA : tid / (BM / EA);
    const int bn = B_K ? tid % BN : tid % (BN / EB) * EB,
              bk = B_K ? tid / BN * EB : tid / (BN / EB);
    short ra[EA], rb[EB];
    const float none = __int_as_float(NAN_BITS);
    float least_a = none, least_b = none;  // smallest logarithms that this thread has staged

    auto load = [&](int k0) {
        int m = m0 + am, n = n0 + bn, ka = k0 + ak, kb = k0 + bk;
        if (A_K)
            fetch(ra, A + m * lda + ka, m < M ? K - ka : 0, align_a);
        else
            fetch(ra, A + ka * lda + m, ka < K ? M - m : 0, align_a);
        if (B_K)
            fetch(rb, B + n * ldb + kb, n < N ? K - kb : 0, align_b);
        else
            fetch(rb, B + kb * ldb + n, kb < K ? N - n : 0, align_b);
    };
    auto store = [&](int buffer, int k_in_block) {
        float* as = staged + (buffer * KG + group) * SLAB;
        float* bs = as + BK * BM;
#pragma unroll
        for (int i = 0; i < EA; i++) {
            float w = Add::widen(ra[i]);
            as[A_K ? (ak + i) * BM + am : ak * BM + am + i] =
                plus(w, Add::drift(k_in_block + ak + (A_K ? i : 0)));
            if (CAN_UNDERFLOW) least_a = smaller(least_a, w);
        }
#pragma unroll
        for (int i = 0; i < EB; i++) {
            float w = Add::widen(rb[i]);
            bs[B_K ? (bk + i) * BN + bn : bk * BN + bn + i] = w;
            if (CAN_UNDERFLOW) least_b = smaller(least_b, w);
        }
    };
    auto sync_group = [&] {
        if (KG == 1)
            __syncthreads();
        else if (GROUP == 1)
            __syncwarp();
        else
            asm volatile("bar.sync %0, %1;" ::"r"(group + 1), "r"(GROUP_THREADS)
                         : "memory");  // 0 is that of __syncthreads
    };

    constexpr int OWN = TM * TN / KG;  // outputs whose block totals a thread adds up
    float acc[TM][TN], total[OWN];
#pragma unroll
    for (int i = 0; i < OWN; i++) total[i] = none;
#pragma unroll
    for (int i = 0; i < TM; i++)
#pragma unroll
        for (int j = 0; j < TN; j++) acc[i][j] = none;

    auto multiply = [&](int buffer) {
        const float* as = staged + (buffer * KG + group) * SLAB + wm;
        const float* bs = staged + (buffer * KG + group) * SLAB + BK * BM + wn;
#pragma unroll UNROLL_K
        for (int k = 0; k < BK; k++) {
            __align__(16) float a[TM], b[TN];
            *(float4*)a = *(const float4*)(as + k * BM);
#pragma unroll
            for (int j = 0; j < TN; j += 4)
                *(float4*)(b + j) = *(const float4*)(bs + k * BN + j * 4);
#pragma unroll
            for (int i = 0; i < TM; i++)
#pragma unroll
                for (int j = 0; j < TN; j++) acc[i][j] = add(acc[i][j], plus(a[i], b[j]));
        }
    };

    const int blocks = (K + BLOCK - 1) / BLOCK;
    if (KG == 1) {
        const int slabs = (K + BK - 1) / BK;
        load(0);
        Add::fill(table, packed);
        store(0, 0);
        __syncthreads();
        for (int slab = 0; slab < slabs; slab++) {
            const bool more = slab + 1 < slabs;
            if (more) load((slab + 1) * BK);
            multiply(slab & 1);
            const int steps = slab * BK % BLOCK + BK;
            if (steps == BLOCK || !more) {
                const float moved = Add::drift(steps);
#pragma unroll
                for (int i = 0; i < TM; i++)
#pragma unroll
                    for (int j = 0; j < TN; j++) {
                        float& sum = total[(i * TN + j) % OWN];
                        sum = minus(add(sum, minus(acc[i][j], moved)), Add::drift(1));
                        acc[i][j] = none;
                    }
            }
            if (more) store((slab + 1) & 1, (slab + 1) * BK % BLOCK);
            __syncthreads();
        }
    } else {
        for (int round = 0; round * KG < blocks; round++) {
            const int start = (round * KG + group) * BLOCK;
            const int steps = start < K ? (min(BLOCK, K - start) + BK - 1) / BK : 0;
            if (steps > 0) load(start);
            if (round == 0) Add::fill(table, packed);
            if (steps > 0) store(0, 0);
            __syncthreads();
            for (int step = 0; step < steps; step++) {
                const bool more = step + 1 < steps;
                if (more) load(start + (step + 1) * BK);
                multiply(step & 1);
                if (more) store((step + 1) & 1, (step + 1) * BK);
                sync_group();
            }
            // Block totals to shared memory, over the slabs; output `o` of group `g` at [g][o].
            __syncthreads();
            const float moved = Add::drift(steps * BK);
            float* totals = staged + group * BM * BN;
#pragma unroll
            for (int i = 0; i < TM; i++)
#pragma unroll
                for (int j = 0; j < TN; j++) {
                    totals[((i * TN + j) * GROUP + in_group) * 32 + lane] = minus(acc[i][j], moved);
                    acc[i][j] = none;
                }
            __syncthreads();
            for (int g = 0; g < KG && round * KG + g < blocks; g++)
#pragma unroll
                for (int o = 0; o < OWN; o++)
                    total[o] = minus(add(total[o], staged[g * BM * BN + o * THREADS + threadIdx.x]),
                                     Add::drift(1));
            __syncthreads();
        }
    }

    bool slowly = false;
    if (CAN_UNDERFLOW) {
        // As nonnegative integers, which order as the floats do; NaN, if all was zero, comes last.
        int* least = (int*)staged;
        __syncthreads();
        if (threadIdx.x == 0) least[0] = least[1] = NAN_BITS;
        __syncthreads();
        atomicMin(least, __float_as_int(plus(least_a, Add::units(BIAS * Add::PITCH))));
        atomicMin(least + 1, __float_as_int(plus(least_b, Add::units(BIAS * Add::PITCH))));
        __syncthreads();
        const int first = least[0] / Add::PITCH, second = least[1] / Add::PITCH;
        slowly = least[0] != NAN_BITS && least[1] != NAN_BITS &&
                 first + second - 2 * BIAS - 2 * DRIFT < ACC_MIN;
    }
    auto finish = [&](int m, int n, float value) {
        if (m >= M || n >= N) return;
        int code = Add::narrow(value);
        if (CAN_UNDERFLOW && slowly)
            code = exact(A + m * (A_K ? lda : 1), B + n * (B_K ? ldb : 1), A_K ? 1 : lda,
                         B_K ? 1 : ldb, K, gauss);
        if (bias)
            code = Add::narrow(minus(add(Add::widen(code), Add::widen(bias[n])), Add::drift(1)));
        C[(i64)m * N + n] = relu && code < 0 ? 0 : code;
    };
#pragma unroll
    for (int o = 0; o < OWN; o++) {
        // Undo the numbering of outputs.
        int e = KG == 1 ? o : (o * WARPS + warp) / GROUP,
            w = KG == 1 ? in_group : (o * WARPS + warp) % GROUP;
        int i = e / TN, j = e % TN;
        int m = w % WM * 32 + lane / 4 * 4 + i,
            n = w / WM * 4 * TN + lane % 4 * 4 + j % 4 + j / 4 * 16;
        finish(m0 + m, n0 + n, total[o]);
    }
}
