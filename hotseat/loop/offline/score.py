"""Scores answers that are in a file already with a reward model, and selects among those to the same prompt."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hotseat.data import load_rows, make_examples
from hotseat.errors import UserError
from hotseat.loop.offline.group_file import Selection
from hotseat.loop.serving.served_model import ModelOptions, RewardModel
from hotseat.model_source import ModelSource
from hotseat.observe import LiveView
from hotseat.words import quantity


@dataclass(frozen=True)
class ScoreOptions:
    """Data and model of `score_answers`. micro_batch_size: answers in one forward."""

    model: str
    data: str
    split: str = "train"
    probs: str | None = None
    seed: int = 42
    max_samples: int | None = None
    first_row: int = 0
    input_key: str = "input"
    output_key: str = "output"
    input_template: str | None = None
    apply_chat_template: bool = False
    max_length: int = 2048
    micro_batch_size: int = 16
    value_head_prefix: str = "score"
    dtype: str | None = None


@dataclass(frozen=True)
class ScoreCounts:
    """Counts of a command that scored. num_dropped: rows whose prompt leaves no room for an answer."""

    num_scored: int
    num_prompts: int
    num_lines: int
    num_dropped: int


def score_answers(options: ScoreOptions, output: Path, selection: Selection, view: LiveView) -> ScoreCounts:
    """Score every row of the data, and write those that are selected, prompt by prompt, in the order of the data.

    Rewards are normalised by the mean and the deviation of the model's scores, if its config.json has them.
    """
    rows = load_rows(
        options.data,
        split=options.split,
        probs=options.probs,
        seed=options.seed,
        max_samples=options.max_samples,
    )[options.first_row :]
    if not rows:
        raise UserError(f"{options.data}: no rows are left to score")
    view.stage("loading the reward model")
    has_scale = _has_scale(options.model)
    model = RewardModel(
        ModelOptions(
            ModelSource(options.model),
            options.max_length,
            options.dtype,
            value_head_prefix=options.value_head_prefix,
            normalize=has_scale,
        )
    )
    view.say(f"{model.description}{', rewards are normalised' if has_scale else ''}")
    if not model.is_causal:
        raise UserError(
            f"{options.model!r} does not read from left to right, as OpenRLHF's reward models do: serve it with"
            " `hotseat serve-rm`, and score while sampling with --remote_rm_url"
        )
    view.stage("reading the answers")
    examples, report = make_examples(
        rows,
        model.tokenizer,
        input_key=options.input_key,
        output_key=options.output_key,
        input_template=options.input_template,
        apply_chat_template=options.apply_chat_template,
        max_length=model.max_length,
    )
    view.stage(f"scoring {quantity(len(examples), 'answer')}")
    tokens = [example.token_ids.tolist() for example in examples]
    rewards = _rewards(model, tokens, options.micro_batch_size, view)
    by_row = {row.where: row.values for row in rows}
    prompts: dict[str, list[dict[str, Any]]] = {}
    for example, reward in zip(examples, rewards, strict=True):
        values = by_row[example.where]
        line = {"input": values[options.input_key], "output": values[options.output_key], "reward": reward}
        prompts.setdefault(json.dumps(line["input"], sort_keys=True), []).append(line)
    lines = [line for group in prompts.values() for line in selection.of(group)]
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")
    return ScoreCounts(len(examples), len(prompts), len(lines), report.num_no_answer)


def _rewards(model: RewardModel, tokens: Sequence[Sequence[int]], size: int, view: LiveView) -> list[float]:
    """Return the reward of each token sequence. Those of similar length go together, which saves padding."""
    order = sorted(range(len(tokens)), key=lambda index: len(tokens[index]))
    rewards = [0.0] * len(tokens)
    for start in range(0, len(order), size):
        members = order[start : start + size]
        for index, reward in zip(members, model.score([tokens[index] for index in members]), strict=True):
            rewards[index] = reward
        view.progress(f"{min(start + size, len(order)):,} of {len(order):,} answers scored")
    return rewards


def _has_scale(model: str) -> bool:
    try:
        stored = json.loads((Path(model) / "config.json").read_text())
    except (OSError, ValueError):
        return False
    return isinstance(stored, dict) and isinstance(stored.get("mean"), int | float) and bool(stored.get("std"))
