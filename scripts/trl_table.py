"""The tables of TRL's fields in docs/trl.md: `python scripts/trl_table.py FILE` updates them."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from doc_tables import update

from hotseat.cli.options_view import options
from hotseat.trl.peft_config import NAMES, WITHOUT_EFFECT
from hotseat.trl.trl_fields import CONFIGS, DPO, GRPO, REWARD, SFT, SHARED, TrlField

BEGIN, END = "<!-- tables of fields: begin -->", "<!-- tables of fields: end -->"
HEADER = (
    "| TRL | default there | here | default here | conversion, or why there is none |\n| --- | --- | --- | --- | --- |"
)
TITLES: Mapping[str, tuple[TrlField, ...]] = {
    "Fields of all configs": SHARED,
    "GRPOConfig": GRPO,
    "SFTConfig": SFT,
    "DPOConfig": DPO,
    "RewardConfig": REWARD,
}


def render_tables() -> str:
    """Render a table for the fields of all configs, one for those of each config, and one for PEFT's."""
    defaults = {option["key"]: option["default"] for option in options("")}
    parts = []
    for title, fields in TITLES.items():
        parts.append(f"### {title}\n\n" + "\n".join([HEADER, *(_row(field, defaults) for field in fields)]))
    parts.append("### peft_config: LoraConfig\n\n" + "\n".join(_adapter_rows(defaults)))
    return "\n" + "\n\n".join(parts) + "\n"


def _row(field: TrlField, defaults: Mapping[str, Any]) -> str:
    keys = " ".join(f"`{key}`" for key in field.sets)
    ours = ", ".join(_shown(defaults[key]) for key in field.sets)
    kind = "refused" if field.is_refused else "" if field.by or field.sets else "no effect"
    note = f"{kind}: {field.note}" if kind else field.note
    return f"| `{field.name}` | {_their_default(field)} | {keys} | {ours} | {note} |"


def _their_default(field: TrlField) -> str:
    others = {name: entry.defaults[field.name] for name, entry in CONFIGS.items() if field.name in entry.defaults}
    if field not in SHARED or not others:
        return _shown(field.default)
    rest = [] if len(others) == len(CONFIGS) else [_shown(field.default)]
    return "; ".join([*rest, *(f"{name.removesuffix('Config')} {_shown(value)}" for name, value in others.items())])


def _adapter_rows(defaults: Mapping[str, Any]) -> list[str]:
    notes = {
        "target_modules": "a list of names, or a regular expression; unset is refused, since it depends on the model"
    }
    rows = [
        f"| `{name}` | `{key}` | {_shown(defaults[key])} | {notes.get(name, 'as it is')} |"
        for name, key in NAMES.items()
    ]
    ignored = ", ".join(f"`{name}`" for name in WITHOUT_EFFECT)
    return [
        "| PEFT | here | default here | conversion |\n| --- | --- | --- | --- |",
        *rows,
        f"| {ignored} | | | no effect |",
        "| all others | | | refused, unless they are at PEFT's default |",
    ]


def _shown(value: Any) -> str:
    """Format a default as YAML writes it."""
    if value is None:
        return "unset"
    return f"`{value}`" if isinstance(value, str) and value else f"`{json.dumps(value)}`"


def main(argv: Sequence[str]) -> None:
    update(argv[0], render_tables(), BEGIN, END)


if __name__ == "__main__":
    main(sys.argv[1:])
