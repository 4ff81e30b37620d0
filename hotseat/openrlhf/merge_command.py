"""OpenRLHF's `lora_combiner` on Hotseat: adds a LoRA adapter to its base model."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from hotseat.cli.ending import reported


def main(argv: Sequence[str]) -> int:
    """Run the command, and return its exit code."""
    parser = argparse.ArgumentParser(prog="lora_combiner", allow_abbrev=False, description=__doc__)
    parser.add_argument("--model_path", dest="base", required=True, help="base model")
    parser.add_argument("--lora_path", dest="adapter", required=True, help="folder of the adapter")
    parser.add_argument("--output_path", dest="output", required=True, help="folder for the merged model")
    parser.add_argument("--is_rm", dest="reward_model", action="store_true", help="the base is a reward model")
    parser.add_argument("--bf16", action="store_true", help="write bfloat16")
    arguments = parser.parse_args(argv)

    def run() -> int:
        from hotseat.cli.offline import run_merge

        return run_merge(arguments)

    return reported("lora_combiner", run)
