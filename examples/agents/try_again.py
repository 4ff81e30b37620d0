"""An agent in the form of OpenRLHF's module-level `step`: two tries, then a verdict.

Each episode sees module globals of its own, so `step_idx` counts the turns of one episode.
"""

from typing import Any

import torch

step_idx = 0
max_steps = 2


async def step(state: str, action: str, label: str, **kwargs: Any) -> tuple[torch.Tensor, str, bool, dict[str, Any]]:
    """Return the reward of this turn, the next state, whether the episode is over, and extra information."""
    global step_idx
    if step_idx >= max_steps:
        done = True
        reward = torch.rand(1)
        next_state = state + action + " The answer is correct. "
    else:
        done = False
        reward = torch.tensor(0)
        next_state = state + action + " The answer is not correct, please try again: "
    step_idx += 1
    return reward, next_state, done, {}
