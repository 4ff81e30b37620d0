"""A pretrained model on a real task, through OpenRLHF's Hybrid Engine command, as a new user would run it.

SmolLM2-135M-Instruct learns chain sums of reasoning-gym (2 to 3 terms of 1 to 2 digits): 64 prompts x 8 samples x at
most 64 tokens, two optimizer steps of 256, a reference with KL as a loss (k3), vLLM and the trainer taking turns on one
device. Prints the learning curve on held-out problems, the seconds of steps and phases, the seconds from the command to
the end of step 1, and the gap between the engine's log-probs and the trainer's.

    python examples/smollm2/convert.py MODEL
    python bench/real_model.py --model MODEL --data                             where reasoning-gym is installed
    python bench/real_model.py --model MODEL --backend deepspeed fsdp --trl     on a GPU
    python bench/real_model.py --model MODEL --backend fsdp --interrupt 20      SIGTERM after 20 rollouts, then resumed
    python bench/real_model.py --model MODEL --reward-model                     --reward_pretrain, --normalize_reward
    python bench/real_model.py --model MODEL --graphs --precision bf16 --trl    CUDA graphs, no checkpointing; pure bf16
    python bench/real_model.py --model MODEL --graphs --set overlap.staleness=1 overlap.in_flight=recompute

On a CPU every case takes a few steps of a smaller form: 4 prompts x 4 samples, fp32.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lib.checkpoint import SMOLLM2, existing
from lib.trl_side import time_grpo

NUM_HELD_OUT = 1000
NUM_WARM_UP = 2  # steps that do not count for medians
STOPPED = 130  # exit code of a run that saved and stopped after SIGTERM


@dataclass(frozen=True)
class Size:
    """Batch sizes of a run; the smaller one is for CPUs."""

    num_prompts: int = 64
    group_size: int = 8
    batch_size: int = 256
    num_held_out: int = NUM_HELD_OUT
    flags: tuple[str, ...] = ("--bf16", "--gradient_checkpointing", "--enforce_eager", "--vllm_enable_sleep")


ON_GPU = Size()
GRAPHS = ("--bf16",)  # nothing is offloaded that need not be
ON_CPU = Size(num_prompts=4, group_size=4, batch_size=8, num_held_out=8, flags=("--vllm_enable_sleep",))


@dataclass
class Outcome:
    """A finished case: the records of its steps, the evaluations, and the clock."""

    records: list[dict[str, Any]]
    evaluations: list[tuple[int, float]]
    first_step_s: float
    wall_s: float
    notes: list[str] = field(default_factory=list)


# --- data -------------------------------------------------------------------------------------------------------------


def make_problems(directory: Path, num_rows: int) -> None:
    """Write train.jsonl and held_out.jsonl; no problem is in both."""
    import reasoning_gym

    drawn = reasoning_gym.create_dataset(
        "chain_sum", min_terms=2, max_terms=3, min_digits=1, max_digits=2, size=3 * (num_rows + NUM_HELD_OUT), seed=11
    )
    rows = list(
        {entry["question"]: {"input": entry["question"], "answer": entry["answer"]} for entry in drawn}.values()
    )
    directory.mkdir(parents=True, exist_ok=True)
    for name, part in (("held_out", rows[:NUM_HELD_OUT]), ("train", rows[NUM_HELD_OUT:][:num_rows])):
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
        print(f"{directory / name}.jsonl: {len(part)} problems")


def make_reward_model(model: Path, out: Path) -> None:
    """Save a tiny random reward model that reads the policy's tokens, with the mean and deviation of its scores."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForSequenceClassification

    tokenizer = AutoTokenizer.from_pretrained(model)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_labels=1,
        pad_token_id=tokenizer.pad_token_id or 0,
        eos_token_id=tokenizer.eos_token_id,
    )
    LlamaForSequenceClassification(config).save_pretrained(out)
    tokenizer.save_pretrained(out)
    saved = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(saved | {"mean": 0.0, "std": 0.02}))


def held_out(data: Path, size: Size) -> Path:
    """The problems to be evaluated on: a file with the first of them where fewer will do."""
    rows = (data / "held_out.jsonl").read_text().splitlines(keepends=True)[: size.num_held_out]
    path = data / f"held_out_{size.num_held_out}.jsonl"
    path.write_text("".join(rows))
    return path


# --- Hotseat ----------------------------------------------------------------------------------------------------------


