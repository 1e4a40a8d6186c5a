"""Matrix products of xlnstorch and xlns, for ``bench_cpu.py --peers``."""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

PEER_SCRIPT = """
import json, os, sys, time
sys.setdlopenflags(os.RTLD_NOW | os.RTLD_GLOBAL)
import numpy as np, torch
torch.set_num_threads(1)
shapes = json.loads(sys.argv[2])
def best(call, seconds=3.0):
    call(); times = []; end = time.perf_counter() + seconds
    while not times or (time.perf_counter() < end and len(times) < 50):
        start = time.perf_counter(); call(); times.append(time.perf_counter() - start)
    return min(times)
results = {}
rng = np.random.default_rng(0)
for M, K, N in shapes:
    name = f"{M}x{K}x{N}"
    x = rng.standard_normal((M, K)).astype(np.float32)
    y = rng.standard_normal((K, N)).astype(np.float32)
    if sys.argv[1] == "xlnstorch":
        import xlnstorch
        results["CSRC_AVAILABLE"] = str(getattr(xlnstorch, "CSRC_AVAILABLE", "unknown"))
        a, b = (xlnstorch.lnstensor(torch.from_numpy(v), f=7) for v in (x, y))
        call = lambda: torch.matmul(a, b)
    else:
        import xlns
        xlns.xlnssetF(7)
        rows = max(1, M // 16)  # a slice of the rows: the rate does not depend on their number
        a, b = xlns.xlnsnp(x[:rows].astype(np.float64)), xlns.xlnsnp(y.astype(np.float64))
        call = lambda: a @ b
        M = rows
    with torch.no_grad():
        results[name] = M * K * N / best(call)
print(json.dumps(results))
"""


def install_peers(folder: Path) -> Path:
    """Make a virtual environment with the peers and return its Python.

    It sees this interpreter's packages, as the peers need its torch.
    """
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        (folder / "lib" / version / "site-packages" / "parent.pth").write_text(
            sysconfig.get_paths()["purelib"] + "\n"
        )
    pip = [str(python), "-m", "pip", "install", "-q"]
    subprocess.run([*pip, "-U", "setuptools>=77", "wheel"], check=False)
    for package in ("xlns", "xlnstorch"):
        subprocess.run([*pip, "--no-deps", "--no-build-isolation", package], check=False)
    return python


def peers(folder: Path, shapes: list[tuple[int, int, int]], ours: dict[str, float]) -> None:
    """Measure matrix products of xlnstorch and xlns at f = 7 on one thread.

    A peer that cannot run is skipped, and the end of its error is printed.
    """
    python = install_peers(folder)
    for name in ("xlnstorch", "xlns"):
        command = [str(python), "-W", "ignore", "-c", PEER_SCRIPT, name, json.dumps(shapes)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            print(f"  {name} skipped: {(done.stderr.strip().splitlines() or ['no output'])[-1]}")
            continue
        results = json.loads(done.stdout.strip().splitlines()[-1])
        note = (
            f" (CSRC_AVAILABLE={results.pop('CSRC_AVAILABLE')})"
            if "CSRC_AVAILABLE" in results
            else ""
        )
        for shape, value in results.items():
            print(
                f"  {shape} {name}{note}: {value / 1e9:.4f} G/s; lns16 here is"
                f" {ours[shape] / value:,.0f} times as fast"
            )
