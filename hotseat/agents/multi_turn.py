"""Agents that act in an environment, turn by turn."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any

from hotseat.agents.agent import Agent, AgentError, OutOfTimeError, SampleFunction, episode_seed
from hotseat.agents.blocking_calls import OwnThread
from hotseat.agents.image_preparer import ImagePreparer, listed
from hotseat.agents.transcript import Transcript
from hotseat.types import Episode, Prompt, SampleKey, Sampling, ScoredEpisode
from hotseat.vision import PreparedImage


@dataclass(frozen=True)
class Step:
    """An environment's response to an action."""

    feedback: str = ""  # the text that the policy reads next, including markers of the turn's begin and end
    reward: float | None = None  # reward of this turn; if no turn has one, the run's reward function scores the episode
    done: bool = False
    score: float | None = None  # used by dynamic filtering; that of the last turn counts; None: the sum of the rewards
    extra: Mapping[str, float] = field(default_factory=dict)  # numbers to log; those of the last turn count
    images: Sequence[Any] = ()  # for the image tokens in the feedback: paths, bytes, data URIs or images of Pillow


class Environment:
    """The environment of one episode: made for it, reset once, stepped after each action, closed at the end.

    Methods may be plain or async. Plain ones run in a thread of the episode and may block; async ones share the loop of
    all episodes and must not.
    """

    def reset(self, prompt: str, label: Any) -> str | None:
        """Begin the episode. Returns the text that the policy starts from; None stands for the prompt unchanged.

        A method with a parameter `seed` gets the episode's seed too, which is the same in every attempt at the sample.
        """
        return None

    def step(self, action: str) -> Step:
        """Respond to an action: the text that the policy sampled, including special tokens such as the stop token."""
        raise NotImplementedError(f"{type(self).__name__}.step")

    def close(self) -> None:
        """Release resources. Called also after a failure."""


@dataclass(eq=False)
class MultiTurn(Agent):
    """Plays an environment until it is done, `max_steps` turns are over, or `max_length` tokens are full.

    `env_factory` makes an environment per episode; usually it is the class. The reward is the sum over the turns, whose
    own rewards are kept as `turn_rewards`.
    """

    env_factory: Callable[[], Environment]
    tokenizer: Any
    _: KW_ONLY
    max_length: int
    max_steps: int | None = None
    run_seed: int = 0
    preparer: ImagePreparer | None = None  # of a VLM's images
    make_turns: Callable[[], Turns] | None = None  # of another form of environment, instead of `env_factory`

    @classmethod
    def of_turns(cls, make_turns: Callable[[], Turns], tokenizer: Any, **limits: Any) -> MultiTurn:
        """Make an agent with the same loop over another kind of `Turns`."""
        return cls(Environment, tokenizer, make_turns=make_turns, **limits)

    async def run(
        self, prompt: Prompt, key: SampleKey, sampling: Sampling, sample: SampleFunction
    ) -> Episode | ScoredEpisode:
        turns = _EnvironmentTurns(self.env_factory) if self.make_turns is None else self.make_turns()
        try:
            return await self._play(turns, prompt, key, sampling, sample)
        finally:
            await turns.end()

    async def _play(
        self, turns: Turns, prompt: Prompt, key: SampleKey, sampling: Sampling, sample: SampleFunction
    ) -> Episode | ScoredEpisode:
        observation = await turns.begin(prompt, episode_seed(key, self.run_seed))
        transcript = self._begin(prompt, observation, await self._look(turns.first_images, len(prompt.images)))
        results: list[TurnResult] = []
        is_cut, last_words = False, ""
        while self.max_steps is None or len(results) < self.max_steps:
            room = self.max_length - transcript.num_tokens
            if room <= 0:
                break
            asked = replace(sampling, max_new_tokens=min(sampling.max_new_tokens, room))
            try:
                images = (transcript.images,) if self.preparer is not None else ()
                completion = await sample(transcript.context, asked, len(results), *images)
            except OutOfTimeError:
                if not results:
                    raise
                break
            is_cut = completion.finish == "length"
            before = transcript.text
            action = transcript.add_sampled(completion)
            result = await turns.act(before, action, asked)
            results.append(result)
            sampling = result.sampling or sampling
            if result.is_done:
                last_words = result.feedback
                break
            if self.preparer is not None and completion.token_ids[-1] in self.preparer.placeholder_ids:
                break  # no forward can read on after a placeholder without an image
            if result.context is not None:
                transcript.start_again(result.context, await self._look(result.images, 0))
            else:
                transcript.add_text(result.feedback, await self._look(result.images, len(transcript.images)))
        if not results:
            raise AgentError(
                f"the first observation has {transcript.num_tokens} tokens and leaves none to sample within"
                f" {self.max_length}"
            )
        last, rewards = results[-1], [result.reward for result in results]
        episode = transcript.episode(key, is_truncated=is_cut or not last.is_done, last_words=last_words)
        if all(reward is None for reward in rewards):
            return episode
        each = tuple(0.0 if reward is None else reward for reward in rewards)
        score = sum(each) if last.score is None else last.score
        return ScoredEpisode(episode, sum(each), score, dict(last.extra), each)

    async def _look(self, images: Sequence[Any], num_before: int) -> list[PreparedImage]:
        if self.preparer is None:
            if images:
                raise AgentError("the environment showed images, and the run has none: set data.image_key")
            return []
        return await self.preparer.prepare_all(images, num_before)

    def _begin(self, prompt: Prompt, observation: str | None, images: Sequence[PreparedImage]) -> Transcript:
        """Return what the first turn is sampled from. images: those after the prompt's."""
        transcript = Transcript(self.tokenizer, prompt, self.preparer)
        if (observation is None or observation == prompt.text) and not images:
            return transcript
        observation = prompt.text if observation is None else observation
        if observation.startswith(prompt.text):
            transcript.add_text(observation[len(prompt.text) :], images)
        else:
            transcript.start_again(observation, [*map(PreparedImage.of_file, prompt.images), *images])
        return transcript


