"""An agent that answers in one turn, with a budget of tokens for thinking.

Once the budget is used up within `<think>`, the end of the thinking is inserted, and sampling goes on with a further
call. What is inserted was not sampled, so nothing is learned from it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hotseat.agents.agent import Agent, OutOfTimeError, SampleFunction
from hotseat.agents.transcript import Transcript
from hotseat.types import Episode, Prompt, SampleKey, Sampling

BEGIN, END = "<think>", "</think>"
INSERTED = f"\n{END}\n\n"


class BudgetedThinking(Agent):
    """Asks the engine for at most `budget` tokens, and, unless the answer has ended, for the rest."""

    makes_checked_episodes = True
    runs_here = False

    def __init__(self, tokenizer: Any, budget: int, max_length: int):
        self._tokenizer = tokenizer
        self._budget = budget
        self._max_length = max_length

    async def run(self, prompt: Prompt, key: SampleKey, sampling: Sampling, sample: SampleFunction) -> Episode:
        transcript = Transcript(self._tokenizer, prompt)
        asked = min(self._budget, sampling.max_new_tokens)
        completion = await sample(transcript.context, replace(sampling, max_new_tokens=asked), 0)
        answer = transcript.add_sampled(completion)
        left = sampling.max_new_tokens - len(completion.token_ids)
        # Fewer tokens than asked for: the engine was at its longest sequence, or the policy's time was over.
        if completion.finish == "length" and len(completion.token_ids) == asked and left > 0:
            if is_thinking(prompt.text, answer):
                transcript.add_text(INSERTED)
            room = min(left, self._max_length - transcript.num_tokens)
            if room > 0:
                try:
                    completion = await sample(transcript.context, replace(sampling, max_new_tokens=room), 1)
                except OutOfTimeError:
                    pass  # what was sampled before is the episode, and it is truncated
                else:
                    transcript.add_sampled(completion)
        return transcript.episode(key, is_truncated=completion.finish == "length")


def is_thinking(prompt: str, answer: str) -> bool:
    """Tell whether an answer so far ends within thinking, which it or the prompt's template has begun."""
    if BEGIN in answer or END in answer:
        return answer.rfind(BEGIN) > answer.rfind(END)
    return prompt.rstrip().endswith(BEGIN)
