#!/usr/bin/env python3
"""Builds the documentation site, without network:  build_docs.py [--program build/release/bin/tessera] [--out build/docs/site]

The pages are docs/, the examples, the packages, and four references made from the project itself:
    API      the public headers (tools/public_headers.txt): every symbol with its comment
    CLI      the --help of the program
    ops      `tessera rules coverage` of the program
    errors   the messages of TESSERA_CHECK and TESSERA_FAIL in the sources
Needs MkDocs with the theme Material (tools/bootstrap docs), in build/docs/venv or in this Python. The site opens from
file://, search included. A broken link, a symbol without a comment and a header without a page are errors."""
import argparse
import html
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import check_examples
import check_public_headers
import public_symbols
from public_symbols import comment_text, symbols_of

ROOT = pathlib.Path(__file__).resolve().parent.parent
STAGE = ROOT / "build/docs/pages"

# Source files that become pages: path in the repository, path in the site, title, section.
PAGES = [
    ("README.md", "index.md", "Tessera", ""),
    ("docs/first_program.md", "tutorials/first_program.md", "A first program", "Tutorials"),
    ("docs/porting.md", "tutorials/porting.md", "From LibTorch to four ranks", "Tutorials"),
    ("docs/migration.md", "tutorials/migration.md", "From Python's DDP, FSDP and TP", "Tutorials"),
    ("docs/own_op.md", "tutorials/own_op.md", "An op of your own", "Tutorials"),
    ("docs/own_schedule.md", "tutorials/own_schedule.md", "A pipeline schedule of your own", "Tutorials"),
    ("docs/concepts.md", "concepts.md", "Concepts", ""),
    ("examples/slurm/README.md", "tutorials/slurm.md", "On a Slurm cluster", "Tutorials"),
    ("docs/weights.md", "howto/weights.md", "Bring your weights, see your run", "How to"),
    ("packaging/README.md", "howto/packages.md", "Install and package", "How to"),
    ("docs/security.md", "howto/security.md", "Security", "How to"),
    ("docs/benchmarks.md", "howto/benchmarks.md", "Benchmarks", "How to"),
    ("CONTRIBUTING.md", "howto/contributing.md", "Work on Tessera", "How to"),
    ("ARCHITECTURE.md", "design/architecture.md", "Architecture", "Design"),
    ("benchmarks/RESULTS.md", "howto/results.md", "Results of the benches", "How to"),
    ("CHANGELOG.md", "changelog.md", "Changelog", ""),
]
SECTIONS = ["Tutorials", "Examples", "How to", "Design", "API", "Reference"]


def repository_pages():
    pages = [page for page in PAGES if (ROOT / page[0]).exists()]
    for path in sorted((ROOT / "docs/design").glob("*.md")):
        title = path.read_text().splitlines()[0].lstrip("# ")
        pages.append((f"docs/design/{path.name}", f"design/{path.name}", title, "Design"))
    return pages


def rewrite_links(text, source, target, places):
    """Links between files of the repository become links between pages; links to other files become text."""
    def link(match):
        label, address = match[1], match[2]
        if re.match(r"[a-z]+:|#", address):
            return match[0]
        path, _, anchor = address.partition("#")
        file = os.path.normpath(os.path.join(os.path.dirname(source), path))
        if file in places:
            to = os.path.relpath(places[file], os.path.dirname(target) or ".")
            return f"{match[0][0] if match[0][0] == '!' else ''}[{label}]({to}{'#' + anchor if anchor else ''})"
        return label if label.startswith("`") or not path else f"{label} (`{file}`)"

    parts = re.split(r"(```.*?```)", text, flags=re.S)  # code is left as it is
    return "".join(part if part.startswith("```") else re.sub(r"!?\[([^\]]*)\]\(([^)\s]+)\)", link, part) for part in parts)


