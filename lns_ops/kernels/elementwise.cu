// Elementwise operations, reductions and conversions on codes; memory-bound. Arrays are contiguous; a second operand may be repeated:
// element i of the result takes y[i / y_div % y_mod] (y_mod = 0: the scalar `y_code`). WIDE = 8 codes, 16 bytes, an access.
//
// -D: the format (arithmetic.cuh); FAST 1: sums through an Adder with COPIES copies of its table, 0: from the definition.
// What LNS has no code for is counted in `faults` (0: NaN or infinity encoded, 1: zero divisor, 2: root of a negative) and read later
// by the host, so that no kernel waits for it; the result is zero there (the largest magnitude for an infinity).
#include "arithmetic.cuh"

constexpr int WIDE = 8;
union Codes {
    uint4 vector;
    uint2 half;
    short code[WIDE];
};

// Arithmetic in which every result is clamped to the format: a value that saturates keeps its sign, one below the range is zero.
// This one follows the definition.
struct ExactArithmetic {
    typedef Exact Number;
    const int2* gauss;

    __device__ __forceinline__ Number of(int code) const { return Exact::of(code); }
    __device__ __forceinline__ int code(Number x) const { return x.code(); }
    __device__ __forceinline__ Number negated(Number x) const { return {x.log, x.sign ^ 1, x.zero}; }
    __device__ __forceinline__ Number sum(Number x, Number y) { return Exact::of(Exact::add(x, y, gauss).code()); }
    __device__ __forceinline__ Number product(Number x, Number y) {
        return Exact::of(Exact{x.log + y.log, x.sign ^ y.sign, x.zero || y.zero}.code());
    }
    __device__ __forceinline__ Number quotient(Number x, Number y) {  // y is positive
        return Exact::of(Exact{x.log - y.log, x.sign, x.zero}.code());
    }
    __device__ __forceinline__ bool saturated() const { return false; }
};

#if FAST
// This one is the Adder's method on fields instead of logarithms: numbers in range are not negative, so integer instructions read
// them too, the table holds G+ and G- themselves (-2^15 for exact cancellation), and nothing drifts. Zero is a NaN or anything below one
// field, which `without_underflow` sends so far down that additions ignore it. Saturation is rare: it is only noticed, and the elements
// at hand are computed again by the definition.
struct FastArithmetic {
    typedef Adder<COPIES> Add;
    typedef float Number;
    static constexpr int PITCH = Add::PITCH;
    const u32 column = threadIdx.x % COPIES * 4;
    float peak = 0;

    static __device__ __forceinline__ float without_underflow(float n) {
        float below, z;  // units below the smallest field, or 0
        asm("sub.sat.f32 %0, %1, %2;" : "=f"(below) : "f"(__int_as_float(PITCH)), "f"(n));
        asm("fma.rn.f32 %0, %1, %2, %3;" : "=f"(z) : "f"(below), "f"(-0x1p100f), "f"(n));
        return z;
    }
    __device__ __forceinline__ Number of(int code) const {
        return without_underflow(__int_as_float((code & FIELD_MASK) * PITCH + (code >> 14 & 2)));
    }
    __device__ __forceinline__ int code(Number n) const {
        int bits = __float_as_int(larger(n, -0x1p-49f)), field = bits >> Add::PITCH_BITS;
        return field <= 0 ? 0 : (bits & 2) * ((SIGN_MASK & 0xffff) / 2) + field;
    }
    __device__ __forceinline__ Number negated(Number n) const { return plus(n, __int_as_float(2)); }
    __device__ __forceinline__ Number clamped(Number n) {
        peak = larger(peak, n);
        return without_underflow(n);
    }
    __device__ __forceinline__ Number sum(Number x, Number y) {
        int at = Add::row(x, y, column), g;
        asm("ld.shared.s16 %0, [%1 + %2];" : "=r"(g) : "r"(at), "n"(SHARED_BASE));
        return clamped(__int_as_float(g * PITCH + __float_as_int(larger(x, y))));
    }
    __device__ __forceinline__ Number product(Number x, Number y) { return clamped(plus(x, plus(y, Add::units(-BIAS * PITCH)))); }
    __device__ __forceinline__ Number quotient(Number x, Number y) {  // y is positive
        return clamped(plus(minus(x, y), Add::units(BIAS * PITCH)));
    }
    __device__ __forceinline__ bool saturated() const { return __float_as_int(peak) >= (FIELD_MASK + 1) * PITCH; }
};
typedef FastArithmetic Arithmetic;
#define SETUP                                    \
    extern __shared__ __align__(16) u32 table[]; \
    Arithmetic::Add::fill(table, packed);        \
    __syncthreads();
