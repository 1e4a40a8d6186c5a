// All steps of an LSTM's variant, and all steps back; steps.py has the equations. A thread
// block takes SEQUENCES of the batch, since each needs its own past alone; what they remember lies
// in shared memory, [units or sums, SEQUENCES], and the recurrent weights stay in the caches.
//
// Arrays are contiguous, float: sums, values (z and the gates) and ds [B, T, K]; y, y_before (that
// of the step before), c and grad [B, T, H]; R [K, H], forward its transpose R_HK; p [gates, H];
// dp, a part for each thread block, [blocks, gates, H]; G [gates H, gates H], forward transposed.
//
// -D: SEQUENCES, a multiple of 4; GATES, how many there are; INPUT, FORGET, OUTPUT: the block that
// a gate is among the sums (z is 0), or 0; PEEPHOLES, COUPLED, RECURRING, Z_TANH, C_TANH: 1 or 0.
typedef long long i64;
constexpr int BLOCKS = 1 + GATES;
extern __shared__ __align__(16) float memory[];

__device__ __forceinline__ float sigmoid(float x) { return 1 / (1 + expf(-x)); }

// totals[b] += sum of a[j, b] w[j, column], j from 0 to n; `w` has `stride` columns.
__device__ __forceinline__ void product(float* totals, const float* a, const float* __restrict__ w,
                                        int n, int stride) {
#pragma unroll 8
    for (int j = 0; j < n; j++) {
        const float weight = w[(i64)j * stride];
        const float4* values = (const float4*)(a + j * SEQUENCES);
#pragma unroll
        for (int q = 0; q < SEQUENCES / 4; q++) {
            const float4 value = values[q];
            totals[4 * q] += value.x * weight;
            totals[4 * q + 1] += value.y * weight;
            totals[4 * q + 2] += value.z * weight;
            totals[4 * q + 3] += value.w * weight;
        }
    }
}

extern "C" __global__ void __launch_bounds__(1024)
    lstm_forward(const float* __restrict__ sums, const float* __restrict__ R_HK,
                 const float* __restrict__ p, const float* __restrict__ G, float* values, float* y,
                 float* y_before, float* c, int steps, int sequences, int units) {
    const int K = BLOCKS * units, first = blockIdx.x * SEQUENCES;
    const int here = min(SEQUENCES, sequences - first);
    float* outputs = memory;                     // of the step before, as cells and gates
    float* cells = outputs + units * SEQUENCES;
    float* totals = cells + units * SEQUENCES;   // of z and the gates
    float* gates = totals + K * SEQUENCES;
    for (int e = threadIdx.x; e < 2 * units * SEQUENCES; e += blockDim.x) memory[e] = 0;
    for (int e = threadIdx.x; RECURRING && e < (K - units) * SEQUENCES; e += blockDim.x)
        gates[e] = 0;
    __syncthreads();
    for (int t = 0; t < steps; t++) {
        const i64 row = (i64)first * steps + t;
        for (int k = threadIdx.x; k < K; k += blockDim.x) {
            float total[SEQUENCES] = {}, given[SEQUENCES];  // read before they are waited for
#pragma unroll
            for (int b = 0; b < SEQUENCES; b++)
                given[b] = b < here ? sums[(row + b * steps) * K + k] : 0;
            product(total, outputs, R_HK + k, units, K);
            if (RECURRING && k >= units) product(total, gates, G + k - units, K - units, K - units);
#pragma unroll
            for (int b = 0; b < SEQUENCES; b++) totals[k * SEQUENCES + b] = given[b] + total[b];
        }
        __syncthreads();
        for (int e = threadIdx.x; e < units * SEQUENCES; e += blockDim.x) {
            const int b = e / units, h = e % units, at = h * SEQUENCES + b;
            const float before = cells[at];
            auto gate = [&](int block, float cell) {
                float total = totals[(block * units + h) * SEQUENCES + b];
                if (PEEPHOLES) total += p[(block - 1) * units + h] * cell;
                return sigmoid(total);
            };
            const float z = Z_TANH ? tanhf(totals[at]) : totals[at];
            const float i = INPUT ? gate(INPUT, before) : 1;
            const float f = COUPLED ? 1 - i : FORGET ? gate(FORGET, before) : 1;
            const float cell = z * i + before * f;
            const float o = OUTPUT ? gate(OUTPUT, cell) : 1;
            const float shown = (C_TANH ? tanhf(cell) : cell) * o;
            if (b < here) y_before[(row + b * steps) * units + h] = outputs[at];
            cells[at] = cell;
            outputs[at] = shown;
            if (RECURRING) {
                gates[at] = i;
                gates[at + units * SEQUENCES] = f;
                gates[at + 2 * units * SEQUENCES] = o;
            }
            if (b < here) {
                float* value = values + (row + b * steps) * K + h;
                value[0] = z;
                if (INPUT) value[INPUT * units] = i;
                if (FORGET) value[FORGET * units] = f;
                if (OUTPUT) value[OUTPUT * units] = o;
                c[(row + b * steps) * units + h] = cell;
                y[(row + b * steps) * units + h] = shown;
            }
        }
        __syncthreads();
    }
}

