#!/usr/bin/env python3
"""Checks that every public symbol has an example that a test compiles and runs.

    check_examples.py              every symbol of a public header is used in an example, and the examples in the comments of
                                   the headers are part of compiled code
    check_examples.py --planted    a test of this script: it must report what is wrong in a sample

Compiled code is: tests/docs/api (one test per header, see below), the C++ blocks of the pages that cmake/TesseraDocs.cmake
names, and examples/. Lines of tests/docs/api between `// example: tessera/comm/work.h` and `// end` are shown on the page of
that header. tools/build_docs.py shows, for a symbol that its header's example does not use, the lines of another example."""
import pathlib
import re
import sys
import textwrap

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import public_symbols

ROOT = pathlib.Path(__file__).resolve().parent.parent
REGION = re.compile(r"^ *// example: (\S+)\n(.*?)^ *// end\n", re.S | re.M)


def regions():
    """Header -> the code of its examples in tests/docs/api."""
    found = {}
    for path in sorted((ROOT / "tests/docs/api").glob("*_test.cpp")):
        for header, code in REGION.findall(path.read_text()):
            found.setdefault(header, []).append(textwrap.dedent(code).strip("\n"))
    return found


def pages():
    """(name, text) of the compiled code besides tests/docs/api: blocks of pages, and examples."""
    for page in re.findall(r"^tessera_doc_blocks\((\S+)", (ROOT / "cmake/TesseraDocs.cmake").read_text(), re.M):
        for block in re.findall(r"^```cpp\n(.*?)^```", (ROOT / page).read_text(), re.S | re.M):
            yield page, block
    for path in sorted((ROOT / "examples").glob("*.cpp")):
        yield path.relative_to(ROOT).as_posix(), path.read_text()


def normalized(code):
    """Code without comments and spaces."""
    return re.sub(r"\s+", "", re.sub(r"//.*", "", code))


def uses(code, symbol):
    """Whether the code names the symbol, and not one of torch. A module is named by its holder: Linear for LinearImpl."""
    code = re.sub(r"//.*|\b(torch|std|at)::(\w+::)*\w+", "", code)
    if symbol.startswith("operator"):
        return symbol[len("operator"):] in code
    return re.search(rf"\b{re.escape(symbol)}\b", code) or (
        symbol.endswith("Impl") and re.search(rf"\b{re.escape(symbol[:-4])}\b", code))


def excerpt(code, symbol):
    """The paragraph of the code that uses the symbol, and of a long one the lines around it."""
    for paragraph in re.split(r"\n\s*\n", code):
        if uses(paragraph, symbol):
            lines = paragraph.strip("\n").splitlines()
            at = next((i for i, line in enumerate(lines) if uses(line, symbol)), 0)
            return textwrap.dedent("\n".join(lines if len(lines) <= 12 else lines[max(0, at - 3) : at + 4]))
    return ""


def example_of(header, symbol, own, others):
    """(source, code) of the example of a symbol: "" as the source if its header's own example has it; None: none."""
    if any(uses(code, symbol) for code in own.get(header, [])):
        return "", ""
    for name, code in others:
        if uses(code, symbol):
            return name, excerpt(code, symbol)
    for name, codes in own.items():
        for code in codes:
            if uses(code, symbol):
                return name, excerpt(code, symbol)
    return None


def comment_examples(comment):
    """The parts of the C++ lines of a comment, without `Example:` and split at `...`"""
    for kind, lines in public_symbols.comment_blocks(comment):
        for line in lines if kind == "cpp" else []:
            for part in line.removeprefix("Example:").split("..."):
                if re.search(r"\w", normalized(part)):
                    yield normalized(part)


HIDDEN = re.compile(r"^ *// *(?!Example:)\S.*\bExample: +\S.*", re.M)


def errors_of(headers, own, others):
    compiled = normalized("\n".join([code for codes in own.values() for code in codes] + [code for _, code in others]))
    count = 0
    for header, text in headers:
        seen = set()
        for line in HIDDEN.findall(text):
            yield f"{header}: an example in the middle of a line is not compiled; begin a line with it: {line.strip()}"
        for name, comment, body in [("introduction", public_symbols.introduction(text), None), *public_symbols.symbols_of(text)]:
            count += body is not None
            if body is not None and not example_of(header, name, own, others):
                yield f"{header}: {name} has no example; use it in the example of this header in tests/docs/api"
            if tuple(comment) not in seen:
                seen.add(tuple(comment))
                for part in comment_examples(comment):
                    if part not in compiled:
                        yield f"{header}: {name}: no test compiles this part of its comment: {part}"
    yield count


def public_headers():
    for header in (ROOT / "tools/public_headers.txt").read_text().split():
        if header.startswith("tessera/"):
            yield header, (ROOT / header).read_text()


SAMPLE = """
namespace tessera {
// Adds. Example:
//   int three = add(1, 2);
int add(int, int);

// Example:  int one = subtract(2, 1);
int subtract(int, int);

// No example.
int multiply(int, int);

// Divides. Example:  int two = divide(4, 2);
int divide(int, int);
}
"""


def main(arguments):
    if "--planted" in arguments:
        own = {"tessera/a.h": ["int three = add(1,\n    2);  // text", "subtract(4, 3)", "divide(6, 3)"]}
        *found, count = errors_of([("tessera/a.h", SAMPLE)], own, [])
        expected = ["tessera/a.h: an example in the middle of a line is not compiled; begin a line with it: "
                    "// Divides. Example:  int two = divide(4, 2);",
                    "tessera/a.h: subtract: no test compiles this part of its comment: intone=subtract(2,1);",
                    "tessera/a.h: multiply has no example; use it in the example of this header in tests/docs/api"]
        if (found, count) != (expected, 4):
            print(f"expected {expected}, found {found}, {count} symbols")
        return 0 if (found, count) == (expected, 4) else 1
    *errors, count = errors_of(public_headers(), regions(), list(pages()))
    print("\n".join(errors + [f"{count} public symbols, {len(errors)} errors"]))
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
