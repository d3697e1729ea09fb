#!/usr/bin/env python3
"""Checks a folder of examples/ported: a LibTorch program, plain.cpp, and its versions for several ranks.

    check_ported.py --tessera build/release/bin/tessera --programs build/release/bin/ported examples/ported/mnist

1. Counts the lines of code that each version changes or adds; comments and empty lines do not count.
       ddp.cpp           against plain.cpp          at most 10
       fully_shard.cpp   against plain.cpp          at most 20
       compiled.cpp      against fully_shard.cpp    at most 5
2. Runs the versions and compares each loss with the plain program's (1e-5 of it; compiled: 1e-4). fully_shard and
   compiled are stopped in the middle of an epoch and continued on another number of ranks.
   With TESSERA_SOAK=1: on 1, 2 and 4 ranks."""
import argparse
import difflib
import os
import pathlib
import subprocess
import sys
import tempfile

LIMITS = [("ddp", "plain", 10), ("fully_shard", "plain", 20), ("compiled", "fully_shard", 5)]


def code(path):
    lines = [line.strip() for line in path.read_text().splitlines()]
    return [line for line in lines if line and not line.startswith("//")]


def changed_lines(before, after):
    matcher = difflib.SequenceMatcher(None, before, after, autojunk=False)
    return sum(max(i2 - i1, j2 - j1) for tag, i1, i2, j1, j2 in matcher.get_opcodes() if tag != "equal")


def read_losses(folder):
    """The last loss of each step: a continued program repeats the steps since the last checkpoint."""
    losses = {}
    for line in (folder / "losses.txt").read_text().splitlines():
        step, loss = line.split()
        losses[int(step)] = float(loss)
    return losses


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--tessera", required=True)
    parser.add_argument("--programs", type=pathlib.Path, required=True)
    parser.add_argument("folder", type=pathlib.Path)
    args = parser.parse_args()
    name, errors = args.folder.name, []

    for version, base, limit in LIMITS:
        count = changed_lines(code(args.folder / f"{base}.cpp"), code(args.folder / f"{version}.cpp"))
        print(f"{name:12} {version:12} {count:3} changed lines (at most {limit})")
        if count > limit:
            errors.append(f"{version}.cpp changes {count} lines of {base}.cpp; at most {limit} are allowed")

    def run(version, ranks, folder, steps):
        command = [str(args.programs / f"{name}_{version}"), str(folder), str(steps)]
        if version != "plain":
            command = [args.tessera, "run", "-n", str(ranks), "--"] + command
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode != 0:
            sys.exit(f"{' '.join(command)} failed:\n{done.stdout[-6000:]}")

    steps, stop = 20, 13
    with tempfile.TemporaryDirectory() as temporary:
        def new_folder():
            return pathlib.Path(tempfile.mkdtemp(dir=temporary))

        plain = new_folder()
        run("plain", 1, plain, steps)
        expected = read_losses(plain)
        if expected[steps - 1] >= expected[0] and name in ("mnist", "forecaster", "translator"):
            errors.append(f"the loss does not fall: {expected}")

        def compare(what, folder, tolerance):
            found = read_losses(folder)
            worst = max((abs(found.get(s, float("inf")) - v) / max(1, abs(v)), s) for s, v in expected.items())
            print(f"{name:12} {what:40} largest difference {worst[0]:.1e}")
            if not worst[0] <= tolerance:
                errors.append(f"{what}: step {worst[1]} has the loss {found.get(worst[1])}, and {expected[worst[1]]} "
                              f"in the plain program")

        soak = os.environ.get("TESSERA_SOAK") == "1"
        for ranks in (1, 2, 4) if soak else (2,):
            folder = new_folder()
            run("ddp", ranks, folder, steps)
            compare(f"ddp on {ranks}", folder, 1e-5)
        for version in ("fully_shard", "compiled"):
            for first, then in ((1, 2), (2, 4), (4, 1), (2, 2)) if soak else ((2, 4),) if version == "fully_shard" else ((2, 1),):
                folder = new_folder()
                run(version, first, folder, stop)
                run(version, then, folder, steps)
                compare(f"{version} on {first}, from step 10 on {then}", folder, 1e-5 if version == "fully_shard" else 1e-4)
    for error in errors:
        print("error:", error)
    sys.exit(1 if errors else 0)


main()
