"""What an agent is, and the simplest one."""

from __future__ import annotations

from typing import Any, Protocol

from hotseat.agents.transcript import Transcript
from hotseat.types import Completion, Episode, Prompt, SampleKey, Sampling, ScoredEpisode


class AgentError(Exception):
    """An episode cannot go on; the message becomes the reason why its sample failed."""


class Sample(Protocol):
    """How an agent reaches the engine."""

    async def __call__(self, token_ids: list[int], sampling: Sampling, turn: int) -> Completion:
        """Sample from these tokens on. `turn` counts the calls of the episode from 0: the seed comes from it.

        An agent may ask for fewer tokens or other stop tokens than the run does; temperature, top-p and top-k are the
        run's, because the trainer computes log-probs under them.
        """


class Agent(Protocol):
    """Makes one episode of one prompt. One object serves many episodes at once, so it keeps nothing of them."""

    async def run(self, prompt: Prompt, key: SampleKey, sampling: Sampling, sample: Sample) -> Episode | ScoredEpisode:
        """An episode, or one with a reward of the agent's own; without, the run's reward function scores it.

        Whatever it raises makes this one sample fail, with the reason. Its segments have the sampled tokens exactly as
        `sample` gave them; `Transcript` puts them together.
        """


class SingleTurn(Agent):
    """Asks once."""

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer

    async def run(self, prompt: Prompt, key: SampleKey, sampling: Sampling, sample: Sample) -> Episode:
        transcript = Transcript(self._tokenizer, prompt)
        completion = await sample(transcript.context, sampling, 0)
        transcript.add_sampled(completion)
        return transcript.episode(key, is_truncated=completion.finish == "length")
