"""Settings of a rollout host, and what it makes of them: its agent, its scorers, its preparer of images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hotseat.agents import Agent, Deadlines, ProgramSettings, load_agent
from hotseat.agents.agent import AgentError
from hotseat.agents.image_preparer import ImagePreparer
from hotseat.config.presence import name_of_function
from hotseat.config.schema.data_options import EvaluationConfig
from hotseat.config.schema.reward_options import GraderConfig, RewardConfig
from hotseat.config.urls import as_list
from hotseat.data.images import ImageLimits, ImageStore, load_processor, processor_template
from hotseat.data.row_problems import BadValue
from hotseat.loop.workers.given_answers import GivenAnswers
from hotseat.loop.workers.notes import note_writer
from hotseat.loop.workers.observations import SimulationSettings
from hotseat.model_source import ModelSource
from hotseat.rewards import Grader, Graders, RewardFunction, SandboxSettings, Scorer
from hotseat.rewards.graders import graders_of
from hotseat.rewards.no_rewards import NoRewards
from hotseat.rewards.rubrics import JudgeSettings
from hotseat.vision import PreparedImage, placeholder_ids, tokens_of

# Seconds of an attempt to score a group, and further attempts. Those of servers are OpenRLHF's.
FUNCTION_LIMITS, SERVER_LIMITS = (60.0, 2), (180.0, 4)


@dataclass(frozen=True)
class ScorerSettings:
    """Settings of the scorers of a rollout host. The default scores nothing."""

    reward: RewardConfig = field(default_factory=RewardConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    seed: int = 0
    token: str | None = field(default=None, repr=False)  # for the servers of `reward.url`
    judge: JudgeSettings | None = None  # a model whose verdicts are added, too
    is_needed: bool = True  # else the reward of every answer is 0: the policy learns from a teacher alone
    notes: str | None = None  # file for notes that the driver shows; None: they go to standard error

    @property
    def attempts(self) -> dict[str, Any]:
        """Return the longest time of an attempt to score a group, and the number of further attempts."""
        timeout_s, retries = SERVER_LIMITS if self.reward.url is not None else FUNCTION_LIMITS
        return {
            "timeout_s": timeout_s if self.reward.timeout_s is None else self.reward.timeout_s,
            "retries": retries if self.reward.retries is None else self.reward.retries,
        }

    @property
    def max_bytes(self) -> int | None:
        """Return the bound on the memory of a function's processes."""
        return None if self.reward.max_memory_gib is None else int(self.reward.max_memory_gib * 2**30)


@dataclass(frozen=True)
class HostImages:
    """Settings of images that environments and programs show."""

    folder: str  # for those that are prepared in episodes
    data_folder: str  # of those of the data, which an episode may show again
    limits: ImageLimits
    largest: str | None = None  # the image of the most tokens that the engine was started for; None: any will do


@dataclass(frozen=True)
class HostSettings:
    """Settings of a rollout host."""

    tokenizer: ModelSource
    run_seed: int
    max_length: int
    agent: str | None
    max_turns: int | None
    max_concurrent: int
    episode_timeout_s: float
    scorers: ScorerSettings
    programs: ProgramSettings | None = None  # of an agent that is a program
    deadlines: Deadlines | None = None  # within an episode; None: none
    has_reward_model: bool = False
    reward_tokenizer: ModelSource | None = None  # of a reward model that cannot read the policy's tokens
    simulation: SimulationSettings | None = None  # episodes are played in simulators
    spool: str | None = None  # folder for finished groups; None: they stay in memory
    kept_rollouts: str | None = None  # folder for groups of the spool that were trained or dropped; None: they go
    max_thinking_tokens: int | None = None  # of an answer, where no agent plays; None: no bound
    logs: str | None = None  # folder for what agents print; None: it is not kept
    crashes: str | None = None  # folder of this start of the run, in which hosts note what they die of; None: nowhere
    is_own_process: bool = False  # which ends where it has to be replaced, instead of only saying so
    images: HostImages | None = None  # for environments that show some; None: the run has none, or no environment
    sampled_share: float = 1.0  # of prompts whose answers the policy samples; the data gives those to the others


