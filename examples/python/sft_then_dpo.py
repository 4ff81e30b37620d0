"""SFT, then DPO, of the demo's small model on sums of two numbers, without a file of data; three minutes on two cores.

    python examples/python/sft_then_dpo.py

The examples of SFT forget the carry, so the model learns a mistake. The pairs of DPO prefer the right sum to that one.
"""

import random

import hotseat
from hotseat.demo import answer, careless, make_model, question

SHARED = {"cluster": {"runtime": "local"}, "eval": {"every": 20}}


def sums(count, seed):
    numbers = random.Random(seed)
    return [(numbers.randrange(100), numbers.randrange(100)) for _ in range(count)]


def examples(count, seed):
    return [{"input": question(a, b), "output": careless(a, b)} for a, b in sums(count, seed)]


def pairs(count, seed):
    carried = [(a, b) for a, b in sums(count, seed) if careless(a, b) != answer(a, b)]
    return [
        {"prompt": question(a, b), "chosen": question(a, b) + answer(a, b), "rejected": question(a, b) + careless(a, b)}
        for a, b in carried
    ]


if __name__ == "__main__":
    make_model("sums_model", seed=0)
    sft = hotseat.run(
        {
            "task": "sft",
            "actor": {"model": "sums_model", "optimizer": {"learning_rate": 3e-3}},
            "data": {"output_key": "output", "max_length": 16},
            "train": {"batch_size": 128},
            **SHARED,
        },
        train=examples(12_800, seed=1),
        eval=examples(200, seed=2),
    )
    dpo = hotseat.run(
        {
            "task": "dpo",
            "actor": {"model": str(sft.model), "optimizer": {"learning_rate": 3e-4}},
            "data": {"prompt_key": "prompt", "max_length": 16},
            "train": {"batch_size": 64},
            **SHARED,
        },
        train=pairs(4_000, seed=3),
        eval=pairs(200, seed=2),
        callbacks=[hotseat.EarlyStopping("eval/accuracy", patience=2)],
    )
    print(dpo.frame().filter(like="eval/").dropna())
