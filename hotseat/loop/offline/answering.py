"""Answers to prompts from one engine in this process, scored by the user's reward: shared by all that sample."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging

from hotseat import faults
from hotseat.agents import AgentHost, OpenRequests
from hotseat.agents.transcript import decode
from hotseat.checks.model_configs import eos_token_ids
from hotseat.checks.pipeline import DEVICES, ENGINE_ALONE
from hotseat.checks.reward_columns import label_hint
from hotseat.checks.stage import DeviceContext, run_checks
from hotseat.closing import on_failure
from hotseat.config import Config
from hotseat.config.precision import with_dtype
from hotseat.data import digest_of
from hotseat.errors import RewardError
from hotseat.loop.inputs import load_tokenizer, prompts_alone
from hotseat.loop.offline.group_file import GroupFile, Row, Selection, settings_of
from hotseat.loop.rl.sample_log import ChosenSample, written
from hotseat.loop.settings.rollout_settings import engine_settings, eval_sampling, host_settings, rollout_sampling
from hotseat.loop.workers.collecting import Collecting, Scoring
from hotseat.loop.workers.engine_worker import make_engine
from hotseat.loop.workers.group_facts import EVALUATION, Job
from hotseat.loop.workers.host_settings import make_agent, make_scorer
from hotseat.loop.workers.records import record_of
from hotseat.observe import LiveView
from hotseat.rollout.engine import Engine
from hotseat.types import Completion, Episode, Failed, Prompt, Request, Sampling, ScoredEpisode
from hotseat.words import label_text, quantity

Outcome = ScoredEpisode | Episode | Failed  # what became of a sample
MIN_JUDGED = 64  # samples before too many failures end the command


@dataclass(frozen=True)
class OfflineInputs:
    """Everything that is checked before a model loads."""

    config: Config
    tokenizer: Any
    eos_token_ids: tuple[int, ...]
    prompts: list[Prompt]
    notes: list[str]


def on_this_device(config: Config) -> Config:
    """Return the config with the dtype for this machine. Raises `UserError` for what its devices cannot do."""
    logging.disable_progress_bar()
    config = with_dtype(config, torch.cuda.is_available())
    run_checks(DeviceContext(config=config, on_gpu=torch.cuda.is_available()), DEVICES, ENGINE_ALONE)
    return config


def prepare(config: Config, view: LiveView, *, is_evaluation: bool = False, first_row: int = 0) -> OfflineInputs:
    """Read the tokenizer and the prompts, and check the model. Raises `UserError` if anything is wrong with them.

    first_row: of the data; those before it are left out.
    """
    view.stage("reading the tokenizer and the prompts")
    config = on_this_device(config)
    tokenizer = load_tokenizer(config)
    prompts, notes = prompts_alone(config, tokenizer, is_evaluation=is_evaluation, first_row=first_row)
    return OfflineInputs(config, tokenizer, eos_token_ids(config, tokenizer), prompts, notes)


class Answerer:
    """One engine in this process, with the agent and the rewards of a config. Close it at the end."""

    def __init__(
        self,
        prepared: OfflineInputs,
        logs: Path,
        view: LiveView,
        *,
        needs_reward: bool,
        submit: Callable[[Engine, Request], Future[Completion]] = lambda engine, request: engine.submit(request),
    ):
        """Load the model. logs: the folder for the log of vLLM. needs_reward: a sample without a reward has failed."""
        config = prepared.config
        self._needs_reward = needs_reward
        self._tokenizer = prepared.tokenizer
        self._host = host_settings(config, None)
        agent = make_agent(self._host, prepared.tokenizer)
        self._reward = make_scorer(self._host.scorers)
        try:
            view.stage(f"loading {config.actor.model} into {config.rollout.engine}")
            self.engine = make_engine(
                engine_settings(config, prepared.eos_token_ids, logs), 0, lambda stage: view.stage(stage)
            )
        except BaseException:
            if self._reward is not None:
                self._reward.close()
            raise
        self._agents = AgentHost(
            agent,
            partial(submit, self.engine),
            run_seed=config.seed,
            max_concurrent=self._host.max_concurrent,
            timeout_s=self._host.episode_timeout_s,
            requests=OpenRequests(self.engine.abort),
            deadlines=self._host.deadlines,
        )

    def answer(
        self, prompts: Sequence[Prompt], epoch: int, num_samples: int, sampling: Sampling
    ) -> Iterator[tuple[Prompt, Sequence[Outcome]]]:
        """Yield each prompt and its samples as they are complete: episodes only where there is no reward.

        Only so many prompts are open at a time that the engine is full.
        """
        # Without scorers, groups come back as those that wait for a reward model do.
        scoring = Scoring(
            self._reward, self._tokenizer, waits_for_model=self._reward is None and not self._needs_reward
        )
        collecting = Collecting(self._agents, scoring, faults.reach)
        waiting = iter([Job(prompt, epoch, num_samples) for prompt in prompts])
        num_ahead = max(2, -(-2 * self._host.max_concurrent // num_samples))
        num_open = self._add(collecting, list(islice(waiting, num_ahead)), sampling)
        while num_open:
            group, scores = collecting.next()
            yield group.job.prompt, group.outcomes if scores is None else group.scored(scores)
            num_open += self._add(collecting, list(islice(waiting, 1)), sampling) - 1

    def close(self) -> None:
        self._agents.close()
        self.engine.close()
        if self._reward is not None:
            self._reward.close()

    @staticmethod
    def _add(collecting: Collecting, jobs: list[Job], sampling: Sampling) -> int:
        if jobs:
            collecting.add(jobs, sampling)
        return len(jobs)


def answer_all(
    prepared: OfflineInputs,
    output: Path,
    view: LiveView,
    *,
    needs_reward: bool,
    is_evaluation: bool = False,
    replace: bool = False,
) -> GroupFile:
    """Answer the prompts that have no answers in the file beside `output` yet, and return the file, which is complete.

    A group is a line with `index`, `rows` (a sample each, as `hotseat generate` writes them) and `failures`; in an
    evaluation also with `records`, which are lines of a run's `samples.jsonl`.
    """
    config = prepared.config
    identity = settings_of(config, digest_of(prepared.prompts))
    file = GroupFile(output, identity, replace=replace, needs_reward=needs_reward)
    with on_failure(file.__exit__):
        todo = [prompt for prompt in prepared.prompts if prompt.index not in file]
        if len(file):
            view.say(f"resumed: {len(file):,} of {quantity(len(prepared.prompts), 'prompt')} are answered already")
        if todo:
            with closing(Answerer(prepared, output.parent / "logs", view, needs_reward=needs_reward)) as answerer:
                _answer(prepared, answerer, todo, file, view, is_evaluation)
    return file


def _answer(
    prepared: OfflineInputs,
    answerer: Answerer,
    todo: Sequence[Prompt],
    file: GroupFile,
    view: LiveView,
    is_evaluation: bool,
) -> None:
    config = prepared.config
    num_samples = config.eval.samples_per_prompt if is_evaluation else config.rollout.samples_per_prompt
    sampling = eval_sampling(config) if is_evaluation else rollout_sampling(config)
    epoch = EVALUATION if is_evaluation else 0
    num_total, num_judged = len(prepared.prompts), len(file) * num_samples  # none of those in the file has failed
    failures: list[str] = []
    view.expect(num_total, {})
    view.advance(len(file), "sampling")
    view.begin()
    for prompt, outcomes in answerer.answer(todo, epoch, num_samples, sampling):
        group = _group(prompt, outcomes, prepared, is_evaluation)
        file.add(group)
        num_judged += num_samples
        failures += [reason for _, reason in group["failures"]]
        if num_judged >= MIN_JUDGED or len(file) == num_total:
            _check_failures(failures, num_judged, config, prepared.prompts)
        rewards = [row["reward"] for row in group["rows"] if "reward" in row]
        view.advance(len(file), f"sampling, last reward {statistics.fmean(rewards):.3g}" if rewards else "sampling")


def _check_failures(failures: Sequence[str], num_samples: int, config: Config, prompts: Sequence[Prompt]) -> None:
    max_fraction = config.reward.max_failed_fraction
    if len(failures) > max_fraction * num_samples:
        hint = label_hint(config, prompts)
        raise RewardError(
            f"{len(failures):,} of {quantity(num_samples, 'sample')} failed, more than reward.max_failed_fraction"
            f" {max_fraction:g} allows; the last: {failures[-1]}{f'; {hint}' if hint else ''}"
        )


def _group(prompt: Prompt, outcomes: Sequence[Outcome], prepared: OfflineInputs, is_evaluation: bool) -> dict[str, Any]:
    tokenizer = prepared.tokenizer
    rows: list[dict[str, Any]] = []
    records: list[dict[str, Any]] = []
    failures: list[tuple[int, str]] = []
    for sample, outcome in enumerate(outcomes):
        if isinstance(outcome, Failed):
            failures.append((sample, outcome.reason))
            continue
        scored = outcome if isinstance(outcome, ScoredEpisode) else None
        episode = outcome.episode if isinstance(outcome, ScoredEpisode) else outcome
        row: dict[str, Any] = {
            "index": prompt.index,
            "sample": sample,
            "input": prompt.text,
            "output": answer_text(episode, prompt, tokenizer, prepared.eos_token_ids),
            "num_tokens": episode.num_sampled,
            "is_truncated": episode.is_truncated,
        }
        row |= {} if label_text(prompt.label) is None else {"label": prompt.label}
        row |= {"source": prompt.source} if prompt.source else {}
        if scored is not None:
            row |= {"reward": scored.reward, "score": scored.score, "extra": dict(scored.extra)}
        rows.append(row)
        if is_evaluation and scored is not None:
            is_right = "right" if scored.reward >= 1 else "wrong"
            records.append(written(0, ChosenSample(episode.key, is_right), record_of(scored, prompt, tokenizer), None))
    line: dict[str, Any] = {"index": prompt.index, "rows": rows, "failures": failures}
    return line | ({"records": records} if is_evaluation else {})


def answer_text(episode: Episode, prompt: Prompt, tokenizer: Any, eos: Sequence[int]) -> str:
    """Return what follows the prompt as text, without the token that ends it: trainers add that themselves."""
    text = episode.query.removeprefix(prompt.text)
    last = int(episode.segments[-1].token_ids[-1])
    return text.removesuffix(decode(tokenizer, [last])) if last in eos else text


@dataclass(frozen=True)
class Generated:
    """Counts of a command's output."""

    num_prompts: int
    num_samples: int
    num_lines: int
    num_failed: int


