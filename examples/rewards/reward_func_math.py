"""Rewards for arithmetic: the final number of an answer, as `#### 42` or after "answer is" or "=".

1 for the right number, 0 for a wrong one, -0.5 for an answer without a number. Labels are numbers.
"""

import re

NUMBER = r"(-?\d[\d,]*(?:\.\d+)?)"
PATTERNS = (re.compile(r"####\s*" + NUMBER), re.compile(r"(?:answer is:?|=)\s*" + NUMBER, re.IGNORECASE))


def final_number(answer):
    for pattern in PATTERNS:
        found = pattern.findall(answer)
        if found:
            return float(found[-1].replace(",", ""))
    return None


def reward_func(queries, prompts, labels):
    rewards = []
    for query, prompt, label in zip(queries, prompts, labels, strict=True):
        number = final_number(query[len(prompt) :])
        if number is None:
            rewards.append(-0.5)
        else:
            rewards.append(float(abs(number - float(label)) < 1e-6))
    return {
        "rewards": rewards,
        "scores": [(reward + 0.5) / 1.5 for reward in rewards],
        "extra_logs": {
            "math_accuracy": [float(reward == 1.0) for reward in rewards],
            "answer_formatted": [float(reward >= 0.0) for reward in rewards],
        },
    }
