"""MuJoCo Warp's table-top: speed, offloading, taking turns, and learning to reach and push from pixels.

    python bench/mujoco_warp.py                                   # a CUDA device: all parts
    python bench/mujoco_warp.py --parts speed offload --limit-s 300
    python bench/mujoco_warp.py --tiny                            # anywhere, in minutes: that it works

Parts: `speed`, world-steps and frames in a second, and whether bits repeat; `offload`, memory that it frees and seconds
until the simulator steps again; `turns`, seconds of a step with simulators and engine that take turns with the actor or
stay, in 1 and 2 stages; `learn`, success on held-out seeds over time: decisions of a script and random ones are
imitated (by the part `imitate` alone, where several runs are to begin with one policy), then PPO or GRPO. Several parts
have a process each, so that a failure of one leaves the others. Nothing begins after `--limit-s`; learning ends there.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.remove(str(Path(__file__).parent))  # where this file would be the package of its name
sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.lib.devices import has_gpu
from bench.lib.imitation import ImitationSettings, imitate
from bench.lib.tabletop import write_policy
from hotseat.envs.family_loading import SimulatorSettings
from hotseat.envs.processes import ProcessEnv

PARTS = ("speed", "offload", "turns", "imitate", "learn")
PATCH = 8  # pixels of the edge of an image token
MAX_LENGTH = 96
MICRO_BATCH_TOKENS = 131_072  # a tiny model is bound by launches
NUM_SUBSTEPS = 3  # steps of physics of an action
STARTED_S = time.monotonic()


def elapsed_s() -> float:
    return time.monotonic() - STARTED_S


def say(*columns: object) -> None:
    print(*columns, flush=True)


# --- speed ------------------------------------------------------------------------------------------------------------


def speed(arguments: argparse.Namespace) -> None:
    import warp as wp

    from hotseat.envs.families.mujoco_warp import make_worlds

    wp.init()
    say(f"warp {wp.config.version} on {wp.get_preferred_device()}")
    # The mode that is not deterministic has kernels of its own to compile, so only the largest sizes have both.
    cases = [(4, True), (8, True), (8, False)]
    if not arguments.tiny:
        cases = [(64, True), (256, True), (1024, True), (4096, True), (1024, False), (4096, False)]
    say(f"{'worlds':>7} {'deterministic':>13} {'actions/s':>12} {'world-steps/s':>14} {'frames/s':>12}   first call s")
    for num_worlds, deterministic in cases:
        seconds = {}
        first_s = 0.0
        for observe in ("state", "image"):
            began_s = time.perf_counter()
            worlds = make_worlds(["push-red"], 10**6, num_worlds, observe, deterministic=deterministic)
            actions = np.random.default_rng(0).uniform(-1, 1, (num_worlds, 4, 2))
            acting = np.zeros(num_worlds, dtype=np.int32)
            worlds.reset(list(range(num_worlds)), [0] * num_worlds, list(range(num_worlds)))
            worlds.step_all(acting, actions)
            wp.synchronize()
            first_s += time.perf_counter() - began_s
            rounds, began_s = 0, time.perf_counter()
            while rounds < 4 or time.perf_counter() - began_s < 1:
                for _ in range(4):
                    worlds.step_all(acting, actions)
                wp.synchronize()
                rounds += 4
            seconds[observe] = (time.perf_counter() - began_s) / rounds
        # A chunk ends with one frame of each world, which is all that the second one does besides.
        frame_s = max(seconds["image"] - seconds["state"], 1e-9)
        per_s = num_worlds * 4 / seconds["state"]
        say(
            f"{num_worlds:7} {'yes' if deterministic else 'no':>13} {per_s:12,.0f}"
            f" {per_s * NUM_SUBSTEPS:14,.0f} {num_worlds / frame_s:12,.0f}   {first_s:.1f}"
        )
    for deterministic in (True, False):
        digests = [_digest(num_worlds, deterministic) for num_worlds in (16, 16, 5)]
        what = "deterministic" if deterministic else "deterministic: false"
        say(f"{what}: again equal {digests[0] == digests[1]}, in a batch of 5 instead of 16 {digests[0] == digests[2]}")


def _digest(num_worlds: int, deterministic: bool) -> str:
    """Play world 0 to 4 for 20 actions; return a hash of what was seen."""
    from hotseat.envs.families.mujoco_warp import make_worlds

    worlds = make_worlds(["push-red"], 100, num_worlds, "both", deterministic=deterministic)
    worlds.reset(list(range(num_worlds)), [0] * num_worlds, list(range(num_worlds)))
    hashed = hashlib.sha256()
    for chunk in range(5):
        actions = np.random.default_rng(chunk).uniform(-1, 1, (5, 4, 2))
        every = np.zeros((num_worlds, 4, 2))
        every[:5] = actions
        steps = worlds.step(list(range(num_worlds)), every)
        for step in steps[:5]:
            hashed.update(step.seen.state.tobytes() + step.seen.image.tobytes())  # type: ignore[union-attr]
    return hashed.hexdigest()


# --- offload ----------------------------------------------------------------------------------------------------------


def used_bytes(env: ProcessEnv | None) -> int:
    """Return the memory in use on the device, or that of the simulators' processes where there is no device."""
    import torch

    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        return total - free
    return sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096 for pid in env.pids()) if env else 0


