"""Whole runs of a policy that sees the simulator's images, from pixels and words to updated weights."""

import hashlib
import json
import pickle
import shutil
import sys
from pathlib import Path

import pytest
import torch

from hotseat import vision
from hotseat.cli.main import main

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "embodied"))
pytestmark = pytest.mark.slow
TASK = "BabyAI-GoToRedBallGrey-v0"
PPO = "{estimator: gae, time_step: chunk, gamma: 0.9, gae_lambda: 0.9}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    pytest.importorskip("minigrid")
    import policy

    folder = tmp_path_factory.mktemp("seeing")
    tokenizer = policy.make_tokenizer()
    policy.make_model(tokenizer, 32, 0).save_pretrained(folder / "model")
    policy.make_processor(tokenizer).save_pretrained(folder / "model")
    return folder


def run(folder: Path, name: str, rollout: str, algorithm: str, **changes: str) -> Path:
    shutil.rmtree(folder / "runs" / name, ignore_errors=True)
    sections = {
        "name": name,
        "run_dir": f"{folder}/runs",
        "cluster": "{runtime: local}",
        "actor": f"{{model: {folder}/model, optimizer: {{learning_rate: 1e-3, schedule: constant}}}}",
        "env": (
            f"{{path: babyai, tasks: [{TASK}, BabyAI-PickupLoc-v0], kwargs: {{view: pixels}}, images: true,"
            " num_envs: 8, chunk: 2, max_steps: 4, reward: success, num_seeds: 4, eval_seeds: 0}"
        ),
        "data": "{max_length: 80}",
        "rollout": f"{{batch_size: 4, samples_per_prompt: 2, num_slots: 8, {rollout}}}",
        "algorithm": algorithm,
        "train": "{dtype: fp32, batch_size: 8}",
    } | changes
    file = folder / f"{name}.yaml"
    file.write_text("\n".join(f"{key}: {value}" for key, value in sections.items()))
    assert main(["run", str(file)]) == 0
    return folder / "runs" / name


@pytest.fixture(scope="module")
def one(folder):
    """A run in one stage, with which others are compared."""
    return run(folder, "ppo-1", "pipeline_stage_num: 1", PPO)


@pytest.mark.long
def test_a_policy_that_sees_learns_by_ppo_in_any_number_of_stages(folder, one):
    """A critic that sees, chunks of two actions as steps of time, and images in forwards with different company."""
    four = run(folder, "ppo-4", "pipeline_stage_num: 4", PPO)
    weights = [hashlib.sha256((done / "model" / "model.safetensors").read_bytes()).digest() for done in (one, four)]
    assert weights[0] == weights[1]
    lines = [json.loads(line) for line in (one / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["value_loss"] > 0
    assert lines[-1]["engine_gap_max"] < 1e-4  # the engine saw what the trainer sees
    assert {"success/BabyAI-PickupLoc-v0", f"success/{TASK}"} <= lines[-1].keys()
    assert not list((folder / "runs" / "images").glob("[!f]*"))  # frames leave no files


class Refusing:
    """Stands in this process for the function that unpickles frames; other processes get the function's name."""

    __module__ = "hotseat.vision"

    def __call__(self, *_: object) -> None:
        raise AssertionError("a frame came to the driver")

    def __reduce__(self) -> str:
        return "_unpickled"


@pytest.mark.long
@pytest.mark.ray
def test_on_ray_frames_never_come_to_the_driver(folder, one, monkeypatch):
    """They go from simulators through env processes to engines and trainers; unpickled here, one would fail the run."""
    cluster = "{runtime: ray, component_placement: {actor: 0, env: 1, rollout: 2}}"

    monkeypatch.setattr(vision, "_unpickled", Refusing())
    with pytest.raises(AssertionError, match="came to the driver"):
        pickle.loads(pickle.dumps(vision.pack_pixels({"pixel_values": torch.zeros(1)})))
    # A checkpoint holds the canary's frames.
    on_ray = run(folder, "on-ray", "pipeline_stage_num: 2", PPO, cluster=cluster, checkpoint="{every_minutes: 0}")
    here, there = ((done / "model" / "model.safetensors").read_bytes() for done in (one, on_ray))
    assert here == there


@pytest.mark.long
def test_a_run_in_simulators_that_are_seen_resumes_with_the_frames_of_its_canary(folder):
    path = run(folder, "extended", "pipeline_stage_num: 1", PPO, checkpoint="{every: 2}")
    assert main(["resume", str(path), "train.num_episodes=2"]) == 0
    assert json.loads((path / "metrics.jsonl").read_text().splitlines()[-1])["canary_gap"] < 1e-4


def test_images_and_the_sight_of_the_model_go_together(folder, capsys):
    file = folder / "wrong.yaml"
    actor = f"actor: {{model: {folder}/model}}\nrollout: {{samples_per_prompt: 2}}"
    file.write_text(f"env: {{path: babyai, tasks: [{TASK}]}}\ndata: {{max_length: 80}}\n{actor}\n")
    assert main(["run", str(file)]) != 0
    assert "takes images, and the run has none: set env.images" in capsys.readouterr().err
