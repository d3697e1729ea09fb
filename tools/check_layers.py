#!/usr/bin/env python3
"""Checks that each layer includes only the layers that LAYERS allows, and that pure code stays pure.

    check_layers.py tessera/                   reports violations
    check_layers.py --expect tests/.../planted  every line marked `// BAD` must be reported, and no other line
"""
import pathlib
import re
import sys

SETTINGS = "base/detail/settings.cpp"
PURE = {  # files by the start of their path -> what they may not include
    "checkpoint/detail/box": r"tessera/(comm|mesh)/|ATen/|torch/",
    "checkpoint/detail/reshard": r"tessera/(comm|mesh)/|ATen/|torch/",
    "checkpoint/detail/save_plan": r"tessera/(comm|mesh)/|ATen/|torch/",
    "rules/": r"tessera/(comm|mesh)/|ATen/(ops/|ATen\.h|Functions\.h|core/Tensor\.h)|torch/",
    "propagate/": r"tessera/comm/|ATen/(ops/|ATen\.h|Functions\.h)|torch/torch\.h",
    "redistribute/detail/plan.": r"tessera/(comm|mesh)/|ATen/|torch/",
    "redistribute/detail/cost": r"tessera/(comm|mesh)/|ATen/|torch/",
}


def read_graph(text):
    """{layer: set of layers it may include}, from lines `layer: a b c`."""
    rows = [row.split("#")[0].split(":") for row in text.splitlines()]
    return {row[0].strip(): set(row[1].split()) for row in rows if len(row) == 2}


def graph_errors(graph):
    """Layers that are not declared, and cycles: a layer includes only layers that stand above it in the file."""
    declared = set()
    for layer, allowed in graph.items():
        for other in sorted(allowed - declared):
            yield f"LAYERS: '{layer}' includes '{other}', which is not declared above it"
        declared.add(layer)


def line_errors(path, line, graph):
    """What is wrong with `line` of the file `path` (relative to tessera/)."""
    if re.search(r"\bgetenv\s*\(", line.split("//")[0]) and path != SETTINGS:
        yield f"only {SETTINGS} calls getenv: add an entry there"
    match = re.match(r'\s*#\s*include\s*[<"]([^>"]+)[>"]', line)
    if not match:
        return
    include = match[1]
    for start, forbidden in PURE.items():
        if path.startswith(start) and re.match(forbidden, include):
            yield f"{start}* is pure and may not include {include}"
    layer, other = path.split("/")[0], re.match(r"tessera/(\w+)/", include)
    if include == "tessera/tessera.h" and layer not in ("cli", "train.h"):  # train.h is the other header for users
        yield "tessera.h is for users: include what is used"
    if other and "/" in path and other[1] != layer:  # tessera.h itself may include everything
        if other[1] not in graph:
            yield f"'{other[1]}' is not a layer of LAYERS"
        elif other[1] not in graph.get(layer, set()):
            yield f"layer '{layer}' may not include '{other[1]}': LAYERS does not list it"


def preset_errors(presets, graph):
    """Presets that build some layers without one that these include: their tests would not link."""
    for layers in re.findall(r'"TESSERA_SOURCES": "/tessera/\(([\w|]+)\)/"', presets):
        built = set(layers.split("|"))
        for layer in sorted(built):
            for missing in sorted(graph.get(layer, set()) - built):
                yield f"CMakePresets.json: TESSERA_SOURCES names '{layer}' without '{missing}', which it includes"


def main(root, expect):
    graph = read_graph((root / "LAYERS").read_text())
    errors = list(graph_errors(graph))
    if not expect:
        errors += preset_errors((root.parent / "CMakePresets.json").read_text(), graph)
    files = sorted(f for f in root.rglob("*") if f.suffix in (".h", ".cpp", ".cu", ".cuh"))
    for file in files:
        path = file.relative_to(root).as_posix()
        if "/" in path and path.split("/")[0] not in graph:
            errors.append(f"{path}: folder '{path.split('/')[0]}' is not a layer of LAYERS")
        for number, line in enumerate(file.read_text().splitlines(), 1):
            found = list(line_errors(path, line, graph))
            if expect:
                if bool(found) != ("// BAD" in line):
                    errors.append(f"{path}:{number}: {'reported, though right' if found else 'not reported'}: {line}")
            else:
                errors += [f"{path}:{number}: {what}" for what in found]
    print("\n".join(errors))
    return 1 if errors or not files or not graph else 0


if __name__ == "__main__":
    sys.exit(main(pathlib.Path(sys.argv[-1]), "--expect" in sys.argv))
