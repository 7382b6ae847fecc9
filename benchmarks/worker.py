"""A process of a benchmark: `python -m benchmarks.worker MODULE ROLE OPTIONS`, run by `Worker`.

It reads one line for each run and answers with one line of JSON.
"""

import contextlib
import importlib
import json
import sys
from typing import Any

from benchmarks.harness import WrongBytes


def main() -> None:
    """Serve until standard input ends."""
    module, role, options = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
    answers = sys.stdout
    sys.stdout = sys.stderr  # what libraries print must not be taken for an answer
    cases = importlib.import_module(f"benchmarks.{module}").cases
    with contextlib.ExitStack() as stack:
        case = stack.enter_context(cases(role, options))
        _say(answers, {"ready": True})
        for line in sys.stdin:
            what = line.strip()
            try:
                measured = case.measure(what) if what else case.measure()
            except WrongBytes as error:
                _say(answers, {"wrong": str(error)})
                continue
            _say(answers, measured if isinstance(measured, dict) else {"seconds": measured})


def _say(answers: Any, told: dict[str, Any]) -> None:
    answers.write(json.dumps(told) + "\n")
    answers.flush()


if __name__ == "__main__":
    main()
