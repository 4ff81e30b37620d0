"""Settings of a rollout host, and what it makes of them: its agent, its scorers, its preparer of images."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hotseat.agents import Agent, Deadlines, ProgramSettings, load_agent
from hotseat.agents.agent import AgentError
from hotseat.agents.image_preparer import EpisodeImage, ImagePreparer
from hotseat.data.images import ImageLimits, ImageStore, load_processor, processor_template
from hotseat.data.row_problems import BadValue
from hotseat.loop.workers.notes import note_writer
from hotseat.loop.workers.observations import SimulationSettings
from hotseat.model_source import ModelSource
from hotseat.rewards import Grader, Graders, RewardFunction, SandboxSettings, Scorer
from hotseat.rewards.rubrics import JudgeSettings
from hotseat.vision import placeholder_ids, tokens_of


@dataclass(frozen=True)
class ScorerSettings:
    """Settings of the scorers of a rollout host. The default scores nothing."""

    function: str | None = None
    eval_function: str | None = None  # scores evaluations, instead of any other reward
    urls: tuple[str, ...] = ()  # servers that score instead of `function`
    token: str | None = field(default=None, repr=False)  # for them
    max_open: int = 64  # requests to them at a time
    timeout_s: float = 60.0  # of an attempt to score a group
    retries: int = 2
    max_bytes: int | None = None  # memory of a function's processes
    seed: int = 0
    graders: tuple[Grader, ...] = ()  # their verdicts are added to the rewards of `function`
    eval_graders: tuple[Grader, ...] = ()  # as `graders`, for `eval_function`
    judge: JudgeSettings | None = None  # a model whose verdicts are added, too
    sandbox: SandboxSettings | None = None  # None: its defaults
    notes: str | None = None  # file for notes that the driver shows; None: they go to standard error


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
    images: HostImages | None = None  # for environments that show some; None: the run has none, or no environment


def make_agent(settings: HostSettings, tokenizer: Any) -> Agent:
    """Load the agent of a host that plays no simulators."""
    return load_agent(
        settings.agent,
        tokenizer,
        max_length=settings.max_length,
        max_steps=settings.max_turns,
        programs=settings.programs,
        preparer=make_image_preparer(settings.images, settings.tokenizer, tokenizer),
    )


def make_image_preparer(settings: HostImages | None, model: ModelSource, tokenizer: Any) -> ImagePreparer | None:
    """Return a preparer of images that prepares them as those of the data were; None without settings."""
    if settings is None:
        return None
    processor = load_processor(model, tokenizer)
    store = ImageStore(Path(settings.folder), processor, settings.limits, Path(settings.data_folder))
    most = None if settings.largest is None else tokens_of(settings.largest).count(store.image_token_id)

    def prepare(image: Any) -> EpisodeImage:
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
        return EpisodeImage(prepared.path, prepared.token_ids)

    template = None if tokenizer.chat_template else processor_template(model.name)
    ids = frozenset(placeholder_ids(model.config()))
    limits = settings.limits
    return ImagePreparer(prepare, store.image_token_id, ids, limits.max_images, template, processor, limits.max_bytes)


# --- scorers ----------------------------------------------------------------------------------------------------------


def make_scorer(settings: ScorerSettings) -> Scorer | None:
    """Return what scores the samples to learn from, and evaluations without a reward of their own."""
    scorer, judge = _function_or_servers(settings), settings.judge
    if not settings.graders and (judge is None or (judge.engine is not None and scorer is None)):
        return scorer
    return Graders(
        settings.graders,
        sandbox=settings.sandbox,
        function=scorer,
        judge=None if judge is None or judge.engine is not None else _judge(judge),
        max_memory_bytes=settings.max_bytes,
    )


def make_eval_scorer(settings: ScorerSettings) -> Scorer | None:
    """Return what scores evaluations instead of any other reward; None: evaluations have none of their own."""
    function = None if settings.eval_function is None else _reward_function(settings.eval_function, settings)
    if not settings.eval_graders:
        return function
    return Graders(
        settings.eval_graders, sandbox=settings.sandbox, function=function, max_memory_bytes=settings.max_bytes
    )


def _judge(settings: JudgeSettings) -> tuple[Grader, Scorer]:
    from hotseat.rewards.judge import Endpoints, Judge

    return Grader("judge", settings.name, settings.weight), Judge(settings, Endpoints(settings))


def _function_or_servers(settings: ScorerSettings) -> Scorer | None:
    if settings.urls:
        from hotseat.rewards.posting import RewardService

        return RewardService(
            settings.urls,
            timeout_s=settings.timeout_s,
            retries=settings.retries,
            max_open=settings.max_open,
            token=settings.token,
        )
    return None if settings.function is None else _reward_function(settings.function, settings)


def _reward_function(path: str, settings: ScorerSettings) -> RewardFunction:
    return RewardFunction(
        path,
        timeout_s=settings.timeout_s,
        retries=settings.retries,
        max_memory_bytes=settings.max_bytes,
        seed=settings.seed,
        say=None if settings.notes is None else note_writer(settings.notes),
    )
