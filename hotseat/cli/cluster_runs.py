"""Short runs of `hotseat check --cluster`: each proves a way to use several devices by what it has to agree with."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

from hotseat.checks.findings import Finding

STEPS = 2
MOST_WEIGHT_GAP = 1e-3  # of the largest weight of a tensor, between ways to train in fp32
MOST_LOG_PROB_GAP = 1e-2  # on average over tokens, between trainer and engine in fp32


@dataclass(frozen=True)
class ShortRun:
    """Two steps with a tiny model, and what they have to agree with.

    config: sft or rl. like: an earlier run, whose weights this one's have to be close to.
    """

    what: str
    config: str
    settings: tuple[str, ...]
    like: str = ""
    package: str = ""  # that the run needs


def short_runs(nodes: Sequence[int]) -> list[ShortRun]:
    """Return the runs that a cluster can do. nodes: of each device."""
    everywhere = on("all", "all")
    alone = "SFT on one device"
    runs = [
        ShortRun(alone, "sft", (*on("0"), "cluster.num_nodes=1")),
        ShortRun("SFT by FSDP2 on all", "sft", on("all"), alone),
        ShortRun("SFT by ZeRO-3 on all", "sft", (*on("all"), "train.backend=deepspeed"), alone, "deepspeed"),
        ShortRun("GRPO on all", "rl", everywhere),
    ]
    if len(nodes) > 1:
        apart = on(0, len(nodes) - 1)
        runs += [
            ShortRun("GRPO, weights pushed", "rl", apart),
            ShortRun("  pushed by gloo", "rl", (*apart, "rollout.weight_transport=gloo"), like="GRPO, weights pushed"),
        ]
    vllm = ("rollout.engine=vllm",)
    runs.append(ShortRun("GRPO by vLLM", "rl", (*everywhere, *vllm), package="vllm"))
    pair = neighbours(nodes)
    if pair is not None:
        tensor_parallel = (*on(pair[0], f"{pair[0]}-{pair[1]}"), *vllm, "rollout.tensor_parallel_size=2")
        runs.append(ShortRun("  over two devices", "rl", tensor_parallel, package="vllm"))
    return [run for run in runs if not run.package or find_spec(run.package) is not None]


def on(actor: object, rollout: object = None) -> tuple[str, ...]:
    placed = {"actor": actor} if rollout is None else {"actor": actor, "rollout": rollout}
    return tuple(f"cluster.component_placement.{role}={place}" for role, place in placed.items())


def neighbours(nodes: Sequence[int]) -> tuple[int, int] | None:
    """Return two devices of one node."""
    for device, (node, after) in enumerate(pairwise(nodes)):
        if node == after:
            return device, device + 1
    return None


def run_findings(place: Path, nodes: Sequence[int]) -> Iterator[Finding]:
    """Run each with its files in a folder that the nodes share. nodes: of each device."""
    from hotseat.cli.new import write_files

    for config in ("sft", "rl"):
        write_files(config, place)
    sizes = sizes_for(len(nodes))
    for rows in ("chats.jsonl", "prompts.jsonl"):
        repeat_rows(place / rows, STEPS * batch_for(len(nodes)))
    done: dict[str, Path] = {}
    for number, run in enumerate(short_runs(nodes)):
        folder = place / "runs" / f"run-{number}"
        started_s = time.monotonic()
        settings = (f"name={folder.name}", "train.dtype=fp32", *sizes[run.config], *run.settings)
        error = attempt(place, run.config, settings)
        seconds = time.monotonic() - started_s
        if error:
            yield Finding(run.what, f"failed after {seconds:.0f} s", f"{error} (see {folder})", stops=True)
            continue
        done[run.what] = folder
        yield from judged(run, folder, done.get(run.like), seconds)


def batch_for(num_devices: int) -> int:
    """Return the least batch of at least 16 that divides over so many ranks."""
    return num_devices * -(-16 // num_devices)


def sizes_for(num_devices: int) -> dict[str, tuple[str, ...]]:
    """Return settings of sizes, by config, that fit runs on one device and on all."""
    batch = batch_for(num_devices)
    return {
        "sft": (f"train.batch_size={batch}", "train.max_epochs=1"),
        "rl": (
            f"rollout.batch_size={batch}",
            f"train.batch_size={8 * batch}",
            f"data.max_samples={STEPS * batch}",
            "train.num_episodes=1",
        ),
    }


def repeat_rows(path: Path, count: int) -> None:
    rows = path.read_text().splitlines()
    path.write_text("\n".join((rows * (1 + count // len(rows)))[:count]) + "\n")


def attempt(place: Path, config: str, settings: Sequence[str]) -> str:
    """Run, and return the last line of the error; nothing if there was none."""
    words = ("run", f"{config}.yaml", "eval.path=null", "eval.every=null", *settings)
    ended = subprocess.run(
        [sys.executable, "-m", "hotseat", *words], cwd=place, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    if ended.returncode == 0:
        return ""
    lines = (ended.stderr.strip() or ended.stdout.strip()).splitlines()
    return lines[-1] if lines else f"it ended with code {ended.returncode}"


def judged(run: ShortRun, folder: Path, like: Path | None, seconds: float) -> Iterator[Finding]:
    """Compare what a run made with another's, and its engines with its trainer."""
    facts, advice = [f"{seconds:.0f} s"], []
    if run.config == "rl":
        facts.append("weights in engines proven by digests")
        gap = log_prob_gap(folder)
        facts.append(f"log-probs of engine and trainer {gap:.1e} apart")
        if not gap <= MOST_LOG_PROB_GAP:
            advice.append(
                f"engine and trainer are further apart than {MOST_LOG_PROB_GAP:g}: they compute different models"
            )
    if like is not None:
        gap = largest_gap(like / "model", folder / "model")
        facts.append(f"weights within {gap:.1e} of those of {run.like.strip()}")
        if not gap <= MOST_WEIGHT_GAP:
            advice.append(f"it learned another model than {run.like}")
    yield Finding(run.what, ", ".join(facts), "; ".join(advice), stops=bool(advice))


def log_prob_gap(folder: Path) -> float:
    """Return the mean distance of the engines' log-probs to the trainer's over the last step's tokens."""
    last = (folder / "metrics.jsonl").read_text().splitlines()[-1]
    return float(json.loads(last)["engine_gap"])


def largest_gap(first: Path, second: Path) -> float:
    """Return the largest difference of two models' weights, relative to the largest weight of its tensor."""
    from safetensors.torch import load_file

    ours, theirs = (
        {key: value for file in sorted(model.glob("*.safetensors")) for key, value in load_file(file).items()}
        for model in (first, second)
    )
    if ours.keys() != theirs.keys():
        return float("inf")
    return max(float((ours[key] - theirs[key]).abs().max() / ours[key].abs().max().clamp_min(1e-12)) for key in ours)
