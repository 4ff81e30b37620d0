"""The hybrid engine on one GPU: vLLM and training take turns, phase by phase, beside TRL and the device's own limits.

The main case is a model of Qwen2.5-1.5B's shape without biases, with random weights (28 layers, hidden 1536, 151,936
tokens), 32 prompts of 23 tokens x 8 samples x 512 new tokens, one optimizer step, GRPO without a reference, pure bf16,
engine share 0.4. Every answer has its full length: the end token lies outside of the model's vocabulary. Other cases
change one thing each. TRL samples with vLLM in the same process, with sleep mode, with the same weights' precision; its
best of four settings counts.

    python bench/hybrid_engine.py                     every case, one after another
    python bench/hybrid_engine.py --only limits bf16  some; results stay in --directory, and all of them are printed
    python bench/hybrid_engine.py --only device bf16  limits without vLLM alone, which takes a minute to start
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lib.devices import need_gpu
from lib.shapes import VOCAB_SIZES, make_weights, shape
from lib.trl_side import time_grpo
from lib.words import save_prompts, save_tokenizer

from hotseat.model_source import ModelSource

NUM_PROMPTS, GROUP_SIZE, PROMPT_LENGTH, NUM_NEW_TOKENS = 32, 8, 23, 512
NUM_SAMPLES = NUM_PROMPTS * GROUP_SIZE
NUM_WARM_UP = 2  # steps that do not count


@dataclass(frozen=True)
class Case:
    """A run of Hotseat, as what differs from the main one."""

    what: str
    model: str = "1.5B"
    steps: int = 5
    dtype: str = "bf16"
    fp32_master: bool = False
    always_offloaded: bool = False
    kl: bool = False
    ppo: bool = False  # with a critic, a reference and a reward model, each of the actor's shape
    micro_batch: int | str = 32
    memory_share: float = 0.4
    num_prompts: int = NUM_PROMPTS
    checkpointing: bool = False
    checkpointed_layers: int | str | None = None  # of those that recompute; None: all
    num_engines: int = 1  # on the one device; each has a part of its memory


CASES = {
    "bf16": Case("pure bf16, everything stays", steps=7),
    "master": Case(
        "fp32 masters, engine and trainer offloaded in turn", steps=4, fp32_master=True, always_offloaded=True
    ),
    "masters": Case("fp32 masters, everything stays", steps=7, fp32_master=True),
    "bf16-2": Case("pure bf16, two engines", steps=7, num_engines=2, memory_share=0.2),
    "masters-2": Case("fp32 masters, two engines", steps=7, fp32_master=True, num_engines=2, memory_share=0.2),
    "reference": Case("pure bf16, reference model and KL in the loss", steps=4, kl=True),
    "ppo": Case("PPO: actor, critic, reference, reward model, pure bf16", steps=10, kl=True, ppo=True),
    "8B": Case(
        "Llama-3-8B's shape, pure bf16", model="8B", steps=3, micro_batch=8, memory_share=0.3, checkpointing=True
    ),
    "8B-8": Case(
        "Llama-3-8B's shape, pure bf16, 8 of 32 layers recomputed",
        model="8B",
        steps=3,
        micro_batch=8,
        memory_share=0.27,
        checkpointing=True,
        checkpointed_layers=8,
    ),
    "8B-auto": Case(
        "Llama-3-8B's shape, pure bf16, as few layers recomputed as fit",
        model="8B",
        steps=4,
        micro_batch="auto",
        memory_share=0.27,
        checkpointing=True,
        checkpointed_layers="auto",
    ),
}


@dataclass(frozen=True)
class Peer:
    """A run of TRL, and the case of Hotseat that it is compared with, whatever the number of engines."""

    beside: str
    micro_batch: int
    checkpointing: bool = False
    dtype: str = "bfloat16"  # of the weights that it trains; float32: masters, computing in bf16
    memory_share: float = 0.4
    steps: int = 7


TRL = {
    "trl-ckpt-64": Peer("bf16", 64, checkpointing=True),
    "trl-ckpt-32": Peer("bf16", 32, checkpointing=True),
    "trl-32": Peer("bf16", 32),
    "trl-16": Peer("bf16", 16),
    "trl-masters-32": Peer("masters", 32, dtype="float32"),
    "trl-masters-16": Peer("masters", 16, dtype="float32"),
    "trl-8B-16": Peer("8B", 16, checkpointing=True, memory_share=0.3, steps=3),
    "trl-8B-32": Peer("8B", 32, checkpointing=True, memory_share=0.3, steps=3),
}

CONFIG = """
task: rl
name: {name}
run_dir: {directory}/runs
cluster: {{component_placement: {{actor: 0, rollout: {rollout}{others}}}}}
actor: {{model: {directory}/{model}, optimizer: {{learning_rate: 1e-6, schedule: constant}}{aside}}}
data: {{path: {directory}/{model}/prompts.jsonl, label_key: label, max_length: {max_length}, max_samples: {num_rows}}}
reward: {{{reward}}}
rollout:
  {{engine: vllm, batch_size: {num_prompts}, samples_per_prompt: 8, max_new_tokens: 512, memory_share: {share}{aside},
  num_engines: {num_engines}}}