#define ARITHMETIC \
    Arithmetic {}
#else
typedef ExactArithmetic Arithmetic;
#define SETUP
#define ARITHMETIC \
    Arithmetic { gauss }
#endif

template <int N>
struct Count {
    __device__ constexpr operator int() const { return N; }
};

// f(i, Count<N>) for runs of N elements from i on that cover 0 .. n - 1: N = W where memory is aligned, then 1.
template <int W = WIDE, class F>
__device__ __forceinline__ void each(i64 n, bool aligned, F f) {
    const i64 first = blockIdx.x * (i64)blockDim.x + threadIdx.x, stride = (i64)gridDim.x * blockDim.x;
    const i64 vectors = aligned ? n / W : 0;
#pragma unroll 2
    for (i64 i = first; i < vectors; i += stride) f(i * W, Count<W>());
    for (i64 i = vectors * W + first; i < n; i += stride) f(i, Count<1>());
}

template <int W>
__device__ __forceinline__ Codes get(const short* p, i64 i, Count<W>) {
    Codes c;
    if (W == WIDE) c.vector = *(const uint4*)(p + i);
    else if (W == WIDE / 2) c.half = *(const uint2*)(p + i);
    else c.code[0] = p[i];
    return c;
}

template <int W>
__device__ __forceinline__ void put(short* p, i64 i, Count<W>, const Codes& c) {
    if (W == WIDE) *(uint4*)(p + i) = c.vector;
    else if (W == WIDE / 2) *(uint2*)(p + i) = c.half;
    else p[i] = c.code[0];
}

template <class F>
__device__ __forceinline__ void binary(const short* x, const short* y, short* z, i64 n, i64 y_div, i64 y_mod, int y_code, int aligned, F f) {
    const bool flat = y_mod == n && y_div == 1;
    each(n, aligned, [&](i64 i, auto count) {
        Codes a = get(x, i, count), b, out;
        if (flat) b = get(y, i, count);
#pragma unroll
        for (int j = 0; j < WIDE; j++)
            if (j < count) {
                int other = flat ? b.code[j] : y_mod ? y[(i + j) / y_div % y_mod] : y_code;
                out.code[j] = f(a.code[j], other);
            }
        put(z, i, count, out);
    });
}

#define BINARY(name, ...)                                                                                                              \
    extern "C" __global__ void __launch_bounds__(512)                                                                                  \
    lns_##name(const short* __restrict__ x, const short* __restrict__ y, short* __restrict__ z, i64 n, i64 y_div, i64 y_mod, int y_code,     \
         int aligned, const u32* __restrict__ packed, const int2* __restrict__ gauss, int* faults) {                                   \
        __VA_ARGS__                                                                                                                    \
    }

template <class A>
__device__ __forceinline__ int added(A& arithmetic, int x, int y, bool subtract) {
    typename A::Number other = arithmetic.of(y);
    return arithmetic.code(arithmetic.sum(arithmetic.of(x), subtract ? arithmetic.negated(other) : other));
}

__device__ __noinline__ int added_exactly(int x, int y, bool subtract, const int2* gauss) {
    ExactArithmetic exact{gauss};
    return added(exact, x, y, subtract);
}

#define SUM(subtract)                                                                        \
    SETUP binary(x, y, z, n, y_div, y_mod, y_code, aligned, [&](int a, int b) {              \
        Arithmetic arithmetic = ARITHMETIC;                                                  \
        int code = added(arithmetic, a, b, subtract);                                        \
        if (arithmetic.saturated()) code = added_exactly(a, b, subtract, gauss);             \
        return code;                                                                         \
    });
