"""Families in real proportions, with random weights, on one GPU: updates, rollouts, and short runs with each engine.

    python bench/families_on_gpu.py step qwen3 qwen3.5       packed updates, tokens/s and peak memory
    python bench/families_on_gpu.py rollout qwen3 qwen3.5    sampling with the transformers engine, tokens/s
    python bench/families_on_gpu.py run qwen3.5 --engines transformers vllm
                                                  GRPO in two steps: pushes, digests, gaps of canary and engine

Each case runs in a fresh process. Updates and runs are in pure bf16. Qwen3 is its 0.6B shape, Qwen3.5 the text of its
0.8B shape with Qwen3's vocabulary; gpt-oss is two layers of its 20B shape. Without a GPU: tiny shapes in fp32.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lib.shapes import dimensions, make_weights
from lib.words import save_prompts, save_tokenizer
from torch.profiler import ProfilerActivity, profile

HAS_GPU = torch.cuda.is_available()
VOCAB_SIZE = 151_936 if HAS_GPU else 512
NUM_SEQUENCES, LENGTH, PROMPT_LENGTH = (64, 535, 23) if HAS_GPU else (4, 100, 23)  # of an update
NUM_KERNELS = 12
NUM_REQUESTS, NUM_SAMPLED = (256, 128) if HAS_GPU else (8, 16)  # of a rollout


def _layer_types(num_layers: int) -> list[str]:
    return ["full_attention" if (index + 1) % 4 == 0 else "linear_attention" for index in range(num_layers)]


LINEAR = {f"linear_{kind}_head_dim": 128 if HAS_GPU else 16 for kind in ("key", "value")} | {
    f"linear_num_{kind}_heads": 16 if HAS_GPU else 4 for kind in ("key", "value")
}
# Names of configs in transformers, and their settings: (on a GPU, elsewhere).
FAMILIES: Mapping[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "qwen3": (
        "Qwen3Config",
        {**dimensions(1024, 3072, 28, 16, 8), "head_dim": 128, "tie_word_embeddings": True},
        {**dimensions(128, 384, 4, 4, 2), "head_dim": 32},
    ),
    "qwen3.5": (
        "Qwen3_5TextConfig",
        {**dimensions(1024, 3584, 24, 8, 2), "head_dim": 256, "tie_word_embeddings": True} | LINEAR,
        {**dimensions(128, 384, 4, 4, 2), "head_dim": 32} | LINEAR,
    ),
    "gpt-oss": (
        "GptOssConfig",
        {**dimensions(2880, 2880, 2, 64, 8), "head_dim": 64, "num_local_experts": 32, "num_experts_per_tok": 4},
        {**dimensions(64, 64, 2, 4, 2), "head_dim": 32, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
}

CONFIG = """
task: rl
name: {engine}
run_dir: {directory}
cluster: {{component_placement: {{actor: {actor}, rollout: "@actor"}}}}
actor: {{model: {directory}/model, optimizer: {{learning_rate: 1e-5, schedule: constant}}}}
data: {{path: {directory}/prompts.jsonl, label_key: label, max_length: 256}}
reward: {{function: {directory}/reward.py}}
rollout: {{engine: {engine}, batch_size: 8, samples_per_prompt: 4, max_new_tokens: 64{more}}}
algorithm: {{estimator: group_norm}}
train: {{dtype: {dtype}, batch_size: 32, micro_batch_size: 8}}
"""
REWARD = """
def reward_func(queries, prompts, labels):
    return [sum(map(ord, query[len(prompt):])) / 1e5 for query, prompt in zip(queries, prompts)]
