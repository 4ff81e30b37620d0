"""Whole runs that sample with vLLM's CPU build. An engine takes some ten seconds to start, so the runs are few.

One is in this process, after other tests that load vLLM; on Ray it is only in `make test-long`.
"""

import contextlib
import importlib.util
import io
import json
import os
import signal
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import preloaded
import pytest
import torch
from environments import own_environment
from loop_cases import make_task, rl_yaml
from model_shells import NO_WEIGHTS
from safetensors.torch import load_file

from hotseat.config import Config, loads
from hotseat.errors import PlacementError
from hotseat.faults import VARIABLE, Fault
from hotseat.loop.run import start
from hotseat.loop.settings.training_settings import policy_settings, train_options
from hotseat.loop.workers.experience import Share
from hotseat.loop.workers.model_workers import ActorWorker
from hotseat.model_source import ModelSource
from hotseat.observe import read_lines
from hotseat.processes.supervisor import end_marked, marked
from hotseat.rollout import TransformersEngine
from hotseat.types import Episode, Prompt, PromptGroup, SampleKey, ScoredEpisode, Segment

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]

MARK = "TEST_VLLM"  # in the environment of everything that a run of these tests starts
# Heads of a width that vLLM takes, and no token without a text: samples are recorded as text.
SHAPE = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 14}
ROLLOUT = "{engine: vllm, batch_size: 4, samples_per_prompt: 4, max_new_tokens: 4}"
COLOCATED = "{actor: 0, rollout: '@actor'}"
NUM_STEPS = 4


@dataclass(frozen=True)
class Ended:
    """A run of the command, and what is left of it."""

    config: Config
    code: int
    said: str
    complained: str
    left: list[int]  # processes
    happened: list[str]  # faults

    @property
    def directory(self) -> Path:
        return Path(self.config.run_dir) / str(self.config.name)

    @property
    def metrics(self) -> list[dict]:
        return read_lines(self.directory / "metrics.jsonl")


def mark_of(name: str) -> str:
    return f"{os.getpid()}-{name}"


def run(task: Path, name: str, placement: str, *overrides: str, faults: Sequence[Fault] = (), **changes: str) -> Ended:
    """`hotseat run`, in a process of its own that has torch loaded."""
    cluster = f"{{runtime: ray, component_placement: {placement}}}"
    text = rl_yaml(task, **{"name": name, "cluster": cluster, "rollout": ROLLOUT, **changes})
    (task / f"{name}.yaml").write_text(text)
    armed = task / f"{name}-faults"
    armed.mkdir()
    for number, fault in enumerate(faults):
        fault.arm(armed, f"{number}-{fault.by}")
    mark = mark_of(name)
    env = own_environment("VLLM_")
    command = [sys.executable, "-m", "hotseat.cli.main", "run", str(task / f"{name}.yaml"), *overrides]
    try:
        done = preloaded.run(
            command, capture_output=True, text=True, timeout=860, env={**env, MARK: mark, VARIABLE: str(armed)}
        )
        left = marked(MARK, [mark])
    finally:
        end_marked(MARK, [mark])
    happened = sorted(path.stem for path in armed.glob("*.happened"))
    return Ended(loads(text, overrides), done.returncode, done.stdout, done.stderr, left, happened)


def weights(path: Path) -> dict[str, torch.Tensor]:
    return load_file(path / "model.safetensors")


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_task(tmp_path_factory.mktemp("task"), **SHAPE)


def run_here(task: Path, name: str, *overrides: str) -> Ended:
    """The same run in this process."""
    text = rl_yaml(task, name=name, cluster="{runtime: local}", rollout=ROLLOUT)
    with contextlib.redirect_stdout(io.StringIO()) as said:
        start(loads(text, overrides))
    return Ended(loads(text, overrides), 0, said.getvalue(), "", [], [])


@pytest.fixture(scope="module", params=["local", pytest.param("ray", marks=[pytest.mark.ray, pytest.mark.long])])
def colocated(task: Path, request: pytest.FixtureRequest) -> Ended:
    """A run of which every sample is recorded."""
    overrides = (
        "train.num_episodes=2",
        "log.samples_every=1",
        "log.samples_per_step=16",
        "rollout.enable_offload=true",
        "rollout.memory_share=0.95",
    )
    if request.param == "local":
        return run_here(task, "local", *overrides)
    return run(task, "colocated", COLOCATED, *overrides)


