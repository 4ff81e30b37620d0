"""GRPO with a model of 0.5B parameters on one GPU, through the transformers engine, against TRL in the same run.

The shape is Qwen2.5-0.5B's without biases, the weights are random: 24 layers, hidden 896, 151,936 tokens. A step is 32
prompts of 64 tokens x 8 samples x 256 new tokens and one optimizer step, in bf16 with fp32 master weights, without a
reference model. Every answer has its full length: the end token lies outside of the model's vocabulary. Hotseat runs on
Ray as `hotseat run` does, actor and engine taking turns on the device; TRL samples with `model.generate`. The median
step counts.

    python bench/loop_on_gpu.py [--steps 6]
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from lib.devices import need_gpu
from lib.shapes import dimensions
from lib.trl_side import time_grpo
from lib.words import save_prompts, save_tokenizer

NUM_PROMPTS, GROUP_SIZE, PROMPT_LENGTH, NUM_NEW_TOKENS = 32, 8, 64, 256
NUM_WARM_UP = 2  # steps that do not count
VOCAB_SIZE = 151_936

CONFIG = """
task: rl
name: hotseat
run_dir: {directory}
cluster: {{component_placement: {{actor: 0, rollout: "@actor"}}}}
actor: {{model: {directory}/model, optimizer: {{learning_rate: 1e-6, schedule: constant}}}}
data: {{path: {directory}/prompts.jsonl, label_key: label, max_length: 352}}
reward: {{function: {directory}/reward.py}}
rollout: {{batch_size: 32, samples_per_prompt: 8, max_new_tokens: 256, num_slots: 256}}
algorithm: {{estimator: group_norm}}
train: {{dtype: bf16, batch_size: 256, micro_batch_size: 64}}
"""

REWARD = """
def reward_func(queries, prompts, labels):
    return [sum(map(ord, query[len(prompt):])) / 1e5 for query, prompt in zip(queries, prompts)]
"""


def make_task(directory: Path, num_rows: int) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    words = [*(f"w{index}" for index in range(VOCAB_SIZE)), "<eos>"]
    save_tokenizer(directory / "model", words)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        **dimensions(896, 4864, 24, 14, 2),
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=VOCAB_SIZE,
        pad_token_id=0,
    )
    with torch.device("cuda"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(directory / "model")
    rng = random.Random(0)
    prompts = [rng.choices(words[1:-1], k=PROMPT_LENGTH) for _ in range(num_rows)]
    save_prompts(directory / "prompts.jsonl", prompts, [""] * num_rows)
    (directory / "reward.py").write_text(REWARD)


def time_trl(directory: Path, num_steps: int) -> tuple[list[float], dict[str, float]]:
    def reward(completions: list[str], **kwargs: Any) -> list[float]:
        return [sum(map(ord, text)) / 1e5 for text in completions]

    seconds = time_grpo(
        directory / "model",
        directory / "prompts.jsonl",
        directory / "trl",
        reward,
        max_steps=num_steps,
        per_device_train_batch_size=64,
        gradient_accumulation_steps=4,
        num_generations=GROUP_SIZE,
        max_completion_length=NUM_NEW_TOKENS,
        bf16=True,
        model_init_kwargs={"dtype": "float32"},
        gradient_checkpointing=False,
    )
    return seconds, {}


def time_hotseat(directory: Path, num_steps: int) -> tuple[list[float], dict[str, float]]:
    from hotseat.config import loads
    from hotseat.loop.run import start
    from hotseat.observe import read_lines

    start(loads(CONFIG.format(directory=directory)))
    records = [record for record in read_lines(directory / "hotseat" / "metrics.jsonl") if "step_s" in record]
    assert all(record["length"] == NUM_NEW_TOKENS for record in records)
    names = [name for name in records[-1] if name.startswith("time/") and name != "time/driver_cpu"]
    names += ["canary_gap", "engine_gap"]
    return [record["step_s"] for record in records], {
        name.removeprefix("time/"): statistics.median(record[name] for record in records[NUM_WARM_UP:])
        for name in names
    }


SIDES = {"trl": time_trl, "hotseat": time_hotseat}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--directory", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.side is not None:
        seconds, medians = SIDES[arguments.side](arguments.directory, arguments.steps)
        found = {"seconds": statistics.median(seconds[NUM_WARM_UP:]), "medians": medians}
        (arguments.directory / f"{arguments.side}.json").write_text(json.dumps(found))
        return
    need_gpu()
    import torch

    results = {}
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        make_task(directory, arguments.steps * NUM_PROMPTS)
        for side in SIDES:
            given = ["--side", side, "--steps", str(arguments.steps), "--directory", name]
            subprocess.run([sys.executable, __file__, *given], check=True)
            results[side] = json.loads((directory / f"{side}.json").read_text())
    num_tokens = NUM_PROMPTS * GROUP_SIZE * NUM_NEW_TOKENS
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; {num_tokens:,} sampled tokens a step")
    for side, result in results.items():
        seconds = result["seconds"]
        ratio = results["trl"]["seconds"] / seconds
        print(f"{side:>8}  {seconds:6.2f} s/step  {num_tokens / seconds:9,.0f} tokens/s  {ratio:5.2f} times as fast")
        if result["medians"]:
            print("          " + ", ".join(f"{name} {value:.3g}" for name, value in result["medians"].items()))


if __name__ == "__main__":
    main()
