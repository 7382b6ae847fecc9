"""Run inputs through a target without the fuzzer: python -m tests.fuzz.replay TARGET FILE..."""

import sys
from pathlib import Path

from tests.fuzz import targets

if __name__ == "__main__":
    run = targets.load(sys.argv[1])
    for name in sys.argv[2:]:
        run(Path(name).read_bytes())
        print(f"{name}: nothing failed")
