"""Seconds from the command to each milestone of a start, up to the end of step 1: cold and warm compile caches.

    python bench/start.py                                    the demo's GRPO config, before its SFT: 2 CPU cores
    python bench/start.py --config run.yaml seed=1           another one, with settings that replace the file's
    python bench/start.py --model MODEL --engine vllm --trl  on a GPU: the demo's prompts, another model; TRL beside it

Cold means that the compile caches (hotseat/caches.py) begin empty. Libraries are always in the page cache: a start that
is not reported comes first (`--no-first` leaves it out). The load of the machine is printed with each start: on few
cores other work delays every milestone. The run is interrupted after step 1.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from lib.trl_side import time_grpo
from rich.console import Console
from rich.table import Table

# A milestone, and the line of the run's output at which it is reached; the last such line counts.
MILESTONES = {
    "prompts read": r"(starting|attaching to) Ray",
    "Ray up": r"starting processes",
    "engines started": r"engine \d+ ready",
    "processes started": r"(\w+ ready after|engine \d+ ready)",
    "first push": r"step 1: (evaluating|sampling)",
    "first evaluation": r"step 1: sampling",
    "end of step 1": r"^(rl|sft|rm|dpo) +1/",
}
_ONLY_FIRST = ("first push", "first evaluation")  # the same lines come again in later steps
_VARIABLES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "VLLM_CACHE_ROOT")


def start(command: Sequence[str], cache: Path) -> dict[str, float]:
    """Run a command to the end of step 1, interrupt it, and return the seconds at which milestones were reached."""
    env = {name: value for name, value in os.environ.items() if name not in _VARIABLES} | {"XDG_CACHE_HOME": str(cache)}
    began_s, reached, lines = time.monotonic(), dict[str, float](), list[str]()
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            seconds = time.monotonic() - began_s
            lines.append(line)
            for name, pattern in MILESTONES.items():
                if re.search(pattern, line) and not (name in _ONLY_FIRST and name in reached):
                    reached[name] = seconds
            if "end of step 1" in reached:
                break
        process.send_signal(signal.SIGINT)
        process.stdout.read()
    if "end of step 1" not in reached:
        sys.exit("".join(["the run ended before step 1 did:\n", *lines[-20:]]))
    return reached


def demo_config(directory: Path, model: Path | None, engine: str) -> list[str]:
    """Write the files of the demo, and return the config of its GRPO run with the settings that differ."""
    from hotseat.cli.demo_command import GRPO, NUM_PROMPTS
    from hotseat.demo import make_files

    files = make_files(directory, seed=0)
    paths = {name: getattr(files, name) for name in ("model", "examples", "prompts", "held_out", "reward")}
    config = directory / "grpo.yaml"
    config.write_text(GRPO.format(directory=directory, seed=0, num_prompts=NUM_PROMPTS, **paths))
    settings = [f"actor.model={model or files.model}", f"rollout.engine={engine}"]
    if model is not None:
        settings += ["data.max_length=256", "rollout.max_new_tokens=64", "train.dtype=null"]
    return [str(config), *settings]


def run_trl(directory: Path, model: Path) -> None:
    """Train by TRL's GRPO up to the end of the update after its first rollout, of the demo's sizes."""
    import torch

    sizes = {"per_device_train_batch_size": 32, "gradient_accumulation_steps": 16, "generation_batch_size": 512}
    on_gpu = {"bf16": True, "use_vllm": True, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.4}
    device = on_gpu | {"vllm_max_model_length": 256} if torch.cuda.is_available() else {"use_cpu": True, "bf16": False}
    reward = lambda completions, **_: [float(len(each)) for each in completions]  # noqa: E731
    length = 64 if torch.cuda.is_available() else 5
    time_grpo(
        model,
        directory / "prompts.jsonl",
        directory / "trl",
        reward,
        max_steps=1,
        num_generations=8,
        max_completion_length=length,
        **sizes,
        **device,
    )


def show(columns: dict[str, dict[str, float]]) -> None:
    table = Table(title="seconds from the command")
    table.add_column("milestone")
    for name in columns:
        table.add_column(name, justify="right")
    for milestone in MILESTONES:
        cells = [f"{column[milestone]:.1f}" if milestone in column else "" for column in columns.values()]
        table.add_row(milestone, *cells)
    Console(width=120).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("settings", nargs="*", help="KEY=VALUE, replaces that of the config")
    parser.add_argument("--config", type=Path, help="YAML file of a run; default: the demo's")
    parser.add_argument("--model", type=Path, help="folder of a checkpoint, for the demo's prompts")
    parser.add_argument("--engine", default="transformers", help="rollout.engine of the demo (default: %(default)s)")
    parser.add_argument("--trl", action="store_true", help="TRL's start beside it, with the demo's prompts")
    parser.add_argument("--no-first", action="store_true", help="no start before those that are reported")
    parser.add_argument("--trl-process", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_intermixed_args()
    if arguments.trl_process is not None:
        run_trl(arguments.trl_process, arguments.model)
        print("rl 1/1", flush=True)
        return
    directory = Path(tempfile.mkdtemp(prefix="start-"))
    try:
        config = demo_config(directory / "demo", arguments.model, arguments.engine)
        config = config if arguments.config is None else [str(arguments.config)]
        columns = {}
        for number, name in enumerate(["first", "cold", "warm"]):
            if name == "first" and arguments.no_first:
                continue
            cache = directory / ("first" if name == "first" else "cache")
            own = ["log.every=1", f"run_dir={directory}/runs", f"name=start-{number}"]
            line = [sys.executable, "-m", "hotseat", "run", *config, *arguments.settings, *own]
            load = os.getloadavg()[0]
            columns[f"{name} (load {load:.1f})"] = start(line, cache)
        if arguments.trl:
            model = arguments.model or directory / "demo" / "base_model"
            line = [sys.executable, __file__, "--model", str(model), "--trl-process", str(directory / "demo")]
            columns["TRL, cold"] = start(line, directory / "trl-cache")
            columns["TRL, warm"] = start(line, directory / "trl-cache")
        show({name: column for name, column in columns.items() if not name.startswith("first")})
    finally:
        shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main()
