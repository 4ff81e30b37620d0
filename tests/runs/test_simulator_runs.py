"""Whole runs in simulators: stages, hosts, engines, deaths and placement change nothing that is learned."""

import base64
import hashlib
import io
import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from loop_cases import as_yaml, make_task
from stopped_runs import stopped_after_saving

from hotseat.cli.main import main
from hotseat.faults import VARIABLE, Fault

pytestmark = pytest.mark.slow
WALK = str(Path(__file__).parents[1] / "helpers" / "walk_env.py")

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
    file.write_text(as_yaml(sections))
    assert main(["run", str(file)]) == 0
    return task / "runs" / name


def weights_of(run_dir: Path) -> str:
    return hashlib.sha256((run_dir / "model" / "model.safetensors").read_bytes()).hexdigest()


def metrics_of(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def one_stage(task):
    return run(task, "one-stage")


@pytest.mark.long
def test_what_is_learned_does_not_depend_on_stages_hosts_engines_or_names(task, one_stage):
    names = "component_names: {simulator: env, policy: rollout}"
    two = run(
        task,
        "two-stages",
        cluster=f"{{runtime: local, {names}, component_placement: {{actor: 0, simulator: 0-1, policy: 2-3}}}}",
        flow="[{name: play, run: [simulator, policy]}, {name: score, run: [actor]}, {name: learn, train: [actor]},"
        " {name: send, push: [policy]}]",
        rollout="{batch_size: 4, samples_per_prompt: 2, num_slots: 4, pipeline_stage_num: 4}",
    )
    assert weights_of(two) == weights_of(one_stage)
    same = ("reward", "extra/success", "eval/success", "success/left", "eval/left/success")
    for ours, theirs in zip(metrics_of(two), metrics_of(one_stage), strict=True):
        assert {name: ours.get(name) for name in same} == {name: theirs.get(name) for name in same}
    assert "success/left" in metrics_of(two)[1]


@pytest.mark.parametrize("num_deaths", [3, pytest.param(20, marks=pytest.mark.long)])
def test_processes_killed_at_random_points_change_nothing(task, one_stage, tmp_path, num_deaths):
    points = [[seed, action] for seed in range(4) for action in range(6)]
    deaths = random.Random(num_deaths).sample(points, num_deaths)
    kwargs = f"kwargs: {{deaths: {deaths}, folder: {tmp_path}}}"
    disturbed = run(task, "disturbed", env=BASE["env"].replace("num_envs", f"{kwargs}, num_envs"))
    assert len(list(tmp_path.iterdir())) >= num_deaths / 2  # some episodes end before their process would be killed
    assert weights_of(disturbed) == weights_of(one_stage)


@pytest.mark.long
@pytest.mark.ray
@pytest.mark.timeout(3600)
def test_env_ranks_killed_at_20_random_points_change_nothing(task, tmp_path):
    """A process of the role env dies with all its simulators; another replaces it, and the rollout is repeated."""
    env = BASE["env"].replace("num_seeds: 4", "num_seeds: 80").replace("eval_seeds: 1", "eval_seeds: 0")
    calm = run(task, "calm", env=env)
    stages = "rollout={batch_size: 4, samples_per_prompt: 2, num_slots: 8, pipeline_stage_num: 2}"
    changes = ["name=killed", "cluster={runtime: ray, component_placement: {actor: 0, env: 1, rollout: 2}}", stages]
    # A rollout has 8 calls of simulators at most: between two deaths there is one that ends.
    skips = [random.Random(1).randint(9, 20) for _ in range(20)]
    faults = tmp_path / "faults"
    faults.mkdir()
    for number, skip in enumerate(skips):
        Fault("simulators.during", "kill", by="env:0", skip=skip).arm(faults, f"{number:03}")
    command = [sys.executable, "-m", "hotseat", "run", str(task / "calm.yaml"), *changes]
    done = subprocess.run(command, env=os.environ | {VARIABLE: str(faults)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert not list(faults.glob("*.fault"))
    assert done.stdout.count("rollout host 0 died and is replaced") == 20
    assert weights_of(task / "runs" / "killed") == weights_of(calm)


def test_resumed_equals_uninterrupted(task, one_stage):
    with stopped_after_saving():
        run(task, "broken", checkpoint="{every: 1, background: false}")
    assert main(["resume", str(task / "runs" / "broken"), "rollout.pipeline_stage_num=2"]) == 0
    assert weights_of(task / "runs" / "broken") == weights_of(one_stage)


MORE_SEEDS = BASE["env"].replace("num_seeds: 4", "num_seeds: 8")
BESIDE = "{runtime: local, component_placement: {actor: 0, env: 1, rollout: 2}}"


@pytest.fixture(scope="module")
def ahead(task):
    return run(task, "ahead", env=MORE_SEEDS, cluster=BESIDE, overlap="{staleness: 1}")


@pytest.mark.long
def test_beside_training_what_is_learned_does_not_depend_on_stages(task, ahead):
    stages = "{batch_size: 4, samples_per_prompt: 2, num_slots: 4, pipeline_stage_num: 4}"
    other = run(task, "ahead-4", env=MORE_SEEDS, cluster=BESIDE, overlap="{staleness: 1}", rollout=stages)
    assert weights_of(other) == weights_of(ahead)
    # Batch b is sampled by version max(0, b - 1): the first is of the weights that learn from it, later ones are older.
    assert [line["staleness"] for line in metrics_of(ahead)[1:]] == [0.0, 1.0, 1.0, 1.0]


@pytest.mark.parametrize("in_flight", ["keep", pytest.param("restart", marks=pytest.mark.long)])
def test_episodes_that_are_open_at_a_push_go_on_or_begin_again(task, in_flight):
    overlap = f"{{staleness: 2, order: arrival, in_flight: {in_flight}}}"
    done = run(task, in_flight, env=MORE_SEEDS, cluster=BESIDE, overlap=overlap)
    lines = metrics_of(done)
    assert len(lines) == 5
    assert max(line["staleness_max"] for line in lines[1:]) <= 2
    trained = [json.loads(line) for line in (done / "ledger.jsonl").read_text().splitlines()]
    keys = [(row["epoch"], row["prompt"]) for row in trained if row["state"] == "trained"]
    assert len(keys) == len(set(keys)) == 16  # every task and seed once


@pytest.mark.long
def test_a_run_with_simulators_beside_training_is_resumed_to_the_same_bits(task, ahead):
    with stopped_after_saving():
        run(
            task,
            "ahead-broken",
            env=MORE_SEEDS,
            cluster=BESIDE,
            overlap="{staleness: 1}",
            checkpoint="{every: 2, background: false}",
        )
    assert main(["resume", str(task / "runs" / "ahead-broken")]) == 0
    assert weights_of(task / "runs" / "ahead-broken") == weights_of(ahead)


@pytest.mark.long
@pytest.mark.ray
def test_an_env_process_that_is_killed_beside_training_changes_nothing(task, ahead, tmp_path):
    faults = tmp_path / "faults"
    faults.mkdir()
    Fault("simulators.during", "kill", by="env:0", skip=9).arm(faults, "000")
    changes = ["name=ahead-killed", "cluster={runtime: ray, component_placement: {actor: 0, env: 1-2, rollout: 3}}"]
    command = [sys.executable, "-m", "hotseat", "run", str(task / "ahead.yaml"), *changes]
    done = subprocess.run(command, env=os.environ | {VARIABLE: str(faults)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert not list(faults.glob("*.fault"))
    assert "rollout host 0 died and is replaced" in done.stdout
    assert weights_of(task / "runs" / "ahead-killed") == weights_of(ahead)


def test_chunks_learn_by_ppo_with_a_critic(task):
    by_chunk = "estimator: gae, time_step: chunk, gamma: 0.9, gae_lambda: 0.9"
    done = run(task, "ppo", algorithm=f"{{{by_chunk}}}")
    last = metrics_of(done)[-1]
    assert last["value_loss"] > 0
    assert last["truncated"] > 0
    # The ratios of tokens have the advantages of their chunk; the critic learns the same.
    tokens = metrics_of(run(task, "ppo-tokens", algorithm=f"{{{by_chunk}, ratio_step: token}}"))
    first = metrics_of(done)[1]
    assert tokens[1]["value_loss"] == first["value_loss"]
    assert tokens[1]["grad_norm"] < first["grad_norm"]


@pytest.mark.long
@pytest.mark.ray
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "placement",
    [
        pytest.param("{actor: 0}", id="colocated"),
        pytest.param("{actor: 0, env: 1-2, rollout: 3}", id="disaggregated"),
        pytest.param("{actor: 0, env: 0-1, rollout: 1-2}", id="hybrid"),
        pytest.param("{actor: 0, env: 0-1, rollout: 0-1}", id="actor-on-part"),
        pytest.param("{actor: 0, env: 0, rollout: 0-1}", id="env-on-part"),
        pytest.param("{actor: 0, env: 0-1, rollout: 1}", id="rollout-on-part"),
        pytest.param("{actor: 1, env: 0, rollout: 1}", id="actor-with-rollout"),
        pytest.param("{actor: 0, env: 1, rollout: 1}", id="actor-apart"),
    ],
)
def test_on_ray_placement_changes_no_bit(task, one_stage, placement):
    offload = "enable_offload: true"
    found = run(
        task,
        "on-ray",
        cluster=f"{{runtime: ray, component_placement: {placement}}}",
        env=BASE["env"].replace("num_envs", f"{offload}, num_envs"),
        rollout=f"{{batch_size: 4, samples_per_prompt: 2, num_slots: 8, pipeline_stage_num: 2, {offload}}}",
    )
    assert weights_of(found) == weights_of(one_stage)


@pytest.mark.long
@pytest.mark.ray
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("inference", ["", ", inference: 0-7"])
def test_rlinfs_hybrid_placement_runs_on_eight_devices(task, inference):
    """Simulators on four devices and engines on the other four, in two stages; then the actor trains on all eight.

    As in RLinf's figure, inference may come between them, on all eight.
    """
    done = run(
        task,
        "hybrid-8",
        cluster=(
            "{runtime: ray, num_nodes: 1, component_placement: {actor: 0-7, env: 0-3, rollout: 4-7" + inference + "}}"
        ),
        env=BASE["env"].replace("num_envs: 8", "num_envs: 4, enable_offload: true"),
        rollout="{enable_offload: true, pipeline_stage_num: 2, batch_size: 4, samples_per_prompt: 4, num_slots: 8}",
        train="{dtype: fp32, batch_size: 8}" if inference else "{dtype: fp32, batch_size: 16}",
        actor=(
            f"{{enable_offload: true, model: {task}/model, optimizer: {{learning_rate: 1e-2, schedule: constant}}}}"
        ),
    )
    timeline = (done / "timeline.json").read_text()
    assert "offload env simulator" in timeline
    assert ('"inference"' in timeline) == bool(inference)  # holds the devices in its turn
    assert len(metrics_of(done)) == 3


@pytest.mark.long
def test_episodes_are_played_again_for_films(task):
    import PIL.Image

    done = run(task, "filmed", env=BASE["env"].replace("num_envs", "films: 2, num_envs"), log="{samples_every: 1}")
    lines = [json.loads(line) for line in (done / "samples.jsonl").read_text().splitlines()]
    assert [sum(line["step"] == step and "film" in line for line in lines) for step in (1, 2)] == [2, 2]
    films = [base64.b64decode(line["film"].partition(",")[2]) for line in lines if "film" in line]
    opened = [PIL.Image.open(io.BytesIO(film)) for film in films]
    assert {film.size for film in opened} == {(8, 8)}
    assert max(getattr(film, "n_frames", 1) for film in opened) > 1  # pictures that are alike become one frame
    assert "data:image/webp" in (done / "report.html").read_text()


def test_a_simulator_that_draws_nothing_is_refused_before_a_model_loads(task, one_stage, capsys):
    blind = task / "blind.py"
    blind.write_text(
        Path(WALK).read_text().replace("def render(self):", "def render(self):\n        raise ValueError('dark')")
    )
    file = task / "blind.yaml"
    file.write_text(
        (task / "one-stage.yaml").read_text().replace(WALK, str(blind)).replace("num_envs", "films: 1, num_envs")
    )
    assert main(["run", str(file), "name=blind"]) != 0
    assert "env.films" in (error := capsys.readouterr().err)
    assert "dark" in error