algorithm: {{estimator: {estimator}{kl}}}
train: {{dtype: {dtype}, fp32_master: {master}, batch_size: {batch}, micro_batch_size: {micro_batch},
  gradient_checkpointing: {checkpointing}, checkpointed_layers: {layers}}}
log: {{samples_per_step: 0}}
"""

REWARD = """
def reward_func(queries, prompts, labels):
    return [sum(map(ord, query[len(prompt):])) / 1e5 for query, prompt in zip(queries, prompts)]
"""


def make_model(directory: Path, model: str) -> None:
    """Random weights, a tokenizer with one word per token, and prompts, by a process that leaves no memory in use."""
    if not (directory / model / "prompts.jsonl").exists():
        subprocess.run([sys.executable, __file__, "--one", f"model {model}", "--directory", str(directory)], check=True)


def write_model(directory: Path, model: str) -> None:
    path, vocab_size = directory / model, VOCAB_SIZES[model]
    words = [*(f"w{index}" for index in range(vocab_size)), "<eos>"]
    save_tokenizer(path, words)
    make_weights(shape(model, eos_token_id=vocab_size), "cuda").save_pretrained(path)
    rng = random.Random(0)
    num_rows = 20 * NUM_PROMPTS
    (directory / "reward.py").write_text(REWARD)
    prompts = [rng.choices(words[1:-1], k=PROMPT_LENGTH) for _ in range(num_rows)]
    save_prompts(path / "prompts.jsonl", prompts, [""] * num_rows)


def write_reward_model(directory: Path, model: str) -> None:
    """Write a reward model of the same shape, with the weights of the model."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    path = directory / f"{model}-reward"
    of_model = AutoModelForSequenceClassification.from_pretrained(directory / model, num_labels=1, dtype=torch.bfloat16)
    of_model.save_pretrained(path)
    AutoTokenizer.from_pretrained(directory / model).save_pretrained(path)


# --- what the device can do -------------------------------------------------------------------------------------------


def best_of(function: Any, num_times: int = 5) -> float:
    """Seconds of the fastest call."""
    import torch

    function()
    seconds = []
    for _ in range(num_times):
        torch.cuda.synchronize()
        start = time.perf_counter()
        function()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def measure_limits(directory: Path) -> dict[str, Any]:
    import torch

    found = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, **measure_device()}
    torch.cuda.empty_cache()
    return found | measure_vllm(directory)


def measure_device() -> dict[str, Any]:
    import torch

    a = torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda")

    def product() -> None:
        for _ in range(20):
            a @ a

    source = torch.empty(2 << 30, dtype=torch.uint8, device="cuda")
    target, host = torch.empty_like(source), torch.empty(2 << 30, dtype=torch.uint8, pin_memory=True)
    size = source.numel() / 1e9
    return {
        "matmul_tflops": 20 * 2 * 8192**3 / best_of(product) / 1e12,
        "copy_gb_per_s": size / best_of(lambda: target.copy_(source)),
        "to_host_gb_per_s": size / best_of(lambda: host.copy_(source, non_blocking=True)),
        "from_host_gb_per_s": size / best_of(lambda: source.copy_(host, non_blocking=True)),
    }