def command(case: str, arguments: argparse.Namespace, size: Size, num_rollouts: int) -> list[str]:
    """OpenRLHF's Hybrid Engine command for one device."""
    data: Path = arguments.directory / "data"
    reward = ["--remote_rm_url", str(Path(__file__).parents[1] / "examples" / "smollm2" / "reward.py")]
    kl = ["--use_kl_loss", "--kl_estimator", "k3"]
    if case == "reward_model":
        reward = ["--reward_pretrain", str(arguments.directory / "reward_model"), "--normalize_reward"]
        kl = []
    return [
        sys.executable,
        "-m",
        "hotseat.cli.train_ppo_ray",
        *("--ref_num_nodes", "1", "--ref_num_gpus_per_node", "1"),
        *("--reward_num_nodes", "1", "--reward_num_gpus_per_node", "1"),
        *("--actor_num_nodes", "1", "--actor_num_gpus_per_node", "1"),
        *("--vllm_num_engines", "1", "--vllm_tensor_parallel_size", "1", "--colocate_all_models"),
        *("--vllm_gpu_memory_utilization", "0.6", "--advantage_estimator", "reinforce_baseline"),
        *("--pretrain", str(arguments.model), *reward),
        *("--save_path", "final", "--ckpt_path", "checkpoints"),
        *("--micro_train_batch_size", arguments.micro_batch, "--train_batch_size", str(size.batch_size)),
        *("--micro_rollout_batch_size", arguments.micro_batch, "--rollout_batch_size", str(size.num_prompts)),
        *("--n_samples_per_prompt", str(size.group_size), "--max_epochs", "1"),
        *("--prompt_max_len", "128", "--generate_max_len", "64"),
        *("--max_samples", str(num_rollouts * size.num_prompts), "--zero_stage", "3"),
        *(GRAPHS if arguments.graphs else size.flags),
        *("--actor_learning_rate", str(arguments.learning_rate), "--critic_learning_rate", "9e-6"),
        *("--init_kl_coef", "1e-4", *kl),
        *("--prompt_data", str(data / "train.jsonl"), "--input_key", "input", "--label_key", "answer"),
        *("--apply_chat_template", "--packing_samples", "--vllm_sync_backend", "nccl"),
        *(() if arguments.graphs else ("--deepspeed_enable_sleep",)),
        *("--eval_dataset", str(held_out(data, size)), "--eval_steps", str(arguments.eval_steps)),
        *("--eval_n_samples_per_prompt", "1", "--eval_temperature", "0.6", "--save_steps", str(arguments.save_steps)),
        *("--backend", "fsdp" if case == "fsdp" else "deepspeed", "--engine", arguments.engine),
    ]


def run_hotseat(case: str, arguments: argparse.Namespace, size: Size) -> Outcome:
    """Run the command in a folder of its own, interrupt and resume it if asked, and read what it recorded."""
    num_rollouts = min(3, arguments.rollouts) if case == "reward_model" else arguments.rollouts
    if case == "reward_model":
        make_reward_model(arguments.model, arguments.directory / "reward_model")
    folder: Path = arguments.directory / f"{case}-{int(time.time())}"
    folder.mkdir(parents=True)
    run_dir = folder / "runs" / "rl-1"
    notes = []
    line = changed(command(case, arguments, size, num_rollouts), folder / "config.yaml", arguments)
    began = time.monotonic()
    first_step_s, code = watch(line, folder, run_dir, arguments.interrupt)
    if arguments.interrupt is not None:
        if code != STOPPED:
            raise SystemExit(f"{case}: exit code {code} after SIGTERM, {STOPPED} expected; see {folder / 'log'}")
        resumed = time.monotonic()
        resume = [sys.executable, "-m", "hotseat.cli.main", "resume", str(run_dir)]
        _, code = watch(resume, folder, run_dir, None)
        notes.append(f"SIGTERM after rollout {arguments.interrupt}; resumed for {time.monotonic() - resumed:.0f} s")
    if code:
        raise SystemExit(f"{case}: exit code {code}; see {folder / 'log'}")
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return Outcome(
        records=[line for line in lines if "step_s" in line],
        evaluations=[(line["step"], line["eval/accuracy"]) for line in lines if "eval/accuracy" in line],
        first_step_s=first_step_s,
        wall_s=time.monotonic() - began,
        notes=notes,
    )


def changed(line: list[str], config: Path, arguments: argparse.Namespace) -> list[str]:
    """Return a command that runs OpenRLHF's with other settings, or itself if there are none."""
    settings = [*(["train.fp32_master=false"] if arguments.precision == "bf16" else []), *arguments.set]
    if not settings:
        return line
    config.write_text(subprocess.run([*line, "--print_config"], check=True, text=True, stdout=subprocess.PIPE).stdout)
    return [sys.executable, "-m", "hotseat.cli.main", "run", str(config), *settings]


