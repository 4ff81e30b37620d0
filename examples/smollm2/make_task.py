"""Sums and differences of two digits, from reasoning-gym: prompts to learn from, and others to be examined on.

    python examples/smollm2/make_task.py data/sums.jsonl

writes data/sums.jsonl and data/sums.held_out.jsonl; a problem is in one of them. Each row is a question and its answer;
the chat template is put around it by `data.apply_chat_template` of the config.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

NUM_HELD_OUT = 32
NUM_DRAWN = 2000  # meets all 200 that there are
SEED = 7


def problems() -> list[dict[str, str]]:
    """Each once, in the order in which they are first drawn."""
    try:
        import reasoning_gym
    except ImportError:
        raise SystemExit("the package reasoning-gym is not installed: pip install 'hotseat[examples]'") from None
    drawn = reasoning_gym.create_dataset(
        "chain_sum", min_terms=2, max_terms=2, min_digits=1, max_digits=1, size=NUM_DRAWN, seed=SEED
    )
    rows = {entry["question"]: {"input": entry["question"], "answer": entry["answer"]} for entry in drawn}
    return list(rows.values())


def write(rows: list[dict[str, str]], path: Path) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(f"{path}: {len(rows)} problems")


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="the file to learn from; the other is named after it")
    out = parser.parse_args(arguments).out
    out.parent.mkdir(parents=True, exist_ok=True)
    rows = problems()
    write(rows[NUM_HELD_OUT:], out)
    write(rows[:NUM_HELD_OUT], out.with_suffix(f".held_out{out.suffix}"))


if __name__ == "__main__":
    main(sys.argv[1:])
