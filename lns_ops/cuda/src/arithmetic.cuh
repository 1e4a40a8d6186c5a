// LNS addition in seven instructions on float registers.
//
// A logarithm of `e` ulps and a sign `s` are carried in one float register as the integer
//
//   n = PITCH * e + 2 * s             in units of 2^-149, float32's smallest step.
//
// Sums and differences of such numbers are exact while |n| < 2^24, they run on the pipe that has
// twice the rate of integer instructions, and a nonnegative one *is* its own bit pattern, so it can
// address memory. The LNS zero is NaN:
//
//   p   = a + b                       product: logarithms add, sign parities add in bit 1 (a carry
//                                     into bit 2 does no harm)
//   d   = acc - p                     signed distance; bit 1 of |d| says whether the signs differ
//   t   = sat(TOP - |d|)              row of the table, largest distance first; too far, or a NaN,
//                                     gives row 0, whose correction is 0
//   at  = (t & MASK) | own column     PITCH bytes a row: one word for each copy of the table, so
//                                     that a lane meets its own bank
//   g   = table[at]                   G+ or G- plus DRIFT, which makes it nonnegative; exact
//                                     cancellation is a NaN
//   acc = max(acc, p) + PITCH * g     max takes the other operand where one is NaN
//
// Every addition moves the logarithm up by DRIFT = -min G-. Repeated additions therefore add DRIFT
// to the k-th term k times as well, and subtract the total at the end; see `drift`. The result
// equals lns_ops.reference.add on unbounded logarithms; clamping is the caller's.
//
// The float instructions are written in PTX, because compilers that are told -ftz=true (as CuPy
// tells them) would flush all of it to zero.
//
// Needs -D BITS, FRACTION_BITS, SQUARE_BITS (of the format that holds squares,
// lns_ops.LNSFormat.of_squares), LAST (index of the last table entry), DRIFT (both from
// lns_ops.spec.gaussian_log), and SHARED_BASE: where dynamic shared memory begins in the shared
// window, a constant of the device that saves an addition a lookup. Kernels that use an Adder have
// the table at the very beginning of dynamic shared memory and no static shared memory.
#pragma once

#ifndef SHARED_BASE
#define SHARED_BASE 1024
#endif

typedef unsigned int u32;
typedef long long i64;

template <int WIDTH>
constexpr int BIAS_OF = 1 << (WIDTH - 2);
constexpr int BIAS = BIAS_OF<BITS>, SQUARE_BIAS = BIAS_OF<SQUARE_BITS>;
constexpr int FIELD_MASK = (1 << (BITS - 1)) - 1;
constexpr int SIGN_MASK = -(1 << (BITS - 1));
constexpr int ACC_MIN = 1 - (1 << 14);
constexpr int ACC_MAX = (1 << 15) + (1 << 14) - 1;
constexpr int BLOCK = 64;

constexpr int bit_length(u32 n) { return n ? 1 + bit_length(n >> 1) : 0; }

// A value straight from the definition: lns_ops.reference on integers. For what is rare, and for
// formats whose tables are too long for shared memory. `gauss[d]` holds G+(d) and G-(d), d = 0 ..
// LAST. Codes are those of a format of WIDTH bits.
struct Exact {
    int log, sign;
    bool zero;

    template <int WIDTH = BITS>
    __device__ __forceinline__ static Exact of(int code) {
        int field = code & (2 * BIAS_OF<WIDTH> - 1);
        return {field - BIAS_OF<WIDTH>, code < 0, field == 0};
    }
    // The square of a code, as the format of squares holds it.
    __device__ __forceinline__ static Exact square_of(int code) {
        const Exact x = of(code);
        const int log = 2 * x.log;
        return {min(log, SQUARE_BIAS - 1), 0, x.zero || log <= -SQUARE_BIAS};
    }

    // x + y on unbounded logarithms.
    __device__ __forceinline__ static Exact add(Exact x, Exact y, const int2* __restrict__ gauss) {
        if (x.zero) return y;
        if (y.zero) return x;
        int distance = min(abs(x.log - y.log), LAST);
        int2 g = __ldg(gauss + distance);
        return {max(x.log, y.log) + (x.sign == y.sign ? g.x : g.y),
                x.log >= y.log ? x.sign : y.sign, distance == 0 && x.sign != y.sign};
    }

    // In the accumulator's range: saturated above, zero below.
    __device__ __forceinline__ Exact accumulator() const {
        return {min(log, ACC_MAX), sign, zero || log < ACC_MIN};
    }

    template <int WIDTH = BITS>
    __device__ __forceinline__ int code() const {
        constexpr int OFFSET = BIAS_OF<WIDTH>;
        int field = min(log, OFFSET - 1) + OFFSET;
        return zero || field <= 0 ? 0 : sign ? field | -2 * OFFSET : field;
    }
};

