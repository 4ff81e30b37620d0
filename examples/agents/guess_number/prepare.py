"""Write a tiny model, scripted games for SFT, and prompts: a number from 1 to 3 is to be guessed.

    python examples/agents/guess_number/prepare.py build/guess_number --seed 0

The script keeps to the hints in a third of its guesses, and otherwise guesses any number. So the model after SFT knows
the form of the game and what hints are, and wins by luck.
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

from tiny_model import make_model, write_rows

PROMPT = "Guess a number from 1 to 3: "
HINTS = ("\nIt is higher. Guess: ", "\nIt is lower. Guess: ")
NUMBERS = range(1, 4)
NUM_GAMES = 3000
MAX_GUESSES = 2
KEPT = 1 / 3  # share of guesses that keep to the hints


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    rng = random.Random(options.seed)
    make_model(options.directory / "base_model", options.seed, phrases=(PROMPT, *HINTS), width=64, max_length=32)
    rows = []
    for _ in range(NUM_GAMES):
        secret, read, left = rng.choice(NUMBERS), PROMPT, list(NUMBERS)
        for _ in range(MAX_GUESSES):
            guess = rng.choice(left if rng.random() < KEPT else NUMBERS)
            rows.append({"input": read, "output": str(guess)})
            if guess == secret:
                break
            left = [number for number in left if (number > guess) == (secret > guess) and number != guess]
            read += f"{guess}<end>{HINTS[guess > secret]}"
    rng.shuffle(rows)
    write_rows(options.directory / "examples.jsonl", rows)
    for name, count in (("prompts", 12 * 40), ("held_out", 12 * 10)):
        secrets = [NUMBERS[at % len(NUMBERS)] for at in range(count)]
        write_rows(options.directory / f"{name}.jsonl", ({"input": PROMPT, "label": str(secret)} for secret in secrets))


if __name__ == "__main__":
    main(sys.argv[1:])
