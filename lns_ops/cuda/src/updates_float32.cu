// Optimizer steps with float32 between loads and stores of codes:
// lns_ops.reference.sgd_update_float32 and adam_update_float32. Every operation is one of float32,
// rounded to nearest; they are written in PTX, so that none is fused or flushed to zero. What
// leaves float32 saturates.
//
// -D: as elementwise.cuh with FAST 0; ADAM_KERNELS 1: the kernels of Adam, 0: of SGD.
#include "elementwise.cuh"
#include "encoding.cuh"
#include "rounding.cuh"

// x, clamped to float32's largest number where it has overflowed.
__device__ __forceinline__ float inside(float x) {
    return smaller(larger(x, -0x1.fffffep127f), 0x1.fffffep127f);
}

__device__ __forceinline__ float root_of(float x) {
    float z;
    asm("sqrt.rn.f32 %0, %1;" : "=f"(z) : "f"(x));
    return z;
}

// Minus the rate: of what the device holds where there is something, or else the number.
__device__ __forceinline__ float held(float negative_lr, const double* at) {
    return at ? -(float)*at : negative_lr;
}

struct Codec {
    Decoder decode;
    Encoder encode;
    StochasticEncoder encode_stochastic;
};

// weight + update in a weight's place, for element j; `bits` are random ones.
template <Rounding ROUNDING>
__device__ __forceinline__ void take(const Codec& codec, Codes& weight, float update,
                                     Codes& compensation, int j, int bits) {
    const float old = codec.decode(weight.code[j]);
    if (ROUNDING == STOCHASTIC) {
        weight.code[j] = codec.encode_stochastic(rounded_sum(old, update), bits);
    } else if (ROUNDING == KAHAN) {
        const float kept = inside(rounded_sum(codec.decode(compensation.code[j]), update));
        weight.code[j] = codec.encode(rounded_sum(old, kept));
        compensation.code[j] = codec.encode(
            rounded_difference(kept, rounded_difference(codec.decode(weight.code[j]), old)));
    } else {
        weight.code[j] = codec.encode(rounded_sum(old, update));
    }
}

#define TABLES                                                              \
    const float* __restrict__ significands, const int2* __restrict__ cells, \
        const int* __restrict__ base, const int2* __restrict__ steps_of
#define SETUP_CODEC                                                                \
    __shared__ float near_significands[Decoder::ROOM];                             \
    __shared__ int2 near_cells[Encoder::ROOM];                                     \
    const Codec codec = {                                                          \
        {significands, near_significands}, {cells, near_cells}, {base, steps_of}}; \
    __syncthreads();

#if !ADAM_KERNELS
template <bool MOMENTUM, Rounding ROUNDING>
__device__ __forceinline__ void sgd_update(const Codec& codec, short* weight, const short* grad,
                                           short* buffer, short* compensation, const i64* step_at,
                                           i64 n, i64 key, float negative_lr, float momentum,
                                           int aligned) {
    const i64 step = ROUNDING == STOCHASTIC ? *step_at : 0;
    struct Arrays {
        Codes g, w, b, c;
    };
    each(
        n, aligned,
        [&](i64 i, auto count) {
            Arrays x = {get(grad, i, count), get(weight, i, count)};
            if (MOMENTUM) x.b = get(buffer, i, count);
            if (ROUNDING == KAHAN) x.c = get(compensation, i, count);
            return x;
        },
        [&](i64 i, auto count, Arrays x) {
            Random random;
            if (ROUNDING == STOCHASTIC) random = Random(key, step, 0, i / WIDE);
#pragma unroll
            for (int j = 0; j < count; j++) {
                float direction = codec.decode(x.g.code[j]);
                if (MOMENTUM) {
                    direction = inside(rounded_sum(
                        rounded_product(momentum, codec.decode(x.b.code[j])), direction));
                    x.b.code[j] = codec.encode(direction);
                }
                take<ROUNDING>(
                    codec, x.w, rounded_product(negative_lr, direction), x.c, j,
                    ROUNDING == STOCHASTIC ? random[count == 1 ? (int)(i % WIDE) : j] : 0);
            }
            put(weight, i, count, x.w);
            if (MOMENTUM) put(buffer, i, count, x.b);
            if (ROUNDING == KAHAN) put(compensation, i, count, x.c);
        });
}

#define SGD(name, with_momentum, rounding)                                                         \
    extern "C" __global__ void __launch_bounds__(512, 2) lns_##name(                               \
        short* __restrict__ weight, const short* __restrict__ grad, short* __restrict__ buffer,    \
        short* __restrict__ compensation, const i64* __restrict__ step,                            \
        const double* __restrict__ rate_at, i64 n, i64 key, float negative_lr, float momentum,     \
        int aligned, TABLES) {                                                                     \
        SETUP_CODEC sgd_update<with_momentum, rounding>(codec, weight, grad, buffer, compensation, \
                                                        step, n, key, held(negative_lr, rate_at),  \
                                                        momentum, aligned);                        \
    }
