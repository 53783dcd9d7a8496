"""Meet every payload of the corpus (payloads.py) with the command line; print one line of JSON, and what failed.

python benchmarks/faults/security.py [--kind KIND] [--name PART]
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "cases"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kind", default="", help="only those of this kind")
    parser.add_argument("--name", default="", help="only those whose name has this")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["OPTRUSH_CACHE"] = f"{folder}/cache"
        import torch

        from hostile import Box
        from payloads import corpus, verdict

        torch.set_num_threads(1)
        begin, here = time.monotonic(), os.getcwd()
        (Path(folder) / "box").mkdir()
        box = Box(Path(folder) / "box")
        chosen = [p for p in corpus() if asked.kind in p.kind and asked.name in p.name]
        failed = 0
        for payload in chosen:
            if wrong := verdict(payload, box):
                failed += 1
                print(f"{payload.kind}: {payload.name}\n    " + "\n    ".join(wrong.splitlines()[-4:]), file=sys.stderr)
        os.chdir(here)
    figure = f"{failed} canaries, tracebacks, hangs or unclear ends in {time.monotonic() - begin:.0f} s"
    print(json.dumps({"fault": "security", "n": len(chosen), "pass": len(chosen) - failed, "figure": figure}))
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
