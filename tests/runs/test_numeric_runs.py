"""Whole runs of policies that act in numbers: what holds for tokens holds for them."""

import hashlib
import json
from pathlib import Path

import pytest
from loop_cases import as_yaml
from stopped_runs import stopped_after_saving

from hotseat.cli.main import main
from hotseat.numeric.models import NumericConfig, write_policy

pytestmark = pytest.mark.slow
WALK = str(Path(__file__).parents[1] / "helpers" / "walk_env.py")

BASE = {
    "cluster": "{runtime: local}",
    "critic": "{optimizer: {learning_rate: 1e-3, schedule: constant}}",
    "data": "{max_length: 8}",
    "env": (
        f"{{path: {WALK}, tasks: [left, right], num_envs: 8, chunk: 2, max_steps: 7, num_seeds: 8, eval_seeds: 1,"
        " reward: simulator}"
    ),
    "rollout": "{engine: numeric, batch_size: 8, samples_per_prompt: 1, num_slots: 8}",
    "algorithm": "{estimator: gae, time_step: chunk, gamma: 0.99, gae_lambda: 0.95}",
    "train": "{dtype: fp32, batch_size: 4, max_epochs: 2, micro_batch_size: 4}",
    "seed": "3",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("numeric")
    write_policy(path / "policy", NumericConfig(state_dim=3, action_dim=2, num_actions=2, hidden_sizes=[16, 16]))
    return path


def run(folder: Path, name: str, code: int = 0, **changes: str) -> Path:
    actor = f"{{model: {folder}/policy, optimizer: {{learning_rate: 1e-3, schedule: constant}}}}"
    sections = BASE | {"name": name, "run_dir": f"{folder}/runs", "actor": actor} | changes
    file = folder / f"{name}.yaml"
    file.write_text(as_yaml(sections))
    assert main(["run", str(file)]) == code
    return folder / "runs" / name


def weights_of(run_dir: Path) -> str:
    return hashlib.sha256((run_dir / "model" / "model.safetensors").read_bytes()).hexdigest()


def metrics_of(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def one_stage(folder):
    return run(folder, "one-stage")


@pytest.mark.long
def test_what_is_learned_does_not_depend_on_stages_and_placement(folder, one_stage):
    two = run(
        folder,
        "two-stages",
        cluster="{runtime: local, component_placement: {actor: 0, env: 0-1, rollout: 2-3}}",
        rollout="{engine: numeric, batch_size: 8, samples_per_prompt: 1, num_slots: 4, pipeline_stage_num: 4}",
    )
    assert weights_of(two) == weights_of(one_stage)
    last = metrics_of(two)[-1]
    assert last["reward"] == metrics_of(one_stage)[-1]["reward"]


def test_engines_and_trainer_agree_and_every_push_is_proved(one_stage):
    steps = [line for line in metrics_of(one_stage) if "engine_gap" in line]
    assert steps
    assert all(line["engine_gap"] < 1e-5 for line in steps)


def test_resumed_equals_uninterrupted(folder, one_stage):
    with stopped_after_saving():
        run(folder, "broken", checkpoint="{every: 1, background: false}")
    assert main(["resume", str(folder / "runs" / "broken")]) == 0
    assert weights_of(folder / "runs" / "broken") == weights_of(one_stage)


def test_an_export_begins_another_run_by_grpo(folder, one_stage):
    again = run(
        folder,
        "grpo",
        actor=f"{{model: {one_stage}/model}}",
        critic="",
        algorithm="{estimator: group_norm}",
        env=BASE["env"].replace("num_seeds: 8", "num_seeds: 2"),
        rollout="{engine: numeric, batch_size: 2, samples_per_prompt: 4, num_slots: 8}",
    )
    assert metrics_of(again)[-1]["step"] == 2


def test_an_engine_for_language_models_is_refused(folder, capsys):
    run(folder, "refused", code=2, rollout="{batch_size: 8, samples_per_prompt: 1}")
    assert "does not run on rollout.engine transformers: set it to numeric" in capsys.readouterr().err