SGD(sgd_float32, false, NEAREST)
SGD(sgd_float32_kahan, false, KAHAN)
SGD(sgd_float32_stochastic, false, STOCHASTIC)
SGD(sgd_float32_momentum, true, NEAREST)
SGD(sgd_float32_momentum_kahan, true, KAHAN)
SGD(sgd_float32_momentum_stochastic, true, STOCHASTIC)
#endif

#if ADAM_KERNELS
struct AdamArguments {
    short* weight;
    const short* grad;
    short *average, *root, *residue, *compensation;
    i64 key;
    float negative_lr, beta1, rest1, beta2, rest2, weight_decay;
};

template <Rounding ROUNDING, WeightDecay DECAY, int W>
__device__ __forceinline__ void adam_update(const Codec& codec, const AdamArguments& a,
                                            const i64* step_at, const float2* scalars, int steps,
                                            i64 n, int aligned) {
    const i64 step = *step_at;
    const float2 now = scalars[min(step, (i64)steps) - 1];
    struct Arrays {
        Codes g, w, m, r, e, c;
    };
    each<W>(
        n, aligned,
        [&](i64 i, auto count) {
            Arrays x = {get(a.grad, i, count), get(a.weight, i, count), get(a.average, i, count),
                        get(a.root, i, count)};
            if (ROUNDING != STOCHASTIC) x.e = get(a.residue, i, count);
            if (ROUNDING == KAHAN) x.c = get(a.compensation, i, count);
            return x;
        },
        [&](i64 i, auto count, Arrays x) {
            Random random, root_random;
            if (ROUNDING == STOCHASTIC)
                random = Random(a.key, step, 0, i / WIDE),
                root_random = Random(a.key, step, 1, i / WIDE);
#pragma unroll
            for (int j = 0; j < count; j++) {
                const int lane = count == WIDE ? j : (int)(i % WIDE) + j;
                const float w = codec.decode(x.w.code[j]);
                float g = codec.decode(x.g.code[j]), r = codec.decode(x.r.code[j]);
                if (DECAY == INTO_GRADIENT)
                    g = inside(rounded_sum(g, rounded_product(a.weight_decay, w)));
                const float m = rounded_sum(rounded_product(a.beta1, codec.decode(x.m.code[j])),
                                            rounded_product(a.rest1, g));
                x.m.code[j] = codec.encode(m);
                if (ROUNDING != STOCHASTIC) r = rounded_sum(r, codec.decode(x.e.code[j]));
                r = root_of(rounded_sum(rounded_product(a.beta2, rounded_product(r, r)),
                                        rounded_product(a.rest2, rounded_product(g, g))));
                if (ROUNDING == STOCHASTIC) {
                    x.r.code[j] = codec.encode_stochastic(r, root_random[lane]);
                } else {
                    x.r.code[j] = codec.encode(r);
                    x.e.code[j] = codec.encode(rounded_difference(r, codec.decode(x.r.code[j])));
                }
                float direction = inside(rounded_product(now.x, over(m, rounded_sum(r, now.y))));
                if (DECAY == DECOUPLED)
                    direction = rounded_sum(direction, rounded_product(a.weight_decay, w));
                take<ROUNDING>(codec, x.w, rounded_product(a.negative_lr, direction), x.c, j,
                               ROUNDING == STOCHASTIC ? random[lane] : 0);
            }
            put(a.weight, i, count, x.w);
            put(a.average, i, count, x.m);
            put(a.root, i, count, x.r);
            if (ROUNDING != STOCHASTIC) put(a.residue, i, count, x.e);
            if (ROUNDING == KAHAN) put(a.compensation, i, count, x.c);
        });
}

#define ADAM(name, rounding, decay, W, blocks)                                                   \
    extern "C" __global__ void __launch_bounds__(512, blocks) lns_##name(                        \
        short* __restrict__ weight, const short* __restrict__ grad, short* __restrict__ average, \
        short* __restrict__ root, short* __restrict__ residue, short* __restrict__ compensation, \
        const i64* __restrict__ step, const double* __restrict__ rate_at,                        \
        const float2* __restrict__ scalars, int steps, i64 n, i64 key, float negative_lr,        \
        float beta1, float rest1, float beta2, float rest2, float weight_decay, int aligned,     \
        TABLES) {                                                                                \
        SETUP_CODEC adam_update<rounding, decay, W>(                                             \
            codec,                                                                               \
            {weight, grad, average, root, residue, compensation, key,                            \
             held(negative_lr, rate_at), beta1, rest1, beta2, rest2, weight_decay},              \
            step, scalars, steps, n, aligned);                                                   \
    }
#define ADAMS(suffix, decay)                               \
    ADAM(adam_float32##suffix, NEAREST, decay, 4, 2)       \
    ADAM(adam_float32##suffix##_kahan, KAHAN, decay, 4, 2) \
    ADAM(adam_float32##suffix##_stochastic, STOCHASTIC, decay, 8, 1)
ADAMS(, NONE)
ADAMS(_l2, INTO_GRADIENT)
ADAMS(_decoupled, DECOUPLED)
#endif
