"""OpenRLHF's `lora_combiner` on Hotseat: adds a LoRA adapter to its base model."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from hotseat.cli.ending import reported


def main(argv: Sequence[str]) -> int:
    """Run the command, and return its exit code."""
    parser = argparse.ArgumentParser(prog="lora_combiner", allow_abbrev=False, description=__doc__)
    parser.add_argument("--model_path", required=True, help="base model")
    parser.add_argument("--lora_path", required=True, type=Path, help="folder of the adapter")
    parser.add_argument("--output_path", required=True, type=Path, help="folder for the merged model")
    parser.add_argument("--is_rm", action="store_true", help="the base is a reward model")
    parser.add_argument("--bf16", action="store_true", help="write bfloat16")
    arguments = parser.parse_args(argv)

    def run() -> int:
        from hotseat.cli.offline import merge_with

        merge_with(
            arguments.model_path,
            arguments.lora_path,
            arguments.output_path,
            is_reward_model=arguments.is_rm,
            bf16=arguments.bf16,
        )
        return 0

    return reported("lora_combiner", run)