BINARY(add, SUM(false))
BINARY(sub, SUM(true))

__device__ __forceinline__ int packed_code(int field, int sign) {
    field = min(field, FIELD_MASK);
    return field <= 0 ? 0 : sign ? field | SIGN_MASK : field;
}

BINARY(mul, binary(x, y, z, n, y_div, y_mod, y_code, aligned, [&](int a, int b) {
           int fa = a & FIELD_MASK, fb = b & FIELD_MASK;
           return fa == 0 || fb == 0 ? 0 : packed_code(fa + fb - BIAS, (a ^ b) < 0);
       });)
BINARY(div, binary(x, y, z, n, y_div, y_mod, y_code, aligned, [&](int a, int b) {
           int fa = a & FIELD_MASK, fb = b & FIELD_MASK;
           if (fb == 0) atomicAdd(faults + 1, 1);
           return fa == 0 || fb == 0 ? 0 : packed_code(fa - fb + BIAS, (a ^ b) < 0);
       });)

extern "C" __global__ void __launch_bounds__(512)
lns_square_root(const short* __restrict__ x, short* __restrict__ z, i64 n, int aligned, int* faults) {
    each(n, aligned, [&](i64 i, auto count) {
        Codes a = get(x, i, count), out;
#pragma unroll
        for (int j = 0; j < WIDE; j++)
            if (j < count) {
                int field = a.code[j] & FIELD_MASK, log = field - BIAS;
                if (field != 0 && a.code[j] < 0) atomicAdd(faults + 2, 1);
                int half = log >> 1;
                half += log & half & 1;  // halfway: to even
                out.code[j] = field == 0 || a.code[j] < 0 ? 0 : packed_code(half + BIAS, 0);
            }
        put(z, i, count, out);
    });
}

// How a weight takes its update: rounded to nearest, with Kahan compensation, or rounded at random.
enum Rounding { NEAREST, KAHAN, STOCHASTIC };

// Uniform 16-bit integers for elements 8 b .. 8 b + 7: Philox4x32-10 of the key and the counter (b low, b high, step, slot);
// lns_ops.reference.random_bits.
struct Random {
    u32 word[4];

    __device__ __forceinline__ Random() {}
    __device__ __forceinline__ Random(i64 key, i64 step, u32 slot, i64 block) {
        u32 a = (u32)block, b = (u32)(block >> 32), c = (u32)step, d = slot, low = (u32)key, high = (u32)(key >> 32);
#pragma unroll
        for (int round = 0; round < 10; round++) {
            u32 first = 0xD2511F53u * a, second = 0xCD9E8D57u * c;
            u32 x = __umulhi(0xCD9E8D57u, c) ^ b ^ low, y = __umulhi(0xD2511F53u, a) ^ d ^ high;
            a = x, b = second, c = y, d = first;
            low += 0x9E3779B9u, high += 0xBB67AE85u;
        }
        word[0] = a, word[1] = b, word[2] = c, word[3] = d;
    }
    __device__ __forceinline__ int operator[](int lane) const {  // selected by comparisons: an array indexed at run time lives in memory
        u32 w = lane < 4 ? lane < 2 ? word[0] : word[1] : lane < 6 ? word[2] : word[3];
        return lane & 1 ? w >> 16 : w & 0xffff;
    }
};

// The code of x + y rounded at random; fine[d] holds G+(d) and G-(d) with 16 bits behind the ulp, d = 0 .. FINE_LAST.
__device__ __forceinline__ int stochastic_sum(int x, int y, int bits, const int* __restrict__ fine) {
    int fx = x & FIELD_MASK, fy = y & FIELD_MASK, lower = min(fx, fy);
    int entry = __ldg(fine + 2 * min(abs(fx - fy), FINE_LAST) + ((x ^ y) < 0));
    int field = max(fx, fy) + (lower == 0 ? 0 : (entry + bits) >> 16);
    field = min(field, FIELD_MASK);
    return field <= 0 ? 0 : (fx >= fy ? x : y) < 0 ? field | SIGN_MASK : field;
}

