"""The text of `--help`: an example, then every key in the sections of verl's config."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from hotseat.verl.verl_keys import KEYS, OWN, Key

WIDTH = 100
_INTRODUCTION = (
    "verl's main_ppo on Hotseat. KEY=VALUE, +KEY=VALUE and ++KEY=VALUE set a key; values are as in Hydra. Each key"
    " below has verl's default; then the config fields that it sets (`hotseat options FIELD` describes one), or why it"
    f" has no effect, or what fits instead of other values. {OWN}FIELD=VALUE sets a field of Hotseat's own config,"
    " after all other keys. Exit codes: 0 done, 1 failed while running, 2 refused before anything ran, 130 stopped by"
    " Ctrl-C or SIGTERM."
)
_EXAMPLE = """\
python -m hotseat.cli.main_ppo data.train_files=train.parquet data.val_files=test.parquet \\
  actor_rollout_ref.model.path=my/model actor_rollout_ref.rollout.name=vllm algorithm.adv_estimator=grpo \\
  actor_rollout_ref.rollout.n=8 reward.custom_reward_function.path=reward.py trainer.n_gpus_per_node=1 \\
  actor_rollout_ref.rollout.tensor_model_parallel_size=1 trainer.logger=console"""


def render_help() -> str:
    """Render an example and every key with its default and what becomes of it."""
    lines = ["usage: python -m hotseat.cli.main_ppo KEY=VALUE ...", "", *_EXAMPLE.splitlines(), ""]
    lines += textwrap.wrap(_INTRODUCTION, WIDTH)
    lines += ["", "  --print_config", "      Print the equivalent YAML config and exit.", "  --help, -h"]
    lines.append("      Show this text and exit.")
    section = None
    for key in sorted(KEYS, key=lambda key: key.name):
        depth = 2 if key.name.startswith("actor_rollout_ref.") else 1
        here = ".".join(key.name.split(".")[:depth])
        if here != section:
            section = here
            lines += ["", f"{section}:"]
        lines += _lines_of(key)
    return "\n".join(lines)


def _lines_of(key: Key) -> Iterator[str]:
    name = f"{key.name}.*" if key.is_section else key.name
    default = "" if key.is_section else f" (default: {'null' if key.default is None else key.default})"
    yield f"  {', '.join((name, *key.aliases))}{default}"
    yield from textwrap.wrap(
        effect_of(key), WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 6, break_on_hyphens=False
    )


def effect_of(key: Key) -> str:
    """Return in words what becomes of a key."""
    if key.sets:
        return ", ".join(key.sets)
    if key.because:
        return f"no effect: {key.because}"
    if key.same_as:
        return f"refused unless it is as {key.same_as}: {key.refused}"
    return f"refused unless it has its default: {key.refused}"
