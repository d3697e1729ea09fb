#!/usr/bin/env python3
"""Checks that the pages (*.md) name files, folders and headings that exist.

    check_links.py             reports links and paths in backticks that lead nowhere
    check_links.py --planted   a test of this script: it must report what is wrong in a sample

A path in backticks counts if it begins with a folder of the repository, as `tessera/base/error.h` does. Names with x in place
of a real name, <name>, * or { } are patterns. CHANGELOG.md names files that are gone."""
import pathlib
import posixpath
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
CODE = re.compile(r"`([^`\n]+)`")
PATTERN = re.compile(r"[<>*{} ]|(^|/)x[_.]")


def slug(heading):
    """The anchor of a heading, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def anchors(text):
    return {slug(heading) for heading in re.findall(r"^#+ (.*)$", text, re.M)}


def errors_of(page, text, names, read):
    """`names`: all files and folders; read(name): the text of a page."""
    tops = {name.split("/")[0] for name in names if "/" in name}
    for link in LINK.findall(text):
        if re.match(r"\w+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = posixpath.normpath(posixpath.join(posixpath.dirname(page), path)) if path else page
        if target not in names:
            yield f"{page}: the link {link} leads nowhere"
        elif anchor and target.endswith(".md") and anchor not in anchors(text if target == page else read(target)):
            yield f"{page}: {target} has no heading for the link {link}"
    for path in CODE.findall(text):
        if path.split("/")[0] in tops and "/" in path and not PATTERN.search(path) and path.rstrip("/") not in names:
            yield f"{page}: {path} does not exist"


def main(arguments):
    if "--planted" in arguments:
        names = {"a.md", "docs", "docs/b.md", "src", "src/c.h"}
        sample = "# One `two`\n[b](docs/b.md#here) [b](docs/b.md#gone) [me](#one-two) [c](c.md) [web](https://d.e) `src/c.h` `src/d.h` `src/x.h`\n"
        found = list(errors_of("a.md", sample, names, lambda name: "## Here\n"))
        expected = ["a.md: docs/b.md has no heading for the link docs/b.md#gone", "a.md: the link c.md leads nowhere",
                    "a.md: src/d.h does not exist"]
        if found != expected:
            print(f"expected {expected}, found {found}")
        return 0 if found == expected else 1
    listed = subprocess.run(["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, check=True, text=True,
                            capture_output=True).stdout.split("\n")
    names = {name for name in listed if name and (ROOT / name).exists()}
    names |= {str(parent) for name in names for parent in pathlib.PurePosixPath(name).parents}
    pages = [name for name in sorted(names) if name.endswith(".md") and name != "CHANGELOG.md"]
    read = lambda name: (ROOT / name).read_text()
    errors = [error for page in pages for error in errors_of(page, read(page), names, read)]
    print("\n".join(errors + [f"{len(pages)} pages, {len(errors)} errors"]))
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