def measure_vllm(directory: Path) -> dict[str, Any]:
    """vLLM alone on the main case's rollout, as its users call it."""
    make_model(directory, "1.5B")
    from vllm import LLM, SamplingParams

    engine = LLM(
        str(directory / "1.5B"),
        skip_tokenizer_init=True,
        dtype="bfloat16",
        gpu_memory_utilization=0.4,
        max_model_len=1024,
        max_num_seqs=NUM_SAMPLES,
    )
    rng = random.Random(1)
    prompts = [[rng.randrange(VOCAB_SIZES["1.5B"]) for _ in range(PROMPT_LENGTH)] for _ in range(NUM_PROMPTS)]
    asked = [{"prompt_token_ids": prompt} for prompt in prompts for _ in range(GROUP_SIZE)]
    sampling = SamplingParams(max_tokens=NUM_NEW_TOKENS, ignore_eos=True, detokenize=False)
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        engine.generate(asked, sampling, use_tqdm=False)
        seconds.append(time.perf_counter() - start)
    return {"vllm_tokens_per_s": NUM_SAMPLES * NUM_NEW_TOKENS / min(seconds)}


def measure_engine(directory: Path) -> dict[str, Any]:
    """The same through the engine contract: a seed for each request, log-probs, weights digested and scored."""
    make_model(directory, "1.5B")
    from hotseat.loop.workers.engine_worker import make_engine
    from hotseat.rollout.kinds import EngineOptions, EngineSettings
    from hotseat.types import Request, Sampling

    options = EngineOptions(1, 0.4, True, False, str(directory / "logs"))
    model = str(directory / "1.5B")
    engine = make_engine(
        EngineSettings(ModelSource(model), 1024, 256, (), "bfloat16", 1, engine="vllm", options=options), 0
    )
    rng = random.Random(1)
    sampling = Sampling(max_new_tokens=NUM_NEW_TOKENS)
    seconds = []
    for attempt in range(3):
        prompts = [[rng.randrange(VOCAB_SIZES["1.5B"]) for _ in range(PROMPT_LENGTH)] for _ in range(NUM_PROMPTS)]
        asked = [
            Request(f"{attempt}/{p}/{s}", tuple(prompt), sampling, seed=p * 8 + s)
            for p, prompt in enumerate(prompts)
            for s in range(GROUP_SIZE)
        ]
        start = time.perf_counter()
        engine.generate(asked)
        seconds.append(time.perf_counter() - start)
    found: dict[str, Any] = {"tokens_per_s": NUM_SAMPLES * NUM_NEW_TOKENS / min(seconds)}
    for name, call in (
        ("digest", engine.digest),
        ("score", lambda: engine.score([prompt[:64] for prompt in prompts[:4]])),
        ("offload", lambda: engine.offload(["weights", "kv_cache"], keep_weights=False)),
        ("onload", lambda: engine.onload(["weights", "kv_cache"])),
    ):
        for turn in range(2 if name in ("digest", "score") else 1):
            start = time.perf_counter()
            result = call()
            found[f"{name}_ms, {turn}"] = (time.perf_counter() - start) * 1e3
            if name in ("offload", "onload"):
                found[f"{name}"] = str(result)
    engine.close()
    return found


# --- updates alone ----------------------------------------------------------------------------------------------------


