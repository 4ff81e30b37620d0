"""Answers that the data gives, in the place of some that the policy would sample."""

from __future__ import annotations

import random

from hotseat.agents.agent import Agent, SampleFunction
from hotseat.agents.transcript import Transcript
from hotseat.loop.workers.group_facts import EVALUATION
from hotseat.types import GIVEN_VERSION, Completion, Episode, Prompt, SampleKey, Sampling


class GivenAnswers(Agent):
    """Answers so many prompts as the policy does, and the others with what the data gives.

    Which ones depends on the seed, the pass over the data and the prompt alone, so a repeated or resumed run has the
    same. sampled: share of prompts whose answers the policy samples. Evaluations are sampled always.
    """

    makes_checked_episodes = True
    runs_here = False

    def __init__(self, policy: Agent, tokenizer: object, *, sampled: float, seed: int, max_length: int):
        self._policy = policy
        self._tokenizer = tokenizer
        self._sampled = sampled
        self._seed = seed
        self._max_length = max_length

    async def run(self, prompt: Prompt, key: SampleKey, sampling: Sampling, sample: SampleFunction) -> Episode:
        if not self.is_given(key):
            made = await self._policy.run(prompt, key, sampling, sample)
            assert isinstance(made, Episode), "an agent that scores its episodes"
            return made
        room = min(sampling.max_new_tokens, self._max_length - len(prompt.token_ids))
        answer = prompt.answer[:room]
        transcript = Transcript(self._tokenizer, prompt)
        zeros, versions = (0.0,) * len(answer), (GIVEN_VERSION,) * len(answer)
        transcript.add_sampled(Completion(str(key), answer, zeros, versions, "stop"))
        return transcript.episode(key, is_truncated=len(answer) < len(prompt.answer))

    def is_given(self, key: SampleKey) -> bool:
        """Tell whether the data gives the answers to the prompt of this sample."""
        if key.epoch == EVALUATION:
            return False
        return random.Random(f"{self._seed} {key.epoch} {key.prompt}").random() >= self._sampled