// weight + update in a weight's place; `bits` are random ones.
template <Rounding ROUNDING, class A>
__device__ __forceinline__ void take(A& arithmetic, short& weight, typename A::Number update, short& compensation, int bits, const int* fine) {
    typename A::Number old = arithmetic.of(weight);
    if (ROUNDING == STOCHASTIC) {
        weight = stochastic_sum(weight, (short)arithmetic.code(update), bits, fine);
    } else if (ROUNDING == KAHAN) {
        typename A::Number kept = arithmetic.sum(arithmetic.of(compensation), update), fresh = arithmetic.sum(old, kept);
        weight = arithmetic.code(fresh);
        typename A::Number taken = arithmetic.sum(fresh, arithmetic.negated(old));
        compensation = arithmetic.code(arithmetic.sum(kept, arithmetic.negated(taken)));
    } else {
        weight = arithmetic.code(arithmetic.sum(old, update));
    }
}

// One SGD step of one element, every operation an LNS operation; see lns_ops.reference.sgd_update.
template <bool MOMENTUM, Rounding ROUNDING, class A>
__device__ __forceinline__ void sgd(A& arithmetic, int rate, int decay, short& weight, short grad, short& buffer, short& compensation, int bits,
                                    const int* fine) {
    typename A::Number step = arithmetic.of(grad);
    if (MOMENTUM) {
        step = arithmetic.sum(arithmetic.product(arithmetic.of(buffer), arithmetic.of(decay)), step);
        buffer = arithmetic.code(step);
    }
    take<ROUNDING>(arithmetic, weight, arithmetic.product(step, arithmetic.of(rate)), compensation, bits, fine);
}

// What the elements of an update share.
struct SgdArguments {
    short* weight;
    const short* grad;
    short *buffer, *compensation;
    i64 key;
    const i64* step;
    int rate, decay;
    const int* fine;
};

template <bool MOMENTUM, Rounding ROUNDING>
__device__ __noinline__ void sgd_exactly(i64 i, int count, SgdArguments a, Random random, const int2* gauss) {
    ExactArithmetic exact{gauss};
    for (int j = 0; j < count; j++) {
        short w = a.weight[i + j], b = MOMENTUM ? a.buffer[i + j] : (short)0, c = ROUNDING == KAHAN ? a.compensation[i + j] : (short)0;
        sgd<MOMENTUM, ROUNDING>(exact, a.rate, a.decay, w, a.grad[i + j], b, c, random[(i + j) % WIDE], a.fine);
        a.weight[i + j] = w;
        if (MOMENTUM) a.buffer[i + j] = b;
        if (ROUNDING == KAHAN) a.compensation[i + j] = c;
    }
}

template <bool MOMENTUM, Rounding ROUNDING>
__device__ __forceinline__ void sgd_update(const SgdArguments& a, i64 n, int aligned, const u32* packed, const int2* gauss) {
    const i64 step = ROUNDING == STOCHASTIC ? *a.step : 0;
    each(n, aligned, [&](i64 i, auto count) {
        Codes g = get(a.grad, i, count), w = get(a.weight, i, count), b, c;
        if (MOMENTUM) b = get(a.buffer, i, count);
        if (ROUNDING == KAHAN) c = get(a.compensation, i, count);
        Random random;
        if (ROUNDING == STOCHASTIC) random = Random(a.key, step, 0, i / WIDE);
        Arithmetic arithmetic = ARITHMETIC;
#pragma unroll
        for (int j = 0; j < count; j++)
            sgd<MOMENTUM, ROUNDING>(arithmetic, a.rate, a.decay, w.code[j], g.code[j], b.code[j], c.code[j],
                                    ROUNDING == STOCHASTIC ? random[count == 1 ? (int)(i % WIDE) : j] : 0, a.fine);
        if (arithmetic.saturated()) {  // nothing is written yet
            sgd_exactly<MOMENTUM, ROUNDING>(i, count, a, random, gauss);
            return;
        }
        put(a.weight, i, count, w);
        if (MOMENTUM) put(a.buffer, i, count, b);
        if (ROUNDING == KAHAN) put(a.compensation, i, count, c);
    });
}