# --- API ---------------------------------------------------------------------------------------------------------------
def api_pages(places):
    """One page per public header. Returns [(path, title)], and the number of symbols. Every symbol has an example."""
    pages, count = [], 0
    own, others = check_examples.regions(), list(check_examples.pages())
    for header in (ROOT / "tools/public_headers.txt").read_text().split():
        if not header.startswith("tessera/"):
            continue
        text = (ROOT / header).read_text()
        missing = list(check_public_headers.undocumented(text))
        if missing:
            raise SystemExit(f"{header}:{missing[0][0]}: this symbol has no comment: {missing[0][1]}")
        found = list(symbols_of(text))
        page = f"api/{header[len('tessera/'):-2].replace('/', '.')}.md"
        shown = set()
        out = [f"# {header}", "", f"```cpp\n#include <{header}>\n```", ""]
        before = None
        introduction = public_symbols.introduction(text)
        out += [comment_text(introduction), ""]
        if header in own:
            out += ["## Example", "", "```cpp", "\n\n".join(own[header]), "```", ""]
        for name, comment, body in found:
            count += 1
            example = check_examples.example_of(header, name, own, others)
            if not example:
                raise SystemExit(f"{header}: {name} has no example; tools/check_examples.py")
            if comment is not before or not comment:
                out += [f"## {name} {{: #{re.sub(r'[^a-z0-9]+', '-', name.lower()).strip('-') or 'operator'}-{count} }}", ""]
                if comment:
                    out += [comment_text(comment), ""]
            out += ["```cpp", *body, "```", ""]
            source, code = example
            if source and name not in shown:
                place = places.get(source) or f"api/{source[len('tessera/'):-2].replace('/', '.')}.md"
                out += [f"Example, from [{source}](../{place}):", "", "```cpp", code, "```", ""]
                shown.add(name)
            before = comment
        target = STAGE / page
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text("\n".join(out))
        pages.append((page, header[len("tessera/"):]))
    return pages, count


# --- other references ----------------------------------------------------------------------------------------------------
def run(program, *words):
    return subprocess.run([program, *words], capture_output=True, text=True, check=True, env={**os.environ, "COLUMNS": "100"}).stdout


def cli_page(program):
    top = run(program, "--help")
    commands = re.findall(r"^  (\w+)\s{2,}", top.split("ubcommands:")[-1], re.M)
    out = ["# The program tessera", "", "Made from `tessera --help`.", "", f"```text\n{top.rstrip()}\n```", ""]
    for command in commands:
        out += [f"## tessera {command}", "", f"```text\n{run(program, command, '--help').rstrip()}\n```", ""]
    (STAGE / "reference").mkdir(exist_ok=True)
    (STAGE / "reference/cli.md").write_text("\n".join(out))
    return len(commands)


def check_blocks(pages):
    """Every page with C++ is one whose blocks a test compiles (cmake/TesseraDocs.cmake)."""
    compiled = {page for page, _ in check_examples.pages()}
    for source, _, _, _ in pages:
        if "```cpp\n" in (ROOT / source).read_text() and source not in compiled:
            raise SystemExit(f"{source}: no test compiles its C++; add it to cmake/TesseraDocs.cmake")


def check_commands(program, pages):
    """The commands `tessera ...` of a page have only options that the program has."""
    helps = {}
    for source, _, _, _ in pages:
        for line in re.findall(r"^    tessera (.*)$", (ROOT / source).read_text(), re.M):
            command, *words = re.sub(r"\s#.*| -- .*", "", line).split()
            if command.startswith("-"):
                continue
            if command not in helps:
                done = subprocess.run([program, command, "--help"], capture_output=True, text=True)
                if done.returncode:
                    raise SystemExit(f"{source}: `tessera {line}`: unknown command {command}")
                helps[command] = done.stdout
            for word in words:
                option = word.split("=")[0]
                if re.match(r"--?[a-z]", option) and not re.search(rf"(^|[\s,]){re.escape(option)}[\s,=:]", helps[command]):
                    raise SystemExit(f"{source}: `tessera {line}`: the program has no option {option}")


def ops_page(program):
    rows = json.loads(run(program, "rules", "coverage", "--json"))
    out = ["# Ops with sharding strategies", "",
           "Made from `tessera rules coverage`: the ops for which PyTorch's DTensor has a strategy, and what Tessera does. "
           "`tessera rules show OP` prints the strategies of a call.", ""]
    listed = rows if isinstance(rows, list) else rows.get("ops", [])
    if isinstance(rows, dict):
        out += ["| | |", "|---|---|"] + [f"| {key} | {value} |" for key, value in rows.items() if not isinstance(value, (list, dict))] + [""]
    if listed:
        columns = list(listed[0]) if isinstance(listed[0], dict) else ["op"]
        out += ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
        for row in listed:
            cells = [str(row.get(c, "")) for c in columns] if isinstance(row, dict) else [str(row)]
            out.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    (STAGE / "reference/ops.md").write_text("\n".join(out) + "\n")
    return len(listed)