def generate(
    config: Config,
    output: Path,
    selection: Selection,
    view: LiveView,
    *,
    overwrite: bool = False,
    first_row: int = 0,
) -> Generated:
    """Answer all prompts and write the lines that `selection` keeps, in the order of the prompts."""
    prepared = prepare(config, view, first_row=first_row)
    for note in prepared.notes:
        view.say(note)
    with answer_all(prepared, output, view, needs_reward=selection.needs_reward, replace=overwrite) as file:
        num_lines = write_lines(output, (line for group in file.groups() for line in selection.of(group["rows"])))
        counts = [(len(group["rows"]), len(group["failures"])) for group in file.groups()]
        file.remove()
    return Generated(len(counts), sum(rows for rows, _ in counts), num_lines, sum(failed for _, failed in counts))


def write_lines(output: Path, lines: Iterable[Row]) -> int:
    """Write a file of JSON lines as a whole: it has all of them, or it is as it was. Returns their number."""
    unfinished = output.with_name(f".{output.name}.unfinished")
    count = 0
    with unfinished.open("w", encoding="utf-8", errors="replace") as out:
        for line in lines:
            out.write(json.dumps(line, ensure_ascii=False) + "\n")
            count += 1
        out.flush()
        os.fsync(out.fileno())
    unfinished.replace(output)
    return count
