"""Run the benchmarks one after the other and write docs/performance.md from what they found.

    python -m benchmarks [--long] [--only views train] [--photos FOLDER] [--cifar10 FOLDER]

Those with peers run in the peers' environment (``python -m benchmarks.setup``), where it exists; the page says who is missing.
"""

import argparse
import subprocess
import sys
import time
from pathlib import Path

from benchmarks import setup

ROOT = Path(__file__).parent.parent
USUAL = ("views", "view_costs", "lock", "train", "evaluate", "startup")
LONG = ("growth", "memory", "shards")
_WITH_PEERS = ("views", "train", "evaluate", "shards")
_OF_PHOTOS = ("views", "view_costs", "lock", "shards")
_OF_CIFAR10 = ("evaluate", "memory")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--long", action="store_true", help="growth, memory and shards instead of the usual ones")
    parser.add_argument("--only", nargs="*", default=[], choices=[*USUAL, *LONG], help="only these")
    parser.add_argument("--photos", type=Path, help="a folder with JPEG files; without it, drawn images")
    parser.add_argument("--cifar10", type=Path, help="the folder of CIFAR-10; without it, the built-in shapes")
    options = parser.parse_args()
    peers = setup.python()
    failed = []
    for name in options.only or (LONG if options.long else USUAL):
        python = str(peers) if name in _WITH_PEERS and peers.is_file() else sys.executable
        words = [python, "-m", f"benchmarks.{name}"]
        if options.photos is not None and name in _OF_PHOTOS:
            words += ["--photos", str(options.photos.absolute())]
        if options.cifar10 is not None and name in _OF_CIFAR10:
            words += ["--data", f"cifar10:{options.cifar10.absolute()}"]
        print(f"== {name}", flush=True)
        begun = time.perf_counter()
        if subprocess.run(words, cwd=ROOT).returncode:
            failed.append(name)
        print(f"== {name}: {(time.perf_counter() - begun) / 60:.1f} minutes", flush=True)
    subprocess.run([sys.executable, "-m", "benchmarks.page"], cwd=ROOT, check=True)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return len(failed)


if __name__ == "__main__":
    raise SystemExit(main())