// Adds terms up in the contract's order: blocks of BLOCK, then block totals.
struct ExactSum {
    Exact total = {0, 0, true}, block = {0, 0, true};
    int count = 0;

    __device__ __forceinline__ void add(Exact term, const int2* gauss) {
        block = Exact::add(block, term.accumulator(), gauss).accumulator();
        if (++count % BLOCK == 0) flush(gauss);
    }
    __device__ __forceinline__ void flush(const int2* gauss) {
        total = Exact::add(total, block, gauss).accumulator();
        block.zero = true;
    }
};

__device__ __forceinline__ float plus(float x, float y) {
    float z;
    asm("add.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
    return z;
}

__device__ __forceinline__ float minus(float x, float y) {
    float z;
    asm("sub.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
    return z;
}

__device__ __forceinline__ float times(float x, float y) {
    float z;
    asm("mul.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
    return z;
}

// The smaller of two numbers; where one is NaN, the other one.
__device__ __forceinline__ float smaller(float x, float y) {
    float z;
    asm("min.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
    return z;
}

// The larger of two numbers; where one is NaN, the other one.
__device__ __forceinline__ float larger(float x, float y) {
    float z;
    asm("max.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
    return z;
}

constexpr int NAN_BITS = 0x7fffffff;

// A copy of the table for each of Copies columns; 32 give every lane of a warp a bank of its own.
template <int Copies>
struct Adder {
    static_assert(Copies % 4 == 0, "rows are written 16 bytes at a time");
    static constexpr int PITCH = 4 * Copies, PITCH_BITS = bit_length(PITCH) - 1;
    static constexpr int TOP = LAST * PITCH + PITCH / 2;
    static constexpr u32 MASK = (((1u << bit_length(LAST)) - 1) * PITCH) | 2u;
    static constexpr int BYTES = (LAST + 1) * PITCH;

    u32 column;  // bytes to this lane's copy

    // n units as a float.
    static __device__ __forceinline__ float units(int n) {
        return __int_as_float(n < 0 ? -n | 0x80000000 : n);
    }

    // What `additions` additions have moved a logarithm up by.
    static __device__ __forceinline__ float drift(int additions) {
        return units(additions * DRIFT * PITCH);
    }

    // Copy the packed table (G+ low half, G- high half, row = LAST - distance) to shared memory;
    // the caller synchronises.
    static __device__ __forceinline__ void fill(u32* shared, const u32* __restrict__ packed) {
#pragma unroll 8
        for (int i = threadIdx.x; i < (LAST + 1) * Copies / 4; i += blockDim.x) {
            u32 word = __ldg(packed + i / (Copies / 4));
            ((uint4*)shared)[i] = make_uint4(word, word, word, word);
        }
    }

    __device__ __forceinline__ Adder() : column(threadIdx.x % Copies * 4) {}

    // Bytes from the table's start to the correction of x + y.
    static __device__ __forceinline__ int row(float x, float y, u32 column) {
        float t;
        asm("{\n\t.reg .f32 d;\n\tsub.f32 d, %1, %2;\n\tabs.f32 d, d;\n\tneg.f32 d, "
            "d;\n\tadd.sat.f32 %0, d, %3;\n\t}"
            : "=f"(t)
            : "f"(x), "f"(y), "f"(__int_as_float(TOP)));
        int at;  // (t & MASK) | column, written out because the compiler prefers two instructions
        asm("lop3.b32 %0, %1, %2, %3, 0xEA;"
            : "=r"(at)
            : "r"(__float_as_int(t)), "n"(MASK), "r"(column));
        return at;
    }

    // x + y, moved up by drift(1).
    __device__ __forceinline__ float operator()(float x, float y) const {
        int g;
        float z;
        asm("ld.shared.s16 %0, [%1 + %2];" : "=r"(g) : "r"(row(x, y, column)), "n"(SHARED_BASE));
        asm("fma.rn.f32 %0, %1, %2, %3;"
            : "=f"(z)
            : "f"(__int_as_float(g)), "f"((float)PITCH), "f"(larger(x, y)));
        return z;
    }

    // The value of a code (sign-extended) with its logarithm moved up by `additions` drifts.
    static __device__ __forceinline__ float widen(int code, int additions = 0) {
        int field = code & FIELD_MASK;
        float n = plus(__int_as_float(field * PITCH + (((u32)code >> 30) & 2)),
                       units((additions * DRIFT - BIAS) * PITCH));
        return field == 0 ? __int_as_float(NAN_BITS) : n;
    }

    // The code of a value without drift: saturates above the format's range, zero below it.
    static __device__ __forceinline__ int narrow(float n) {
        int bits = __float_as_int(plus(n, units(BIAS * PITCH + PITCH / 2)));
        int field = min(bits / PITCH, FIELD_MASK);
        int code = bits & 2 ? field | SIGN_MASK : field;
        return field <= 0 || __float_as_int(n) == NAN_BITS ? 0 : code;
    }
};
