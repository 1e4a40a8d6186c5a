// Counters of faults, values that LNS has no code for: a row of lns_ops/cuda/faults.py is a counter
// for each kind, and the address of a word of the host's memory that the first fault writes.
#pragma once

enum Fault { NON_FINITE, ZERO_DIVISOR, NEGATIVE_ROOT, NO_VALUE, FAULTS };

__device__ __forceinline__ void count_fault(int* row, Fault kind, int n = 1) {
    if (atomicAdd(row + kind, n) == 0) **(volatile int**)(row + FAULTS) = 1;
}