def measure_updates(directory: Path) -> dict[str, Any]:
    """Forward, backward and optimizer step of the main case, by layout; and with mixed lengths."""
    import torch

    from hotseat.loop.workers.objectives import SftObjective
    from hotseat.train.backend import TrainOptions
    from hotseat.train.fsdp import FSDPBackend
    from hotseat.train.packing import split_by_count, split_by_tokens
    from hotseat.types import MicroBatch

    def batch(lengths: list[int]) -> MicroBatch:
        offsets = torch.tensor([0, *itertools.accumulate(lengths)])
        num_tokens = int(offsets[-1])
        position = torch.arange(num_tokens) - torch.repeat_interleave(offsets[:-1], torch.tensor(lengths))
        return MicroBatch(
            token_ids=torch.randint(0, VOCAB_SIZES["1.5B"], (num_tokens,)),
            offsets=offsets,
            mask=position >= PROMPT_LENGTH,
            weights=torch.full((num_tokens,), 1 / num_tokens),
            sample_ids=tuple(map(str, range(len(lengths)))),
        )

    rng = random.Random(2)
    equal = [batch([PROMPT_LENGTH + NUM_NEW_TOKENS] * 64) for _ in range(4)]
    mixed = [batch([rng.randint(64, 1024) for _ in range(64)]) for _ in range(4)]
    found: dict[str, Any] = {}
    for layout, compiled in (("auto", True), ("auto", False), ("padded", True)):
        options = TrainOptions(precision="bf16", layout=layout, compile=compiled)
        backend = FSDPBackend(str(directory / "1.5B"), options, device="cuda")
        for name, batches in (("equal", equal), ("mixed", mixed)):
            seconds, num_tokens = [], 0
            torch.cuda.reset_peak_memory_stats()
            for each in batches:
                cut = split_by_tokens(each, 32 * 535) if layout == "auto" else split_by_count(each, 16)
                start = time.perf_counter()
                backend.update(cut, SftObjective().loss, 1.0)
                torch.cuda.synchronize()
                seconds.append(time.perf_counter() - start)
                num_tokens = each.num_tokens
            best = min(seconds[1:])
            key = f"{'packed' if layout == 'auto' else layout}{', compiled' if compiled else ''}, {name}"
            found[key] = {
                "tokens_per_s": num_tokens / best,
                "seconds": seconds,
                "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
            }
            print(key, found[key], flush=True)
        backend.close()
        del backend
        torch.cuda.empty_cache()
    return found


# --- the runs ---------------------------------------------------------------------------------------------------------


def config_of(directory: Path, name: str) -> Any:
    from hotseat.config import loads

    case = CASES[name]
    return loads(
        CONFIG.format(
            name=f"{name}-{int(time.time())}",
            directory=directory,
            model=case.model,
            rollout='"@actor"' if case.num_engines == 1 else f'"0:0-{case.num_engines - 1}"',
            num_engines=case.num_engines,
            layers="null" if case.checkpointed_layers is None else case.checkpointed_layers,
            others=', reference: "@actor"' * case.kl + ', critic: "@actor", reward: "@actor"' * case.ppo,
            reward=f"model: {directory}/{case.model}-reward" if case.ppo else f"function: {directory}/reward.py",
            estimator="gae" if case.ppo else "group_norm",
            aside=", enable_offload: true" if case.always_offloaded else "",
            share=case.memory_share,
            kl=f", kl: {{coef: 0.001, as_loss: {str(not case.ppo).lower()}}}" if case.kl else "",
            dtype=case.dtype,
            master=str(case.fp32_master).lower(),
            max_length=PROMPT_LENGTH + NUM_NEW_TOKENS + 1,
            num_rows=case.steps * case.num_prompts,
            num_prompts=case.num_prompts,
            batch=case.num_prompts * GROUP_SIZE,
            micro_batch=case.micro_batch,
            checkpointing=str(case.checkpointing).lower(),
        )
    )


def run_hotseat(directory: Path, name: str) -> dict[str, Any]:
    from hotseat.loop.run import start
    from hotseat.observe import read_lines

    case = CASES[name]
    make_model(directory, case.model)
    if case.ppo:
        write_reward_model(directory, case.model)
    config = config_of(directory, name)
    began = time.time()
    start(config)
    run_dir = max((directory / "runs").glob(f"{name}-*"))
    records = [record for record in read_lines(run_dir / "metrics.jsonl") if "step_s" in record]
    assert all(record["length"] == NUM_NEW_TOKENS for record in records)
    made = json.loads((run_dir / "plan.json").read_text())  # with the memory that this device has
    planned = {step["step"]: step["used_gib"] for step in made["groups"][0]["steps"]}
    return {
        "what": case.what,
        "model": case.model,
        "records": records,
        "planned_gib": planned,
        "wall_s": time.time() - began,
    }