MESSAGE = re.compile(r"TESSERA_(CHECK|FAIL|CHECK_ERRNO)\s*\(")


def call_arguments(text, at):
    """The arguments of a call whose ( is at `at`, split at its commas."""
    depth, start, quoted, out, i = 0, at + 1, False, [], at
    while i < len(text):
        c = text[i]
        if quoted:
            i += c == "\\"
            quoted = c != '"' or text[i] == "\\" and False
        elif c == '"':
            quoted = True
        elif c == "'" and text[i + 2 : i + 3] == "'":
            i += 2
        elif c in "([{":
            depth += 1
        elif c in ")]}":
            depth -= 1
            if depth == 0:
                return out + [text[start:i]]
        elif c == "," and depth == 1:
            out.append(text[start:i])
            start = i + 1
        i += 1
    return []


def message_of(arguments):
    """The text of a message: string literals as they are, other arguments as …"""
    out = ""
    for argument in arguments:
        literals = re.findall(r'"((?:\\.|[^"\\])*)"', argument)
        is_literal = re.fullmatch(r'\s*("(?:\\.|[^"\\])*"\s*)+', argument, re.S)
        out += "".join(literals).replace('\\"', '"').replace("\\n", " ") if is_literal else "…"
    return re.sub(r"…+", "…", out).strip()


def errors_page():
    by_layer = {}
    for path in sorted((ROOT / "tessera").rglob("*.cpp")):
        text = path.read_text()
        for match in MESSAGE.finditer(text):
            arguments = call_arguments(text, match.end() - 1)
            kinds = [i for i, a in enumerate(arguments[:2]) if re.fullmatch(r"\s*\w+Error\s*", a)]
            kind = arguments[kinds[0]].strip() if kinds else "SystemError" if match[1] == "CHECK_ERRNO" else None
            message = message_of(arguments[kinds[0] + 1 if kinds else 1 :])
            if kind and len(message.replace("…", "").strip()) > 8:
                layer = path.relative_to(ROOT / "tessera").parts[0]
                by_layer.setdefault(layer, set()).add((kind, message))
    out = ["# Error catalogue", "", "Made from the sources. `…` stands for what depends on the call. UsageError: the caller can fix "
           "it. ShardingError: placements do not combine. CommError: a peer or the network. SystemError: the machine. InternalError: "
           "please report.", ""]
    for layer, messages in sorted(by_layer.items()):
        out += [f"## {layer}", "", "| error | message |", "|---|---|"]
        out += [f"| {kind} | {html.escape(message).replace('|', '&#124;').replace('*', '&#42;').replace('_', '&#95;')} |" for kind, message in sorted(messages)]
        out.append("")
    (STAGE / "reference/errors.md").write_text("\n".join(out))
    return sum(len(messages) for messages in by_layer.values())


def example_pages():
    pages = []
    for path in sorted((ROOT / "examples").glob("*.cpp")):
        lines = path.read_text().splitlines()
        end = next(i for i, line in enumerate(lines) if not line.startswith("//"))
        title = path.stem.replace("_", " ").capitalize()
        page = f"examples/{path.stem}.md"
        body = "\n".join(re.sub(r"^// ?", "", line) for line in lines[:end])
        code = "\n".join(lines[end:]).strip()
        (STAGE / "examples").mkdir(exist_ok=True)
        (STAGE / page).write_text(f"# {title}\n\n{body}\n\n`examples/{path.name}`, which the tests build and run on one and on four "
                                  f"ranks:\n\n```cpp\n{code}\n```\n")
        pages.append((page, title))
    return pages


# Browsers load no worker from file://. There, the worker of the search runs in a hidden frame of the page. (The theme would
# load such a script from the network.)
WORKER = """if (location.protocol === "file:") window.Worker = class extends EventTarget {
  constructor(address) {
    super();
    const frame = document.createElement("iframe"), waiting = [];
    frame.hidden = true;
    document.body.append(frame);
    const inner = frame.contentWindow, script = inner.document.createElement("script");
    inner.postMessage = data => this.dispatchEvent(new MessageEvent("message", {data}));
    inner.importScripts = () => Promise.resolve();
    this.send = data => inner.dispatchEvent(new inner.MessageEvent("message", {data}));
    this.postMessage = data => waiting.push(data);
    script.onload = () => { this.postMessage = this.send; waiting.forEach(data => this.send(data)); };
    script.src = new URL(address, location.href);
    inner.document.body.append(script);
  }
};
"""