#define SGD(name, momentum, rounding)                                                                                               \
    extern "C" __global__ void __launch_bounds__(512, 2)                                                                            \
    lns_##name(short* __restrict__ weight, const short* __restrict__ grad, short* __restrict__ buffer,                              \
               short* __restrict__ compensation, const i64* __restrict__ step, i64 n, i64 key, int rate, int decay, int aligned,    \
               const u32* __restrict__ packed, const int2* __restrict__ gauss, const int* __restrict__ fine) {                      \
        SETUP sgd_update<momentum, rounding>({weight, grad, buffer, compensation, key, step, rate, decay, fine}, n, aligned, packed, gauss); \
    }
SGD(sgd, false, NEAREST)
SGD(sgd_kahan, false, KAHAN)
SGD(sgd_stochastic, false, STOCHASTIC)
SGD(sgd_momentum, true, NEAREST)
SGD(sgd_momentum_kahan, true, KAHAN)
SGD(sgd_momentum_stochastic, true, STOCHASTIC)

// The code of sqrt(beta root^2 + (1 - beta) x^2), root not negative: lns_ops.reference.root_mean_square. The logarithm has 16 bits behind the
// ulp, which round to nearest and become `residue`, or round at random by `bits`.
struct Decay {
    const int* __restrict__ table;
    int first, last, keep, take;

    template <bool RANDOM>
    __device__ __forceinline__ int operator()(int root, int x, short& residue, int bits) const {
        const int fx = x & FIELD_MASK, index = max(min(fx - root, last), first) - first;
        const i64 nothing = -(1ll << 40);
        i64 kept = root > 0 ? (i64)((root - BIAS) << 16) + (RANDOM ? 0 : residue) + keep : nothing;
        i64 taken = fx > 0 ? (i64)((fx - BIAS) << 16) + take : nothing;
        i64 sum = max(kept, taken) + (min(root, fx) > 0 ? __ldg(table + index) : 0) + (RANDOM ? bits : 1 << 15);
        i64 field = (sum >> 16) + BIAS;
        int code = field > FIELD_MASK ? FIELD_MASK : field < 0 ? 0 : (int)field;
        if (!RANDOM) residue = field > 0 && field <= FIELD_MASK ? (int)(sum & 0xffff) - (1 << 15) : 0;
        return code;
    }
};

struct AdamArguments {
    short* weight;
    const short* grad;
    short *average, *root, *residue, *compensation;
    i64 key;
    const i64* step;
    int rate, beta, rest, weight_decay, into_grad, decoupled;
    Decay decay;
    const int* fine;
};

// One Adam step of one element, every operation an LNS operation; see lns_ops.reference.adam_update.
template <Rounding ROUNDING, class A>
__device__ __forceinline__ void adam(A& arithmetic, const AdamArguments& a, int correction, int eps, short& weight, short grad, short& average,
                                     short& root, short& residue, short& compensation, int bits, int root_bits) {
    typedef typename A::Number Number;
    Number g = arithmetic.of(grad);
    if (a.into_grad) g = arithmetic.sum(g, arithmetic.product(arithmetic.of(weight), arithmetic.of(a.weight_decay)));
    Number m = arithmetic.sum(arithmetic.product(arithmetic.of(average), arithmetic.of(a.beta)), arithmetic.product(g, arithmetic.of(a.rest)));
    average = arithmetic.code(m);
    root = a.decay.template operator()<ROUNDING == STOCHASTIC>(root, arithmetic.code(g), residue, root_bits);
    Number direction = arithmetic.quotient(m, arithmetic.sum(arithmetic.of(root), arithmetic.of(eps)));
    direction = arithmetic.product(direction, arithmetic.of(correction));
    if (a.decoupled) direction = arithmetic.sum(direction, arithmetic.product(arithmetic.of(weight), arithmetic.of(a.weight_decay)));
    take<ROUNDING>(arithmetic, weight, arithmetic.product(direction, arithmetic.of(a.rate)), compensation, bits, a.fine);
}