def watch(line: list[str], folder: Path, run_dir: Path, interrupt: int | None) -> tuple[float, int]:
    """Run a command to its end: seconds until its first step was recorded, and the exit code.

    interrupt: send SIGTERM to the command when so many steps are recorded.
    """
    metrics = run_dir / "metrics.jsonl"
    num_before = count_steps(metrics)
    began = time.monotonic()
    first_step_s = float("nan")
    root = str(Path(__file__).parents[1])
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))}
    with (folder / "log").open("a") as log:
        process = subprocess.Popen(line, cwd=folder, stdout=log, stderr=subprocess.STDOUT, env=env)
        while process.poll() is None:
            time.sleep(0.1)
            num_steps = count_steps(metrics)
            if num_steps > num_before and first_step_s != first_step_s:
                first_step_s = time.monotonic() - began
            if interrupt is not None and num_steps >= interrupt:
                process.send_signal(signal.SIGTERM)
                interrupt = None
    print(re.sub(r"(?m)^(?!.*(rl +\d+/|note|warn|batch|colocated)).*\n?", "", (folder / "log").read_text())[-4000:])
    return first_step_s, process.returncode


def count_steps(metrics: Path) -> int:
    return metrics.read_text().count('"step_s"') if metrics.exists() else 0


# --- TRL --------------------------------------------------------------------------------------------------------------


