"""An environment of several turns: guess a number, with a hint after each wrong guess.

The prompts ask for a number between 1 and 100, the label is the number. Run it with

    agent:
      path: examples/agents/guess_number.py
      max_steps: 7
    data:
      label_key: label

An episode ends with the right guess, or after `max_steps` turns. A right guess is worth 1; a guess that is no number
costs a tenth, so that a policy learns to answer in the form asked for before it learns to search.
"""

import re

from hotseat import Environment, Step


class GuessNumber(Environment):
    def reset(self, prompt: str, label: str) -> str | None:
        self.secret = int(label)
        self.num_guesses = 0
        return None  # start from the prompt as it is

    def step(self, action: str) -> Step:
        self.num_guesses += 1
        found = re.search(r"\d+", action)
        if not found:
            return Step("\nThat is no number. Guess: ", reward=-0.1)
        guess = int(found[0][:9])
        if guess == self.secret:
            return Step("\nRight!", reward=1.0, done=True, score=1.0, extra={"num_guesses": self.num_guesses})
        hint = "higher" if guess < self.secret else "lower"
        return Step(f"\nIt is {hint}. Guess: ", reward=0.0, score=0.0, extra={"num_guesses": self.num_guesses})