def test_a_colocated_run_learns_says_what_it_measured_and_leaves_nothing_behind(colocated: Ended, task: Path) -> None:
    assert colocated.code == 0, colocated.said[-1000:] + colocated.complained[-3000:]
    assert not colocated.left
    assert json.loads((colocated.directory / "plan.json").read_text())["label"] == "colocated"
    assert len(colocated.metrics) == 1 + NUM_STEPS
    before, after = weights(task / "model"), weights(colocated.directory / "model")
    assert all((before[name] != after[name]).any() for name in before)
    for step, record in enumerate(colocated.metrics[1:], start=1):
        # Engine and trainer have the same weights, and differ by rounding only.
        assert 0 <= record["engine_gap"] < 1e-5
        assert 0 < record["engine_gap_p99"] < 1e-4
        assert record["engine_gap"] <= record["engine_gap_max"] < 1e-4
        assert 0 <= record["canary_gap"] < 1e-4
        assert record["version"] == step
        assert {"time/rollout", "time/prepare", "time/update", "time/sync"} <= record.keys()
    if colocated.config.cluster.runtime == "ray":
        assert "vllm" in (colocated.directory / "logs" / "rollout-0.log").read_text()


def test_what_vllm_cannot_do_on_a_cpu_is_said_once_and_nothing_is_offload(colocated: Ended) -> None:
    plan = json.loads((colocated.directory / "plan.json").read_text())
    for said in (
        "rollout.enable_offload: no effect here: on a CPU vLLM cannot offload its weights and its cache",
        "rollout.memory_share: no effect here: on a CPU vLLM's cache has the size that its sequences need",
    ):
        assert " ".join(colocated.said.split()).count(said) == 1
        assert said in plan["warnings"]
    assert not any("time/offload" in record for record in colocated.metrics)


@pytest.mark.long
@pytest.mark.ray
@pytest.mark.parametrize("colocated", ["ray"], indirect=True)
def test_two_engines_on_devices_of_their_own_share_the_work_and_change_no_maths(colocated: Ended, task: Path) -> None:
    sampled = [Fault("generation.during", "0", by=f"rollout:{rank}") for rank in range(2)]  # noted, and nothing happens
    apart = run(task, "apart", "{actor: 0, rollout: 1-2}", "train.num_episodes=2", faults=sampled)
    assert apart.code == 0, apart.said[-1000:] + apart.complained[-3000:]
    assert not apart.left
    assert json.loads((apart.directory / "plan.json").read_text())["label"] == "disaggregated"
    assert apart.happened == ["0-rollout:0", "1-rollout:1"]
    assert sorted(path.name for path in (apart.directory / "logs").glob("*.log")) == ["rollout-0.log", "rollout-1.log"]
    # Other batches have other last bits. The tokens are the same nonetheless, and only they are learned from.
    one, other = weights(colocated.directory / "model"), weights(apart.directory / "model")
    assert all((one[name] == other[name]).all() for name in one)


# --- the episodes of a run, replayed ----------------------------------------------------------------------------------


