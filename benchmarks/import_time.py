"""What `import batchbayes` adds to `import torch`: seconds, and packages.

python benchmarks/import_time.py
"""

import statistics
import subprocess
import sys

SCRIPT = """
import time, sys, torch, numpy
start, before = time.process_time(), set(sys.modules)
import batchbayes
for name in batchbayes.__all__:  # public names are imported when they are asked for
    getattr(batchbayes, name)
print(time.process_time() - start, *sorted({m.split(".")[0] for m in set(sys.modules) - before}))
"""


def main() -> None:
    runs = [
        subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True).stdout.split()
        for _ in range(7)
    ]
    print(f"import batchbayes adds {statistics.median(float(run[0]) for run in runs):.3f} CPU s to torch and numpy")
    print("top-level packages added:", *[name for name in runs[0][1:] if name not in sys.stdlib_module_names])


if __name__ == "__main__":
    main()
