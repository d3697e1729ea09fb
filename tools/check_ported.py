#!/usr/bin/env python3
"""Checks a folder of examples/ported: a LibTorch program, plain.cpp, and its versions for several ranks.

    check_ported.py --tessera build/release/bin/tessera --programs build/release/bin/ported examples/ported/mnist
    check_ported.py --count examples/ported/*                             # only the table of changed lines

1. Counts the lines of code that each version changes or adds; comments and empty lines do not count.
       ddp.cpp           against plain.cpp          at most 10
       fully_shard.cpp   against plain.cpp          at most 20
       compiled.cpp      against fully_shard.cpp    at most 5
2. Runs the versions and compares each loss with the plain program's. fully_shard and compiled are stopped after step 13,
   in the middle of an epoch, and continue from the checkpoint of step 10, on another number of ranks too. They repeat
   three losses: on the same number of ranks these have the same bits.
   With TESSERA_SOAK=1: on 1, 2 and 4 ranks."""
import argparse
import difflib
import os
import pathlib
import subprocess
import sys
import tempfile

LIMITS = [("ddp", "plain", 10), ("fully_shard", "plain", 20), ("compiled", "fully_shard", 5)]
STEPS, STOP, CHECKPOINT = 20, 13, 10
TOLERANCE = 1e-5  # of the loss, or of 1

# Runs of a version: on so many ranks until STOP, then on so many ranks. None: one run.
SHORT = {"ddp": [(2, None)], "fully_shard": [(2, 4)], "compiled": [(2, 2)]}
LONG = {
    "ddp": [(1, None), (2, None), (4, None)],
    "fully_shard": [(1, 2), (2, 4), (4, 1), (2, 2), (4, 4)],
    "compiled": [(1, 2), (2, 4), (4, 1), (2, 2)],
}


def code(path):
    lines = [line.strip() for line in path.read_text().splitlines()]
    return [line for line in lines if line and not line.startswith("//")]


def changed_lines(before, after):
    matcher = difflib.SequenceMatcher(None, before, after, autojunk=False)
    return sum(max(i2 - i1, j2 - j1) for tag, i1, i2, j1, j2 in matcher.get_opcodes() if tag != "equal")


def count(folder):
    """Prints the numbers of changed lines. Returns errors."""
    errors = []
    for version, base, limit in LIMITS:
        lines = changed_lines(code(folder / f"{base}.cpp"), code(folder / f"{version}.cpp"))
        print(f"{folder.name:12} {version:12} {lines:3} changed lines (at most {limit})")
        if lines > limit:
            errors.append(f"{version}.cpp changes {lines} lines of {base}.cpp; at most {limit} are allowed")
    return errors


class Runs:
    def __init__(self, arguments, folder, temporary):
        self.arguments, self.name, self.temporary = arguments, folder.name, temporary
        self.errors = []
        plain = self.new_folder()
        self.run("plain", 1, plain, STEPS)
        self.expected = dict(self.read_losses(plain))
        if sorted(self.expected) != list(range(STEPS)):
            sys.exit(f"the plain program has losses of the steps {sorted(self.expected)}")

    def new_folder(self):
        return pathlib.Path(tempfile.mkdtemp(dir=self.temporary))

    def run(self, version, ranks, folder, steps):
        command = [str(self.arguments.programs / f"{self.name}_{version}")]
        if version != "plain":
            command = [self.arguments.tessera, "run", "-n", str(ranks), "--"] + command
        command += [str(folder), str(steps)]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode != 0:
            sys.exit(f"{' '.join(command)} failed:\n{done.stdout[-6000:]}")

    @staticmethod
    def read_losses(folder):
        """(step, loss) of each line. A continued program repeats the steps since the last checkpoint."""
        lines = (folder / "losses.txt").read_text().splitlines()
        return [(int(line.split()[0]), float(line.split()[1])) for line in lines]

    def check(self, version, first, then):
        what = f"{version} on {first}" + (f", from step {CHECKPOINT} on {then}" if then else "")
        folder = self.new_folder()
        self.run(version, first, folder, STOP if then else STEPS)
        steps = list(range(STOP if then else STEPS))
        if then:
            self.run(version, then, folder, STEPS)
            steps += range(CHECKPOINT, STEPS)
        found = self.read_losses(folder)
        if [step for step, _ in found] != steps:
            self.errors.append(f"{what}: has losses of the steps {[step for step, _ in found]}, expected {steps}")
            return
        worst, at = max((abs(loss - self.expected[s]) / max(1, abs(self.expected[s])), s) for s, loss in found)
        print(f"{self.name:12} {what:40} largest difference to plain {worst:.1e}")
        if not worst <= TOLERANCE:
            self.errors.append(f"{what}: the losses of step {at} are {[loss for s, loss in found if s == at]}, and "
                               f"{self.expected[at]} in the plain program")
        if first == then and found[CHECKPOINT:STOP] != found[STOP : 2 * STOP - CHECKPOINT]:
            self.errors.append(f"{what}: losses differ after the checkpoint: {found[CHECKPOINT:]}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--tessera")
    parser.add_argument("--programs", type=pathlib.Path)
    parser.add_argument("--count", action="store_true")
    parser.add_argument("folders", type=pathlib.Path, nargs="+")
    arguments = parser.parse_args()
    errors = []
    for folder in arguments.folders:
        errors += count(folder)
        if arguments.count:
            continue
        with tempfile.TemporaryDirectory() as temporary:
            runs = Runs(arguments, folder, temporary)
            for version, cases in (LONG if os.environ.get("TESSERA_SOAK") == "1" else SHORT).items():
                for first, then in cases:
                    runs.check(version, first, then)
            errors += runs.errors
    for error in errors:
        print("error:", error)
    sys.exit(1 if errors else 0)


main()
