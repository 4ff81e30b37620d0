"""`hotseat eval`: accuracy, pass@k and lengths of a model's answers, and a page that shows them."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hotseat.config import Config, to_saved
from hotseat.config.hiding import has_secrets
from hotseat.errors import RunError
from hotseat.files import write_whole
from hotseat.loop.offline.answering import answer_all, prepare, write_lines
from hotseat.loop.offline.group_file import GroupFile
from hotseat.loop.rl.collect import evaluation_metrics
from hotseat.loop.workers.group_facts import EVALUATION, GroupFacts
from hotseat.observe import METRICS, SAMPLES, LiveView
from hotseat.observe.journal import histogram
from hotseat.observe.report import EVALUATED, write_report

REPORT = "report.html"


def evaluate(config: Config, folder: Path, view: LiveView, *, overwrite: bool = False) -> dict[str, float]:
    """Answer all prompts, write a folder that `hotseat report` can read, and return the metrics."""
    prepared = prepare(config, view, is_evaluation=True)
    for note in prepared.notes:
        view.say(note)
    with answer_all(
        prepared, folder / EVALUATED, view, needs_reward=True, is_evaluation=True, replace=overwrite
    ) as file:
        groups = [_facts(group) for group in file.groups()]
        metrics = measure(groups, config.eval.samples_per_prompt)
        _write(folder, prepared.config, file, groups, metrics)
        file.remove()
    write_report([folder], folder / REPORT)
    return metrics


def measure(groups: Sequence[GroupFacts], num_samples: int) -> dict[str, float]:
    """Return the metrics of an evaluation in training, with pass@k of fewer samples, truncated answers and lengths."""
    metrics = evaluation_metrics(groups, num_samples)
    for k in [2**n for n in range(1, (num_samples - 1).bit_length())]:  # the powers of two below it
        solved = [
            pass_at(k, len(facts.rewards), sum(reward >= 1.0 for reward in facts.rewards))
            for facts in groups
            if len(facts.rewards) >= k
        ]
        if solved:
            metrics[f"eval/pass@{k}"] = statistics.fmean(solved)
    lengths = sorted(length for facts in groups for length in facts.num_sampled)
    if not lengths:
        raise RunError("no answer has a reward")
    metrics["eval/length_median"] = float(statistics.median(lengths))
    metrics["eval/length_max"] = float(lengths[-1])
    metrics["eval/truncated"] = statistics.fmean(flag for facts in groups for flag in facts.truncated)
    return metrics


def pass_at(k: int, num_samples: int, num_right: int) -> float:
    """Estimate without bias the probability that one of k answers is right: 1 - C(n - c, k) / C(n, k).

    Chen et al., "Evaluating Large Language Models Trained on Code", 2021, equation 1.
    """
    return 1.0 - math.comb(num_samples - num_right, k) / math.comb(num_samples, k)


def _facts(group: Mapping[str, Any]) -> GroupFacts:
    rows = group["rows"]
    return GroupFacts(
        epoch=EVALUATION,
        prompt=group["index"],
        source=rows[0].get("source", "") if rows else "",
        samples=tuple(row["sample"] for row in rows),
        rewards=tuple(row["reward"] for row in rows),
        scores=tuple(row["score"] for row in rows),
        num_sampled=tuple(row["num_tokens"] for row in rows),
        num_tokens=tuple(row["num_tokens"] for row in rows),
        truncated=tuple(row["is_truncated"] for row in rows),
        failures=tuple((sample, reason) for sample, reason in group["failures"]),
    )


def _write(
    folder: Path, config: Config, file: GroupFile, groups: Sequence[GroupFacts], metrics: Mapping[str, float]
) -> None:
    write_whole(folder / "config.yaml", to_saved(config), is_private=has_secrets(config))
    values = {
        "reward": [reward for facts in groups for reward in facts.rewards],
        "length": [float(length) for facts in groups for length in facts.num_sampled],
    }
    distributions = {"step": 0} | {name: histogram(each) for name, each in values.items()}
    (folder / "distributions.jsonl").write_text(json.dumps(distributions) + "\n")
    write_lines(folder / SAMPLES, (record for group in file.groups() for record in group["records"]))
    write_lines(folder / METRICS, [{"step": 0, **metrics}])
    write_lines(folder / EVALUATED, (row for group in file.groups() for row in group["rows"]))
