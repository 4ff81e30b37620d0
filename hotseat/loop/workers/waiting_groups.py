"""Groups on a rollout host that wait for a model to score them: a reward model, or a judge with its own engines."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hotseat.cluster import WorkerGroup
from hotseat.loop.workers.collecting import OpenGroup, submit_group
from hotseat.loop.workers.engine_client import TakesRequests
from hotseat.loop.workers.judge_engines import JudgeEngines
from hotseat.model_source import ModelSource
from hotseat.rewards import Grader, Score
from hotseat.rewards.graders import add_verdict
from hotseat.rewards.rubrics import JudgeSettings
from hotseat.types import Episode, Failed, MicroBatch

if TYPE_CHECKING:
    from hotseat.rewards.judge import Judge

_MODEL = Grader("model", "model")  # the reward model's part of a reward, where functions score, too

ScoredGroup = tuple[OpenGroup, list[Score | Failed]]  # with the scores of its episodes


class WaitingGroups:
    """Has a reward model or a judge score the groups that wait.

    The ranks of a reward model fetch the tokens to score (`to_score`), and their rewards complete the groups
    (`take_scored`). The engines of a judge are asked by this process (`take_judged`).

    groups: those that are scored next. reward_tokenizer: of a reward model with another vocabulary; None: it reads the
    tokens of the policy.
    """

    def __init__(self, tokenizer: Any, reward_tokenizer: ModelSource | None, judge: JudgeSettings | None):
        self.groups: list[OpenGroup] = []
        self._tokenizer = tokenizer
        self._reward_tokenizer = None if reward_tokenizer is None else reward_tokenizer.tokenizer()
        self._settings = judge
        self._judge: Judge | None = None
        self._engines: JudgeEngines | None = None

    def connect_judge(self, client: str, engines: WorkerGroup[TakesRequests], num_hosts: int) -> None:
        """Connect to the engines of the judge; a second call replaces the connection."""
        from hotseat.rewards.judge import Judge

        settings = self._settings
        assert settings is not None
        assert settings.engine is not None
        self.close()
        self._engines = JudgeEngines(
            engines,
            client,
            settings.engine.model.tokenizer(),
            max_length=settings.engine.max_length,
            max_open=-(-settings.engine.num_slots * engines.size // num_hosts),
            timeout_s=settings.timeout_s,
        )
        self._judge = Judge(settings, self._engines)

    def to_score(self, rank: int, num_ranks: int) -> MicroBatch:
        """Return the tokens that one rank of the reward model scores: every `num_ranks`-th of the waiting episodes."""
        mine = [episode for group in self.groups for episode in group.episodes][rank::num_ranks]
        sequences = [self._for_reward_model(episode) for episode in mine]
        names, images = [str(episode.key) for episode in mine], [episode.segments[-1].images for episode in mine]
        return MicroBatch.from_segments(sequences, None, names, images=images)

    def take_scored(self, rewards: Mapping[str, float]) -> list[ScoredGroup]:
        """Take the groups, with the reward model's rewards, by sample id."""
        groups, self.groups = self.groups, []

        def score(episode: Episode, earlier: Score | Failed | None) -> Score | Failed:
            name, reward = str(episode.key), rewards[str(episode.key)]
            given = Score(reward, reward) if math.isfinite(reward) else Failed(f"the reward model gave {reward}")
            return given if earlier is None else add_verdict(earlier, _MODEL, given, name)

        scored = []
        for group in groups:
            episodes = group.episodes
            scores: Sequence[Score | Failed | None] = group.scores or [None] * len(episodes)
            scored.append((group, [score(*each) for each in zip(episodes, scores, strict=True)]))
        return scored

    def take_judged(self) -> list[ScoredGroup]:
        """Have the judge's engines judge the episodes, and take the groups.

        Raises the death of an engine; called again, it judges what is left: verdicts are kept.
        """
        assert self._settings is not None
        assert self._judge is not None, "not connected to the judge"
        assert self._engines is not None
        grader = Grader("judge", self._settings.name, self._settings.weight)
        groups = list(self.groups)
        asked = [submit_group(self._judge, group, self._tokenizer) for group in groups]
        judged = [future.result() for future in asked]
        self._engines.check()
        self.groups = self.groups[len(groups) :]
        scored = []
        for group, verdicts in zip(groups, judged, strict=True):
            names = [str(episode.key) for episode in group.episodes]
            earlier = zip(group.scores or [Score(0.0, 0.0, {})] * len(names), verdicts, names, strict=True)
            scored.append((group, [add_verdict(total, grader, verdict, name) for total, verdict, name in earlier]))
        return scored

    def close(self) -> None:
        if self._judge is not None:
            self._judge.close()

    def _for_reward_model(self, episode: Episode) -> Tensor:
        """Return the tokens of the last segment, which ends the episode: [num_tokens].

        Its text is tokenised again for a reward model with a tokenizer of its own.
        """
        token_ids = episode.segments[-1].token_ids
        if self._reward_tokenizer is None:
            return token_ids
        text = self._tokenizer.decode(token_ids.tolist(), skip_special_tokens=True)
        retokenized = list(self._reward_tokenizer(text)["input_ids"])
        end = self._reward_tokenizer.eos_token_id
        if end is not None and not episode.is_truncated and retokenized[-1:] != [end]:
            retokenized.append(end)  # reward models put the reward of an answer at its end token
        return torch.tensor(retokenized)
