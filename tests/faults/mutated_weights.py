"""A process of its own that reads files of weights and thousands of mutations of each, and prints how many came out how.

Whatever is neither read nor answered by one line ends it.
"""

import json
import random
import resource
import sys
from collections import Counter
from pathlib import Path

from dssl.errors import DsslError
from dssl.weights.load import read_tensors


def mutated(content: bytes, generator: random.Random) -> bytes:
    """The content with one to three changes of every kind that disks, networks and people with time make."""
    changed = bytearray(content)
    for _ in range(generator.choice((1, 1, 1, 2, 3))):
        place, kind = generator.randrange(len(changed)), generator.randrange(6)
        if kind == 0:
            changed[place] ^= 1 << generator.randrange(8)
        elif kind == 1:
            changed[place] = generator.randrange(256)
        elif kind == 2:
            del changed[place : place + generator.randrange(1, 9)]
        elif kind == 3:
            changed[place:place] = changed[(start := generator.randrange(len(changed))) : start + 16]
        elif kind == 4:
            changed[place:place] = generator.randbytes(generator.randrange(1, 5))
        else:
            del changed[max(2, place) :]
    return bytes(changed)


def main(count: str, seed: str, *paths: str) -> None:
    generator = random.Random(int(seed))
    outcomes: Counter[str] = Counter()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for path in map(Path, paths):
        content = path.read_bytes()
        copy = path.with_stem(f"{path.stem}-copy")
        for number in range(int(count) + 1):
            copy.write_bytes(mutated(content, generator) if number else content)
            try:
                read_tensors(copy)
                outcomes["read"] += 1
            except DsslError as error:
                outcomes["one line" if "\n" not in str(error) else "several lines"] += 1
    kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert kilobytes < 500_000, f"{kilobytes:,} kB for files of a few kB"
    print(json.dumps(outcomes))


if __name__ == "__main__":
    main(*sys.argv[1:])
