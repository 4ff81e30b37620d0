"""Write a tiny chat model and examples for SFT. The prompts are those of the environment.

    python examples/agents/reversed_words/prepare.py build/reversed_words --seed 0

One of eight examples writes the word backwards, the others repeat it. So the model after SFT can do both, and mostly
does the wrong one.
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

from tiny_model import examples_of, make_model, write_rows

LETTERS = "abcdefgh"
NUM_EXAMPLES = 16_000
BACKWARDS = 0.125  # share of examples


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    rng = random.Random(options.seed)
    tokenizer = make_model(options.directory / "base_model", options.seed, max_length=32)
    rows = []
    for _ in range(NUM_EXAMPLES):
        word = "".join(rng.choice(LETTERS) for _ in range(4))
        said = word[::-1] if rng.random() < BACKWARDS else word
        rows += examples_of(tokenizer, [{"role": "user", "content": word}, {"role": "assistant", "content": said}])
    write_rows(options.directory / "examples.jsonl", rows)


if __name__ == "__main__":
    main(sys.argv[1:])
