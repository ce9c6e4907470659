"""What `import batchbayes` adds to `import torch`: seconds, and packages.

    python benchmarks/import_time.py

The garbage that torch leaves is collected before, because the next to allocate memory would pay for it (0.09 s). The
first run writes the bytecode and does not count.
"""

import os
import statistics
import subprocess
import sys

SCRIPT = """
import gc, time, sys, torch, numpy
gc.collect()
start, before = time.process_time(), set(sys.modules)
import batchbayes
batchbayes.mcbn, batchbayes.predict, batchbayes.categorical
few = time.process_time() - start
for name in batchbayes.__all__:  # public names are imported when they are asked for
    getattr(batchbayes, name)
print(few, time.process_time() - start, *sorted({m.split(".")[0] for m in set(sys.modules) - before}))
"""


def main() -> None:
    usual = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    options = {"capture_output": True, "text": True, "check": True, "env": usual}
    runs = [subprocess.run([sys.executable, "-c", SCRIPT], **options).stdout.split() for _ in range(8)][1:]
    few, every = (statistics.median(float(run[i]) for run in runs) for i in (0, 1))
    print(f"mcbn, predict and categorical add {few:.3f} CPU s to torch and numpy, all public names {every:.3f}")
    print("top-level packages added:", *[name for name in runs[0][2:] if name not in sys.stdlib_module_names])


if __name__ == "__main__":
    main()
