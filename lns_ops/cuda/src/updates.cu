// Optimizer steps, fused: each array is read and written once, every operation in between is an LNS
// operation. A launch updates as many parameters as a List holds, in thread blocks of their own.
//
// -D: as elementwise.cuh; MOST_ENTRIES: parameters that a List holds; FINE_LAST: last index of the
// table for additions that round at random; ADAM_KERNELS 1: those of Adam, 0: of SGD; SHARED_TABLES
// 1: that table and Adam's table of decays are copied to shared memory behind the Adder's, where a
// gather costs a few cycles instead of some twenty.
#include "elementwise.cuh"
#include "rounding.cuh"

// The code of x + y rounded at random; fine[d] holds G+(d) and G-(d) with 16 bits behind the ulp, d
// = 0 .. FINE_LAST.
__device__ __forceinline__ int stochastic_sum(int x, int y, int bits,
                                              const int* __restrict__ fine) {
    const int fx = x & FIELD_MASK, fy = y & FIELD_MASK;
    const int entry = __ldg(fine + 2 * min(abs(fx - fy), FINE_LAST) + ((x ^ y) < 0));
    const int field = min(max(fx, fy) + (min(fx, fy) == 0 ? 0 : (entry + bits) >> 16), FIELD_MASK);
    return field <= 0 ? 0 : (fx >= fy ? x : y) < 0 ? field | SIGN_MASK : field;
}

#if SHARED_TABLES
constexpr int FINE_AT = Arithmetic::Add::BYTES / 4, FINE_WORDS = 2 * (FINE_LAST + 1);

// `table` behind the Adder's own: the fine corrections, largest distance first, G+ and G- side by
// side.
__device__ __forceinline__ void copy_fine(const int* __restrict__ fine) {
    for (int i = threadIdx.x; i < FINE_WORDS; i += blockDim.x)
        table[FINE_AT + (FINE_WORDS - 2 - i / 2 * 2) + i % 2] = __ldg(fine + i);
}

__device__ __forceinline__ void copy_moves(int at, const int* __restrict__ moves, int count) {
    for (int i = threadIdx.x; i < count; i += blockDim.x) table[at + i] = __ldg(moves + i);
}

// The same sum by the Adder's method: a distance beyond the table, or from a zero, is row 0, whose
// corrections are 0.
__device__ __forceinline__ float stochastic_sum(const FastArithmetic&, float x, float y, int bits,
                                                const int*) {
    typedef FastArithmetic::Add Add;
    float t;
    asm("{\n\t.reg .f32 d;\n\tsub.f32 d, %1, %2;\n\tabs.f32 d, d;\n\tneg.f32 d, d;\n\tadd.sat.f32 "
        "%0, d, %3;\n\t}"
        : "=f"(t)
        : "f"(x), "f"(y), "f"(__int_as_float(FINE_LAST * Add::PITCH + Add::PITCH / 2)));
    const u32 row = __float_as_uint(t);
    const int entry = *(const int*)((const char*)(table + FINE_AT) + (row & 2) * 2 +
                                    (row >> (Add::PITCH_BITS - 3) & ~7u));
    return FastArithmetic::without_underflow(
        __int_as_float(((entry + bits) >> 16) * Add::PITCH + __float_as_int(larger(x, y))));
}
#endif

// The same sum by way of codes, where that table is absent and for the definition.
template <class A>
__device__ __forceinline__ typename A::Number stochastic_sum(const A& arithmetic,
                                                             typename A::Number x,
                                                             typename A::Number y, int bits,
                                                             const int* fine) {
    return arithmetic.of(
        stochastic_sum((short)arithmetic.code(x), (short)arithmetic.code(y), bits, fine));
}