# --- turns ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TurnResult:
    """Checked result of one turn, whichever form of environment it comes from."""

    feedback: str
    is_done: bool
    reward: float | None = None
    score: float | None = None
    extra: Mapping[str, float] = field(default_factory=dict)
    context: str | None = None  # a new text for the policy to continue from, instead of the transcript so far
    sampling: Sampling | None = None  # from the next turn on
    images: tuple[Any, ...] = ()  # for the image tokens in the feedback or the context


class Turns:
    """The environment of one episode, whichever form of user file it comes from.

    first_images: those that it shows in its first observation, after the prompt's; known once it has begun.
    """

    first_images: tuple[Any, ...] = ()

    async def begin(self, prompt: Prompt, seed: int) -> str | None:
        """Start the environment and return the first observation; None stands for the prompt."""
        raise NotImplementedError

    async def act(self, observation: str, action: str, sampling: Sampling) -> TurnResult:
        """Pass on an action that was sampled after the observation, and return the environment's response."""
        raise NotImplementedError

    async def end(self) -> None:
        """Close the environment. Called once, also after a failure; must not raise."""


class _EnvironmentTurns(Turns):
    def __init__(self, env_factory: Callable[[], Environment]):
        self._factory = env_factory
        self._environment: Environment | None = None
        self._thread = OwnThread("environment")

    async def begin(self, prompt: Prompt, seed: int) -> str | None:
        self._environment = environment = await self._thread.call(self._factory)
        seeded = {"seed": seed} if takes_seed(environment.reset) else {}
        observation = await self._thread.call(environment.reset, prompt.text, prompt.label, **seeded)
        if observation is not None and not isinstance(observation, str):
            raise AgentError(f"reset returned a {type(observation).__name__}, neither a string nor None")
        return observation

    async def act(self, observation: str, action: str, sampling: Sampling) -> TurnResult:
        assert self._environment is not None
        step = await self._thread.call(self._environment.step, action)
        if not isinstance(step, Step):
            raise AgentError(f"step returned a {type(step).__name__}, not a Step")
        if not isinstance(step.feedback, str):
            raise AgentError(f"step returned feedback that is a {type(step.feedback).__name__}, not a string")
        return TurnResult(
            step.feedback,
            bool(step.done),
            None if step.reward is None else number("reward", step.reward),
            None if step.score is None else number("score", step.score),
            {name: number(f"extra[{name!r}]", value, is_log=True) for name, value in step.extra.items()},
            images=listed(step.images),
        )

    async def end(self) -> None:
        environment, self._environment = self._environment, None
        close = getattr(environment, "close", None)
        if close is not None and getattr(close, "__func__", None) is not Environment.close:
            await self._thread.finish(close)
        self._thread.end()


def takes_seed(function: Callable[..., Any]) -> bool:
    return "seed" in inspect.signature(function).parameters


def number(name: str, value: Any, *, is_log: bool = False) -> float:
    """Convert a number, a tensor or array with one element, or a list of one number. Refuses infinities unless logged.

    name: what the value is called in the error. is_log: the value is only logged, so it may be infinite or NaN.
    """
    if callable(getattr(value, "tolist", None)):
        value = value.tolist()
    while isinstance(value, list | tuple) and len(value) == 1:
        value = value[0]
    if not isinstance(value, bool | int | float):
        shown = f"a list of {len(value)}" if isinstance(value, list | tuple) else f"a {type(value).__name__}"
        raise AgentError(f"{name} is {shown}, not one number")
    if not is_log and not math.isfinite(value):
        raise AgentError(f"{name} is {float(value)}")
    return float(value)
