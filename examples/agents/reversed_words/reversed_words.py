"""An environment of verifiers: write a word backwards.."""

import random

import verifiers as vf
from datasets import Dataset

LETTERS = "abcdefgh"


def words(num_words: int, seed: int) -> list[str]:
    rng = random.Random(seed)
    return ["".join(rng.choice(LETTERS) for _ in range(4)) for _ in range(num_words)]


async def is_reversed(completion, answer) -> float:
    return float(completion[-1]["content"] == answer)


def load_environment(num_words: int = 600, seed: int = 0) -> vf.Environment:
    rows = [{"question": word, "answer": word[::-1]} for word in words(num_words, seed)]
    return vf.SingleTurnEnv(dataset=Dataset.from_list(rows), rubric=vf.Rubric(funcs=[is_reversed]))