def offload(arguments: argparse.Namespace) -> None:
    num_worlds = 8 if arguments.tiny else 1024
    settings = SimulatorSettings("mujoco_warp", ("push-red",), 40, {"observe": "image"})
    slots = list(range(num_worlds))
    used_bytes(None)  # this process has its context before anything is measured
    before = used_bytes(None)
    began_s = time.perf_counter()
    env = ProcessEnv(settings, num_worlds)
    try:
        say(f"started in {time.perf_counter() - began_s:.1f} s: imports, context, kernels, {num_worlds} worlds")
        _play(env, slots)
        taken = used_bytes(env) - before
        say(f"{'':10} {'MiB taken':>10} {'MiB left':>9} {'freed':>7} {'offload s':>10} {'steps again after s':>20}")
        for turn in range(3):
            env._is_on_device = True  # on a CPU too, to show that it works
            began_s = time.perf_counter()
            env.offload()
            offload_s = time.perf_counter() - began_s
            time.sleep(arguments.pause_s)  # a phase of the actor, in which the next process imports
            left = used_bytes(env) - before
            began_s = time.perf_counter()
            env.onload()
            _play(env, slots)
            again_s = time.perf_counter() - began_s
            say(
                f"turn {turn:<5} {taken / 2**20:10.0f} {left / 2**20:9.0f} {1 - left / taken:7.1%} {offload_s:10.2f}"
                f" {again_s:20.2f}"
            )
    finally:
        env.close()


def _play(env: ProcessEnv, slots: list[int]) -> None:
    env.reset(slots, [0] * len(slots), slots)
    env.step(slots, np.zeros((len(slots), 2, 2)))
    env.forget(slots)


# --- runs -------------------------------------------------------------------------------------------------------------


