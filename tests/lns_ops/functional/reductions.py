"""Shapes and dimensions of sums and normalizations that the tests of every device use."""

REDUCTIONS = [
    ((7,), [0]),
    ((9000,), [0]),
    ((64,), [0]),
    ((5, 70, 3), [0]),
    ((5, 70, 3), [1]),
    ((130, 64), [1]),
    ((130, 61), [1]),
    ((2, 9000), [1]),
    ((9000, 2), [0]),
    ((4, 6, 8, 8), [2, 3]),
    ((4, 6, 8, 8), [0, 2, 3]),
    ((40, 3, 300), [0, 2]),
    ((70, 5, 16, 16), [0, 2, 3]),
    ((3, 5, 7), [0, 2]),
    ((2, 3, 4, 5, 6), [0, 2, 4]),
    ((2, 3, 4, 5, 6), [1, 3]),
    ((3, 1, 5), [1]),
    ((0, 3), [0]),
    ((3, 0), [0]),
]
"""Shapes, and what is summed over: one stride, two, and more than the GPU's kernel reads."""

NORMALIZATIONS = [
    ((4, 6, 8, 8), (1, 6, 1, 1), (6, 1, 1)),
    ((4, 6, 7, 5), (1, 6, 1, 1), (6, 1, 1)),
    ((10, 48), (10, 1), (48,)),
    ((10, 45), (10, 1), (45,)),
    ((4, 2, 3, 35), (4, 2, 1, 1), (2, 3, 1)),
    ((5, 3, 16), (5, 3, 1), (3, 1)),
    ((2, 3, 4, 5), (2, 1, 4, 1), (3, 1, 5)),
]
"""Shapes of what is normalized, of its statistics, and of weight and bias."""

WHOLE_NORMALIZATIONS = [
    ((4, 6, 8, 8), [0, 2, 3]),
    ((70, 5, 9), [0, 2]),
    ((3, 4, 5000), [2]),
    ((200, 6), [0]),
    ((4, 6, 8, 8), [1, 2, 3]),
]
"""Shapes of what is normalized, and over which dimensions."""