// weight + update in a weight's place, for element j; `bits` are random ones. Kahan's sums grow by
// four octaves at most.
constexpr int GROWTH = 4;
template <Rounding ROUNDING, class A>
__device__ __forceinline__ void take(A& arithmetic, Codes& weight, typename A::Number update,
                                     Codes& compensation, int j, int bits, const int* fine) {
    typedef typename A::Number Number;
    const Number old = arithmetic.watched(arithmetic.of(weight, j));
    if (ROUNDING == STOCHASTIC) {
        weight.code[j] = arithmetic.code(stochastic_sum(arithmetic, old, update, bits, fine));
    } else if (ROUNDING == KAHAN) {
        const Number kept =
                         arithmetic.sum(arithmetic.watched(arithmetic.of(compensation, j)), update),
                     fresh = arithmetic.sum(old, kept);
        weight.code[j] = arithmetic.code(fresh);
        const Number taken = arithmetic.sum(fresh, arithmetic.negated(old));
        compensation.code[j] = arithmetic.code(arithmetic.sum(kept, arithmetic.negated(taken)));
    } else {
        weight.code[j] = arithmetic.code(arithmetic.sum(old, update));
    }
}

// One SGD step of element j, every operation an LNS operation; see lns_ops.reference.sgd_update.
template <bool MOMENTUM, Rounding ROUNDING, class A>
__device__ __forceinline__ void sgd(A& arithmetic, int rate, int decay, Codes& weight,
                                    const Codes& grad, Codes& buffer, Codes& compensation, int j,
                                    int bits, const int* fine) {
    typename A::Number step = arithmetic.of(grad, j);
    if (MOMENTUM) {
        step = arithmetic.sum(arithmetic.product(arithmetic.of(buffer, j), arithmetic.of(decay)),
                              arithmetic.watched(step));
        buffer.code[j] = arithmetic.code(step);
    }
    take<ROUNDING>(arithmetic, weight, arithmetic.product(step, arithmetic.of(rate)), compensation,
                   j, bits, fine);
}

// Parameters that are updated together, the thread blocks of each beginning behind those of the one
// before; a kernel's arguments have at most 4,096 bytes.
template <class P>
struct List {
    P entries[P::MOST];

    __device__ __forceinline__ const P& mine(int count) const {
        int low = 0;
        for (int high = count; high - low > 1;) {
            const int middle = (low + high) / 2;
            (entries[middle].first <= (int)blockIdx.x ? low : high) = middle;
        }
        return entries[low];
    }
};

// The code of a rate: what the device holds where there is something, or else the number.
__device__ __forceinline__ int held(int rate, const short* at) { return at ? *at : rate; }

// The values that all elements of an update share.
struct SgdArguments {
    short* weight;
    const short* grad;
    short *buffer, *compensation;
    i64 key;
    const i64* step;
    int rate, decay;
    const int* fine;
};

struct SgdParameter {
    static constexpr int MOST = MOST_ENTRIES;
    short* weight;
    const short* grad;
    short *buffer, *compensation;
    const i64* step;
    i64 n, key;
    int first, blocks, aligned;

    __device__ __forceinline__ Share share() const { return {(int)blockIdx.x - first, blocks}; }
};

template <bool MOMENTUM, Rounding ROUNDING>
__device__ __noinline__ void sgd_exactly(i64 i, int count, SgdArguments a, Random random,
                                         const int2* gauss) {
    ExactArithmetic exact{gauss};
    const Count<1> one;
    for (i64 end = i + count; i < end; i++) {
        Codes g = get(a.grad, i, one), w = get(a.weight, i, one), b, c;
        if (MOMENTUM) b = get(a.buffer, i, one);
        if (ROUNDING == KAHAN) c = get(a.compensation, i, one);
        sgd<MOMENTUM, ROUNDING>(exact, a.rate, a.decay, w, g, b, c, 0, random[i % WIDE], a.fine);
        put(a.weight, i, one, w);
        if (MOMENTUM) put(a.buffer, i, one, b);
        if (ROUNDING == KAHAN) put(a.compensation, i, one, c);
    }
}

