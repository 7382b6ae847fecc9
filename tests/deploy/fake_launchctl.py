"""A stand-in for launchctl, run as a program: keeps launchd's state in a file, records its calls.

The state is JSON beside this file's copy: ``gui`` (whether somebody is logged in), ``loaded``
(domain/label), ``draining`` (how often bootout and print still find what bootout took out),
``errors`` (by verb, the exit codes of its next calls), ``calls``, ``text`` (what print prints).
"""

import json
import plistlib
import sys
from pathlib import Path
from typing import Any

TEXTS = {
    125: "Bootstrap failed: 125: Domain does not support specified action",
    5: "Bootstrap failed: 5: Input/output error",
    3: "Boot-out failed: 3: No such process",
    36: "Boot-out failed: 36: Operation now in progress",
    113: "Could not find service in domain",
}


def answer(state: dict[str, Any], verb: str, arguments: list[str]) -> int:
    planned = state["errors"].get(verb, [])
    loaded: list[str] = state["loaded"]
    if planned:
        code = int(planned.pop(0))
        if verb == "bootout" and code in (3, 125):
            loaded.clear()
        return code
    if verb == "print":
        (target,) = arguments
        if target.count("/") == 1:
            return 0 if state["gui"] or not target.startswith("gui/") else 113
        print(state["text"])
        return 0 if target in loaded or still_drains(state) else 113
    if verb == "bootstrap":
        domain, file = arguments
        label = plistlib.loads(Path(file).read_bytes())["Label"]
        if domain.startswith("gui/") and not state["gui"]:
            return 125
        if f"{domain}/{label}" in loaded or still_drains(state):
            return 5
        loaded.append(f"{domain}/{label}")
        return 0
    if verb == "bootout":
        if arguments[0] not in loaded:
            return 36 if still_drains(state) else 3
        loaded.remove(arguments[0])
        return 0
    if verb == "kickstart":
        return 0 if arguments[-1] in loaded else 113
    return 0


def still_drains(state: dict[str, Any]) -> bool:
    drains = state.get("draining", 0) > 0 and not state["loaded"]
    state["draining"] = state.get("draining", 0) - drains
    return bool(drains)


def main() -> None:
    file = Path(sys.argv[0]).with_suffix(".json")
    state = json.loads(file.read_text())
    verb, *arguments = sys.argv[1:]
    state["calls"].append([verb, *arguments])
    status = answer(state, verb, arguments)
    file.write_text(json.dumps(state))
    if status:
        print(TEXTS.get(status, "failed"), file=sys.stderr)
    sys.exit(status)


if __name__ == "__main__":
    main()
