"""Tasks of reasoning-gym: one question, one answer, scored by the data set.

name: a data set, such as `chain_sum`. arguments: of `create_dataset`, among them `seed` and `size`; and `system`, a
text before each question. Numbers are the entries of the data set.
"""

from __future__ import annotations

import sys
from typing import Any

import reasoning_gym

_ANSWER = ("<answer>", "</answer>")

NEEDS_NAME = "reasoning_gym needs the name of a data set, such as chain_sum"


class ReasoningGymTasks:
    def __init__(self, name: str, arguments: dict[str, Any]):
        arguments = {"size": 1 << 31, **arguments}
        self._system = arguments.pop("system", None)
        self._entries = reasoning_gym.create_dataset(name, **arguments)

    def prompt(self, number: int) -> str:
        return self._entry(number)["question"]

    def play(self, number: int, policy: Any) -> dict[str, Any]:
        entry = self._entry(number)
        opening = sys.modules["hotseat_worker"].opening(self._system)
        answer = policy.ask([*opening, {"role": "user", "content": entry["question"]}]) or ""
        before, _, rest = answer.rpartition(_ANSWER[0])
        answer = rest.partition(_ANSWER[1])[0] if before or answer.startswith(_ANSWER[0]) else answer
        return {"reward": float(self._entries.score_answer(answer=answer.strip(), entry=entry))}

    def _entry(self, number: int) -> Any:
        if number >= len(self._entries):
            raise ValueError(f"there is no task {number}: the data set has {len(self._entries)}, its argument `size`")
        return self._entries[number]
