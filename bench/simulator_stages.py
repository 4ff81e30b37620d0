"""What stages gain: simulators and policy with about equal costs, a pinned core for each, in 1, 2 and 4 stages.

    python bench/simulator_stages.py --predict > bench/results/cpu_simulator_stages.txt

What runs are the processes of a run on Ray. On one core: a process of the role env, which is a `RolloutHost`, and its
simulators, MuJoCo's in a child process. On the other: an `EngineWorker` with a small Llama. An action has as many steps
of physics as make a round (an action of every simulator) cost on their core what it costs on the policy's. Costs are
processor time of the processes on a core; every number is measured. Where others work on the same cores, run it with
`RAY_worker_niceness=0 nice -n -20`: Ray adds 15 to the niceness of its processes.

--predict: measures half and a quarter of the simulators in one stage too, and compares the rollouts of other stages
with what `hotseat plan --auto` predicts from one stage.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lib.shapes import dimensions

from hotseat.cluster import Cluster
from hotseat.envs.family_loading import SimulatorSettings
from hotseat.loop.rl.auto_placement import RolloutShape, TurnCosts, predicted_rollout, turn_costs
from hotseat.loop.rl.groups import RolloutHosts
from hotseat.loop.workers.engine_worker import EngineWorker, make_engine
from hotseat.loop.workers.group_facts import GroupFacts, Job
from hotseat.loop.workers.host_settings import HostSettings, ScorerSettings
from hotseat.loop.workers.observations import SimulationSettings, simulation_prompts
from hotseat.loop.workers.rollout_host import RolloutHost
from hotseat.loop.workers.simulation import Player
from hotseat.model_source import ModelSource
from hotseat.rollout.kinds import EngineSettings
from hotseat.types import Prompt, Sampling

FAMILY = str(Path(__file__).parent / "lib" / "mujoco_table.py")
BINS = 256
MAX_LENGTH = 64
SAMPLING = Sampling(max_new_tokens=1, ignore_eos=True)
TICK_S = 1 / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Measured:
    """One rollout. env_s, policy_s: processor time on the core of each."""

    num_actions: int
    num_rounds: float
    took_s: float
    env_s: float
    policy_s: float
    turns: TurnCosts | None  # with one stage

    @property
    def rate(self) -> float:
        return self.num_actions / self.took_s

    @property
    def env_round_ms(self) -> float:
        return 1e3 * self.env_s / self.num_rounds

    @property
    def policy_round_ms(self) -> float:
        return 1e3 * self.policy_s / self.num_rounds


def simulation(substeps: int, num_envs: int, stages: int, max_steps: int) -> SimulationSettings:
    simulator = SimulatorSettings(FAMILY, ("push",), max_steps, {"substeps": substeps})
    return SimulationSettings(simulator, num_envs, stages, 1, 1, BINS, 60.0, False, False, False)


def tree_of(pid: int) -> list[int]:
    """Return a process and all that it started."""
    found = [pid]
    for thread in Path(f"/proc/{pid}/task").iterdir():
        for child in (thread / "children").read_text().split():
            found += tree_of(int(child))
    return found


def pin(pid: int, core: int) -> None:
    """Keep all threads of a process and of what it started on a core."""
    for each in tree_of(pid):
        for thread in Path(f"/proc/{each}/task").iterdir():
            with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
                os.sched_setaffinity(int(thread.name), {core})


def processor_s(pid: int) -> float:
    """Return the processor time of a process and of what it started."""
    total = 0
    for each in tree_of(pid):
        fields = Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split()
        total += int(fields[11]) + int(fields[12])
    return total * TICK_S


def write_policy(path: str, width: int) -> Any:
    """Write a Llama with random weights that reads numbers in bins; return its tokenizer."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = ["<pad>", "<end>", "<unknown>", *(f"<{number}>" for number in range(BINS))]
    made = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unknown>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<end>", unk_token="<unknown>"
    )
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        **dimensions(width, 2 * width, 2, 4, 4),
        max_position_embeddings=128,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return tokenizer


class Host(RolloutHost):
    """A rollout host whose simulators are made anew for every measurement."""

    def simulate(self, settings: SimulationSettings) -> None:
        if self._player is not None:
            self._player.end()
        self._player = self._agent = Player(settings, self._tokenizer, MAX_LENGTH)


class Policy(EngineWorker):
    """An engine that is made anew for every measurement, with the slots and prompts that a run would have.

    Its run has twice as many slots as simulators.
    """

    def __init__(self, settings: EngineSettings):
        super().__init__(settings)
        self._settings = settings

    def resize(self, num_slots: int) -> None:
        self._engine.close()
        num_kept = self._settings.num_kept_prompts + 2 * self._settings.num_slots - num_slots
        self._engine = make_engine(replace(self._settings, num_slots=num_slots, num_kept_prompts=num_kept), 0)