def config(arguments: argparse.Namespace, folder: Path, name: str, model: Path, **changes: str) -> dict[str, str]:
    """Return the sections of a run."""
    sizes = arguments.sizes
    group = episodes_of_a_seed(arguments)
    algorithm = f"estimator: {arguments.estimator}, entropy_coef: {arguments.entropy_coef}"
    if arguments.estimator == "gae":
        algorithm += f", time_step: chunk, gamma: 1.0, gae_lambda: {arguments.gae_lambda}"
        rate = f"{{learning_rate: {arguments.critic_learning_rate}, schedule: constant, warmup_ratio: 0.0}}"
        changes = {"critic": f"{{optimizer: {rate}}}", **changes}
    hosts = arguments.hosts if arguments.runtime == "ray" else 1
    return {
        "name": name,
        "run_dir": f"{folder}/runs",
        "seed": str(arguments.seed),
        "cluster": cluster(arguments, hosts),
        "actor": (
            f"{{model: {model}, optimizer: {{learning_rate: {arguments.learning_rate}, schedule: {arguments.schedule},"
            " warmup_ratio: 0.0}}"
        ),
        "data": f"{{max_length: {MAX_LENGTH}}}",
        "env": env_section(arguments, arguments.tasks, sizes["num_envs"] // hosts),
        "rollout": (
            f"{{batch_size: {sizes['num_envs'] // group}, samples_per_prompt: {group}, num_slots: {sizes['num_envs']},"
            f" pipeline_stage_num: 2, temperature: {arguments.temperature},"
            f" max_tokens_per_device: {MICRO_BATCH_TOKENS}}}"
        ),
        "algorithm": f"{{{algorithm}}}",
        "train": (
            f"{{dtype: fp32, compile: false, batch_size: {sizes['num_envs'] // arguments.updates},"
            f" max_tokens_per_device: {MICRO_BATCH_TOKENS}}}"
        ),
        "reward": "{max_failed_fraction: 0.5}",  # a policy at random may sample a placeholder of images
        "eval": "{every: 1000000}",
        **changes,
    }


def episodes_of_a_seed(arguments: argparse.Namespace) -> int:
    """Return how many episodes of a step have the same task and seed."""
    return 8 if arguments.estimator == "group_norm" else 1


def cluster(arguments: argparse.Namespace, hosts: int = 1) -> str:
    if arguments.runtime == "local":
        return "{runtime: local}"
    env = f"0:0-{hosts - 1}" if hosts > 1 else "0"  # several processes on one device
    critic = ", critic: '0'" if arguments.estimator == "gae" else ""
    return f"{{runtime: ray, component_placement: {{actor: '0', env: '{env}', rollout: '0'{critic}}}}}"


def env_section(arguments: argparse.Namespace, tasks: list[str], num_envs: int, **changes: object) -> str:
    sizes = arguments.sizes
    fields: dict[str, object] = {
        "path": "mujoco_warp",
        "tasks": f"[{', '.join(tasks)}]",
        "kwargs": (
            f"{{observe: image, pixels: {arguments.pixels}, progress: {arguments.progress}, deterministic: false}}"
        ),
        "images": "true",
        "num_envs": num_envs,
        "chunk": arguments.chunk,
        "bins": arguments.bins,
        "max_steps": arguments.max_steps,
        "reward": "simulator",
        "num_seeds": sizes["num_seeds"],
        "eval_seeds": sizes["eval_seeds"],
        "step_timeout_s": 300,
    }
    return f"{{{', '.join(f'{key}: {value}' for key, value in (fields | changes).items())}}}"


def start(sections: dict[str, str], folder: Path) -> subprocess.Popen[bytes]:
    file = folder / f"{sections['name']}.yaml"
    file.write_text("\n".join(f"{key}: {value}" for key, value in sections.items()))
    log = (folder / f"{sections['name']}.log").open("wb")
    return subprocess.Popen(
        [sys.executable, "-m", "hotseat", "run", str(file)],
        stdout=log,
        stderr=subprocess.STDOUT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        start_new_session=True,
    )


def finish(run: subprocess.Popen[bytes], limit_s: float, watch: Callable[[], bool] = lambda: False) -> bool:
    """Wait for a run, and end it at the limit or when `watch` says so. Tell whether it ended well."""
    while run.poll() is None:
        if elapsed_s() > limit_s or watch():
            os.killpg(run.pid, signal.SIGTERM)  # SIGINT is ignored by what was started in the background of a script
            try:
                run.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(run.pid, signal.SIGKILL)
            run.wait()
            return False
        time.sleep(0.2)
    return run.returncode == 0


def metrics_of(folder: Path, name: str) -> list[dict[str, Any]]:
    file = folder / "runs" / name / "metrics.jsonl"
    if not file.exists():
        return []
    whole = [line for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return [json.loads(line) for line in whole]


def tail(folder: Path, name: str) -> str:
    return "\n".join((folder / f"{name}.log").read_text(errors="replace").splitlines()[-12:])


def turns(arguments: argparse.Namespace, folder: Path) -> None:
    model = arguments.start or folder / "turns-model"
    if arguments.start is None:
        write_policy(model, bins=arguments.bins, pixels=arguments.pixels, patch=PATCH, width=arguments.width, layers=2)
    say(
        f"{'':14} {'stages':>6} {'s/step':>8} {'rollout':>8} {'update':>8} {'offload':>8} {'onload':>8}   GiB of phases"
    )
    steps = 3 if arguments.tiny else 4
    sizes = arguments.sizes
    for kind, is_offloaded in (("taking turns", "true"), ("all resident", "false")):
        for stages in (1, 2):
            name = f"turns-{is_offloaded}-{stages}"
            began_s = elapsed_s()
            plain = config(arguments, folder, name, model)
            offloads = f", enable_offload: {is_offloaded}}}"
            sections = plain | {
                "cluster": cluster(arguments),
                "actor": plain["actor"][:-1] + offloads,
                "env": env_section(
                    arguments,
                    arguments.tasks[:1],
                    sizes["num_envs"],
                    num_seeds=sizes["num_envs"] // episodes_of_a_seed(arguments) * steps,
                    eval_seeds=0,
                    enable_offload=is_offloaded,
                ),
                "rollout": plain["rollout"][:-1].replace("pipeline_stage_num: 2", f"pipeline_stage_num: {stages}")
                + offloads,
            }
            sections.pop("eval")
            if not finish(start(sections, folder), arguments.limit_s):
                say(f"{kind:14} {stages:6} did not end:\n{tail(folder, name)}")
                continue
            warm = metrics_of(folder, name)[2:]

            def mean(key: str, absent: float = 0.0, warm: list[dict[str, Any]] = warm) -> float:
                return float(np.mean([each.get(key, absent) for each in warm]))

            memory = {phase: mean(f"memory/{phase}/device 0", np.nan) for phase in ("rollout", "update")}
            say(
                f"{kind:14} {stages:6} {mean('step_s'):8.2f} {mean('time/rollout'):8.2f} {mean('time/update'):8.2f}"
                f" {mean('time/offload'):8.2f} {mean('time/onload'):8.2f}   rollout {memory['rollout']:.2f}, update"
                f" {memory['update']:.2f}; {len(warm)} steps, {elapsed_s() - began_s:.0f} s with the start"
            )


def make_start(arguments: argparse.Namespace, folder: Path) -> Path:
    """Write a policy that sees and seldom succeeds; return its folder."""
    from hotseat.envs.families.mujoco_warp import make_worlds

    began_s = elapsed_s()
    write_policy(
        folder / "model",
        bins=arguments.bins,
        pixels=arguments.pixels,
        patch=PATCH,
        width=arguments.width,
        layers=2,
        seed=arguments.seed,
    )
    num_worlds = arguments.sizes["views"]
    worlds = make_worlds(
        arguments.tasks, arguments.max_steps, num_worlds, "both", arguments.pixels, deterministic=False
    )
    settings = ImitationSettings(num_worlds * 128, arguments.sft_batch, arguments.sft_s)
    if arguments.tiny:
        settings = ImitationSettings(16, 8, 1.0, num_steps=2, num_mixed_steps=2, max_mixtures=1)
    imitate(folder / "model", arguments.tasks, worlds, arguments.chunk, arguments.bins, settings, say)
    worlds.close()
    say(f"imitated after {elapsed_s() - began_s:.0f} s")
    return folder / "model"


def learn(arguments: argparse.Namespace, folder: Path) -> None:
    began_s = elapsed_s()
    model = arguments.start or make_start(arguments, folder)
    sections = config(
        arguments,
        folder,
        "learn",
        model,
        eval=f"{{every: {arguments.eval_every}, temperature: 1.0, samples_per_prompt: 1}}",
    )
    learning_s = elapsed_s()
    shown = 0

    def watch() -> bool:
        nonlocal shown
        all_metrics = metrics_of(folder, "learn")
        for each in all_metrics[shown:]:
            success = each.get("eval/success")
            trained = each.get("extra/success")
            columns = [f"{elapsed_s() - learning_s:6.0f} s  step {each['step']:4}"]
            if trained is not None:
                columns.append(f"sampled {trained:6.1%}  {each['step_s']:.2f} s")
            if success is not None:
                columns.append(f"held out {success:6.1%}")
                columns += [f"{task} {each.get(f'eval/{task}/success', 0.0):.0%}" for task in arguments.tasks]
            say("  ".join(columns))
        shown = len(all_metrics)
        reached = [each["eval/success"] for each in all_metrics if each.get("eval/success") is not None]
        return bool(reached) and reached[-1] >= arguments.target

    run = start(sections, folder)
    is_done = finish(run, arguments.limit_s, watch)
    is_target = watch()
    if not is_done and not is_target and elapsed_s() < arguments.limit_s:
        say(f"the run failed:\n{tail(folder, 'learn')}")
    if not metrics_of(folder, "learn"):
        say(f"learning did not begin:\n{tail(folder, 'learn')}")
        return
    held_out = [e["eval/success"] for e in metrics_of(folder, "learn") if e.get("eval/success") is not None]
    say(
        f"from {held_out[0]:.1%} to {held_out[-1]:.1%} of held-out seeds, at best {max(held_out):.1%}, in"
        f" {elapsed_s() - learning_s:.0f} s of learning"
        f"{'' if arguments.start else f', {elapsed_s() - began_s:.0f} s with imitation'}"
        f"{' (ended by itself)' if is_done else ''}"
        if held_out
        else f"nothing was evaluated:\n{tail(folder, 'learn')}"
    )


def run_parts(arguments: argparse.Namespace) -> None:
    """Run each part in a process of its own, up to the limit."""
    for part in arguments.parts:
        left_s = arguments.limit_s - elapsed_s()
        if left_s <= 0:
            say(f"\n{part}: not begun, the limit of {arguments.limit_s:.0f} s is over")
            continue
        # argparse takes the last of an option that is there twice.
        command = [sys.executable, __file__, *sys.argv[1:], "--parts", part, "--limit-s", f"{left_s:.0f}"]
        child = subprocess.Popen(command, start_new_session=True)
        try:
            child.wait(left_s + 60)
        except subprocess.TimeoutExpired:
            say(f"{part}: ended at the limit")
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=[part for part in PARTS if part != "imitate"])
    parser.add_argument("--tiny", action="store_true", help="small sizes, as without a GPU")
    parser.add_argument("--limit-s", type=float, default=1500.0, help="of the whole call")
    parser.add_argument("--pause-s", type=float, default=5.0, help="between offloading and coming back")
    parser.add_argument("--tasks", nargs="+", default=["reach-red", "reach-blue", "push-red", "push-blue"])
    parser.add_argument("--sft-batch", type=int, default=512)
    parser.add_argument("--sft-s", type=float, default=180.0, help="of imitating the script, at most")
    parser.add_argument("--estimator", choices=("gae", "group_norm"), default="group_norm", help="PPO or GRPO")
    parser.add_argument("--learning-rate", type=float, default=7e-4)
    parser.add_argument("--schedule", default="linear", help="of the rate, over --steps")
    parser.add_argument("--steps", type=int, default=70, help="of learning, unless the target is reached before")
    parser.add_argument("--critic-learning-rate", type=float, default=1e-3)
    parser.add_argument("--gae-lambda", type=float, default=0.95)
    parser.add_argument("--temperature", type=float, default=1.0, help="of rollouts; evaluation has 1")
    parser.add_argument("--entropy-coef", type=float, default=0.0)
    parser.add_argument("--updates", type=int, default=4, help="of each step")
    parser.add_argument("--progress", type=float, default=0.0, help="reward of a metre of way, besides 1 for success")
    parser.add_argument("--target", type=float, default=0.8)
    parser.add_argument("--eval-every", type=int, default=10)
    parser.add_argument("--chunk", type=int, default=2)
    parser.add_argument("--bins", type=int, default=7)
    parser.add_argument("--pixels", type=int, default=64)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--max-steps", type=int, default=48)
    parser.add_argument("--runtime", choices=("local", "ray"), help="ray on a CUDA device, else local, if not set")
    parser.add_argument("--hosts", type=int, default=4, help="processes of the role env while it learns, on Ray")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--num-envs", type=int, help="simulators, each of which plays an episode in a step")
    parser.add_argument("--start", type=Path, help="FOLDER/model of `--parts imitate --folder FOLDER`, to begin with")
    parser.add_argument("--folder", type=Path, help="kept; a temporary one if not set")
    arguments = parser.parse_args()
    arguments.tiny = arguments.tiny or not has_gpu()
    if "imitate" in arguments.parts and arguments.folder is None:
        parser.error("the part imitate writes a policy for other calls: set --folder to where it is to stay")
    is_made_first = len(arguments.parts) > 1 and "imitate" in arguments.parts
    if arguments.start is not None and not is_made_first and not (arguments.start / "config.json").exists():
        parser.error(f"--start {arguments.start} has no config.json: name the folder `model` that imitate wrote")
    if len(arguments.parts) > 1:
        run_parts(arguments)
        return
    if arguments.runtime is None:
        import torch

        arguments.runtime = "ray" if torch.cuda.is_available() else "local"
    num_envs = arguments.num_envs or (32 if arguments.tiny else 512)
    num_prompts = num_envs // episodes_of_a_seed(arguments)  # of a step
    arguments.sizes = {
        "num_envs": num_envs,
        "num_seeds": -(-num_prompts * (2 if arguments.tiny else arguments.steps) // len(arguments.tasks)),
        "eval_seeds": 2 if arguments.tiny else 128,
        "views": 8 if arguments.tiny else 512,  # worlds that the imitation plays in, 128 views of each
    }
    if arguments.tiny:
        arguments.sft_batch, arguments.width, arguments.max_steps = 16, 32, 4
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="mujoco-warp-"))
    folder.mkdir(parents=True, exist_ok=True)
    [part] = arguments.parts
    say(f"\n{part}")
    try:
        if part in ("speed", "offload"):
            {"speed": speed, "offload": offload}[part](arguments)
        else:
            {"turns": turns, "imitate": make_start, "learn": learn}[part](arguments, folder)
    finally:
        say(f"{part}: {elapsed_s():.0f} s")
        if arguments.folder is None:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
