"""An agent with a tool, as a class of a script: an untrained model learns in a minute to use its calculator.

    python examples/python/tool_agent.py

The policy sees a sum such as `07+35=`. It may answer, or write `+` first, and then its calculator answers for it, which
costs a little of the reward.
"""

import random

import hotseat
from hotseat.demo import answer, make_model, question


class Calculator(hotseat.Environment):
    """One turn: the policy's own answer, or that of the tool that it asks for."""

    def reset(self, prompt, label):
        self.label = label

    def step(self, action):
        if action.startswith("+"):
            return hotseat.Step(feedback=self.label, reward=0.9, done=True, extra={"tool_calls": 1.0})
        is_right = action.removesuffix("<eos>") == self.label
        return hotseat.Step(reward=float(is_right), done=True, extra={"tool_calls": 0.0})


def rows(count, seed):
    numbers = random.Random(seed)
    sums = [(numbers.randrange(100), numbers.randrange(100)) for _ in range(count)]
    return [{"input": question(a, b), "label": answer(a, b)} for a, b in sums]


if __name__ == "__main__":
    make_model("tool_model", seed=0)
    run = hotseat.run(
        {
            "actor": {"model": "tool_model", "optimizer": {"learning_rate": 3e-3}},
            "data": {"label_key": "label", "max_length": 24},
            "rollout": {"batch_size": 16, "samples_per_prompt": 8, "max_new_tokens": 4},
            "train": {"batch_size": 128, "num_episodes": 2},
        },
        train=rows(256, seed=1),
        agent=Calculator,
        callbacks=[hotseat.StopAt("reward", 0.85)],
    )
    print(run.frame()[["reward", "extra/tool_calls"]])
