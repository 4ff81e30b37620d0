"""Agents of four turns against answers in one turn, with equally many sampled tokens: tokens per second of rollout.

64 prompts x 8 samples, each of 256 sampled tokens: in one turn, or in four of 64 with a sentence of feedback between.
The third row plays the four turns as a program does, by an OpenAI client and the gateway, where an answer may also end
early. Prefix caching is on; actor and engine take turns on one device.

    python bench/agent_turns.py                        SmolLM2; with a GPU by vLLM, else 2 prompts by transformers
    python bench/agent_turns.py --model DIRECTORY      another pretrained model with a chat template
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from lib.checkpoint import SMOLLM2, existing
from lib.devices import has_gpu
from rich.console import Console
from rich.table import Table

from hotseat.observe import read_lines

GROUP_SIZE, NUM_SAMPLED, NUM_TURNS = 8, 256, 4
NUM_WARM_UP = 2  # steps that do not count
TARGET = 0.8

CONFIG = """
task: rl
name: {name}
run_dir: {directory}
cluster: {{component_placement: {{actor: 0, rollout: "@actor"}}}}
actor: {{model: {model}, optimizer: {{learning_rate: 1e-6, schedule: constant}}}}
data:
  {{path: {directory}/prompts.jsonl, input_key: prompt, label_key: label, apply_chat_template: true, max_length: 640}}
agent: {{path: {directory}/{agent}.py}}
rollout: {{engine: {engine}, batch_size: {prompts}, samples_per_prompt: 8, max_new_tokens: 256{caching}}}
algorithm: {{estimator: group_norm}}
train: {{batch_size: {samples}, {precision}}}
checkpoint: {{every_minutes: 0}}
log: {{samples_per_step: 0}}
"""

AGENT = """
from dataclasses import replace

from hotseat.agents import Agent, Transcript
from hotseat.types import ScoredEpisode

NUM_TURNS, LENGTH = {turns}, {length}
FEEDBACK = (
    "<|im_end|>\\n<|im_start|>user\\nGo on, and say more about the second point.<|im_end|>\\n<|im_start|>assistant\\n"
)


class Talks(Agent):
    def __init__(self, tokenizer):
        self._tokenizer = tokenizer

    async def run(self, prompt, key, sampling, sample):
        transcript = Transcript(self._tokenizer, prompt)
        sampling = replace(sampling, max_new_tokens=LENGTH, ignore_eos=True)
        for turn in range(NUM_TURNS):
            completion = await sample(transcript.context, sampling, turn)
            transcript.add_sampled(completion)
            if turn < NUM_TURNS - 1:
                transcript.add_text(FEEDBACK)
        reward = sum(completion.token_ids) % 7 / 7
        return ScoredEpisode(transcript.episode(key, is_truncated=False), reward, reward)
"""

PROGRAM = """
import openai


async def play(prompt, client):
    messages = [{{"role": "user", "content": prompt.text}}]
    async with openai.AsyncOpenAI(base_url=client.base_url, api_key=client.api_key) as policy:
        for _ in range({turns}):
            reply = await policy.chat.completions.create(model=client.model, messages=messages, max_tokens={length})
            answer = reply.choices[0].message
            messages += [answer, {{"role": "user", "content": "Go on, and say more about the second point."}}]
    return {{"reward": len(answer.content) % 7 / 7}}
"""

CASES = {  # a title, and the agent's file
    "single": ("one turn of 256", AGENT, 1),
    "turns": ("four turns of 64", AGENT, NUM_TURNS),
    "client": ("four turns of at most 64, OpenAI client", PROGRAM, NUM_TURNS),
}
SUBJECTS = ("rivers", "bread", "bridges", "owls", "chess", "glass", "tea", "maps", "salt", "clocks")


def run(directory: Path, name: str, arguments: argparse.Namespace) -> list[dict[str, float]]:
    _, agent, turns = CASES[name]
    (directory / f"{name}.py").write_text(agent.format(turns=turns, length=NUM_SAMPLED // turns))
    text = CONFIG.format(
        name=name,
        directory=directory,
        model=arguments.model.absolute(),
        agent=name,
        engine=arguments.engine,
        caching=", prefix_caching: true" if arguments.engine == "vllm" else "",
        prompts=arguments.prompts,
        samples=arguments.prompts * GROUP_SIZE,
        precision="dtype: bf16, fp32_master: false" if arguments.engine == "vllm" else "dtype: fp32",
    )
    (directory / f"{name}.yaml").write_text(text)
    subprocess.run([sys.executable, "-m", "hotseat", "run", str(directory / f"{name}.yaml")], check=True)
    return [record for record in read_lines(directory / name / "metrics.jsonl") if "step_s" in record][NUM_WARM_UP:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=SMOLLM2)
    parser.add_argument("--engine", choices=("vllm", "transformers"), default="vllm" if has_gpu() else "transformers")
    parser.add_argument("--prompts", type=int, default=64 if has_gpu() else 2)
    parser.add_argument("--steps", type=int, default=6 if has_gpu() else 3)
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    arguments = parser.parse_args()
    arguments.model = existing(arguments.model)
    table = Table(
        title=f"{arguments.prompts} x {GROUP_SIZE} samples, medians after {NUM_WARM_UP} of {arguments.steps} steps"
    )
    for column in ("", "sampled per step", "rollout s", "tokens/s", "of one turn", "target"):
        table.add_column(column, justify="right")
    single = None
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        rows = [
            f'{{"prompt": "Write a long text about {SUBJECTS[number % len(SUBJECTS)]}, part {number}.", "label": ""}}\n'
            for number in range(arguments.steps * arguments.prompts)
        ]
        (directory / "prompts.jsonl").write_text("".join(rows))
        for case in arguments.only:
            records = run(directory, case, arguments)
            speed = statistics.median(record["sampled_tokens"] / record["time/rollout"] for record in records)
            single = speed if case == "single" else single
            table.add_row(
                CASES[case][0],
                f"{statistics.median(record['sampled_tokens'] for record in records):,.0f}",
                f"{statistics.median(record['time/rollout'] for record in records):.2f}",
                f"{speed:,.0f}",
                "" if single is None or case == "single" else f"{speed / single:.2f}",
                "" if case == "single" else f"{TARGET}",
            )
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
