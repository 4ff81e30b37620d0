"""The table of all flags in docs/openrlhf.md: `python scripts/openrlhf_table.py FILE` updates it."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from doc_tables import update

from hotseat.cli.options_view import options
from hotseat.config.unsupported import UNSUPPORTED
from hotseat.openrlhf.flag import Flag
from hotseat.openrlhf.flags import COMMANDS, TASKS
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


def _row(flag: Flag, meanings: Mapping[str, str]) -> tuple[str, str, str, str]:
    names = " ".join(f"`{name}`" for name in (flag.name, *flag.aliases))
    return (
        names,
        f"`{flag.dotted}`" if flag.dotted else "",
        " ".join(f"`{key}`" for key in flag.sets),
        _effect(flag, meanings),
    )


def _effect(flag: Flag, meanings: Mapping[str, str]) -> str:
    """Describe what a flag does: the meaning of the first field that it sets."""
    if flag.because:
        return f"no effect: {flag.because}"
    if not flag.sets:
        return "set by `deepspeed` and `torchrun` for each process"
    if flag.sets[0] in UNSUPPORTED:
        return f"refused: {UNSUPPORTED[flag.sets[0]]}"
    return MEANINGS.get(flag.name, meanings[flag.sets[0]]).replace("|", "\\|")


def main(argv: Sequence[str]) -> None:
    update(argv[0], render_table(), BEGIN, END)


if __name__ == "__main__":
    main(sys.argv[1:])