class Bench:
    """A host with simulators on one core, an engine on the other."""

    def __init__(self, cluster: Cluster, folder: Path, num_envs: int, width: int, cores: tuple[int, int]):
        self._num_envs, self._cores = num_envs, cores
        model = str(folder / "model")
        self._tokenizer = write_policy(model, width)
        engine = EngineSettings(ModelSource(model), MAX_LENGTH, num_envs, (), "float32", num_threads=1)
        host = HostSettings(
            ModelSource(model),
            run_seed=0,
            max_length=MAX_LENGTH,
            agent=None,
            max_turns=None,
            max_concurrent=num_envs,
            episode_timeout_s=600.0,
            scorers=ScorerSettings(),
            simulation=simulation(1, num_envs, 1, 1),
        )
        self._engines = cluster.launch("rollout", Policy, args=(engine,), wait=False)
        self._hosts = RolloutHosts(cluster.launch("env", Host, args=(host,)))
        self._engines.ready()
        self._epoch = 0

    def measure(
        self, substeps: int, stages: int, max_steps: int, num_rollouts: int = 1, num_envs: int | None = None
    ) -> list[Measured]:
        """Play two episodes in each simulator, the first time without measuring."""
        num_envs = num_envs or self._num_envs
        chosen = simulation(substeps, num_envs, stages, max_steps)
        [prompts] = simulation_prompts(chosen, self._tokenizer, MAX_LENGTH, [range(2 * num_envs)])
        self._hosts.workers.call(Host.simulate, chosen)
        self._engines.call(Policy.resize, num_envs // stages)
        self._hosts.connect(self._engines)
        env, engine = self._hosts.workers.pids()[0], self._engines.pids()[0]
        for pid, core in zip((env, engine), self._cores, strict=True):
            pin(pid, core)
        self._collect(prompts[:num_envs])
        measured = []
        for _ in range(num_rollouts):
            before = processor_s(env), processor_s(engine)
            began_s = time.perf_counter()
            facts = self._collect(prompts)
            took_s = time.perf_counter() - began_s
            spent = processor_s(env) - before[0], processor_s(engine) - before[1]
            batch = {
                "num_turns": sum(each.num_turns for each in facts),
                "policy_s": sum(each.policy_s for each in facts),
                "seconds": [[*each.episode_s, each.scoring_s] for each in facts],
            }
            turns = turn_costs(self.shape(stages, num_envs), [batch], took_s)
            num_actions = round(sum(extra["actions"] for each in facts for extra in each.extra))
            measured.append(Measured(num_actions, num_actions / num_envs, took_s, *spent, turns))
        return measured

    def shape(self, stages: int, num_envs: int | None = None) -> RolloutShape:
        """Return the sizes of a rollout of two episodes for each simulator."""
        num_envs = num_envs or self._num_envs
        return RolloutShape(2 * num_envs, num_envs, 1, 1, stages)

    def _collect(self, prompts: list[Prompt]) -> list[GroupFacts]:
        """Play an episode of each prompt."""
        self._epoch += 1
        jobs = [Job(prompt, self._epoch, 1) for prompt in prompts]
        facts = self._hosts.collect(jobs, SAMPLING)
        self._hosts.forget([job.key for job in jobs])
        return facts

    def balanced_substeps(self, max_steps: int) -> int:
        """Return the number of substeps with which simulators cost what the policy does."""
        few, more = 10, 40
        [one], [other] = (self.measure(substeps, 1, max_steps) for substeps in (few, more))
        substep_ms = (other.env_round_ms - one.env_round_ms) / (more - few)
        policy_ms = (one.policy_round_ms + other.policy_round_ms) / 2
        return max(1, round(few + (policy_ms - one.env_round_ms) / substep_ms))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-envs", type=int, default=64)
    parser.add_argument("--max-steps", type=int, default=12)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--stages", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--predict", action="store_true", help="compare with what smaller rollouts of a stage predict")
    parser.add_argument("--substeps", type=int, help="steps of physics in an action; chosen unless given")
    arguments = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    assert len(cores) >= 2, "two cores are needed"
    with tempfile.TemporaryDirectory() as folder, Cluster("ray", num_devices=1) as cluster:
        bench = Bench(cluster, Path(folder), arguments.num_envs, arguments.width, (cores[0], cores[1]))
        substeps = arguments.substeps
        if substeps is None:
            substeps = bench.balanced_substeps(arguments.max_steps)
        print(f"{arguments.num_envs} simulators, {substeps} substeps an action, a policy of width {arguments.width}")
        sizes = [arguments.num_envs // parts for parts in (4, 2)] if arguments.predict else []
        costs = [
            turns
            for size in sizes
            for each in bench.measure(substeps, 1, arguments.max_steps, 2, size)
            if (turns := each.turns) is not None
        ]
        base = 0.0
        for stages in arguments.stages:
            found = bench.measure(substeps, stages, arguments.max_steps, arguments.repeats)
            middle = sorted(found, key=lambda each: each.rate)[len(found) // 2]
            base = base or middle.rate
            env_ms = statistics.median(each.env_round_ms for each in found)
            policy_ms = statistics.median(each.policy_round_ms for each in found)
            print(
                f"{stages} stages: {middle.rate:.0f} actions/s ({', '.join(f'{each.rate:.0f}' for each in found)}),"
                f" {middle.rate / base:.2f} times 1 stage; a round takes {1e3 * middle.took_s / middle.num_rounds:.0f}"
                f" ms: simulators {env_ms:.0f} ms, policy {policy_ms:.0f} ms, ratio {env_ms / policy_ms:.2f}",
                flush=True,
            )
            costs += [each.turns for each in found if each.turns is not None]
            if arguments.predict and stages > 1:
                predicted_s = predicted_rollout(costs, bench.shape(stages)).seconds
                error = predicted_s / middle.took_s - 1
                print(f"  predicted {predicted_s:.2f} s, measured {middle.took_s:.2f} s, {error:+.1%}", flush=True)


if __name__ == "__main__":
    main()