template <Rounding ROUNDING>
__device__ __noinline__ void adam_exactly(i64 i, int count, AdamArguments a, int correction, int eps, Random random, Random root_random,
                                          const int2* gauss) {
    ExactArithmetic exact{gauss};
    for (int j = 0; j < count; j++) {
        short w = a.weight[i + j], m = a.average[i + j], r = a.root[i + j], e = 0, c = 0;
        if (ROUNDING != STOCHASTIC) e = a.residue[i + j];
        if (ROUNDING == KAHAN) c = a.compensation[i + j];
        const int lane = (i + j) % WIDE;
        adam<ROUNDING>(exact, a, correction, eps, w, a.grad[i + j], m, r, e, c, random[lane], root_random[lane]);
        a.weight[i + j] = w, a.average[i + j] = m, a.root[i + j] = r;
        if (ROUNDING != STOCHASTIC) a.residue[i + j] = e;
        if (ROUNDING == KAHAN) a.compensation[i + j] = c;
    }
}

template <Rounding ROUNDING, int W>
__device__ __forceinline__ void adam_update(const AdamArguments& a, const short* corrections, const short* eps_hats, int steps, i64 n, int aligned,
                                            const u32* packed, const int2* gauss) {
    const i64 step = *a.step, now = min(step, (i64)steps) - 1;
    const int correction = corrections[now], eps = eps_hats[now];
    each<W>(n, aligned, [&](i64 i, auto count) {
        Codes g = get(a.grad, i, count), w = get(a.weight, i, count), m = get(a.average, i, count), r = get(a.root, i, count), e, c;
        if (ROUNDING != STOCHASTIC) e = get(a.residue, i, count);
        if (ROUNDING == KAHAN) c = get(a.compensation, i, count);
        Random random, root_random;
        if (ROUNDING == STOCHASTIC) random = Random(a.key, step, 0, i / WIDE), root_random = Random(a.key, step, 1, i / WIDE);
        Arithmetic arithmetic = ARITHMETIC;
#pragma unroll
        for (int j = 0; j < count; j++) {
            const int lane = count == WIDE ? j : (int)(i % WIDE) + j;
            adam<ROUNDING>(arithmetic, a, correction, eps, w.code[j], g.code[j], m.code[j], r.code[j], e.code[j], c.code[j],
                           ROUNDING == STOCHASTIC ? random[lane] : 0, ROUNDING == STOCHASTIC ? root_random[lane] : 0);
        }
        if (arithmetic.saturated()) {  // nothing is written yet
            adam_exactly<ROUNDING>(i, count, a, correction, eps, random, root_random, gauss);
            return;
        }
        put(a.weight, i, count, w);
        put(a.average, i, count, m);
        put(a.root, i, count, r);
        if (ROUNDING != STOCHASTIC) put(a.residue, i, count, e);
        if (ROUNDING == KAHAN) put(a.compensation, i, count, c);
    });
}

// W codes at a time, and so many thread blocks a multiprocessor, as registers allow.
#define ADAM(name, rounding, W, blocks)                                                                                             \
    extern "C" __global__ void __launch_bounds__(512, blocks)                                                                       \
    lns_##name(short* __restrict__ weight, const short* __restrict__ grad, short* __restrict__ average, short* __restrict__ root,   \
               short* __restrict__ residue, short* __restrict__ compensation, const i64* __restrict__ step,                         \
               const short* __restrict__ corrections, const short* __restrict__ eps_hats, int steps, i64 n, i64 key, int rate,      \
               int beta, int rest, int weight_decay, int decoupled, const int* __restrict__ decay, int first, int last, int keep,   \
               int taken, int aligned, const u32* __restrict__ packed, const int2* __restrict__ gauss, const int* __restrict__ fine) { \
        SETUP adam_update<rounding, W>({weight, grad, average, root, residue, compensation, key, step, rate, beta, rest, weight_decay, \
                                     weight_decay && !decoupled, weight_decay && decoupled, {decay, first, last, keep, taken}, fine},  \
                                    corrections, eps_hats, steps, n, aligned, packed, gauss);                                       \
    }
