"""The protocol of agents, and the simplest agent."""

from __future__ import annotations

from typing import Any, Protocol

from hotseat.agents.transcript import Transcript
from hotseat.types import Completion, Episode, Prompt, SampleKey, Sampling, ScoredEpisode, WhenSampled

_EPISODE = -2  # in place of a turn, for the seed of the episode itself


class AgentError(Exception):
    """An episode cannot continue; the message becomes the reason why its sample failed.

    shown: what is kept with the episode's output besides, such as the traceback in another process.
    """

    shown: str = ""


class PlayAgain(Exception):
    """The process that played an episode has ended: it is to be played from its beginning, with the same seeds."""


class OutOfTimeError(AgentError):
    """The episode ran out of time during a request to the policy: it consists of the tokens sampled so far."""


def episode_seed(key: SampleKey, run_seed: int) -> int:
    """Return the seed of an episode for environments and programs: the same in every attempt, below 2^31."""
    return key.seed(run_seed, _EPISODE) % 2**31


class SampleFunction(Protocol):
    """The function by which an agent samples from the engine."""

    async def __call__(
        self,
        token_ids: list[int],
        sampling: Sampling,
        turn: int,
        images: tuple[str, ...] | None = None,
        when_sampled: WhenSampled | None = None,
    ) -> Completion:
        """Sample a continuation of these tokens. `turn` counts the episode's calls from 0 and determines the seed.

        images: those of the placeholders among the tokens; None: those of the prompt.
        when_sampled: called in the event loop with all tokens so far, whenever there are more of them; where the engine
        cannot say, never.

        An agent may ask for fewer tokens, other stop tokens or strings than the run does; temperature, top-p and top-k
        are the run's, because the trainer computes log-probs under them.
        """


class Agent(Protocol):
    """Makes one episode from one prompt. One object serves many episodes at once, so it must not store their state.

    An agent may have a coroutine function `close`, which is called in the event loop of its host at the end.
    """

    name: str = ""  # for messages; without one, that of the class
    samples_by_itself: bool = False  # may sample under its own settings; such answers are not learned
    makes_checked_episodes: bool = False  # out of what the engine returned, so that nothing is left to check
    runs_here: bool = True  # code of the user's runs in the process of the host

    async def run(
        self, prompt: Prompt, key: SampleKey, sampling: Sampling, sample: SampleFunction
    ) -> Episode | ScoredEpisode:
        """Return an episode, which the run's reward function scores, or an episode with the agent's own reward.

        An exception makes this one sample fail, with its message as the reason. The segments must contain the sampled
        tokens exactly as `sample` returned them; `Transcript` puts them together.
        """


class SingleTurn(Agent):
    """Asks the engine once: the prompt and its answer are the episode."""

    runs_here = False

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer

    async def run(self, prompt: Prompt, key: SampleKey, sampling: Sampling, sample: SampleFunction) -> Episode:
        transcript = Transcript(self._tokenizer, prompt)
        completion = await sample(transcript.context, sampling, 0)
        transcript.add_sampled(completion)
        return transcript.episode(key, is_truncated=completion.finish == "length")
