// C = A B in the contract's order for any format: one output a thread, straight from the
// definition, G read from global memory. For fraction_bits > 7, whose tables do not fit 32 times
// into shared memory.
#include "arithmetic.cuh"

extern "C" __global__ void __launch_bounds__(256)
    lns_gemm(const short* __restrict__ A, const short* __restrict__ B, short* __restrict__ C,
             const int2* __restrict__ gauss, int M, int N, int K, i64 a_m, i64 a_k, i64 b_k,
             i64 b_n, i64 batch_a, i64 batch_b) {
    constexpr int SIDE = 16, DEPTH = 64;
    __shared__ short as[SIDE][DEPTH + 2], bs[DEPTH][SIDE + 2];
    const int tx = threadIdx.x % SIDE, ty = threadIdx.x / SIDE, m0 = blockIdx.y * SIDE,
              n0 = blockIdx.x * SIDE;
    A += batch_a * blockIdx.z;
    B += batch_b * blockIdx.z;
    ExactSum sum;
    for (int k0 = 0; k0 < K; k0 += DEPTH) {
        __syncthreads();
        for (int t = threadIdx.x; t < SIDE * DEPTH; t += 256) {
            int m = m0 + t / DEPTH, k = k0 + t % DEPTH;
            as[t / DEPTH][t % DEPTH] = m < M && k < K ? A[m * a_m + k * a_k] : 0;
            int n = n0 + t % SIDE, kb = k0 + t / SIDE;
            bs[t / SIDE][t % SIDE] = n < N && kb < K ? B[kb * b_k + n * b_n] : 0;
        }
        __syncthreads();
        for (int k = 0; k < DEPTH; k++) {
            Exact a = Exact::of(as[ty][k]), b = Exact::of(bs[k][tx]);
            sum.add({a.log + b.log, a.sign ^ b.sign, a.zero || b.zero}, gauss);
        }
    }
    if (m0 + ty < M && n0 + tx < N)
        C[((i64)blockIdx.z * M + m0 + ty) * N + n0 + tx] = sum.total.code();
}