ADAM(adam, NEAREST, 4, 2)
ADAM(adam_kahan, KAHAN, 4, 2)
ADAM(adam_stochastic, STOCHASTIC, 8, 1)

// out[n] = sum over k of x[k][n] in the contract's order. A thread takes one block of 64 of one column; `columns` (a power of two) of
// them and 512 / columns blocks at a time in a thread block.
extern "C" __global__ void __launch_bounds__(512)
lns_sum(const short* __restrict__ x, short* __restrict__ out, i64 K, i64 N, int columns, const int2* __restrict__ gauss) {
    __shared__ Exact totals[512];
    const int column = threadIdx.x % columns, slot = threadIdx.x / columns, slots = 512 / columns;
    const i64 n = blockIdx.x * (i64)columns + column, blocks = (K + BLOCK - 1) / BLOCK;
    Exact total = {0, 0, true};
    for (i64 first = 0; first < blocks; first += slots) {
        Exact block = {0, 0, true};
        const i64 end = min(K, (first + slot + 1) * BLOCK);
        if (n < N)
            for (i64 k = (first + slot) * BLOCK; k < end; k++)
                block = Exact::add(block, Exact::of(x[k * N + n]).accumulator(), gauss).accumulator();
        totals[threadIdx.x] = block;
        __syncthreads();
        if (slot == 0)
            for (int s = 0; s < slots && first + s < blocks; s++)
                total = Exact::add(total, totals[s * columns + column], gauss).accumulator();
        __syncthreads();
    }
    if (slot == 0 && n < N) out[n] = total.code();
}

// The code nearest to x in logarithm. A cell of 2^-(f+1) of the significand holds at most one threshold; `cells` gives the rounded
// logarithm at the cell's start and the threshold's float32 mantissa.
constexpr int CELL_SHIFT = 22 - FRACTION_BITS, CELLS = 1 << (FRACTION_BITS + 1);
extern "C" __global__ void __launch_bounds__(512)
lns_encode(const float* __restrict__ x, short* __restrict__ out, i64 n, int aligned, const int2* __restrict__ cells, int* faults) {
    constexpr bool SHARED = FRACTION_BITS <= 9, SUBNORMAL = BIAS > 126 << FRACTION_BITS;
    __shared__ int2 near[SHARED ? CELLS : 1];
    if (SHARED) {
        for (int i = threadIdx.x; i < CELLS; i += blockDim.x) near[i] = cells[i];
        __syncthreads();
    }
    each<4>(n, aligned, [&](i64 i, auto count) {
        __align__(16) float v[4];
        if (count == 4) *(float4*)v = *(const float4*)(x + i);
        else v[0] = x[i];
        Codes code;
        int largest = 0;
#pragma unroll
        for (int j = 0; j < 4; j++)
            if (j < count) {
                int bits = __float_as_int(v[j]), magnitude = bits & 0x7fffffff, shift = 0;
                largest = max(largest, magnitude);
                if (SUBNORMAL && magnitude < 0x800000) {
                    magnitude = __float_as_int(times(v[j], 0x1p64f)) & 0x7fffffff;
                    shift = magnitude == 0 ? 1 << 12 : 64;
                }
                int mantissa = magnitude & 0x7fffff;
                int2 cell = SHARED ? near[mantissa >> CELL_SHIFT] : __ldg(cells + (mantissa >> CELL_SHIFT));
                int log = (((magnitude >> 23) - 127 - shift) << FRACTION_BITS) + cell.x + (mantissa > cell.y);
                code.code[j] = packed_code(log + BIAS, bits < 0);
            }
        if (largest >= 0x7f800000) {  // an infinity came out saturated, as it should
            int nonfinite = 0;
#pragma unroll
            for (int j = 0; j < 4; j++)
                if (j < count) {
                    int magnitude = __float_as_int(v[j]) & 0x7fffffff;
                    nonfinite += magnitude >= 0x7f800000;
                    if (magnitude > 0x7f800000) code.code[j] = 0;
                }
            atomicAdd(faults, nonfinite);
        }
        put(out, i, count, code);
    });
}

