"""Write the pages of the documentation that are made from the code: options, commands, flags, error messages.

    python scripts/reference_pages.py FOLDER

`make docs` does so before it builds the site.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from hotseat import errors
from hotseat.cli.main import make_parser
from hotseat.cli.options_view import options
from hotseat.registry.metric_names import HEADINGS, METRIC_NAMES

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "hotseat"
# What raises or yields an error: Problem(KEY, MESSAGE), and the classes of errors.
RAISED = {name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, Exception)}
SHORTEST_MESSAGE = 12  # characters besides what is filled in; shorter ones cannot be searched for


def write(folder: Path) -> None:
    """Write all generated pages into a folder."""
    folder.mkdir(exist_ok=True)
    for name, text in {
        "options": options_page(),
        "commands": commands_page(),
        "metrics": metrics_page(),
        "errors": errors_page(),
    }.items():
        path = folder / f"{name}.md"
        if not path.exists() or path.read_text() != text:  # an unchanged file need not be built again
            path.write_text(text)


def options_page() -> str:
    """Make the reference of options: a section for each section of the config."""
    sections = defaultdict(list)
    for option in options(""):
        sections[option["key"].split(".")[0] if "." in option["key"] else ""].append(option)
    parts = [
        "# Options\n\nEvery key of a config, with its default. `hotseat options SECTION` prints the same in a"
        " terminal. A key can be set in the file, or on the command line as `KEY=VALUE`."
    ]
    for section, found in sections.items():
        parts.append(f"## {section or 'Keys without a section'}")
        parts += [_option(option) for option in found]
    return "\n\n".join(parts) + "\n"


def _option(option: dict) -> str:
    default = option["default"]
    shown = "" if default is None else f" Default: `{default if isinstance(default, str) else _yaml(default)}`."
    tasks = "" if len(option["tasks"]) == 4 else f" Tasks: {', '.join(option['tasks'])}."
    only = f" Only if {', and '.join(option['if'])}." if option["if"] else ""
    missing = f" Not part of this version: {option['unsupported']}." if option["unsupported"] else ""
    facts = f"Takes: {option['takes']}.{shown}{tasks}{only}{missing}".replace("<", "\\<").replace("|", "\\|")
    return f"`{option['key']}`\n: {option['meaning']}\n\n  {facts}"


def _yaml(value: object) -> str:
    return {True: "true", False: "false"}.get(value, str(value)) if isinstance(value, bool) else str(value)


def commands_page() -> str:
    """Make the reference of the commands of `hotseat`: what `--help` prints of each."""
    parser = make_parser("resume")  # whose list of what may change is made only for it
    [commands] = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    parts = ["# Commands\n\nWhat `hotseat COMMAND --help` prints."]
    for name, command in commands.choices.items():
        command.formatter_class = _wide(command.formatter_class)
        parts.append(f"## hotseat {name}\n\n```text shown\n{command.format_help().strip()}\n```")
    return "\n\n".join(parts) + "\n"


def _wide(formatter: type) -> type:
    return lambda prog: formatter(prog, width=100)


def metrics_page() -> str:
    """Make the reference of metrics, by what is before the slash of their names."""
    parts = [
        "# Metrics\n\nThe names in `metrics.jsonl`, in trackers, at the endpoint and in the report. A word in"
        " capital letters stands for a name of the run, such as a phase or a task."
    ]
    for heading in HEADINGS:
        rows = [f"| `{entry.name}` | {entry.summary} |" for entry in METRIC_NAMES.values() if entry.heading == heading]
        parts.append("\n".join([f"## {heading}\n", "| metric | meaning |", "| --- | --- |", *rows]))
    return "\n\n".join(parts) + "\n"


def errors_page() -> str:
    """Make the list of error messages: each says what was given, what would fit, and what to change."""
    parts = [
        "# Error messages\n\nEvery message with which Hotseat stops or refuses something, by the part of the package"
        " that it comes from; `…` stands for what is filled in. Most say what to change; search this page for a part of"
        " yours.\n"
        "[Troubleshooting](../troubleshooting.md) explains the frequent ones."
    ]
    by_part = defaultdict(set)
    for path in sorted(PACKAGE.rglob("*.py")):
        part = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        by_part[part] |= set(_messages(ast.parse(path.read_text())))
    for part, messages in by_part.items():
        if messages:
            parts.append(f"## {part}\n\n" + "\n".join(f"- {text}" for text in sorted(messages)))
    return "\n\n".join(parts) + "\n"


def _messages(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in {*RAISED, "Problem"}:
            texts = [_text(argument) for argument in node.args]
            if node.func.id == "Problem" and len(texts) > 1 and texts[1]:
                yield from _long_enough(texts[1], f"{texts[0]}: " if texts[0] else "")
            elif node.func.id != "Problem" and texts:
                yield from _long_enough(texts[0])


def _long_enough(text: str, before: str = "") -> Iterator[str]:
    if len(text.replace("…", "")) >= SHORTEST_MESSAGE:
        yield _escaped(before + text)


def _text(node: ast.expr) -> str:
    """Return the text of a literal, with … for what is filled in; an empty one for other expressions."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return "".join(_text(part) or "…" for part in (node.left, node.right))
    return ""


def _escaped(text: str) -> str:
    return re.sub(r"([<>*_|`\[\]$])", r"\\\1", " ".join(text.split()))


if __name__ == "__main__":
    write(Path(sys.argv[1]))