template <bool MOMENTUM, Rounding ROUNDING>
__device__ __forceinline__ void sgd_update(const SgdArguments& a, i64 n, int aligned, Share share,
                                           const int2* gauss) {
    const i64 step = ROUNDING == STOCHASTIC ? *a.step : 0;
    struct Arrays {
        Codes g, w, b, c;
    };
    each(
        n, aligned,
        [&](i64 i, auto count) {
            Arrays x = {get(a.grad, i, count), get(a.weight, i, count)};
            if (MOMENTUM) x.b = get(a.buffer, i, count);
            if (ROUNDING == KAHAN) x.c = get(a.compensation, i, count);
            return x;
        },
        [&](i64 i, auto count, Arrays x) {
            Random random;
            if (ROUNDING == STOCHASTIC) random = Random(a.key, step, 0, i / WIDE);
            Arithmetic arithmetic = ARITHMETIC;
#pragma unroll
            for (int j = 0; j < count; j++)
                sgd<MOMENTUM, ROUNDING>(
                    arithmetic, a.rate, a.decay, x.w, x.g, x.b, x.c, j,
                    ROUNDING == STOCHASTIC ? random[count == 1 ? (int)(i % WIDE) : j] : 0, a.fine);
            if (arithmetic.template saturated<GROWTH>()) {  // nothing is written yet
                sgd_exactly<MOMENTUM, ROUNDING>(i, count, a, random, gauss);
                return;
            }
            put(a.weight, i, count, x.w);
            if (MOMENTUM) put(a.buffer, i, count, x.b);
            if (ROUNDING == KAHAN) put(a.compensation, i, count, x.c);
        },
        share);
}

#if SHARED_TABLES
#define SETUP_UPDATE(rounding)                   \
    if (rounding == STOCHASTIC) copy_fine(fine); \
    SETUP
#define SETUP_ADAM(rounding)                                                                  \
    copy_moves(FINE_AT + (rounding == STOCHASTIC ? FINE_WORDS : 0), moves, last - first + 1); \
    SETUP_UPDATE(rounding)
#else
#define SETUP_UPDATE(rounding) SETUP
#define SETUP_ADAM(rounding) SETUP
#endif

#if !ADAM_KERNELS
#define SGD(name, momentum, rounding)                                                             \
    extern "C" __global__ void __launch_bounds__(512, 2)                                          \
        lns_##name(const short* __restrict__ rate_at, int rate, int decay, int count,             \
                   const u32* __restrict__ packed, const int2* __restrict__ gauss,                \
                   const int* __restrict__ fine,                                                  \
                   const __grid_constant__ List<SgdParameter> list) {                             \
        SETUP_UPDATE(rounding)                                                                    \
        const SgdParameter& p = list.mine(count);                                                 \
        sgd_update<momentum, rounding>({p.weight, p.grad, p.buffer, p.compensation, p.key,        \
                                        p.step, held(rate, rate_at), decay, fine},                \
                                       p.n, p.aligned, p.share(), gauss);                         \
    }
SGD(sgd, false, NEAREST)
SGD(sgd_kahan, false, KAHAN)
SGD(sgd_stochastic, false, STOCHASTIC)
SGD(sgd_momentum, true, NEAREST)
SGD(sgd_momentum_kahan, true, KAHAN)
SGD(sgd_momentum_stochastic, true, STOCHASTIC)
#endif

#if ADAM_KERNELS
// The code of sqrt(beta root^2 + (1 - beta) x^2), root not negative:
// lns_ops.reference.root_mean_square. The logarithm has 16 bits behind the ulp, which round to
// nearest and become `residue`, or round at random by `bits`.
struct Decay {
    const int* __restrict__ moves;
    int first, last, keep, take;

