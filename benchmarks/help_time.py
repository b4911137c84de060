"""How long `flowkit --help` takes, process start included: `python benchmarks/help_time.py [RUNS]`.

Prints and writes benchmarks/results/help_time.json: the median and the fastest wall time and the median
processor time of fresh processes. Held to: median below .4 s.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

LIMIT = 0.4
COMMAND = [sys.executable, "-m", "flowkit", "--help"]


def once() -> tuple[float, float]:
    """Wall and processor seconds of one run."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start = time.perf_counter()
    subprocess.run(COMMAND, check=True, stdout=subprocess.DEVNULL)
    wall = time.perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> int:
    """Measure, report, and return 1 when the limit is missed."""
    once()  # fills the caches of bytecode and of the disk
    walls, busy = zip(*(once() for _ in range(int(sys.argv[1]) if len(sys.argv) > 1 else 20)), strict=True)
    report = {
        "command": "flowkit --help",
        "runs": len(walls),
        "wall_median_s": round(median(walls), 3),
        "wall_fastest_s": round(min(walls), 3),
        "processor_median_s": round(median(busy), 3),
        "limit_s": LIMIT,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "load_average": round(os.getloadavg()[0], 2),
    }
    results = Path(__file__).parent / "results"
    results.mkdir(exist_ok=True)
    (results / "help_time.json").write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report, indent=2))
    return int(report["wall_median_s"] > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
