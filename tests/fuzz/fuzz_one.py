"""One target under the coverage-guided fuzzer.

    python -m tests.fuzz.fuzz_one TARGET [options of libFuzzer] [directories of inputs]

The product is instrumented as it is imported, so nothing of it is imported before.
"""

import importlib
import sys

from tests.fuzz import targets


def main() -> None:
    """Fuzz until libFuzzer ends; it leaves a failing input where ``-artifact_prefix`` says."""
    # By name: it has wheels for Linux alone, and the checks run without it.
    atheris = importlib.import_module("atheris")
    name = sys.argv.pop(1)
    # To merge, libFuzzer starts itself again through a shell.
    sys.argv[0] = f"{sys.executable} -m tests.fuzz.fuzz_one {name}"
    with atheris.instrument_imports(include=["prefixcached"]):
        run = targets.load(name)
    atheris.Setup(sys.argv, run)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
