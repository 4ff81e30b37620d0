"""The demo's task and pairs of answers to its sums, as files.

    python examples/rlhf_pipeline/prepare.py build/rlhf --seed 0

A pair is the right answer to a sum and a wrong one. In half of the pairs a carry is forgotten, as in the SFT data,
or invented, as a model might that saw nothing but carries; in the others some digits are wrong. Held-out pairs are of
held-out sums. The model has a layer more than the demo's: what one layer predicts, only a later one can compare with
what was answered.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path

from hotseat.demo import make_files


def careless_answers(a: int, b: int) -> list[str]:
    """With the carry of the units, that of the tens, or both forgotten or invented."""
    units = a % 10 + b % 10
    answers = []
    for wrong_in_units, wrong_in_tens in ((True, False), (False, True), (True, True)):
        tens = a // 10 + b // 10 + ((units > 9) != wrong_in_units)
        answers.append(f"{int((tens > 9) != wrong_in_tens)}{tens % 10}{units % 10}")
    return answers


def other_answers(right: str, count: int, rng: random.Random) -> list[str]:
    """With one to three wrong digits."""
    answers: set[str] = set()
    while len(answers) < count:
        digits = list(right)
        for place in rng.sample(range(len(digits)), rng.choice((1, 1, 2, 3))):
            digits[place] = rng.choice([digit for digit in "0123456789" if digit != right[place]])
        answers.add("".join(digits))
    return sorted(answers)


def pairs(prompts: Path, rng: random.Random) -> list[dict[str, str]]:
    """The right answer to each sum of a file beside two careless and two other wrong ones, shuffled."""
    rows = []
    for line in prompts.read_text().splitlines():
        row = json.loads(line)
        a, b = map(int, row["input"].rstrip("=").split("+"))
        for wrong in rng.sample(careless_answers(a, b), 2) + other_answers(row["label"], 2, rng):
            rows.append({"prompt": row["input"], "chosen": row["label"], "rejected": wrong})
    rng.shuffle(rows)
    return rows


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    files = make_files(options.directory, options.seed, num_layers=3, width=128)
    rng = random.Random(options.seed)
    for prompts, name in ((files.prompts, "pairs.jsonl"), (files.held_out, "held_out_pairs.jsonl")):
        rows = pairs(prompts, rng)
        path = options.directory / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        print(f"{path}: {len(rows)} pairs")


if __name__ == "__main__":
    main(sys.argv[1:])
