"""Write a tiny chat model, examples for SFT, and prompts: colours to be passed on.

    python examples/agents/signals/prepare.py build/signals --seed 0

In the examples speakers mostly say any letter and listeners name any colour; three of ten keep to a code. So the model
after SFT knows the form of the game, and wins little more often than by chance.
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

from agent import LETTERS
from tiny_model import examples_of, make_model, write_rows

CODE = {"a": "red", "b": "green", "c": "blue", "d": "white"}
COLOURS = tuple(CODE.values())
KEPT = 0.3  # share of examples that keep to the code
NUM_EXAMPLES = 6400


def draw(rng: random.Random) -> tuple[str, str]:
    return rng.choice(COLOURS), rng.choice(LETTERS)


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    rng = random.Random(options.seed)
    phrases = ("speaker", "listener", *COLOURS)
    tokenizer = make_model(options.directory / "base_model", options.seed, phrases=phrases, width=64, max_length=32)
    rows = []
    for _ in range(NUM_EXAMPLES):
        colour, letter = rng.choice(list(CODE.items()))[::-1] if rng.random() < KEPT else draw(rng)
        role, read, said = rng.choice([("speaker", colour, letter), ("listener", letter, colour)])
        messages = [
            {"role": "system", "content": role},
            {"role": "user", "content": read},
            {"role": "assistant", "content": said},
        ]
        rows += examples_of(tokenizer, messages)
    write_rows(options.directory / "examples.jsonl", rows)
    for name, count in (("prompts", 640), ("held_out", 100)):
        colours = [COLOURS[at % len(COLOURS)] for at in range(count)]
        write_rows(options.directory / f"{name}.jsonl", ({"input": colour, "label": colour} for colour in colours))


if __name__ == "__main__":
    main(sys.argv[1:])