"""


def config_of(family: str) -> Any:
    import transformers

    name, on_gpu, elsewhere = FAMILIES[family]
    settings = on_gpu if HAS_GPU else elsewhere
    if family == "qwen3.5":
        settings = {**settings, "layer_types": _layer_types(settings["num_hidden_layers"])}
    return getattr(transformers, name)(
        **settings,
        vocab_size=VOCAB_SIZE,
        max_position_embeddings=4096,
        bos_token_id=None,
        eos_token_id=VOCAB_SIZE,
        pad_token_id=0,
    )


def model_of(family: str) -> Any:
    made = make_weights(config_of(family), "cuda" if HAS_GPU else "cpu")
    return made if HAS_GPU else made.float()


def synchronize() -> None:
    if HAS_GPU:
        torch.cuda.synchronize()


def step(family: str, engine: str) -> dict[str, Any]:
    """Time packed updates; the best after the second counts. Print the kernels of one more."""
    from hotseat.loop.workers.objectives import SftObjective
    from hotseat.train.backend import TrainOptions
    from hotseat.train.make import make_backend
    from hotseat.train.packing import split_by_tokens
    from hotseat.types import MicroBatch

    model = model_of(family)
    num_parameters = sum(weight.numel() for weight in model.parameters())
    options = TrainOptions(precision="bf16" if HAS_GPU else "fp32", layout="packed", compile=None if HAS_GPU else False)
    backend = make_backend(model, options, device="cuda" if HAS_GPU else "cpu")
    # Lengths as different as those of answers, twice LENGTH at most.
    rng = random.Random(0)
    lengths = [rng.randint(PROMPT_LENGTH * 2, 2 * LENGTH - PROMPT_LENGTH * 2) for _ in range(NUM_SEQUENCES)]
    offsets = torch.tensor([0, *itertools.accumulate(lengths)])
    num_tokens = int(offsets[-1])
    place = torch.arange(num_tokens) - offsets[:-1].repeat_interleave(offsets.diff())
    batch = MicroBatch(
        token_ids=torch.randint(0, VOCAB_SIZE, (num_tokens,)),
        offsets=offsets,
        mask=place >= PROMPT_LENGTH,
        weights=torch.full((num_tokens,), 1 / num_tokens),
        sample_ids=tuple(map(str, range(NUM_SEQUENCES))),
    )
    cut, seconds = split_by_tokens(batch, num_tokens // 2), []
    for _ in range(6):
        synchronize()
        began_s = time.perf_counter()
        backend.update(cut, SftObjective().loss, 1.0)
        synchronize()
        seconds.append(time.perf_counter() - began_s)
    peak = torch.cuda.max_memory_allocated() / 2**30 if HAS_GPU else 0.0
    with profile(activities=[ProfilerActivity.CUDA if HAS_GPU else ProfilerActivity.CPU]) as recorder:
        backend.update(cut, SftObjective().loss, 1.0)
        synchronize()
    kind = "self_device_time_total" if HAS_GPU else "self_cpu_time_total"
    kernels = sorted(((getattr(row, kind) / 1e3, row.key) for row in recorder.key_averages()), reverse=True)
    print(f"{family}: {sum(ms for ms, _ in kernels):.0f} ms in kernels, of which")
    for ms, name in kernels[:NUM_KERNELS]:
        print(f"{ms:9.1f} {name[:90]}")
    backend.close()
    best_s = min(seconds[2:])
    return {
        "parameters, M": round(num_parameters / 1e6),
        "tokens": num_tokens,
        "tokens/s": round(num_tokens / best_s),
        "G parameters x tokens/s": round(num_parameters * num_tokens / best_s / 1e9),
        "peak GiB": round(peak, 1),
        "first s": round(seconds[0], 1),
    }


def rollout(family: str, engine: str) -> dict[str, Any]:
    """Time sampling; the better of two after a first."""
    from hotseat.rollout import TransformersEngine
    from hotseat.types import Request, Sampling

    made = TransformersEngine(model_of(family), max_length=512, num_slots=NUM_REQUESTS)
    rng = random.Random(0)
    requests = [
        Request(str(index), tuple(rng.choices(range(VOCAB_SIZE), k=64)), Sampling(NUM_SAMPLED, 1.0), seed=index)
        for index in range(NUM_REQUESTS)
    ]
    seconds = []
    for repeat in range(3):
        began_s = time.perf_counter()
        found = made.generate([Request(f"{repeat}/{r.id}", r.token_ids, r.sampling, seed=r.seed) for r in requests])
        seconds.append(time.perf_counter() - began_s)
        assert all(len(each.token_ids) == NUM_SAMPLED for each in found)
    made.close()
    best_s = min(seconds[1:])
    tokens = NUM_REQUESTS * NUM_SAMPLED
    return {
        "sequences": NUM_REQUESTS,
        "tokens/s": round(tokens / best_s),
        "ms/step": round(1e3 * best_s / NUM_SAMPLED, 1),
    }


def run(family: str, engine: str) -> dict[str, Any]:
    """Run two steps of GRPO, whose pushes the run checks by digests."""
    from hotseat.config import loads
    from hotseat.loop.run import start
    from hotseat.observe import read_lines

    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        words = [*(f"w{index}" for index in range(VOCAB_SIZE)), "<eos>"]
        save_tokenizer(directory / "model", words)
        model_of(family).save_pretrained(directory / "model")
        if HAS_GPU:
            torch.cuda.empty_cache()
        rng = random.Random(0)
        prompts = [rng.choices(words[1:-1], k=48) for _ in range(16)]
        save_prompts(directory / "prompts.jsonl", prompts, [""] * len(prompts))
        (directory / "reward.py").write_text(REWARD)
        more = ", memory_share: 0.4" if engine == "vllm" and HAS_GPU else ", num_slots: 32"
        text = CONFIG.format(
            directory=directory,
            engine=engine,
            more=more,
            dtype="bf16" if HAS_GPU else "fp32",
            actor=0 if HAS_GPU else "cpu*1",
        )
        start(loads(text))
        records = [line for line in read_lines(directory / engine / "metrics.jsonl") if "engine_gap_max" in line]
    last = records[-1]
    return {
        "versions": [record["version"] for record in records],
        "step s": round(last["step_s"], 1),
        **{key: f"{last[key]:.1e}" for key in ("engine_gap", "engine_gap_max", "canary_gap") if key in last},
    }


WORKS = {"step": step, "rollout": rollout, "run": run}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", choices=WORKS)
    parser.add_argument("families", nargs="+", choices=FAMILIES)
    parser.add_argument("--engines", nargs="+", choices=("transformers", "vllm"), default=["transformers"])
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        found = WORKS[arguments.work](arguments.families[0], arguments.engines[0])
        print(json.dumps(found))
        return
    rows: list[dict[str, Any]] = []
    for family, engine in itertools.product(arguments.families, arguments.engines):
        command = [sys.executable, __file__, arguments.work, family, "--engines", engine, "--one"]
        ended = subprocess.run(command, stdout=subprocess.PIPE, text=True)
        lines = ended.stdout.strip().splitlines() or [""]
        shown = [line for line in lines[:-1] if arguments.work == "step" or "digest" in line]
        print(*shown[-1 - NUM_KERNELS :], sep="\n", flush=True)
        if ended.returncode:
            print(f"{family}, {engine}: exit {ended.returncode}", *lines[-12:], sep="\n", flush=True)
            continue
        rows.append({"family": family, "engine": engine} | json.loads(lines[-1]))
        print(" | ".join(f"{key}: {value}" for key, value in rows[-1].items()), flush=True)
    speeds = {row["family"]: row["tokens/s"] for row in rows if "tokens/s" in row}
    if {"qwen3", "qwen3.5"} <= speeds.keys():
        print(f"Qwen3.5 to Qwen3: {speeds['qwen3.5'] / speeds['qwen3']:.2f} of the tokens/s")


if __name__ == "__main__":
    main()