// The same for float64; thresholds in units of 2^-52.
extern "C" __global__ void __launch_bounds__(512)
lns_encode_double(const double* __restrict__ x, short* __restrict__ out, i64 n, const i64* __restrict__ thresholds, int* faults) {
    each(n, false, [&](i64 i, auto) {
        int exponent;
        double fraction = frexp(fabs(x[i]), &exponent);
        int code = 0;
        if (!isfinite(x[i])) atomicAdd(faults, 1);
        if (x[i] != 0 && !isnan(x[i])) {
            i64 significand = (i64)ldexp(fraction, 53);
            int low = 0, high = 1 << FRACTION_BITS;  // thresholds strictly below the significand
            while (low < high) {
                int middle = (low + high) / 2;
                if (__ldg(thresholds + middle) < significand) low = middle + 1;
                else high = middle;
            }
            code = isinf(x[i]) ? FIELD_MASK : packed_code(((exponent - 1) << FRACTION_BITS) + low + BIAS, 0);
            if (x[i] < 0 && code != 0) code |= SIGN_MASK;
        }
        out[i] = code;
    });
}

// sign 2^(log / 2^f): the significand from a table, rounded to the type, times a power of two.
template <class T, class F>
__device__ __forceinline__ void decoded(const short* codes, T* out, i64 n, bool aligned, F value) {
    each<4>(n, aligned, [&](i64 i, auto count) {
        Codes c = get(codes, i, count);
        __align__(16) T v[4];
#pragma unroll
        for (int j = 0; j < 4; j++)
            if (j < count) v[j] = value(c.code[j]);
        if (count == 4) {
#pragma unroll
            for (int j = 0; j < (int)sizeof(T) / 4; j++) ((float4*)(out + i))[j] = ((float4*)v)[j];
        } else {
            out[i] = v[0];
        }
    });
}

extern "C" __global__ void __launch_bounds__(512)
lns_decode(const short* __restrict__ codes, float* __restrict__ out, i64 n, int aligned, const float* __restrict__ significands) {
    constexpr bool SHARED = FRACTION_BITS <= 9, SUBNORMAL = BIAS > 126 << FRACTION_BITS;
    __shared__ int near[SHARED ? 1 << FRACTION_BITS : 1];
    if (SHARED) {
        for (int i = threadIdx.x; i < 1 << FRACTION_BITS; i += blockDim.x) near[i] = __float_as_int(significands[i]);
        __syncthreads();
    }
    decoded(codes, out, n, aligned, [&](int code) {
        int field = code & FIELD_MASK, log = field - BIAS, exponent = log >> FRACTION_BITS;
        int bits = SHARED ? near[log & ((1 << FRACTION_BITS) - 1)] : __float_as_int(__ldg(significands + (log & ((1 << FRACTION_BITS) - 1))));
        float v;
        if (SUBNORMAL && exponent < -126) v = times(__int_as_float(bits + ((exponent + 64) << 23)), 0x1p-64f);
        else v = __int_as_float(bits + (exponent << 23));
        return field == 0 ? 0.0f : __int_as_float(__float_as_int(v) | (code & 0x80000000));
    });
}

extern "C" __global__ void __launch_bounds__(512)
lns_decode_double(const short* __restrict__ codes, double* __restrict__ out, i64 n, int aligned, const double* __restrict__ significands) {
    decoded(codes, out, n, aligned, [&](int code) {
        int field = code & FIELD_MASK, log = field - BIAS;
        double v = field == 0 ? 0.0 : ldexp(__ldg(significands + (log & ((1 << FRACTION_BITS) - 1))), log >> FRACTION_BITS);
        return code < 0 && field != 0 ? -v : v;
    });
}
