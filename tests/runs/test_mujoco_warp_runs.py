"""Whole runs with MuJoCo Warp on a CPU: placement, stages, ranks, runtime and resume change no bit."""

import shutil
from pathlib import Path

import pytest
from loop_cases import make_task
from stopped_runs import stopped_after_saving
from test_simulator_runs import metrics_of, weights_of

from hotseat.cli.main import main
from hotseat.envs.family_loading import import_problem

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(import_problem("mujoco_warp") is not None, reason="mujoco_warp is not installed"),
]
PLACEMENTS = {
    "colocated": "{actor: 0}",
    "disaggregated": "{actor: 0, env: 1, rollout: 2}",
    "hybrid": "{actor: 0, env: 0, rollout: 1}",
    "disaggregated-2": "{actor: 0, env: 1-2, rollout: 3}",
    "hybrid-2": "{actor: 0, env: 0-1, rollout: 1-2}",
}


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    return make_task(tmp_path_factory.mktemp("warp"), max_position_embeddings=128)


def sections(task: Path, name: str, placement: str, stages: int, runtime: str = "local") -> dict[str, str]:
    return {
        "name": name,
        "run_dir": f"{task}/runs",
        "cluster": f"{{runtime: {runtime}, component_placement: {PLACEMENTS[placement]}}}",
        "actor": f"{{model: {task}/model, optimizer: {{learning_rate: 1e-2, schedule: constant}}}}",
        "data": "{max_length: 96}",
        "env": (
            "{path: mujoco_warp, tasks: [reach-red, push-blue], kwargs: {device: cpu, progress: 1.0}, num_envs: 8,"
            " chunk: 2, bins: 4, max_steps: 4, num_seeds: 10, enable_offload: true}"
        ),
        "rollout": f"{{batch_size: 4, samples_per_prompt: 2, num_slots: 8, pipeline_stage_num: {stages}}}",
        "train": "{dtype: fp32, batch_size: 8, micro_batch_size: 8}",
        "seed": "3",
    }


def write(task: Path, parts: dict[str, str]) -> str:
    shutil.rmtree(task / "runs" / parts["name"], ignore_errors=True)
    file = task / f"{parts['name']}.yaml"
    file.write_text("\n".join(f"{key}: {value}" for key, value in parts.items()))
    return str(file)


def run(task: Path, placement: str, stages: int, runtime: str = "local") -> Path:
    parts = sections(task, f"{placement}-{stages}-{runtime}", placement, stages, runtime)
    assert main(["run", write(task, parts)]) == 0
    return task / "runs" / parts["name"]


@pytest.fixture(scope="module")
def reference(task):
    """A run of five steps, in which the policy changes."""
    done = run(task, "colocated", 1)
    metrics = metrics_of(done)[1:]  # after what precedes the first step
    assert len(metrics) == 5
    assert all(each["grad_norm"] > 0 for each in metrics)
    return done


def test_a_hybrid_run_that_is_stopped_and_resumed_equals_a_colocated_one(task, reference):
    parts = sections(task, "broken", "hybrid-2", 2) | {"checkpoint": "{every: 2, background: false}"}
    with stopped_after_saving():
        main(["run", write(task, parts)])
    assert main(["resume", str(task / "runs" / "broken"), "rollout.pipeline_stage_num=1"]) == 0
    assert weights_of(task / "runs" / "broken") == weights_of(reference)


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_placement_stages_and_ranks_change_no_bit(task, reference, placement, stages):
    assert weights_of(run(task, placement, stages)) == weights_of(reference)


@pytest.mark.ray
@pytest.mark.parametrize(("placement", "stages"), [("colocated", 1), ("disaggregated-2", 4), ("hybrid-2", 2)])
def test_ray_changes_no_bit(task, reference, placement, stages):
    assert weights_of(run(task, placement, stages, runtime="ray")) == weights_of(reference)