def run_trl(directory: Path, name: str) -> dict[str, Any]:
    peer = TRL[name]
    model = CASES[peer.beside].model
    make_model(directory, model)

    def reward(completions: list[str], **kwargs: Any) -> list[float]:
        return [sum(map(ord, text)) / 1e5 for text in completions]

    seconds = time_grpo(
        directory / model,
        directory / model / "prompts.jsonl",
        directory / name,
        reward,
        max_steps=peer.steps,
        per_device_train_batch_size=peer.micro_batch,
        gradient_accumulation_steps=NUM_SAMPLES // peer.micro_batch,
        num_generations=GROUP_SIZE,
        max_completion_length=NUM_NEW_TOKENS,
        bf16=True,
        model_init_kwargs={"dtype": peer.dtype},
        gradient_checkpointing=peer.checkpointing,
        use_vllm=True,
        vllm_mode="colocate",
        vllm_enable_sleep_mode=True,
        vllm_gpu_memory_utilization=peer.memory_share,
        vllm_max_model_length=1024,
    )
    return {
        "seconds": seconds,
        "step_s": statistics.median(seconds[NUM_WARM_UP if len(seconds) > NUM_WARM_UP + 1 else 1 :]),
    }


# --- tables -----------------------------------------------------------------------------------------------------------


def num_parameters(model: str, has_critic: bool = False) -> int:
    """Of the layers and the output embedding, and of a critic's layers: what forwards multiply with."""
    config = shape(model, eos_token_id=VOCAB_SIZES[model])
    hidden, inner = config.hidden_size, config.intermediate_size
    head = getattr(config, "head_dim", None) or hidden // config.num_attention_heads
    attention = 2 * hidden * head * (config.num_attention_heads + config.num_key_value_heads)
    layers = config.num_hidden_layers * (attention + 3 * hidden * inner)
    return layers * (1 + has_critic) + config.vocab_size * hidden


