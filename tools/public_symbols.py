"""Reads the symbols of public headers: names, comments and declarations. For tools/build_docs.py and tools/check_examples.py."""
import re
import textwrap

import check_public_headers


def is_cpp(lines):
    """Whether indented lines of a comment are C++, and not a table or a drawing."""
    return any(line.startswith("Example:") or re.search(r"[;{}]$", re.sub(r"//.*", "", line).rstrip()) for line in lines)


def comment_blocks(lines):
    """The parts of a // comment: ("text" or "cpp" or "drawing", lines). Lines that are indented more than prose are code."""
    blocks = []
    for line in lines:
        text = re.sub(r"^\s*// ?", "", line)
        starts = text.startswith("Example:")
        kind = "code" if starts or text.startswith("  ") or (not text.strip() and blocks and blocks[-1][0] == "code") else "text"
        if not blocks or blocks[-1][0] != kind or starts or (kind == "code" and blocks[-1][1][-1:] == [""]):
            blocks.append((kind, []))
        blocks[-1][1].append(text)
    return [("text" if kind == "text" else "cpp" if is_cpp(block) else "drawing", block) for kind, block in blocks]


def comment_text(lines):
    """A // comment as Markdown."""
    out = []
    for kind, block in comment_blocks(lines):
        block = "\n".join(block).rstrip()
        if block.startswith("Example:"):
            block = textwrap.dedent(block.replace("Example:", " " * len("Example:"), 1)).strip("\n")
        out.append(block if kind == "text" else f"\n```{'cpp' if kind == 'cpp' else 'text'}\n{block}\n```\n")
    return "\n".join(out)


def without_private(lines):
    """The public part of a class."""
    out, hidden, depth = [], False, 0
    for number, line in enumerate(lines):
        code = check_public_headers.strip(line)
        if depth == 1 and re.match(r"\s*(private|protected):", code):
            hidden = True
        elif depth == 1 and re.match(r"\s*public:", code):
            hidden = False
        last = number == len(lines) - 1
        if not hidden or last:
            out.append(line)
        depth += code.count("{") - code.count("}")
    while len(out) > 2 and not out[-2].strip():
        del out[-2]
    return out


def without_body(lines):
    """The declaration of a function that is defined: up to the { outside of its parentheses."""
    text, parens = "\n".join(lines), 0
    for i, c in enumerate(text):
        parens += (c == "(") - (c == ")")
        if c == "{" and parens == 0 and text[:i].rstrip()[-1:] != "=":
            return (text[:i].rstrip() + ";").splitlines()
    return lines


def introduction(text):
    """The comment lines above the namespace, which introduce the header."""
    above = re.split(r"^namespace tessera", text, maxsplit=1, flags=re.M)[0].rstrip("\n").splitlines()
    start = len(above)
    while start and above[start - 1].startswith("//"):
        start -= 1
    return above[start:]


def symbols_of(text):
    """(name, comment lines, declaration lines) of each declaration at namespace scope."""
    lines = text.splitlines()
    comment, i = [], 0
    declared = False  # since the comment; a comment after a declaration is that of the next one
    namespaces = 0
    hidden_from = 0  # the level of a detail namespace; 0: outside
    while i < len(lines):
        line = lines[i]
        code = check_public_headers.strip(line).strip()
        opened = re.match(r"(inline )?namespace\s+([\w:]*)\s*\{", code)
        if opened and "}" not in code:
            namespaces += 1
            if "detail" in opened[2].split("::") and not hidden_from:
                hidden_from = namespaces
            comment = []
        elif code.startswith("}") and "namespace" in line:
            if hidden_from == namespaces:
                hidden_from = 0
            namespaces -= 1
            comment = []
        elif line.strip().startswith("//"):
            comment = [line] if declared else comment + [line]
            declared = False
        elif not line.strip():
            comment = []
        elif code.startswith("#") and not code.startswith("#define"):
            comment = []
        elif re.match(r"TESSERA_\w+\(\w+\)$", code):  # a list of declarations, whose macro has the comment
            comment = []
        elif code.startswith("#define"):
            body = [line]
            while lines[i].rstrip().endswith("\\"):
                i += 1
                body.append(lines[i])
            name = re.match(r"#define (\w+)", code)[1]
            if not name.endswith("_") and f"#undef {name}\n" not in text:
                yield name, comment, body[:1] if len(body) > 3 else body
        else:
            start, braces, parens = i, 0, 0
            while True:
                code = check_public_headers.strip(lines[i])
                braces += code.count("{") - code.count("}")
                parens += code.count("(") - code.count(")")
                if braces <= 0 and parens <= 0 and re.search(r"[;}]\s*$", code.rstrip()):
                    break
                i += 1
                if i >= len(lines):
                    return
            body = lines[start : i + 1]
            first = " ".join(check_public_headers.strip(l).strip() for l in body[:3])
            first = re.sub(r"^template\s*<[^{;]*?>\s*(requires [^{;]*? )?(?=(class|struct|[\w:<>,&* ]+\())", "", first)
            type_match = re.match(r"(?:template\s*<.*?>\s*)?(?:class|struct|enum class|enum|union)\s+(\w+)", first)
            call = re.search(r"(operator\S+|(?!requires|decltype)\b[\w~]+)\s*\(", first)
            made_by_macro = re.match(r"TESSERA_\w+\((\w+),", first)
            alias = re.match(r"using\s+(\w+)\s*=", first)
            constant = re.search(r"(\w+)\s*(?:\[\])?\s*(?:=|\{|;)", first)
            is_forward = re.match(r"(class|struct)\s+[\w:]+;$", first)
            match = type_match or alias or made_by_macro or call or constant
            is_internal = any(line.startswith("// Internal:") for line in comment)
            if match and not is_internal and not hidden_from and not is_forward and not first.startswith(("static_assert", "extern template", "friend", "struct std::", "template <> struct std::")):
                if type_match:
                    body = without_private(body)
                elif call and not alias and check_public_headers.strip(body[-1]).rstrip().endswith("}"):
                    body = without_body(body)
                yield match[1], comment, body
            declared = True
        i += 1
