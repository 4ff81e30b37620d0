"""Runs on Ray with faults armed, and what is left of them."""

import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import preloaded
from environments import own_environment
from loop_cases import make_task, rl_yaml
from safetensors.torch import load_file

from hotseat.config import loads
from hotseat.faults import VARIABLE, Fault
from hotseat.loop.run import start
from hotseat.processes.supervisor import end_marked, marked

MARK = "TEST_FAULTS"  # in the environment of everything that a run of these tests starts

# Slow enough that a kill during scoring is one.
REWARD = """
import time

def reward_func(queries, prompts, labels):
    time.sleep(0.02)
    return [float(query[len(prompt):].count("7")) for query, prompt in zip(queries, prompts)]
"""

COLOCATED = "{actor: 0, rollout: '@actor'}"
BESIDE = "{actor: 0, rollout: 1}"
TWO_RANKS = "{actor: 0-1, rollout: 2}"


def make_faulty_task(directory: Path) -> Path:
    task = make_task(directory)
    (task / "reward.py").write_text(REWARD)
    return task


def config_text(
    task: Path,
    name: str,
    num_passes: int,
    placement: str | None,
    transport: str = "",
    overlap: str = "",
    **cluster: float | str,
) -> str:
    """A run in which every point is reached: it saves and evaluates, and its roles leave their devices.

    overlap: rollout goes on beside training, so no role can leave its devices.
    """
    options = "".join(f", {key}: {value}" for key, value in cluster.items())
    offload = "" if overlap else "enable_offload: true, "
    runtime = "runtime: local" if placement is None else f"component_placement: {placement}"
    return rl_yaml(
        task,
        name=name,
        cluster=f"{{{runtime}{options}}}",
        actor=f"{{model: {task}/model, {offload}optimizer: {{learning_rate: 1e-2, schedule: constant}}}}",
        rollout=f"{{{offload}batch_size: 4, samples_per_prompt: 4, max_new_tokens: 4, num_slots: 8"
        + (f", weight_transport: {transport}}}" if transport else "}"),
        overlap=overlap,
        eval=f"{{path: {task}/prompts.jsonl, every: 2}}",
        checkpoint="{every: 1}",
        train=f"{{dtype: fp32, batch_size: 16, micro_batch_size: 2, num_episodes: {num_passes}}}",
    )


def run_undisturbed(
    task: Path, num_passes: int, name: str = "undisturbed", overlap: str = "", overrides: Sequence[str] = ()
) -> Path:
    cluster = {"inventory": "1x2", "component_placement": BESIDE} if overlap else {}
    start(loads(config_text(task, name, num_passes, None, overlap=overlap, **cluster), overrides))
    return task / "runs" / name


@dataclass
class Faulty:
    """A run in a process of its own, and its faults."""

    task: Path
    num_passes: int
    placement: str = COLOCATED
    cluster: dict[str, float] = field(default_factory=dict)
    transport: str = ""
    overlap: str = ""
    overrides: Sequence[str] = ()

    def __post_init__(self) -> None:
        self.mark = f"{os.getpid()}-{time.monotonic_ns()}"
        self.run_dir = self.task / "runs" / "disturbed"
        self.faults = self.task / "faults"
        self.faults.mkdir()
        text = config_text(
            self.task, "disturbed", self.num_passes, self.placement, self.transport, self.overlap, **self.cluster
        )
        (self.task / "disturbed.yaml").write_text(text)
        self.process: preloaded.Process | None = None

    def arm(self, *faults: Fault) -> None:
        for fault in faults:
            number = len(list(self.faults.iterdir()))
            fault.arm(self.faults, f"{number:03}-{fault.point}-{fault.do}")

    def start(self) -> None:
        """From the beginning, or from its last checkpoint."""
        if (self.run_dir / "checkpoints").is_dir():
            arguments = ["resume", str(self.run_dir)]
        else:
            arguments = ["run", str(self.task / "disturbed.yaml"), *self.overrides]
            if self.run_dir.exists():
                arguments.append("checkpoint.resume=true")  # it did not come to its first checkpoint
        env = own_environment()
        self.process = preloaded.popen(
            [sys.executable, "-m", "hotseat.cli.main", *arguments],
            stdout=preloaded.PIPE,
            stderr=preloaded.PIPE,
            text=True,
            env={**env, MARK: self.mark, VARIABLE: str(self.faults)},
            process_group=0,  # as a shell or a batch scheduler starts it: some tests signal all of the group
        )

    def finish(self, timeout_s: float = 600) -> tuple[int, str, str]:
        """(exit code, what it printed, what it complained of)."""
        assert self.process is not None
        out, errors = self.process.communicate(timeout=timeout_s)
        self.ended_s = time.time()
        return self.process.returncode, out, errors

    def go(self, timeout_s: float = 600) -> tuple[int, str, str]:
        self.start()
        return self.finish(timeout_s)

    def moments(self) -> list[float]:
        """When faults happened, in order; by `time.time`."""
        return sorted(path.stat().st_ctime for path in self.faults.glob("*.happened"))

    def seconds_since_last_fault(self) -> float:
        """From the last fault that happened to the end of the run."""
        return self.ended_s - self.moments()[-1]

    def all_happened(self) -> bool:
        return not list(self.faults.glob("*.fault"))

    def is_gone(self, within_s: float) -> bool:
        """Whether no process of the run is left."""
        until = time.monotonic() + within_s
        while marked(MARK, [self.mark]):
            if time.monotonic() > until:
                return False
            time.sleep(0.1)
        return True

    def close(self) -> None:
        end_marked(MARK, [self.mark])
        if self.process is not None:
            self.process.kill()
            self.process.wait(60)

    def __enter__(self) -> "Faulty":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def pid_of(run: Faulty, who: str) -> int:
    return int((run.faults / f"{who}.pid").read_text())


def send(run: Faulty, who: str, number: signal.Signals) -> None:
    os.kill(pid_of(run, who), number)


def differences(one: Path, other: Path) -> list[str]:
    """Between two finished runs: weights bit by bit, ledgers byte by byte."""
    found = []
    ours, theirs = (load_file(run / "model" / "model.safetensors") for run in (one, other))
    found += [name for name in ours if not (ours[name] == theirs[name]).all()]
    if (one / "ledger.jsonl").read_bytes() != (other / "ledger.jsonl").read_bytes():
        found.append("ledger.jsonl")
    return found