    // 32 bits are enough where keep and take are above -2^30, which the smallest beta that is
    // allowed grants.
    template <bool RANDOM>
    __device__ __forceinline__ int operator()(int root, int x, short& residue, int bits) const {
#if FAST
        typedef int Wide;
        constexpr int NOTHING = -(1 << 30) - (1 << 29) - (1 << 28);
#else
        typedef i64 Wide;
        constexpr i64 NOTHING = -(1ll << 40);
#endif
        const int fx = x & FIELD_MASK, index = max(min(fx - root, last), first) - first;
#if SHARED_TABLES
        const int moved = table[FINE_AT + (RANDOM ? FINE_WORDS : 0) + index];
#else
        const int moved = __ldg(moves + index);
#endif
        const Wide kept =
            root > 0 ? (Wide)((root - BIAS) << 16) + (RANDOM ? 0 : residue) + keep : NOTHING;
        const Wide taken = fx > 0 ? (Wide)((fx - BIAS) << 16) + take : NOTHING;
        const Wide sum =
            max(kept, taken) + (min(root, fx) > 0 ? moved : 0) + (RANDOM ? bits : 1 << 15);
        const int field = (int)(sum >> 16) + BIAS;
        if (!RANDOM)
            residue = field > 0 && field <= FIELD_MASK ? (int)(sum & 0xffff) - (1 << 15) : 0;
        return max(min(field, FIELD_MASK), 0);
    }
};

struct AdamArguments {
    short* weight;
    const short* grad;
    short *average, *root, *residue, *compensation;
    i64 key;
    const i64* step;
    int rate, beta, rest, weight_decay;
    Decay decay;
    const int* fine;
};

// One Adam step of element j, every operation an LNS operation; see lns_ops.reference.adam_update.
template <Rounding ROUNDING, WeightDecay DECAY, class A>
__device__ __forceinline__ void adam(A& arithmetic, const AdamArguments& a, int correction, int eps,
                                     Codes& weight, const Codes& grad, Codes& average, Codes& root,
                                     Codes& residue, Codes& compensation, int j, int bits,
                                     int root_bits) {
    typedef typename A::Number Number;
    Number g = arithmetic.of(grad, j);
    if (DECAY == INTO_GRADIENT)
        g = arithmetic.sum(
            arithmetic.watched(g),
            arithmetic.product(arithmetic.of(weight, j), arithmetic.of(a.weight_decay)));
    const Number m =
        arithmetic.sum(arithmetic.product(arithmetic.of(average, j), arithmetic.of(a.beta)),
                       arithmetic.product(g, arithmetic.of(a.rest)));
    average.code[j] = arithmetic.code(m);
    root.code[j] = a.decay.template operator()<ROUNDING == STOCHASTIC>(
        root.code[j], arithmetic.code(g), residue.code[j], root_bits);
    const Number below =
        arithmetic.sum(arithmetic.watched(arithmetic.of(root, j)), arithmetic.of(eps));
    Number direction = arithmetic.product(arithmetic.quotient(m, below), arithmetic.of(correction));
    if (DECAY == DECOUPLED)
        direction = arithmetic.sum(
            direction, arithmetic.product(arithmetic.of(weight, j), arithmetic.of(a.weight_decay)));
    take<ROUNDING>(arithmetic, weight, arithmetic.product(direction, arithmetic.of(a.rate)),
                   compensation, j, bits, a.fine);
}

struct AdamParameter {
    static constexpr int MOST = MOST_ENTRIES;
    short* weight;
    const short* grad;
    short *average, *root, *residue, *compensation;
    const i64* step;
    i64 n, key;
    int first, blocks, aligned;

    __device__ __forceinline__ Share share() const { return {(int)blockIdx.x - first, blocks}; }
};

