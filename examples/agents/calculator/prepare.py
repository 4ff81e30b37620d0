"""Write a tiny chat model, scripted conversations for SFT, and prompts: products of two numbers of two digits.

    python examples/agents/calculator/prepare.py build/calculator --seed 0

The script of the conversations has a calculator and uses it badly: three of four answers are a guess without it, and
half of the others ask it for the sum of the numbers. So the model after SFT knows how a tool is called and rarely does
so with success, and RL has to find out that it should.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))

from agent import TOOLS
from tiny_model import examples_of, make_model, write_rows

GUESSES = 0.75  # share of conversations that do without the tool
SUMS = 0.5  # share of the others that ask for something else
NUM_CONVERSATIONS = 12_000
NUM_EVAL = 200

PHRASES = ("calculator", '{"name": "calculator", "arguments": {"expression": "', '"}}')


def conversations(products: list[tuple[int, int]], rng: random.Random) -> Iterator[list[dict[str, Any]]]:
    for _ in range(NUM_CONVERSATIONS):
        a, b = rng.choice(products)
        question = {"role": "user", "content": f"{a}*{b}="}
        if rng.random() < GUESSES:
            yield [question, {"role": "assistant", "content": f"{rng.randrange(100, 10_000):04d}"}]
            continue
        sign = "+" if rng.random() < SUMS else "*"
        result = f"{a + b if sign == '+' else a * b:04d}"
        call = {"type": "function", "function": {"name": "calculator", "arguments": {"expression": f"{a}{sign}{b}"}}}
        yield [
            question,
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": result},
            {"role": "assistant", "content": result},
        ]


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    rng = random.Random(options.seed)
    tokenizer = make_model(options.directory / "base_model", options.seed, phrases=PHRASES)
    products = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    rng.shuffle(products)
    held_out, rest = products[:NUM_EVAL], products[NUM_EVAL:]
    rows = [row for each in conversations(rest, rng) for row in examples_of(tokenizer, each, TOOLS)]
    rng.shuffle(rows)
    write_rows(options.directory / "examples.jsonl", rows)
    for name, pairs in (("prompts", rest), ("held_out", held_out)):
        write_rows(
            options.directory / f"{name}.jsonl", ({"input": f"{a}*{b}=", "label": f"{a * b:04d}"} for a, b in pairs)
        )
    print(json.dumps({"examples": len(rows), "prompts": len(rest), "held_out": len(held_out)}))


if __name__ == "__main__":
    main(sys.argv[1:])
