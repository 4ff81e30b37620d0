"""TRL's GRPOTrainer on the same task: the seconds of each of its steps."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def time_grpo(
    model: Path, prompts: Path, output: Path, reward: Callable[..., list[float]], **config: Any
) -> list[float]:
    from datasets import load_dataset
    from trl import GRPOConfig, GRPOTrainer

    trainer = GRPOTrainer(
        model=str(model),
        reward_funcs=reward,
        args=GRPOConfig(
            output_dir=str(output),
            lr_scheduler_type="constant",
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            logging_steps=1000,
            **{"learning_rate": 1e-6, "beta": 0.0} | config,
        ),
        train_dataset=load_dataset("json", data_files=str(prompts), split="train").rename_column("input", "prompt"),
    )
    return timed_steps(trainer)


def timed_steps(trainer: Any, when_made: Callable[[list[float]], object] | None = None) -> list[float]:
    """Train with one of transformers' trainers; return the seconds of each of its steps.

    when_made: called after each step, with those of the steps so far.
    """
    import torch
    from transformers import TrainerCallback

    ends: list[float] = []

    class Clock(TrainerCallback):
        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            ends.append(time.perf_counter())

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            ends.append(time.perf_counter())
            seconds = durations()
            print(f"step {len(seconds)}: {seconds[-1]:.2f} s", flush=True)
            if when_made is not None:
                when_made(seconds)

    def durations() -> list[float]:
        return [end - begin for begin, end in itertools.pairwise(ends)]

    trainer.add_callback(Clock())
    trainer.train()
    return durations()
