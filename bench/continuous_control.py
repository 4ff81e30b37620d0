"""PPO with a Gaussian MLP policy on gymnasium's MuJoCo tasks, beside the same algorithm in one file.

    python bench/continuous_control.py TASK SEED SIDE [--steps 100000] --out FILE    # one run, appended to FILE
    python bench/continuous_control.py --table FILE

Sides: `hotseat`, a run of the loop with one process (`cluster.runtime: local`) and simulators in a child process;
`episodes`, the reference (`lib/ppo_reference.py`) with Hotseat's batches, which are whole episodes; `cleanrl`, the
reference with CleanRL's: 2,048 steps in 32 minibatches. Networks, GAE, clip, epochs, optimizer, learning rate and
budget are the same, and none normalises observations or rewards. A return is the mean over the last episodes; seconds
are without start-up. Needs `pip install 'hotseat[mujoco]'`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from lib.ppo_reference import ADAM, CLIP, GAMMA, LAMBDA, MAX_NORM, NUM_EPOCHS, Batches, train

LAST = 20  # episodes whose mean return counts


# By task: sizes of states and actions, episodes of a batch and of a minibatch, and the learning rate.
TASKS = {
    "InvertedPendulum-v5": (4, 1, 16, 4, 1e-3),
    "Reacher-v5": (10, 2, 40, 4, 1e-3),
}
SIDES = ("hotseat", "episodes", "cleanrl")


def config_of(task: str, seed: int, folder: str) -> dict[str, Any]:
    state_dim, action_dim, batch, minibatch, rate = TASKS[task]
    optimizer = {
        "learning_rate": rate,
        "schedule": "constant",
        "warmup_ratio": 0,  # the learning rate is the reference's from the first update on
        "max_grad_norm": MAX_NORM,
        "betas": list(ADAM["betas"]),
        "eps": ADAM["eps"],
    }
    return {
        "name": "run",
        "run_dir": folder,
        "seed": seed,
        "cluster": {"runtime": "local"},
        "actor": {"model": f"{folder}/policy", "optimizer": optimizer},
        "critic": {"value_clip": None, "optimizer": optimizer},
        "env": {"path": "gym", "tasks": [task], "num_envs": batch, "num_seeds": batch * 1000},
        "rollout": {"engine": "numeric", "batch_size": batch, "samples_per_prompt": 1, "num_slots": batch},
        "algorithm": {
            "estimator": "gae",
            "time_step": "chunk",
            "gamma": GAMMA,
            "gae_lambda": LAMBDA,
            "clip_low": CLIP,
            "clip_high": CLIP,
        },
        "reward": {"clip": None},
        "train": {
            "dtype": "fp32",
            "batch_size": minibatch,
            "micro_batch_size": minibatch,
            "max_epochs": NUM_EPOCHS,
        },
        "data": {"max_length": state_dim + action_dim + 1},
        "log": {"every": 1000},
    }


def run_hotseat(task: str, seed: int, max_steps: int) -> dict[str, Any]:
    import yaml

    import hotseat
    from hotseat.numeric import NumericConfig, write_policy

    state_dim, action_dim, *_ = TASKS[task]
    returns: list[tuple[int, float]] = []
    num_steps, seconds = 0, 0.0
    with tempfile.TemporaryDirectory() as folder:
        write_policy(
            f"{folder}/policy", NumericConfig(state_dim=state_dim, action_dim=action_dim, num_actions=1), seed=seed
        )
        path = Path(folder, "config.yaml")
        path.write_text(yaml.safe_dump(config_of(task, seed, folder)))
        run = hotseat.start(str(path))
        for metrics in run:
            if metrics["step"] == 0:  # what is measured before training
                continue
            # Episodes of a step are not told apart in its metrics: each counts with their mean.
            num_steps += round(metrics["extra/actions"] * metrics["samples"])
            returns += [(num_steps, metrics["reward"])] * round(metrics["samples"])
            seconds += metrics["step_s"]
            if num_steps >= max_steps:
                run.finish()
                break
        run.wait()
    return {"returns": returns, "num_steps": num_steps, "seconds": seconds}


def run_side(task: str, seed: int, side: str, max_steps: int) -> dict[str, Any]:
    *_, batch, minibatch, rate = TASKS[task]
    if side == "hotseat":
        return run_hotseat(task, seed, max_steps)
    batches = Batches(batch, minibatch, True) if side == "episodes" else Batches(2048, 64, False)
    return vars(train(task, seed, max_steps, batches, rate))


def summary(result: dict[str, Any], max_steps: int) -> dict[str, Any]:
    """Return the mean return of the last episodes of a run, and its speed."""
    last = [each for _, each in result["returns"]][-LAST:]
    return {
        "num_steps": result["num_steps"],
        "seconds": round(result["seconds"], 2),
        "steps_per_s": round(result["num_steps"] / result["seconds"], 1),
        "last_return": round(statistics.fmean(last), 2),
        "num_episodes": len(result["returns"]),
    }


def table(lines: list[dict[str, Any]]) -> None:
    for task in TASKS:
        for side in SIDES:
            runs = [line for line in lines if (line["task"], line["side"]) == (task, side)]
            if not runs:
                continue
            returns, rates = ([run[name] for run in runs] for name in ("last_return", "steps_per_s"))
            spread = statistics.stdev(returns) if len(runs) > 1 else float("nan")
            print(
                f"{task:20} {side:9} seeds {[run['seed'] for run in runs]}  return {statistics.fmean(returns):8.1f}"
                f" ± {spread:6.1f} {returns}  steps/s {statistics.fmean(rates):7.0f}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", nargs="?", choices=TASKS)
    parser.add_argument("seed", nargs="?", type=int)
    parser.add_argument("side", nargs="?", choices=SIDES)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--table", type=Path)
    args = parser.parse_args()
    if args.table is not None:
        table([json.loads(line) for line in args.table.read_text().splitlines() if line.startswith("{")])
        return
    start = time.monotonic()
    found = summary(run_side(args.task, args.seed, args.side, args.steps), args.steps)
    line = {"task": args.task, "seed": args.seed, "side": args.side, **found, "wall_s": round(time.monotonic() - start)}
    print(json.dumps(line))
    if args.out is not None:
        with args.out.open("a") as file:
            print(json.dumps(line), file=file)


if __name__ == "__main__":
    main()
