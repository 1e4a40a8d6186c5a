"""Count the instructions in the loops of the fused updates, and the speed that these allow.

    python scripts/count_instructions.py [--format lns12] [--copy 4.26e12] [--issue 32.9e12]

Compiles lns_ops/cuda/src/updates.cu and updates_float32.cu for sm_90 with nvcc, reads the largest
loop of each kernel by cuobjdump (both from CUDA 13; on PyPI in nvidia-cuda-nvcc and
nvidia-cuda-cuobjdump), and prints instructions an element, bytes an element, the time that either
takes at the measured rates (bytes a second of a copy, read plus written; thread instructions a
second that the chip issues: scripts/bench_gpu.py measures both) and the fraction of the copy's rate
at which the instructions alone would run.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import tempfile
from collections import Counter
from functools import lru_cache
from pathlib import Path

from lns_ops.cuda import elementwise, runtime
from lns_ops.format import LNSFormat
from lns_ops.spec.gaussian_log import stochastic_tables

KERNELS = {  # bytes an element, elements a loop
    "sgd": (6, 8),
    "sgd_kahan": (10, 8),
    "sgd_momentum": (10, 8),
    "sgd_momentum_kahan": (14, 8),
    "adam_decoupled": (18, 8),
    "adam_decoupled_kahan": (22, 4),
    "sgd_float32_kahan": (10, 8),
    "sgd_float32_momentum_kahan": (14, 8),
    "adam_float32_decoupled": (18, 8),
}


def loop(name: str, fmt: LNSFormat, folder: Path) -> Counter[str]:
    """Return the instructions of the largest loop of a kernel, by kind."""
    source, binary = folder / f"{name}.cu", folder / f"{name}.cubin"
    more = {"FAST": int("float32" not in name), "ADAM_KERNELS": int(name.startswith("adam"))}
    if more["FAST"]:
        more |= {
            "COPIES": elementwise.COPIES,
            "SHARED_TABLES": 1,
            "MOST_ENTRIES": elementwise.LISTS[name[:3]][1],
            "FINE_LAST": len(stochastic_tables(fmt.fraction_bits).plus) - 1,
        }
    source.write_text(runtime.kernel_source("updates.cu" if more["FAST"] else "updates_float32.cu"))
    defines = runtime.compile_options(fmt, 0, **more)
    subprocess.run(
        ["nvcc", "-std=c++17", "-arch=sm_90", "-w", "-cubin", *defines, "-o", binary, source],
        check=True,
    )
    sass = subprocess.run(
        ["cuobjdump", "-sass", "-fun", f"lns_{name}", binary],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    pattern = r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\d+ )?([A-Z][A-Z0-9_]*)[A-Z0-9_.]*(.*?);"
    instructions = [
        (int(at, 16), kind, rest) for at, kind, rest in re.findall(pattern, sass, re.MULTILINE)
    ]
    back = [
        (at, int(target[1], 16))
        for at, kind, rest in instructions
        if kind == "BRA" and (target := re.search("0x([0-9a-f]+)", rest))
    ]
    last, first = max(
        ((at, target) for at, target in back if target < at), key=lambda jump: jump[0] - jump[1]
    )
    return Counter(kind for at, kind, _ in instructions if first <= at <= last)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--format", default="lns12")
    parser.add_argument("--copy", type=float, default=4.26e12)
    parser.add_argument("--issue", type=float, default=32.9e12)
    options = parser.parse_args()
    # asked of the device elsewhere; any constant makes the same code
    runtime.shared_base = lru_cache(lambda device: 1024)
    print(f"{'update':28s} instructions  bytes   issue ps  copy ps   issue alone / copy")
    with tempfile.TemporaryDirectory() as folder:
        for name, (size, elements) in KERNELS.items():
            kinds = loop(name, LNSFormat.parse(options.format), Path(folder))
            count = kinds.total() / elements
            issue, copy = 1e12 * count / options.issue, 1e12 * size / options.copy
            print(
                f"{name:28s} {count:8.1f} {size:9d} {issue:9.2f} {copy:9.2f}"
                f" {copy / issue:12.2f}   ",
                end="",
            )
            print(
                ", ".join(
                    f"{kind} {number / elements:.1f}" for kind, number in kinds.most_common(8)
                )
            )


if __name__ == "__main__":
    main()
