"""Write what the example starts from: a tiny Llama that reads BabyAI's views, and what BabyAI's bot did.

    python examples/embodied/policy.py FOLDER --tasks BabyAI-GoToRedBallGrey-v0 --episodes 200

`FOLDER/model` has random weights and a tokenizer with a token per word, whose last tokens are the actions.
`FOLDER/expert.jsonl` has a row per action of the bot: the view, and the action as its token.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from hotseat.envs.families import babyai

MISSION = (
    "go to the a pick up put next open door ball box key red green blue purple yellow grey object then and after you"
    " on your left right in front of behind"
)
ACTIONS = [f"<{name}>" for name in babyai.ACTIONS]


def make_tokenizer() -> PreTrainedTokenizerFast:
    words = ["<pad>", "<end>", "<unknown>", *dict.fromkeys([*MISSION.split(), *babyai.WORDS])]
    words += reversed(ACTIONS)  # action 0 is the last token
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unknown>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>", unk_token="<unknown>"
    )


def make_model(tokenizer: PreTrainedTokenizerFast, width: int, seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=width,
            intermediate_size=2 * width,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=128,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def expert_rows(tasks: list[str], num_episodes: int, first_seed: int) -> list[dict[str, str]]:
    """Return a row for each action of the bot, in episodes of seeds that no run learns from."""
    simulator = babyai.make(tasks)
    rows = []
    for episode in range(num_episodes):
        seen = simulator.reset(episode % len(tasks), first_seed + episode)
        bot, action = simulator.expert(), None
        while True:
            action = bot.replan(action)
            rows.append({"input": f"{seen.instruction} {seen.text}", "output": f" {ACTIONS[action]}"})
            step = simulator.step(np.array([float(action)]))
            seen = step.seen
            if step.terminated or step.truncated:
                break
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tasks", nargs="+", default=["BabyAI-GoToRedBallGrey-v0"])
    parser.add_argument("--episodes", type=int, default=260)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(arguments.folder / "model")
    make_model(tokenizer, arguments.width, arguments.seed).save_pretrained(arguments.folder / "model")
    rows = expert_rows(arguments.tasks, arguments.episodes, 2_000_000 + 10_000 * arguments.seed)
    (arguments.folder / "expert.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(f"{arguments.folder}: a model, and {len(rows)} actions in {arguments.episodes} episodes")


if __name__ == "__main__":
    main()