extern "C" __global__ void __launch_bounds__(1024)
    lstm_backward(const float* __restrict__ grad, const float* __restrict__ values,
                  const float* __restrict__ c, const float* __restrict__ R,
                  const float* __restrict__ p, const float* __restrict__ G, float* ds, float* dp,
                  int steps, int sequences, int units) {
    const int K = BLOCKS * units, first = blockIdx.x * SEQUENCES;
    const int here = min(SEQUENCES, sequences - first);
    float* of_sums = memory;                         // ds of this step
    float* of_outputs = of_sums + K * SEQUENCES;     // R^T ds of the step after, of each block
    float* of_cells = of_outputs + K * SEQUENCES;    // C dc of the step after
    float* of_peepholes = of_cells + units * SEQUENCES;
    float* of_gates = of_peepholes + (K - units) * SEQUENCES;  // G^T ds of the step after
    const int remembered = (K + K + (RECURRING ? K - units : 0)) * SEQUENCES;
    for (int e = threadIdx.x; e < remembered; e += blockDim.x) of_outputs[e] = 0;
    __syncthreads();
    for (int t = steps - 1; t >= 0; t--) {
        const i64 row = (i64)first * steps + t;
        for (int e = threadIdx.x; e < units * SEQUENCES; e += blockDim.x) {
            const int b = e / units, h = e % units, at = h * SEQUENCES + b;
            if (b >= here) continue;
            const i64 here_row = row + b * steps;
            const float* value = values + here_row * K + h;
            const float z = value[0], i = INPUT ? value[INPUT * units] : 1;
            const float f = COUPLED ? 1 - i : FORGET ? value[FORGET * units] : 1;
            const float o = OUTPUT ? value[OUTPUT * units] : 1;
            const float cell = c[here_row * units + h];
            const float before = t ? c[(here_row - 1) * units + h] : 0;
            const float shown = C_TANH ? tanhf(cell) : cell;
            float of_y = grad[here_row * units + h];
            for (int block = 0; block < BLOCKS; block++)
                of_y += of_outputs[at + block * units * SEQUENCES];
            float of_c = of_cells[at] + of_y * o * (C_TANH ? 1 - shown * shown : 1);
            float of_before = 0;
            auto write = [&](int block, float value) {
                of_sums[at + block * units * SEQUENCES] = value;
                ds[here_row * K + block * units + h] = value;
            };
            auto of_gate = [&](int block, float x, float of_x, float seen) {
                const int place = at + (block - 1) * units * SEQUENCES;
                if (RECURRING) of_x += of_gates[place];
                const float of_sum = of_x * x * (1 - x);
                write(block, of_sum);
                if (PEEPHOLES) of_peepholes[place] += of_sum * seen;
                return PEEPHOLES ? of_sum * p[(block - 1) * units + h] : 0;
            };
            if (OUTPUT) of_c += of_gate(OUTPUT, o, of_y * shown, cell);
            write(0, of_c * i * (Z_TANH ? 1 - z * z : 1));
            if (INPUT) of_before += of_gate(INPUT, i, of_c * (COUPLED ? z - before : z), before);
            if (FORGET) of_before += of_gate(FORGET, f, of_c * before, before);
            of_cells[at] = of_before + of_c * f;
        }
        __syncthreads();
        for (int e = threadIdx.x; e < K; e += blockDim.x) {
            const int block = e / units, h = e % units;
            float total[SEQUENCES] = {};
            product(total, of_sums + block * units * SEQUENCES, R + (i64)block * units * units + h,
                    units, units);
#pragma unroll
            for (int b = 0; b < SEQUENCES; b++) of_outputs[e * SEQUENCES + b] = total[b];
            if (RECURRING && e < K - units) {
                float recurred[SEQUENCES] = {};
                product(recurred, of_sums + units * SEQUENCES, G + e, K - units, K - units);
#pragma unroll
                for (int b = 0; b < SEQUENCES; b++) of_gates[e * SEQUENCES + b] = recurred[b];
            }
        }
        __syncthreads();
    }
    for (int e = threadIdx.x; PEEPHOLES && e < K - units; e += blockDim.x) {
        float total = 0;
        for (int b = 0; b < here; b++) total += of_peepholes[e * SEQUENCES + b];
        dp[(i64)blockIdx.x * (K - units) + e] = total;
    }
}