def run_trl(arguments: argparse.Namespace, size: Size) -> Outcome:
    """TRL on the same task, with vLLM in its process; it sleeps between rollouts unless `--graphs` is given."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "smollm2"))
    from reward import reward_func

    rewards: list[float] = []

    def reward(prompts: list[Any], completions: list[Any], answer: list[str], **kwargs: Any) -> list[float]:
        texts = [completion[0]["content"] for completion in completions]
        scores = reward_func(texts, [""] * len(texts), answer)
        rewards.append(statistics.fmean(scores))
        return scores

    prompts = arguments.directory / "data" / "trl.jsonl"
    rows = [json.loads(line) for line in (arguments.directory / "data" / "train.jsonl").read_text().splitlines()]
    chats = [{"input": [{"role": "user", "content": row["input"]}], "answer": row["answer"]} for row in rows]
    prompts.write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    num_samples, micro_batch = size.num_prompts * size.group_size, min(arguments.trl_micro_batch, size.batch_size)
    on_gpu: dict[str, Any] = {
        "bf16": True,
        "model_init_kwargs": {"dtype": "bfloat16" if arguments.precision == "bf16" else "float32"},
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_enable_sleep_mode": not arguments.graphs,
        "vllm_gpu_memory_utilization": 0.4,
        "vllm_max_model_length": 256,
    }
    began = time.monotonic()
    seconds = time_grpo(
        arguments.model,
        prompts,
        arguments.directory / "trl",
        reward,
        max_steps=2 * arguments.trl_rollouts,
        learning_rate=arguments.learning_rate,
        beta=1e-4,
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=size.batch_size // micro_batch,
        generation_batch_size=num_samples,
        num_generations=size.group_size,
        max_completion_length=64,
        gradient_checkpointing=False,
        **(on_gpu if size is ON_GPU else {"use_cpu": True, "bf16": False}),
    )
    wall_s = time.monotonic() - began
    pairs = [sum(seconds[index : index + 2]) for index in range(0, len(seconds) - 1, 2)]
    records = [{"step_s": pair, "reward": score} for pair, score in zip(pairs, rewards, strict=False)]
    return Outcome(records, [], wall_s - sum(pairs[1:]), wall_s)


# --- tables -----------------------------------------------------------------------------------------------------------

ROWS = {
    "step_s": "seconds per rollout and its updates",
    "time/rollout": "  rollout",
    "time/prepare": "  prepare",
    "time/update": "  update",
    "time/sync": "  sync",
    "time/offload": "  offload",
    "time/onload": "  onload",
    "sync/proof_ms": "digests and canary, ms",
    "length": "tokens per answer",
    "engine_gap": "engine gap, mean",
    "engine_gap_p99": "engine gap, 99th percentile",
    "engine_gap_max": "engine gap, largest",
    "canary_gap": "canary gap",
}


def show(outcomes: dict[str, Outcome]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(width=140)
    table = Table(title="SmolLM2-135M-Instruct, chain sums (medians after the first steps; smallest to largest)")
    table.add_column("")
    for case in outcomes:
        table.add_column(case, justify="right")
    for key, label in ROWS.items():
        cells = [spread([r[key] for r in o.records[NUM_WARM_UP:] or o.records if key in r]) for o in outcomes.values()]
        if any(cells):
            table.add_row(label, *cells)
    table.add_row("command to the end of step 1, s", *[f"{o.first_step_s:.0f}" for o in outcomes.values()])
    table.add_row("whole run, s", *[f"{o.wall_s:.0f}" for o in outcomes.values()])
    table.add_row("rollouts", *[str(len(o.records)) for o in outcomes.values()])
    console.print(table)
    for case, outcome in outcomes.items():
        for note in outcome.notes:
            console.print(f"{case}: {note}")
        for step, accuracy in outcome.evaluations:
            console.print(f"{case} held-out accuracy after {step:3d}: {accuracy:.3f} {'█' * round(60 * accuracy)}")
        rewards = [f"{record['reward']:.2f}" for record in outcome.records if "reward" in record]
        console.print(f"{case} reward by rollout: {' '.join(rewards)}")


def spread(values: list[float]) -> str:
    if not values:
        return ""
    return f"{statistics.median(values):.4g} ({min(values):.3g} to {max(values):.3g})"


def run_trl_aside(arguments: argparse.Namespace) -> Outcome:
    """Run TRL in a process of its own, which leaves no device memory behind."""
    line = [sys.executable, __file__, *sys.argv[1:], "--trl-process"]
    subprocess.run(line, check=True)
    return Outcome(**json.loads((arguments.directory / "trl.json").read_text()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=SMOLLM2, help="checkpoint that examples/smollm2/convert.py made")
    parser.add_argument("--directory", type=Path, default=Path("build/real_model"), help="data, runs and logs")
    parser.add_argument("--data", action="store_true", help="make the problems anew; they are made if there are none")
    parser.add_argument("--backend", nargs="+", choices=("deepspeed", "fsdp"), default=[])
    parser.add_argument("--reward-model", action="store_true", help="three rollouts with a tiny reward model, ZeRO-3")
    parser.add_argument("--trl", action="store_true", help="TRL on the same task")
    parser.add_argument("--rollouts", type=int, help="default: 40, on a CPU 3")
    parser.add_argument("--trl-rollouts", type=int, default=6)
    parser.add_argument("--trl-micro-batch", type=int, default=32)
    parser.add_argument("--micro-batch", default="32", help="samples per micro-batch, or auto")
    parser.add_argument("--precision", choices=("masters", "bf16"), default="masters", help="fp32 masters or pure bf16")
    parser.add_argument("--graphs", action="store_true", help="CUDA graphs, no gradient checkpointing, no sleep")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="settings of Hotseat's config")
    parser.add_argument("--learning-rate", type=float, default=2e-5)
    parser.add_argument("--engine", choices=("vllm", "transformers"), default="vllm")
    parser.add_argument("--eval-steps", type=int, default=10)
    parser.add_argument("--save-steps", type=int, default=1000)
    parser.add_argument("--interrupt", type=int, metavar="N", help="SIGTERM after N rollouts, then resume")
    parser.add_argument("--trl-process", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    import torch

    size = ON_GPU if torch.cuda.is_available() else ON_CPU
    arguments.rollouts = arguments.rollouts or (40 if size is ON_GPU else 3)
    arguments.model, arguments.directory = existing(arguments.model), arguments.directory.resolve()
    if size is ON_CPU and arguments.micro_batch == "32":
        arguments.micro_batch = "4"
    if arguments.trl_process:
        outcome = run_trl(arguments, size)
        (arguments.directory / "trl.json").write_text(json.dumps(vars(outcome)))
        return
    data: Path = arguments.directory / "data"
    if arguments.data or not (data / "train.jsonl").exists():
        make_problems(data, num_rows=40 * ON_GPU.num_prompts)
    outcomes: dict[str, Outcome] = {}
    is_other = arguments.data or arguments.reward_model or arguments.trl
    backends = arguments.backend or ([] if is_other else ["fsdp"])
    for case in [*backends, *(["reward_model"] if arguments.reward_model else [])]:
        outcomes[case] = run_hotseat(case, arguments, size)
        show({case: outcomes[case]})
    if arguments.trl:
        outcomes["trl"] = run_trl_aside(arguments)
    if arguments.trl or len(outcomes) > 1:
        show(outcomes)


if __name__ == "__main__":
    main()
