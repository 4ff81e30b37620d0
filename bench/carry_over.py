"""What carrying open requests over to the next rollout gains where engine and trainer share one device.

A model of Qwen2.5-1.5B's shape with random weights; answers of very different lengths: exponential, at most 512 tokens,
which is four times their mean. 32 prompts x 8 samples a step, one optimizer step, GRPO, pure bf16, vLLM. Synchronous,
and with staleness 1 and 2, order arrival, open requests recomputed after each push. Prints sampled tokens per second
over all steps after the first ones, and what was trained per step.

    python bench/carry_over.py                          every case, one after another, each in its own process
    python bench/carry_over.py --only 0 1               some; results stay in --directory, and all of them are printed
    python bench/carry_over.py --model tiny --steps 4   a tiny shape, the default without a GPU: transformers engine
"""

from __future__ import annotations

import argparse
import json
import math
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from lib.devices import has_gpu
from lib.shapes import VOCAB_SIZES, make_weights, shape
from lib.words import save_prompts, save_tokenizer

NUM_PROMPTS, PROMPT_LENGTH, MAX_NEW_TOKENS = 32, 23, 512
NUM_WARM_UP = 3  # steps that do not count
TARGETS = {1: 1.15, 2: 1.2}

CONFIG = """
task: rl
name: staleness-{staleness}-{number}
run_dir: {directory}/runs
cluster: {{component_placement: {{actor: 0, rollout: "@actor"}}}}
actor: {{model: {directory}/{model}, optimizer: {{learning_rate: 1e-6, schedule: constant}}}}
data: {{path: {directory}/{model}/prompts.jsonl, label_key: label, max_length: 536, max_samples: {num_rows}}}
agent: {{path: {directory}/agent.py}}
rollout: {{engine: {engine}, batch_size: 32, samples_per_prompt: 8, max_new_tokens: 512, {share}}}
algorithm: {{estimator: group_norm}}
train: {{{precision}, batch_size: 256, micro_batch_size: 32}}
log: {{samples_per_step: 0}}
{overlap}
"""

AGENT = """
import math
import random
from dataclasses import replace

from hotseat.agents import Agent, Transcript
from hotseat.types import ScoredEpisode

LONGEST, SCALE = {longest}, {scale}


class Answers(Agent):
    def __init__(self, tokenizer):
        self._tokenizer = tokenizer

    async def run(self, prompt, key, sampling, sample):
        length = min(LONGEST, math.ceil(random.Random(str(key)).expovariate(1 / SCALE)))
        transcript = Transcript(self._tokenizer, prompt)
        completion = await sample(transcript.context, replace(sampling, max_new_tokens=length), 0)
        transcript.add_sampled(completion)
        reward = sum(completion.token_ids) % 7 / 7
        return ScoredEpisode(transcript.episode(key, is_truncated=False), reward, reward)
"""


def write_model(directory: Path, model: str) -> None:
    path, vocab_size = directory / model, VOCAB_SIZES[model]
    words = [*(f"w{index}" for index in range(vocab_size)), "<eos>"]  # the end lies outside of the vocabulary
    save_tokenizer(path, words)
    weights = make_weights(shape(model, eos_token_id=vocab_size), "cuda" if has_gpu() else "cpu")
    (weights if has_gpu() else weights.float()).save_pretrained(path)
    rng = random.Random(0)
    num_rows = 40 * NUM_PROMPTS
    save_prompts(
        path / "prompts.jsonl", [rng.choices(words[1:-1], k=PROMPT_LENGTH) for _ in range(num_rows)], [""] * num_rows
    )
    # The mean of min(longest, exponential) is scale (1 - exp(-longest / scale)): a quarter of the longest.
    (directory / "agent.py").write_text(AGENT.format(longest=MAX_NEW_TOKENS, scale=MAX_NEW_TOKENS / 3.92))
    assert abs((1 - math.exp(-3.92)) / 3.92 - 0.25) < 0.001


def run(directory: Path, model: str, staleness: int, num_steps: int) -> dict[str, Any]:
    from hotseat.config import loads
    from hotseat.loop.run import start
    from hotseat.observe import read_lines

    number = int(time.time())
    overlap = f"overlap: {{staleness: {staleness}, order: arrival, in_flight: recompute}}" if staleness else ""
    text = CONFIG.format(
        directory=directory,
        model=model,
        staleness=staleness,
        number=number,
        engine="vllm" if has_gpu() else "transformers",
        share="memory_share: 0.4" if has_gpu() else "num_slots: 256",
        precision="dtype: bf16, fp32_master: false" if has_gpu() else "dtype: fp32",
        num_rows=num_steps * NUM_PROMPTS,
        overlap=overlap,
    )
    start(loads(text))
    records = read_lines(directory / "runs" / f"staleness-{staleness}-{number}" / "metrics.jsonl")
    return {"staleness": staleness, "records": [record for record in records if "step_s" in record]}


def show(results: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(
        "staleness", "tokens/s trained", "times synchronous", "target", "s/step", "rollout", "update", "length"
    )
    speeds: dict[int, float] = {}
    for result in results:
        staleness, records = result["staleness"], result["records"][NUM_WARM_UP:]

        def total(key: str, records: list[dict[str, float]] = records) -> float:
            return sum(record.get(key, 0.0) for record in records)

        seconds = total("step_s")
        lengths = total("length") / len(records)
        speeds[staleness] = lengths * NUM_PROMPTS * 8 * len(records) / seconds
        table.add_row(
            str(staleness),
            f"{speeds[staleness]:,.0f}",
            f"{speeds[staleness] / speeds[0]:.2f}" if 0 in speeds else "",
            str(TARGETS.get(staleness, "")),
            f"{seconds / len(records):.2f}",
            f"{total('time/rollout') / len(records):.2f}",
            f"{total('time/update') / len(records):.2f}",
            f"{lengths:.0f}",
        )
    Console(width=120).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=VOCAB_SIZES, default="1.5B" if has_gpu() else "tiny")
    parser.add_argument("--only", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=14 if has_gpu() else 4)
    parser.add_argument("--directory", type=Path, default=Path("bench-carry-over"))
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    directory, model = arguments.directory.absolute(), arguments.model
    results = directory / "results"
    results.mkdir(parents=True, exist_ok=True)
    if arguments.one == "model":
        write_model(directory, model)
    elif arguments.one is not None:
        result = run(directory, model, int(arguments.one), arguments.steps)
        (results / f"{arguments.one}.json").write_text(json.dumps(result))
    else:
        cases = ([] if (directory / model / "prompts.jsonl").exists() else ["model"]) + list(map(str, arguments.only))
        for case in cases:
            given = ["--one", case, "--model", model, "--directory", str(directory), "--steps", str(arguments.steps)]
            subprocess.run([sys.executable, __file__, *given], check=True)
        show([json.loads(path.read_text()) for path in sorted(results.glob("*.json"))])


if __name__ == "__main__":
    main()