def use_own_worker(site):
    (site / "assets/worker.js").write_text(WORKER)
    for path in site.rglob("*.html"):
        up = os.path.relpath(site, path.parent)
        text = path.read_text()
        path.write_text(text.replace("https://unpkg.com/iframe-worker/shim", f"{up}/assets/worker.js"))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--program", default=str(ROOT / "build/release/bin/tessera"))
    parser.add_argument("--out", default=str(ROOT / "build/docs/site"))
    arguments = parser.parse_args()
    if not os.path.exists(arguments.program):
        raise SystemExit(f"{arguments.program} does not exist; build the target tessera_program, or give --program")
    shutil.rmtree(STAGE, ignore_errors=True)
    STAGE.mkdir(parents=True)
    pages = repository_pages()
    places = {source: target for source, target, _, _ in pages}
    shutil.copy(ROOT / "docs/picture.svg", STAGE / "picture.svg")
    (STAGE / "wide.css").write_text("@media (min-width: 76.25em) { .md-grid { max-width: 84rem; } }\n")  # code has 120 columns
    places["docs/picture.svg"] = "picture.svg"
    nav = {"": []}
    for source, target, title, section in pages:
        (STAGE / target).parent.mkdir(parents=True, exist_ok=True)
        (STAGE / target).write_text(rewrite_links((ROOT / source).read_text(), source, target, places))
        nav.setdefault(section, []).append((target, title))
    nav["Examples"] = example_pages()
    places |= {f"examples/{pathlib.Path(page).stem}.cpp": page for page, _ in nav["Examples"]}
    nav["API"], symbols = api_pages(places)
    check_blocks(pages)
    check_commands(arguments.program, pages)
    commands, ops, errors = cli_page(arguments.program), ops_page(arguments.program), errors_page()
    nav["Reference"] = [("reference/cli.md", "Program"), ("reference/ops.md", "Ops"), ("reference/errors.md", "Errors")]

    def entries(section):
        return "".join(f"      - {json.dumps(title)}: {target}\n" for target, title in nav.get(section, []))

    config = ROOT / "build/docs/mkdocs.yml"
    config.write_text(
        f"site_name: Tessera\nsite_description: Distributed tensors and SPMD training for LibTorch\n"
        f"docs_dir: {STAGE}\nsite_dir: {arguments.out}\n"
        "theme:\n  name: material\n  font: false\n  icon:\n    repo: null\n"
        "  features: [navigation.indexes, navigation.top, search.highlight, content.code.copy, toc.follow]\n"
        "  palette:\n"
        "    - {media: '(prefers-color-scheme)', toggle: {icon: material/brightness-auto, name: As the system}}\n"
        "    - {media: '(prefers-color-scheme: light)', scheme: default, primary: teal, toggle: {icon: material/weather-night, name: Dark}}\n"
        "    - {media: '(prefers-color-scheme: dark)', scheme: slate, primary: teal, toggle: {icon: material/weather-sunny, name: Light}}\n"
        "extra_css: [wide.css]\nextra: {generator: false}\nplugins: [search, offline]\n"
        "markdown_extensions: [tables, attr_list, toc, pymdownx.highlight, pymdownx.superfences]\n"
        "validation: {links: {anchors: info, unrecognized_links: info}}\n"
        "nav:\n" + "".join(f"  - {json.dumps(title)}: {target}\n" for target, title in nav[""] if target != "changelog.md")
        + "".join(f"  - {section}:\n{entries(section)}" for section in SECTIONS)
        + "  - Changelog: changelog.md\n")
    python = ROOT / "build/docs/venv/bin/python3"
    command = [str(python) if python.exists() else sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-f", str(config)]
    done = subprocess.run(command)
    if done.returncode:
        return done.returncode
    use_own_worker(pathlib.Path(arguments.out))
    total = len(list(pathlib.Path(arguments.out).rglob("*.html")))
    print(f"{arguments.out}/index.html: {total} pages; {symbols} symbols of {len(nav['API'])} headers, {commands} commands, "
          f"{ops} ops, {errors} error messages")
    return 0


if __name__ == "__main__":
    sys.exit(main())
