#pragma once

// Operations with an explicit rounding mode: the assembler fuses a product and a sum without one.
// They keep subnormal numbers too, which CuPy's option -ftz=true takes for zero in the language's
// own operations, comparisons and conversions of floats.
__device__ __forceinline__ float rounded_sum(float x, float y) {
    float z;
    asm("add.rn.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
    return z;
}

__device__ __forceinline__ float rounded_difference(float x, float y) {
    float z;
    asm("sub.rn.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
    return z;
}

__device__ __forceinline__ float rounded_product(float x, float y) {
    float z;
    asm("mul.rn.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
    return z;
}

__device__ __forceinline__ float over(float x, float y) {
    float z;
    asm("div.rn.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
    return z;
}

__device__ __forceinline__ bool at_least(float x, float y) {
    int found;
    asm("{ .reg .pred p; setp.ge.f32 p, %1, %2; selp.s32 %0, 1, 0, p; }"
        : "=r"(found)
        : "f"(x), "f"(y));
    return found;
}

__device__ __forceinline__ double as_double(float x) {
    double y;
    asm("cvt.f64.f32 %0, %1;" : "=d"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float nearest_float(double x) {
    float y;
    asm("cvt.rn.f32.f64 %0, %1;" : "=f"(y) : "d"(x));
    return y;
}

// The rounding of weight + update: to nearest, with Kahan compensation, or at random.
enum Rounding { NEAREST, KAHAN, STOCHASTIC };

// Uniform 16-bit integers for elements 8 b .. 8 b + 7: Philox4x32-10 of the key and the counter (b
// low, b high, step, slot); lns_ops.reference.random_bits.
struct Random {
    u32 word[4];

    __device__ __forceinline__ Random() {}
    __device__ __forceinline__ Random(i64 key, i64 step, u32 slot, i64 block) {
        u32 a = (u32)block, b = (u32)(block >> 32), c = (u32)step, d = slot, low = (u32)key,
            high = (u32)(key >> 32);
#pragma unroll
        for (int round = 0; round < 10; round++) {
            u32 first = 0xD2511F53u * a, second = 0xCD9E8D57u * c;
            u32 x = __umulhi(0xCD9E8D57u, c) ^ b ^ low, y = __umulhi(0xD2511F53u, a) ^ d ^ high;
            a = x, b = second, c = y, d = first;
            low += 0x9E3779B9u, high += 0xBB67AE85u;
        }
        word[0] = a, word[1] = b, word[2] = c, word[3] = d;
    }
    __device__ __forceinline__ int operator[](
        int lane) const {  // selected by comparisons: an array indexed at run time lives in memory
        u32 w = lane < 4 ? lane < 2 ? word[0] : word[1] : lane < 6 ? word[2] : word[3];
        return lane & 1 ? w >> 16 : w & 0xffff;
    }
};

// The place of weight decay: none, added to the gradient (L2), or decoupled from it (AdamW).
enum WeightDecay { NONE, INTO_GRADIENT, DECOUPLED };
