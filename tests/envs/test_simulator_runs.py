"""Whole runs in simulators: stages, hosts, engines, deaths and placement change nothing that is learned."""

import hashlib
import json
import shutil
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from loop_cases import make_task

from hotseat.cli.main import main

pytestmark = pytest.mark.slow
WALK = str(Path(__file__).parent / "walk_env.py")

BASE = {
    "cluster": "{runtime: local}",
    "data": "{max_length: 32}",
    "env": (
        f"{{path: {WALK}, tasks: [left, right], num_envs: 8, chunk: 2, bins: 4, max_steps: 6, num_seeds: 4,"
        " eval_seeds: 1}"
    ),
    "rollout": "{batch_size: 4, samples_per_prompt: 2, num_slots: 8}",
    "train": "{dtype: fp32, batch_size: 8, micro_batch_size: 8}",
    "seed": "3",
}


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    return make_task(tmp_path_factory.mktemp("walk"))


def run(task: Path, name: str, **changes: str) -> Path:
    shutil.rmtree(task / "runs" / name, ignore_errors=True)
    actor = f"{{model: {task}/model, optimizer: {{learning_rate: 1e-2, schedule: constant}}}}"
    sections = BASE | {"name": name, "run_dir": f"{task}/runs", "actor": actor} | changes
    file = task / f"{name}.yaml"
    file.write_text("\n".join(f"{key}: {value}" for key, value in sections.items() if value))
    assert main(["run", str(file)]) == 0
    return task / "runs" / name


def weights_of(run_dir: Path) -> str:
    return hashlib.sha256((run_dir / "model" / "model.safetensors").read_bytes()).hexdigest()


def metrics_of(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def one_stage(task):
    return run(task, "one-stage")


def test_what_is_learned_does_not_depend_on_stages_hosts_or_engines(task, one_stage):
    two = run(
        task,
        "two-stages",
        cluster="{runtime: local, component_placement: {actor: 0, env: 0-1, rollout: 2-3}}",
        rollout="{batch_size: 4, samples_per_prompt: 2, num_slots: 4, pipeline_stage_num: 4}",
    )
    assert weights_of(two) == weights_of(one_stage)
    same = ("reward", "extra/success", "eval/success", "success/left", "eval/left/success")
    for ours, theirs in zip(metrics_of(two), metrics_of(one_stage), strict=True):
        assert {name: ours.get(name) for name in same} == {name: theirs.get(name) for name in same}
    assert "success/left" in metrics_of(two)[1]


def test_chunks_learn_by_ppo_with_a_critic(task):
    done = run(task, "ppo", algorithm="{estimator: gae, time_step: chunk, gamma: 0.9, gae_lambda: 0.9}")
    last = metrics_of(done)[-1]
    assert last["value_loss"] > 0
    assert last["truncated"] > 0