template <Rounding ROUNDING, WeightDecay DECAY>
__device__ __noinline__ void adam_exactly(i64 i, int count, AdamArguments a, int correction,
                                          int eps, Random random, Random root_random,
                                          const int2* gauss) {
    ExactArithmetic exact{gauss};
    const Count<1> one;
    for (i64 end = i + count; i < end; i++) {
        Codes g = get(a.grad, i, one), w = get(a.weight, i, one), m = get(a.average, i, one),
              r = get(a.root, i, one), e, c;
        if (ROUNDING != STOCHASTIC) e = get(a.residue, i, one);
        if (ROUNDING == KAHAN) c = get(a.compensation, i, one);
        adam<ROUNDING, DECAY>(exact, a, correction, eps, w, g, m, r, e, c, 0, random[i % WIDE],
                              root_random[i % WIDE]);
        put(a.weight, i, one, w);
        put(a.average, i, one, m);
        put(a.root, i, one, r);
        if (ROUNDING != STOCHASTIC) put(a.residue, i, one, e);
        if (ROUNDING == KAHAN) put(a.compensation, i, one, c);
    }
}

template <Rounding ROUNDING, WeightDecay DECAY, int W>
__device__ __forceinline__ void adam_update(const AdamArguments& a, const short* corrections,
                                            const short* eps_hats, int steps, i64 n, int aligned,
                                            Share share, const int2* gauss) {
    const i64 step = *a.step, now = min(step, (i64)steps) - 1;
    const int correction = corrections[now], eps = eps_hats[now];
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
            Arithmetic arithmetic = ARITHMETIC;
#pragma unroll
            for (int j = 0; j < count; j++) {
                const int lane = count == WIDE ? j : (int)(i % WIDE) + j;
                adam<ROUNDING, DECAY>(arithmetic, a, correction, eps, x.w, x.g, x.m, x.r, x.e, x.c,
                                      j, ROUNDING == STOCHASTIC ? random[lane] : 0,
                                      ROUNDING == STOCHASTIC ? root_random[lane] : 0);
            }
            if (arithmetic.template saturated<GROWTH>()) {  // nothing is written yet
                adam_exactly<ROUNDING, DECAY>(i, count, a, correction, eps, random, root_random,
                                              gauss);
                return;
            }
            put(a.weight, i, count, x.w);
            put(a.average, i, count, x.m);
            put(a.root, i, count, x.r);
            if (ROUNDING != STOCHASTIC) put(a.residue, i, count, x.e);
            if (ROUNDING == KAHAN) put(a.compensation, i, count, x.c);
        },
        share);
}

// W codes at a time, and so many thread blocks a multiprocessor, as registers allow.
#define ADAM(name, rounding, weight_decay, W, blocks)                                             \
    extern "C" __global__ void __launch_bounds__(512, blocks)                                     \
        lns_##name(const short* __restrict__ rate_at, const short* __restrict__ corrections,      \
                   const short* __restrict__ eps_hats, int steps, int rate, int beta, int rest,   \
                   int decay, const int* __restrict__ moves, int first, int last, int keep,       \
                   int take_in, int count, const u32* __restrict__ packed,                        \
                   const int2* __restrict__ gauss, const int* __restrict__ fine,                  \
                   const __grid_constant__ List<AdamParameter> list) {                            \
        SETUP_ADAM(rounding)                                                                      \
        const AdamParameter& p = list.mine(count);                                                \
        adam_update<rounding, weight_decay, W>(                                                   \
            {p.weight, p.grad, p.average, p.root, p.residue, p.compensation, p.key, p.step,       \
             held(rate, rate_at), beta, rest, decay, {moves, first, last, keep, take_in}, fine},  \
            corrections, eps_hats, steps, p.n, p.aligned, p.share(), gauss);                      \
    }
#define ADAMS(suffix, weight_decay)                       \
    ADAM(adam##suffix, NEAREST, weight_decay, 8, 1)       \
    ADAM(adam##suffix##_kahan, KAHAN, weight_decay, 4, 1) \
    ADAM(adam##suffix##_stochastic, STOCHASTIC, weight_decay, 8, 1)
ADAMS(, NONE)
ADAMS(_l2, INTO_GRADIENT)
ADAMS(_decoupled, DECOUPLED)
#endif
