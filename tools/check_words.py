#!/usr/bin/env python3
"""Checks that sources, messages and docs use PyTorch's words.

    check_words.py             reports each line that has a word of the table below
    check_words.py PATH...     only files below these paths
    check_words.py --expect    every pattern must match its own example (a test of this script)

Identifiers count too: is_cut and IsCut have the word `cut`. Exceptions stand in tools/words_allowed.txt, one per line:
path pattern | text pattern | reason."""
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
SUFFIXES = {".h", ".cpp", ".cu", ".py", ".md", ".cmake", ".txt", ".sh", ".toml", ".ir", ""}


def phrase(pattern):
    """Prose, in any case."""
    return f"(?i:{pattern})"


def word(*names):
    """Each name as a word of prose or as a part of an identifier: cut, is_cut, cut_order, CutOrder."""
    parts = []
    for name in names:
        parts.append(rf"(?<![A-Za-z])(?i:{name})(?![a-z])")  # prose and snake_case
        parts.append(rf"(?<=[a-z0-9A-Z]){name.capitalize()}(?![a-z])")  # CamelCase
    return "|".join(parts)


NOUN = r"(?:rank|axis|step|unit|parameter|group|file|line|launcher|channel|call|process|test|op|mesh|bucket|node|tensor|dim|block|host|thread)"
TABLE = [  # pattern, what to write, an example that must match
    (word("cut", "cuts", "cutting", "uncut"), "shard, sharded; split", "is_cut()"),
    (word("whole", "wholes"), "replicated; unsharded; full tensor; entire", "WholeParameters"),
    (word("piece", "pieces"), "local shard, local tensor; part", "piece_of(t)"),
    (word("lies", "lie", "lying"), "has placement S(0); is stored", "where it lies"),
    (phrase(r"\bpending sums?\b|\b(?:has|have|is|are) an? term\b|\bterms? of (?:a|the) sum\b"), "partial", "each rank has a term"),
    (phrase(r"\bput(?:s|ting)? (?:\w+ )?right\b|\bmend(?:s|ed|ing)?\b"), "redistribute; fix", "puts them right"),
    (phrase(r"\blets? go of\b|\blet_go\b|\bletting go\b"), "free, release", "let go of"),
    (phrase(rf"\b(?:one|two|three|four|five|a number|a file|once|\d+) an? {NOUN}\b"), "one per rank", "one a rank"),
    (phrase(r"\bforetold\b|\bforetells?\b"), "predicted", "is foretold"),
    (phrase(r"\blast[ _]words\b"), "error file", "last_words"),
    (word("departure", "departures") + "|" + phrase(r"\bwho is still there\b"), "liveness; stopped ranks", "Departures"),
    (word("owes", "owed") + "|" + phrase(r"\bwhat (?:has )?came\b|\bcame_\b|\baside_?\b"), "ready, deferred, saved gradients", "aside_"),
    (r"\bfew_|\bFew\b|_few\b|`few`", "reshard group", "few_layout"),
    (r"\bTurns?\b|\bturns?_\b|\bturn(?:\.|->)\w|\bhide\(", "scheduled unit; reshard but keep the buffer", "turn.unit"),
    (word("claim", "claims", "claimed", "claimer", "claimers", "originals", "told") + r"|\bHeld\b",
     "parameter ownership; unflattened parameters; notify; local boxes", "Claims"),
    (phrase(r"\bconcludes?\b|\bconcluded\b|\bconclusion\b"), "gather on rank 0, decide, broadcast", "conclude(all)"),
    (phrase(r"\bmakes? a program of\b|\bruns? as it is\b"), "compiles the step; falls back to eager", "makes a program of"),
    (phrase(r"\bbugs? of ours\b|\bour bug\b"), "internal error, please report", "a bug of ours"),
    (phrase(r"\bfor (?:those )?who knows?\b|\bby who\b|\bof who\b"), "for PyTorch users; by the caller", "for who knows PyTorch"),
    (phrase(r"\b(?:is|are|was|were) no (?!longer|more\b|less|other)(?!\w+ (?:in|for|left|of|on|at|to|that|which|there|here|between)\b)[a-z]+|"
     r"\bare none\b|\bis none\b"), "is not an X; there are none", "it is no tensor"),
]


def allowed():
    for line in (ROOT / "tools/words_allowed.txt").read_text().splitlines():
        if line.strip() and not line.startswith("#"):
            path, text, reason = (part.strip() for part in line.split(" | "))
            assert reason, line
            yield re.compile(path), re.compile(text)


def main(arguments):
    table = [(re.compile(pattern), advice, example) for pattern, advice, example in TABLE]
    if "--expect" in arguments:
        missed = [example for pattern, _, example in table if not pattern.search(example)]
        print("\n".join(f"not found: {example}" for example in missed))
        return 1 if missed else 0
    exceptions = list(allowed())
    files = subprocess.check_output(["git", "ls-files", "-co", "--exclude-standard", "--", *arguments], cwd=ROOT, text=True)
    any_pattern = re.compile("|".join(f"(?:{pattern})" for pattern, _, _ in TABLE))
    found = 0
    for name in files.splitlines():
        path = ROOT / name
        if path.suffix not in SUFFIXES or not path.is_file() or name in ("tools/check_words.py", "tools/words_allowed.txt"):
            continue
        text = path.read_text(errors="replace")
        if not any_pattern.search(text):
            continue
        mine = [words for where, words in exceptions if where.search(name)]
        for number, line in enumerate(text.splitlines(), 1):
            for exception in mine:
                line = exception.sub("", line)
            for pattern, advice, _ in table:
                if match := pattern.search(line):
                    print(f"{name}:{number}: '{match[0]}' -> {advice}: {line.strip()[:110]}")
                    found += 1
    print(f"{found} found")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
