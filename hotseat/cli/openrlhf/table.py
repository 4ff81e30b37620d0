"""The table of all flags in docs/openrlhf.md: `python -m hotseat.cli.openrlhf.table FILE` writes it anew."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from hotseat.cli.openrlhf.flags import COMMANDS, TASKS, Flag
from hotseat.cli.openrlhf.readers import find_readers
from hotseat.config.built import UNBUILT

BEGIN, END = "<!-- table of flags: begin -->", "<!-- table of flags: end -->"
HEADER = "| flag | newer spelling | for | config field | read by, or why not |\n| --- | --- | --- | --- | --- |"


def render_table(readers: Mapping[str, str] | None = None) -> str:
    """One row per flag and meaning, in the order of the commands."""
    readers = find_readers() if readers is None else readers
    rows: dict[tuple[str, ...], list[str]] = {}
    for command, flags in COMMANDS.items():
        for flag in flags:
            rows.setdefault(_row(flag, readers), []).append(TASKS[command])
    lines = []
    for (names, dotted, fields, effect), tasks in rows.items():
        where = "all" if len(tasks) == len(COMMANDS) else ", ".join(tasks)
        lines.append(f"| {names} | {dotted} | {where} | {fields} | {effect} |")
    return "\n".join([HEADER, *lines])


def with_table(document: str, table: str) -> str:
    """A document with the table between its two marks."""
    before, _, rest = document.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table}\n{END}{after}"


def _row(flag: Flag, readers: Mapping[str, str]) -> tuple[str, str, str, str]:
    names = " ".join(f"`{name}`" for name in (flag.name, *flag.aliases))
    return (
        names,
        f"`{flag.dotted}`" if flag.dotted else "",
        " ".join(f"`{key}`" for key in flag.sets),
        _effect(flag, readers),
    )


def _effect(flag: Flag, readers: Mapping[str, str]) -> str:
    if flag.because:
        return f"no effect: {flag.because}"
    if flag.not_built:
        return f"not built yet: {flag.not_built}"
    if flag.read_by:
        return f"`{flag.read_by}`"
    said = []
    for key in flag.sets:
        if feature := feature_of(key):
            said.append(f"not built yet: {feature}")
        else:
            said.append(f"`{readers[key]}`" if key in readers else "not read yet")
    values = [f"`{value}` is not built yet" for each in UNBUILT if each.key in flag.sets for value in each.values]
    return "; ".join(dict.fromkeys(said + values))


def feature_of(key: str) -> str | None:
    """The feature that is not built and to which alone a field belongs."""
    return next((each.what for each in UNBUILT if each.owns(key)), None)


def main(argv: Sequence[str]) -> None:
    path = Path(argv[0])
    path.write_text(with_table(path.read_text(), render_table()))


if __name__ == "__main__":
    main(sys.argv[1:])
