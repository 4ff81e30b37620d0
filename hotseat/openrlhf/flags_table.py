"""The table of all flags in docs/openrlhf.md: `python -m hotseat.openrlhf.flags_table FILE` updates it."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from hotseat.cli.options_view import options
from hotseat.config.unsupported import UNBUILT
from hotseat.openrlhf.flags import COMMANDS, TASKS, Flag
from hotseat.openrlhf.help import MEANINGS

BEGIN, END = "<!-- table of flags: begin -->", "<!-- table of flags: end -->"
HEADER = "| flag | newer spelling | for | config field | what it does |\n| --- | --- | --- | --- | --- |"


def render_table() -> str:
    """Render one row per flag and meaning, in the order of the commands."""
    meanings = {option["key"]: option["meaning"] for option in options("")}
    rows: dict[tuple[str, ...], list[str]] = {}
    for command, flags in COMMANDS.items():
        for flag in flags:
            rows.setdefault(_row(flag, meanings), []).append(TASKS[command])
    lines = []
    for (names, dotted, fields, effect), tasks in rows.items():
        where = "all" if len(tasks) == len(COMMANDS) else ", ".join(tasks)
        lines.append(f"| {names} | {dotted} | {where} | {fields} | {effect} |")
    return "\n".join([HEADER, *lines])


def with_table(document: str, table: str) -> str:
    """Return a document with the table between its two marks replaced."""
    before, _, rest = document.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table}\n{END}{after}"


def _row(flag: Flag, meanings: Mapping[str, str]) -> tuple[str, str, str, str]:
    names = " ".join(f"`{name}`" for name in (flag.name, *flag.aliases))
    return (
        names,
        f"`{flag.dotted}`" if flag.dotted else "",
        " ".join(f"`{key}`" for key in flag.sets),
        _effect(flag, meanings),
    )


def _effect(flag: Flag, meanings: Mapping[str, str]) -> str:
    """Describe what a flag does: the meaning of the first field that it sets, and its features that are not built."""
    if flag.because:
        return f"no effect: {flag.because}"
    if flag.unsupported:
        return f"not built yet: {flag.unsupported}"
    if not flag.sets:
        return "set by `deepspeed` and `torchrun` for each process"
    built = [key for key in flag.sets if feature_of(key) is None]
    lacking = [
        each for each in UNBUILT if any(each.owns(key) or (each.values and key == each.key) for key in flag.sets)
    ]
    word = "refused" if all(each.is_refused for each in lacking) else "not built yet"
    note = f"{word}: {', '.join(dict.fromkeys(each.what for each in lacking))}" if lacking else ""
    if not built:
        return note
    return f"{MEANINGS.get(flag.name, meanings[built[0]])} {note[:1].upper()}{note[1:]}".strip().replace("|", "\\|")


def feature_of(key: str) -> str | None:
    """Return the unbuilt feature that a field belongs to, if it belongs to nothing else."""
    return next((each.what for each in UNBUILT if each.owns(key)), None)


def main(argv: Sequence[str]) -> None:
    path = Path(argv[0])
    path.write_text(with_table(path.read_text(), render_table()))


if __name__ == "__main__":
    main(sys.argv[1:])
