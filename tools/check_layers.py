#!/usr/bin/env python3
"""Checks who includes whom, as LAYERS says, and that pure code stays pure.  check_layers.py [--expect] tessera/

With --expect it runs over planted errors: each line marked `// BAD` must be reported, and no other."""
import pathlib
import re
import sys

PURE = {  # files by the start of their path -> what they may not include
    "checkpoint/box": r"tessera/(comm|mesh)/|ATen/|torch/",
    "checkpoint/reshard": r"tessera/(comm|mesh)/|ATen/|torch/",
    "checkpoint/save_plan": r"tessera/(comm|mesh)/|ATen/|torch/",
    "rules/": r"tessera/(comm|mesh)/|ATen/(ops/|ATen\.h|Functions\.h|core/Tensor\.h)|torch/",
    "propagate/": r"tessera/comm/|ATen/(ops/|ATen\.h|Functions\.h)|torch/torch\.h",
    "redistribute/plan": r"tessera/(comm|mesh)/|ATen/|torch/",
    "redistribute/cost": r"tessera/(comm|mesh)/|ATen/|torch/",
}


def complaints(path, line, layers, apart):
    """What is wrong with `line` of the file `path` (relative to tessera/)."""
    if re.search(r"\bgetenv\s*\(", line.split("//")[0]) and path != "base/settings.cpp":
        yield "only base/settings.cpp calls getenv: add a row there"
    match = re.match(r'\s*#\s*include\s*[<"]([^>"]+)[>"]', line)
    if not match:
        return
    include = match[1]
    for start, forbidden in PURE.items():
        if path.startswith(start) and re.match(forbidden, include):
            yield f"{start}* is pure and may not include {include}"
    me, other = path.split("/")[0], re.match(r"tessera/(\w+)/", include)
    if include == "tessera/tessera.h" and me != "cli":
        yield "tessera.h is for users: include what is used"
    if other and "/" in path:  # tessera.h itself may include everything
        other = other[1]
        if other not in layers:
            yield f"'{other}' is no layer of LAYERS"
        elif me in layers and layers.index(other) > layers.index(me):
            yield f"layer '{me}' may not include '{other}', which is below it in LAYERS"
        elif me != other and {me, other} <= apart:
            yield f"layers '{me}' and '{other}' stay apart"


def main(root, expect):
    rows = [r.split("#")[0].strip() for r in (root / "LAYERS").read_text().splitlines()]
    apart = {name for r in rows if r.startswith("apart:") for name in r[len("apart:"):].split()}
    layers = [r for r in rows if r and ":" not in r]
    wrong = 0
    files = sorted(f for f in root.rglob("*") if f.suffix in (".h", ".cpp", ".cu", ".cuh"))
    for file in files:
        path = file.relative_to(root).as_posix()
        if "/" in path and path.split("/")[0] not in layers:
            print(f"{path}: folder '{path.split('/')[0]}' is no layer of LAYERS")
            wrong += 1
        for number, line in enumerate(file.read_text().splitlines(), 1):
            found = list(complaints(path, line, layers, apart))
            if expect and bool(found) != ("// BAD" in line):
                print(f"{path}:{number}: {'reported, though right' if found else 'not reported'}: {line}")
                wrong += 1
            elif not expect:
                for what in found:
                    print(f"{path}:{number}: {what}")
                    wrong += 1
    return 1 if wrong or not files or not layers else 0


if __name__ == "__main__":
    sys.exit(main(pathlib.Path(sys.argv[-1]), "--expect" in sys.argv))
