"""What stages gain: simulators and policy with about equal costs, one pinned core each, in 1, 2 and 4 stages.

    python bench/simulator_stages.py > bench/results/cpu_simulator_stages.txt

The simulators are BabyAI's in a child process on a core, drawing pictures until a round of them costs what the answers
of the policy do. The policy is a tiny Llama on the transformers engine, on the other core. Every number is measured.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "embodied"))

import policy

from hotseat.agents import AgentHost
from hotseat.envs.loading import SimulatorSettings
from hotseat.envs.processes import ProcessEnv
from hotseat.loop.workers.simulation import Player, SimulationSettings, simulation_prompts
from hotseat.rollout.transformers_engine import TransformersEngine
from hotseat.types import Request, SampleKey, Sampling

TASK = "BabyAI-GoToRedBallGrey-v0"
FAMILY = str(Path(__file__).parent / "lib" / "camera_babyai.py")
MAX_LENGTH = 64
SAMPLING = Sampling(max_new_tokens=1, ignore_eos=True)


def simulator(frames: int, max_steps: int) -> SimulatorSettings:
    return SimulatorSettings(FAMILY, (TASK,), max_steps, {"frames": frames})


def settings(frames: int, num_envs: int, num_stages: int, max_steps: int) -> SimulationSettings:
    return SimulationSettings(simulator(frames, max_steps), num_envs, num_stages, 1, 1, 256, 60.0, True, False, False)


def pin_children(pids: list[int], core: int) -> None:
    for pid in pids:
        os.sched_setaffinity(pid, {core})


def env_round_s(frames: int, num_envs: int, core: int) -> float:
    """Seconds in which all simulators carry out one action."""
    env = ProcessEnv(simulator(frames, 64), num_envs)
    pin_children(env.pids(), core)
    slots = list(range(num_envs))
    env.reset(slots, [0] * num_envs, slots)
    times = []
    for _ in range(8):
        began_s = time.perf_counter()
        env.step(slots, np.full((num_envs, 1, 1), 5.0))
        times.append(time.perf_counter() - began_s)
    env.close()
    return sorted(times)[len(times) // 2]


def policy_round_s(engine: TransformersEngine, prompts: list[tuple[int, ...]], num_envs: int) -> float:
    """Seconds in which the policy answers all simulators once."""
    times = []
    for turn in range(8):
        requests = [
            Request(f"{turn}/{at}", prompts[(turn * num_envs + at) % len(prompts)], SAMPLING, at)
            for at in range(num_envs)
        ]
        began_s = time.perf_counter()
        engine.generate(requests)
        times.append(time.perf_counter() - began_s)
    return sorted(times)[len(times) // 2]


def observations(tokenizer: object, count: int) -> list[tuple[int, ...]]:
    """Return tokens of different observations, so that the engine finds none of them in its cache."""
    first = simulation_prompts(settings(0, 1, 1, 64), tokenizer, MAX_LENGTH, [range(1)])[0][0].token_ids
    draw = np.random.default_rng(0)
    return [tuple(draw.permutation(np.array(first)).tolist()) for _ in range(count)]


def rounds_per_s(
    engine: TransformersEngine, tokenizer: object, frames: int, num_envs: int, stages: int, max_steps: int, core: int
) -> float:
    """Play two episodes in each simulator; return actions of all simulators per second."""
    chosen = settings(frames, num_envs, stages, max_steps)
    prompts = simulation_prompts(chosen, tokenizer, MAX_LENGTH, [range(2 * num_envs)])[0]
    player = Player(chosen, tokenizer, MAX_LENGTH)
    pin_children([pid for stage in player._stages for pid in stage.env.pids()], core)
    host = AgentHost(player, engine.submit, run_seed=0, max_concurrent=num_envs)
    began_s = time.perf_counter()
    futures = host.submit_many([(prompt, SampleKey(0, prompt.index, 0)) for prompt in prompts], SAMPLING)
    num_actions = sum(future.result().extra["actions"] for future in futures)
    took_s = time.perf_counter() - began_s
    host.close()
    player.end()
    return num_actions / took_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-envs", type=int, default=32)
    parser.add_argument("--max-steps", type=int, default=24)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    assert len(cores) >= 2, "two cores are needed"
    os.sched_setaffinity(0, {cores[0]})
    torch.set_num_threads(1)
    tokenizer = policy.make_tokenizer()
    model = policy.make_model(tokenizer, 64, 0)
    engine = TransformersEngine(model, max_length=MAX_LENGTH, num_slots=arguments.num_envs, num_threads=1)
    prompts = observations(tokenizer, 8 * arguments.num_envs)
    policy_s = policy_round_s(engine, prompts, arguments.num_envs)
    frames, env_s = 0, env_round_s(0, arguments.num_envs, cores[1])
    one_s = env_round_s(1, arguments.num_envs, cores[1]) - env_s
    if env_s < policy_s:
        frames = max(0, round((policy_s - env_s) / one_s))
        env_s = env_round_s(frames, arguments.num_envs, cores[1])
    print(f"{arguments.num_envs} simulators, {frames} pictures a step, on cores {cores[1]} and {cores[0]}")
    print(f"a round: simulators {env_s * 1e3:.1f} ms, policy {policy_s * 1e3:.1f} ms, ratio {env_s / policy_s:.2f}")
    base = 0.0
    for stages in (1, 2, 4):
        rates = [
            rounds_per_s(engine, tokenizer, frames, arguments.num_envs, stages, arguments.max_steps, cores[1])
            for _ in range(arguments.repeats)
        ]
        rate = sorted(rates)[len(rates) // 2]
        base = base or rate
        each = ", ".join(f"{value:.0f}" for value in rates)
        print(f"{stages} stages: {rate:.0f} actions/s ({each}), {rate / base:.2f} times 1 stage")
    engine.close()


if __name__ == "__main__":
    main()