def recorded_steps(ended: Ended, task: Path) -> Iterator[list[PromptGroup]]:
    """The groups of each step, from what the run wrote of its samples."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(task / "model")
    by_step: dict[int, dict[tuple[int, int], list[ScoredEpisode]]] = defaultdict(lambda: defaultdict(list))
    for line in read_lines(ended.directory / "samples.jsonl"):
        [segment] = line["segments"]
        token_ids = tokenizer.convert_tokens_to_ids(segment["text"])
        sampled = torch.tensor(segment["sampled"])
        episode = Episode(
            SampleKey(line["epoch"], line["prompt"], line["sample"]),
            (
                Segment(
                    token_ids=torch.tensor(token_ids),
                    mask=sampled,
                    log_probs=torch.tensor([value or 0.0 for value in segment["engine_log_probs"]]),
                    versions=torch.tensor(
                        [-1 if value is None else value for value in segment["versions"]], dtype=torch.int32
                    ),
                ),
            ),
            line["prompt_text"],
            is_truncated=line["is_truncated"],
        )
        scored = ScoredEpisode(episode, line["reward"], line["reward"])
        by_step[line["step"]][line["epoch"], line["prompt"]].append(scored)
    for _, groups in sorted(by_step.items()):
        yield [
            PromptGroup(Prompt(prompt, "", ()), tuple(sorted(samples, key=lambda each: each.episode.key.sample)))
            for (_, prompt), samples in groups.items()
        ]


def test_the_same_episodes_give_the_same_weights_whatever_engine_made_them(colocated: Ended, task: Path) -> None:
    """What the run learned from what vLLM sampled, again, with log-probs of the transformers engine in their place."""
    from transformers import AutoModelForCausalLM

    config = colocated.config
    policy = policy_settings(config, 1, 0.0)
    actor = ActorWorker(ModelSource(config.actor.model), train_options(config, NUM_STEPS), "float32")
    model = AutoModelForCausalLM.from_pretrained(task / "model", dtype=torch.float32)
    engine = TransformersEngine(model, max_length=16, num_slots=16, num_threads=1)
    try:
        num_steps = 0
        for version, groups in enumerate(recorded_steps(colocated, task)):
            engine.load_weights(actor._backend.weights(), version)
            assert [len(group.samples) for group in groups] == [4] * 4
            for segment in (s for group in groups for sample in group.samples for s in sample.episode.segments):
                [scores] = engine.score([segment.token_ids.tolist()])
                mine = torch.where(segment.mask, torch.tensor(scores), 0.0)
                assert (mine - segment.log_probs).abs().max() < 1e-4
                segment.log_probs.copy_(mine)
            actor.prepare([Share(tuple(groups), ((0,) * 4,) * 4)], 1, policy, [])
            actor.update(policy)
            num_steps += 1
        assert num_steps == NUM_STEPS
        learned = weights(colocated.directory / "model")
        for name, tensor in actor._backend.weights():
            if name in learned:
                assert (tensor - learned[name]).abs().max() < 1e-6, name
    finally:
        engine.close()
        actor.close()


# --- what cannot work -------------------------------------------------------------------------------------------------


def test_engines_and_ranks_that_do_not_fit_the_devices_are_refused_before_anything_loads(tmp_path: Path) -> None:
    task = make_task(tmp_path)
    (task / "model" / "model.safetensors").write_bytes(NO_WEIGHTS)
    text = rl_yaml(
        task,
        cluster="{component_placement: {actor: 0-7, rollout: '@actor'}}",
        rollout="{engine: vllm, batch_size: 4, samples_per_prompt: 4, num_engines: 4, tensor_parallel_size: 4}",
    )
    with pytest.raises(
        PlacementError, match=r"rollout: 4 engines x tp 4 need 16 devices, actor has 8: .*num_engines to 2"
    ):
        start(loads(text))
    assert not (task / "runs").exists()


@pytest.mark.long
@pytest.mark.ray
def test_a_model_that_vllm_does_not_know_is_one_error_that_names_the_engine_and_is_not_tried_again(
    tmp_path: Path,
) -> None:
    task = make_task(tmp_path, **SHAPE)
    config = json.loads((task / "model" / "config.json").read_text())
    (task / "model" / "config.json").write_text(json.dumps(config | {"architectures": ["NoSuchForCausalLM"]}))
    ended = run(task, "unknown", COLOCATED)
    assert ended.code == 1
    assert not ended.left
    assert "rollout rank 0: '__init__' raised RunError: vLLM did not start with the model" in ended.complained
    assert "architectures ['NoSuchForCausalLM'] are not supported" in ended.complained
    assert f"its log: {ended.directory}/logs/rollout-0.log" in ended.complained
    assert len(ended.complained) < 4000
    assert "started again" not in ended.said + ended.complained
    assert "NoSuchForCausalLM" in (ended.directory / "logs" / "rollout-0.log").read_text()


@pytest.mark.long
@pytest.mark.ray
def test_weights_that_are_damaged_are_named_by_the_engine(tmp_path: Path) -> None:
    task = make_task(tmp_path, **SHAPE)
    file = task / "model" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    ended = run(task, "damaged", COLOCATED)
    assert ended.code == 1
    assert not ended.left
    assert "rollout rank 0: '__init__' raised RunError: vLLM did not start with the model" in ended.complained
    assert "started again" not in ended.said + ended.complained


def command_of(pid: int) -> bytes:
    """Nothing if it has ended meanwhile."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


def kill_rank(mark: str, metrics: Path) -> None:
    """The second tensor-parallel rank of the engine of a run, after its first step."""
    deadline, ranks = time.monotonic() + 200, list[int]()
    while time.monotonic() < deadline:
        time.sleep(0.01)
        if not ranks:  # found beforehand: steps are short, and on a busy machine to look takes longer
            ranks = [pid for pid in marked(MARK, [mark]) if b"Worker_TP1" in command_of(pid)]
        elif metrics.exists() and len(read_lines(metrics)) > 1:
            os.kill(ranks[0], signal.SIGKILL)
            return


@pytest.mark.long
@pytest.mark.ray
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("victim", ["engine", "rank"])
def test_an_engine_over_two_devices_is_replaced_when_any_of_its_processes_is_killed(
    task: Path, colocated: Ended, victim: str
) -> None:
    """With one go all the others; the run goes on, and learns the same."""
    name = f"killed-{victim}"
    faults = [Fault("generation.during", "kill", by="rollout:0", skip=3)] if victim == "engine" else []
    killer = threading.Thread(
        target=kill_rank, args=(mark_of(name), task / "runs" / name / "metrics.jsonl"), daemon=True
    )
    if victim == "rank":
        killer.start()
    cut = run(
        task,
        name,
        "{actor: 0, rollout: 1-2}",
        "train.num_episodes=2",
        "rollout.tensor_parallel_size=2",
        faults=faults,
    )
    assert cut.code == 0, cut.said[-1000:] + cut.complained[-3000:]
    assert not cut.left
    assert "engine 0 died and is replaced" in cut.said
    for key, tensor in weights(colocated.directory / "model").items():
        assert (tensor - weights(cut.directory / "model")[key]).abs().max() < 1e-5