def print_case(name: str, result: dict[str, Any], limits: dict[str, Any], trl_s: float | None) -> None:
    from rich.console import Console
    from rich.table import Table

    records = result["records"][NUM_WARM_UP if len(result["records"]) > NUM_WARM_UP + 1 else 1 :]

    def median(key: str) -> float:
        return statistics.median(record.get(key, 0.0) for record in records)

    step_s = median("step_s")
    num_tokens = median("sampled_tokens")
    trained = num_tokens * (PROMPT_LENGTH + NUM_NEW_TOKENS) / NUM_NEW_TOKENS
    peak = limits["matmul_tflops"] * 1e12
    update_s = median("time/update")
    update_flops = 6 * num_parameters(result["model"], CASES[name].ppo) * trained
    limit = {
        "rollout": f"{num_tokens / median('time/rollout') / limits['vllm_tokens_per_s']:.0%} of vLLM alone"
        if result["model"] == "1.5B" and "vllm_tokens_per_s" in limits
        else f"{num_tokens / median('time/rollout'):,.0f} tokens/s",
        "update": f"{update_flops / update_s / peak:.1%} of matmul peak",
        "sync": f"{median('sync/gb_per_s'):,.0f} GB/s sent, copies reach {limits['copy_gb_per_s']:,.0f};"
        f" proof {median('sync/proof_ms'):.0f} ms",
    }
    for how, bandwidth in (("offload", "to_host_gb_per_s"), ("onload", "from_host_gb_per_s")):
        limit[how] = f"host copies reach {limits[bandwidth]:.0f} GB/s"
    table = Table(title=f"{name}: {result['what']} ({len(records)} steps, medians)")
    for column in ("phase", "s", "share", "peak GiB", "planned", "error", "against the device's limit"):
        table.add_column(column, justify="left" if column in ("phase", "against the device's limit") else "right")
    total = 0.0
    for phase in ("rollout", "prepare", "update", "offload", "sync", "onload"):
        seconds = median(f"time/{phase}")
        total += seconds
        peak_gib = median(f"memory/{phase}/device 0")
        steps = [used for step, used in result["planned_gib"].items() if step.startswith(phase)]
        planned = max(steps) if steps else None
        error = f"{planned / peak_gib - 1:+.0%}" if planned and peak_gib else ""
        row = [phase, f"{seconds:.3f}", f"{seconds / step_s:.1%}", f"{peak_gib:.1f}" if peak_gib else ""]
        table.add_row(*row, f"{planned:.1f}" if planned else "", error, limit.get(phase, ""))
    table.add_row("other", f"{step_s - total:.3f}", f"{(step_s - total) / step_s:.1%}", "", "", "", "")
    beside = f"; TRL {trl_s:.2f} s, {trl_s / step_s:.2f} times as long" if trl_s else ""
    table.add_row("step", f"{step_s:.3f}", "", "", "", "", f"{num_tokens / step_s:,.0f} sampled tokens/s{beside}")
    Console(width=150).print(table)
    gib, copied = median("handover/gib"), median("handover/gib_copied")
    if gib:
        handed = median("time/offload") + median("time/onload")
        ideal = copied * 2**30 / limits["to_host_gb_per_s"] / 1e9
        print(
            f"    handed over {gib:.2f} GiB, of which {copied:.2f} GiB copied: {handed:.3f} s,"
            f" {handed / ideal if ideal else float('nan'):.2f} times what {limits['to_host_gb_per_s']:.0f} GB/s allow"
        )
    print(
        f"    log-prob gap: mean {median('engine_gap'):.4f}, p99 {median('engine_gap_p99'):.4f}, max"
        f" {median('engine_gap_max'):.3f}; canary {records[-1].get('canary_gap', float('nan')):.4f};"
        f" {median('sync/gb'):.2f} GB in"
        f" {median('sync/transfer_ms'):.1f} ms"
    )
    after = [record.get("memory/sync/device 0", 0.0) for record in result["records"]]
    print(f"    device memory at the end of each step's sync, GiB: {', '.join(f'{gib:.2f}' for gib in after)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--directory", type=Path, default=Path("bench-hybrid"))
    parser.add_argument("--only", nargs="*", help="limits or device, engine, updates, " + ", ".join((*CASES, *TRL)))
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    directory = arguments.directory.resolve()
    directory.mkdir(parents=True, exist_ok=True)
    if arguments.one is not None:
        name = arguments.one
        if name.startswith("model "):
            write_model(directory, name.removeprefix("model "))
            return
        if name == "limits":
            found = measure_limits(directory)
        elif name == "device":
            found = measure_device()
        elif name == "engine":
            found = measure_engine(directory)
        elif name == "updates":
            found = measure_updates(directory)
        else:
            found = run_trl(directory, name) if name in TRL else run_hotseat(directory, name)
        (directory / f"{name}.json").write_text(json.dumps(found))
        return
    need_gpu()
    for name in arguments.only if arguments.only is not None else ("limits", "engine", "updates", *CASES, *TRL):
        began = time.time()
        given = [sys.executable, __file__, "--one", name, "--directory", str(directory)]
        ended = subprocess.run(given, env=os.environ)
        print(f"== {name}: exit {ended.returncode} after {time.time() - began:.0f} s", flush=True)
    results = {path.stem: json.loads(path.read_text()) for path in directory.glob("*.json")}
    results.setdefault("limits", results.get("device"))
    if results["limits"]:
        print({key: round(value, 1) if isinstance(value, float) else value for key, value in results["limits"].items()})
    if "engine" in results:
        print({key: round(value, 1) if isinstance(value, float) else value for key, value in results["engine"].items()})
    for key, value in results.get("updates", {}).items():
        flops = 6 * num_parameters("1.5B") * value["tokens_per_s"]
        share = flops / results["limits"]["matmul_tflops"] / 1e12 if results["limits"] else float("nan")
        print(f"update, {key}: {value['tokens_per_s']:,.0f} tokens/s, {share:.1%} of peak, {value['peak_gib']:.1f} GiB")
    times = {name: results[name]["step_s"] for name in TRL if name in results}
    for name, seconds in times.items():
        print(f"{name}: {seconds:.2f} s/step")
    for name in CASES:
        if name in results and results["limits"]:
            alike = name.removesuffix("-2")  # with another number of engines
            beside = [seconds for peer, seconds in times.items() if TRL[peer].beside == alike]
            print_case(name, results[name], results["limits"], min(beside, default=None))


if __name__ == "__main__":
    main()