def make_agent(settings: HostSettings, tokenizer: Any) -> Agent:
    """Load the agent of a host that plays no simulators."""
    policy = load_agent(
        settings.agent,
        tokenizer,
        max_length=settings.max_length,
        max_steps=settings.max_turns,
        programs=settings.programs,
        preparer=make_image_preparer(settings.images, settings.tokenizer, tokenizer),
        max_thinking_tokens=settings.max_thinking_tokens,
    )
    if settings.sampled_share == 1.0:
        return policy
    seed, max_length = settings.run_seed, settings.max_length
    return GivenAnswers(policy, tokenizer, sampled=settings.sampled_share, seed=seed, max_length=max_length)


def make_image_preparer(settings: HostImages | None, model: ModelSource, tokenizer: Any) -> ImagePreparer | None:
    """Return a preparer of images that prepares them as those of the data were; None without settings."""
    if settings is None:
        return None
    processor = load_processor(model, tokenizer)
    store = ImageStore(Path(settings.folder), processor, settings.limits, Path(settings.data_folder))
    most = None if settings.largest is None else tokens_of(settings.largest).count(store.image_token_id)

    def prepare(image: Any) -> PreparedImage:
        try:
            prepared = store.prepare(image, "an image of the episode", Path())
        except BadValue as error:
            raise AgentError(str(error)) from None
        num_tokens = prepared.token_ids.count(store.image_token_id)
        if most is not None and num_tokens > most:
            raise AgentError(
                f"an image of the episode: {num_tokens} tokens, and vLLM was started for images of {most}: make it"
                " smaller, or raise data.max_length"
            )
        return prepared

    template = None if tokenizer.chat_template else processor_template(model.name)
    ids = frozenset(placeholder_ids(model.config()))
    limits = settings.limits
    return ImagePreparer(prepare, store.image_token_id, ids, limits.max_images, template, processor, limits.max_bytes)


# --- scorers ----------------------------------------------------------------------------------------------------------


def make_scorer(settings: ScorerSettings) -> Scorer | None:
    """Return what scores the samples to learn from, and evaluations without a reward of their own."""
    reward, judge = settings.reward, settings.judge
    scorer: Scorer | None = None if settings.is_needed else NoRewards()
    if reward.url is not None:
        from hotseat.rewards.posting import RewardService

        urls, max_open = tuple(as_list(reward.url)), reward.max_open_requests
        scorer = RewardService(urls, **settings.attempts, max_open=max_open, token=settings.token)
    elif reward.function is not None:
        scorer = _reward_function(reward.function, settings, reward.kwargs)
    beside: list[tuple[Grader, Scorer]] = [
        (Grader("function", name_of_function(each), each.weight), _reward_function(each.function, settings))
        for each in reward.functions
    ]
    if judge is not None and judge.engine is None:
        from hotseat.rewards.judge import Endpoints, Judge

        beside.append((Grader("judge", judge.name, judge.weight), Judge(judge, Endpoints(judge))))
    has_verdicts = reward.graders or beside or (judge is not None and scorer is not None)
    return _graders(reward.graders, settings, scorer, beside) if has_verdicts else scorer


def make_eval_scorer(settings: ScorerSettings) -> Scorer | None:
    """Return what scores evaluations instead of any other reward; None: evaluations have none of their own."""
    evaluation = settings.evaluation
    function = None if evaluation.reward is None else _reward_function(evaluation.reward, settings)
    return _graders(evaluation.graders, settings, function) if evaluation.graders else function


def _graders(
    graders: Sequence[GraderConfig],
    settings: ScorerSettings,
    function: Scorer | None,
    beside: Sequence[tuple[Grader, Scorer]] = (),
) -> Graders:
    sandbox = SandboxSettings.of_config(settings.reward.sandbox)
    return Graders(
        graders_of(graders), sandbox=sandbox, function=function, beside=beside, max_memory_bytes=settings.max_bytes
    )


def _reward_function(path: str, settings: ScorerSettings, kwargs: Mapping[str, Any] | None = None) -> RewardFunction:
    return RewardFunction(
        path,
        **settings.attempts,
        max_memory_bytes=settings.max_bytes,
        seed=settings.seed,
        kwargs=kwargs,
        say=None if settings.notes is None else note_writer(settings.notes),
    )
