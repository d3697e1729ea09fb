#!/usr/bin/env python3
"""Checks the public headers: those below tessera/ that are neither in a detail/ folder nor part of the program (cli/).

    check_public_headers.py              the list in tools/public_headers.txt is complete and has at most 90 headers;
                                         every symbol has a doc comment
    check_public_headers.py --write      writes the list
    check_public_headers.py --planted    a test of this script: it must report the undocumented symbols of a sample

A symbol is a type, function, alias, constant or macro at namespace scope, or a public member of a type; the comment of a
type also documents its converting constructors. It is documented
by a comment above it or behind it. A comment above the first of several declarations without blank lines between them
documents all of them."""
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
LIST = ROOT / "tools/public_headers.txt"
MOST = 90
SKIP = re.compile(  # lines that declare nothing that a user calls
    r"\s*(?:#(?!define)|namespace\b|using [\w:<>,() ]+::\w+;|using Impl = |explicit \w+\(|\[\[nodiscard\]\] \w+\(|#define \w+_\(|public:|private:|protected:|friend\b|template\b.*>\s*$|requires\b|[})]|using namespace|"
    r"static_assert|extern template|~|explicit operator|TESSERA_MODULE|TORCH_|(?:class|struct|enum(?: class)?) [\w:<>]+;|"
    r"case |default:|return\b|if\b|for\b|else\b|while\b|\[\[nodiscard\]\]$|[:,])"
)
MEMBERWISE = re.compile(r"operator\s*=[^=]|= default|= delete|operator==|operator<<")


def strip(line):
    """The line without strings and comments."""
    return re.sub(r"//.*", "", re.sub(r'"(?:\\.|[^"\\])*"', '""', line))


def undocumented(text):
    """(line number, line) of each public declaration without a comment."""
    open_scopes = []  # per brace: "namespace", "public", "private", "detail" or "body"
    documented = False  # the declaration block at hand has a comment above it
    continuing = False  # the line continues a declaration
    parentheses = 0
    pending = None  # an undocumented declaration that goes on: a comment behind its last line counts
    for number, raw in enumerate(text.splitlines(), 1):
        line = raw.strip()
        code = strip(raw).strip()
        if not line:
            documented = continuing = False
            continue
        if line.startswith("//") or line.startswith("/*"):
            documented = True
            continue
        visible = all(scope in ("namespace", "public") for scope in open_scopes)
        label = re.match(r"(public|private|protected):", code)
        if label:
            open_scopes[-1] = "public" if label[1] == "public" else "private"
            documented = False
            continue
        declares = visible and not continuing and code and not SKIP.match(code) and not MEMBERWISE.search(code)
        if declares and not documented and "//" not in raw:
            pending = number, line
        head = code
        for char in re.finditer(r"[{}()]", code):
            if char[0] == "(":
                parentheses += 1
            elif char[0] == ")":
                parentheses -= 1
            elif char[0] == "{":
                before = head[: char.start()]
                if re.search(r"namespace\s+[\w:]*detail", before):
                    open_scopes.append("detail")
                elif re.search(r"\bnamespace\b", before):
                    open_scopes.append("namespace")
                elif parentheses == 0 and re.search(r"\b(struct|union)\s+\w+[^()=;]*$", before):
                    open_scopes.append("public")
                elif parentheses == 0 and re.search(r"\bclass\s+\w+[^()=;]*$", before) and "enum" not in before:
                    open_scopes.append("private")
                else:
                    open_scopes.append("body")
            elif open_scopes:
                open_scopes.pop()
        if pending and "//" in raw:
            pending = None
        continuing = bool(code) and not re.search(r"[;{}:]\s*$", code) and not code.startswith("#")
        if continuing and code.startswith("template"):
            continuing = parentheses != 0 or not code.endswith(">")
        if pending and not continuing:
            yield pending
            pending = None


SAMPLE = """
namespace tessera {
// A documented type.
class Documented {
 public:
  int first() const;  // documented
  int second() const;
 private:
  int third_;
};

int fourth(int x);

// Documented block.
int fifth();
int sixth();
}
"""


def main(arguments):
    if "--planted" in arguments:
        found = [line for _, line in undocumented(SAMPLE)]
        expected = ["int second() const;", "int fourth(int x);"]
        if found != expected:
            print(f"expected {expected}, found {found}")
        return 0 if found == expected else 1
    headers = sorted(p.relative_to(ROOT).as_posix() for p in (ROOT / "tessera").rglob("*.h"))
    headers = [h for h in headers if "/detail/" not in h and not h.startswith("tessera/cli/")]
    if "--write" in arguments:
        LIST.write_text("# Headers for users. tools/check_public_headers.py --write writes this list.\n" + "\n".join(headers) + "\n")
    errors = []
    listed = [line for line in LIST.read_text().splitlines() if line.startswith("tessera/")]
    errors += [f"{h}: not in tools/public_headers.txt; move it under detail/, or add it" for h in headers if h not in listed]
    errors += [f"tools/public_headers.txt: {h} does not exist" for h in listed if h not in headers]
    if len(listed) > MOST:
        errors.append(f"tools/public_headers.txt: {len(listed)} headers, at most {MOST} are allowed")
    for header in headers:
        for number, line in undocumented((ROOT / header).read_text()):
            errors.append(f"{header}:{number}: no doc comment: {line}")
    print("\n".join(errors + [f"{len(listed)} public headers, {len(errors)} errors"]))
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
