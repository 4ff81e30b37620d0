"""RLinf's script for embodied tasks: the names that it imports, its configs, and a run of it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from hotseat.cli.main import main as hotseat
from hotseat.cluster import Process
from hotseat.errors import ConfigError, PlacementError, UnsupportedError
from hotseat.rlinf.config_keys import translate
from hotseat.rlinf.embodied import EmbodiedRewardWorker, LaunchedRole, validate_cfg
from hotseat.rlinf.shim import DIRECTORY

ROOT = Path(__file__).parents[2]
WALK = str(ROOT / "tests" / "helpers" / "walk_env.py")

# A script of the same form as RLinf's: it knows RLinf's names alone.
SCRIPT = """
import sys
from omegaconf import OmegaConf
from rlinf.config import validate_cfg
from rlinf.runners.embodied_runner import EmbodiedRunner
from rlinf.scheduler import Cluster
from rlinf.utils.placement import HybridComponentPlacement
from rlinf.workers.actor.embodied_fsdp_actor_worker import EmbodiedFSDPActor
from rlinf.workers.env.env_worker import EnvWorker
from rlinf.workers.reward import EmbodiedAPIRewardWorker, EmbodiedRewardWorker
from rlinf.workers.rollout.hf.huggingface_worker import MultiStepRolloutWorker

if __name__ == "__main__":
    cfg = OmegaConf.load(sys.argv[1])
    OmegaConf.set_struct(cfg, True)
    cfg = validate_cfg(cfg)
    cluster = Cluster(cluster_cfg=cfg.cluster, distributed_log_dir=cfg.runner.per_worker_log_path)
    placement = HybridComponentPlacement(cfg, cluster)
    groups = {}
    for role, kind in (("actor", EmbodiedFSDPActor), ("rollout", MultiStepRolloutWorker), ("env", EnvWorker)):
        groups[role] = kind.create_group(cfg).launch(
            cluster, name=cfg[role].group_name, placement_strategy=placement.get_strategy(role)
        )
    runner = EmbodiedRunner(cfg=cfg, reward=None, **groups)
    runner.init_workers()
    runner.run()
"""


def config(**changes):
    values = {
        "cluster": {"num_nodes": 1, "component_placement": {"actor": "0-1", "env": 0, "rollout": 1}},
        "runner": {
            "task_type": "embodied",
            "logger": {"log_path": "results", "experiment_name": "walk"},
            "max_epochs": 2,
            "max_steps": -1,
            "val_check_interval": -1,
            "save_interval": -1,
        },
        "algorithm": {
            "update_epoch": 2,
            "normalize_advantages": True,
            "group_size": 1,
            "reward_type": "chunk_level",
            "logprob_type": "token_level",
            "adv_type": "gae",
            "loss_type": "actor_critic",
            "gamma": 0.99,
            "gae_lambda": 0.95,
        },
        "env": {
            "group_name": "EnvGroup",
            "enable_offload": True,
            "train": {
                "env_type": WALK,
                "total_num_envs": 8,
                "rollout_epoch": 2,
                "max_episode_steps": 6,
                "init_params": {"id": "left"},
            },
        },
        "rollout": {"group_name": "RolloutGroup", "enable_offload": True, "pipeline_stage_num": 2},
        "actor": {
            "group_name": "ActorGroup",
            "enable_offload": True,
            "seed": 7,
            "global_batch_size": 24,
            "micro_batch_size": 8,
            "model": {
                "model_type": "mlp_policy",
                "model_path": "",
                "obs_dim": 3,
                "action_dim": 2,
                "num_action_chunks": 2,
                "hidden_dim": 16,
                "precision": "32",
                "add_value_head": True,
            },
            "optim": {"lr": 1e-3, "value_lr": 1e-3, "clip_grad": 0.5},
        },
    }
    return values | changes


def test_a_config_becomes_a_run_of_as_many_steps_and_updates():
    ours = translate(config()).values
    # A step has 8 simulators x 2 epochs = 16 episodes of 3 chunks, 48 in all: 2 updates of 24 chunks, 8 episodes each.
    assert (ours["rollout"]["batch_size"], ours["env"]["num_seeds"], ours["train"]["batch_size"]) == (16, 32, 8)
    assert (ours["rollout"]["engine"], ours["env"]["chunk"], ours["env"]["path"]) == ("numeric", 2, WALK)
    assert ours["data"]["max_length"] == 3 + 2 * 2 + 1
    assert "model" not in ours["actor"]


def test_a_simulator_that_is_not_here_is_named(capsys):
    cfg = config()
    cfg["env"]["train"]["env_type"] = "libero"
    with pytest.raises(ConfigError, match=r"env\.train\.env_type: libero is no simulator here: gym, babyai"):
        validate_cfg(cfg)


def with_key(key, value):
    cfg = config()
    *sections, name = key.split(".")
    section = cfg
    for each in sections:
        section = section.setdefault(each, {})
    section[name] = value
    return cfg


@pytest.mark.parametrize(
    ("key", "value", "ours"),
    [
        ("env.train.reward_coef", 5.0, {"reward_scale": 5.0}),
        ("env.train.use_rel_reward", True, {"relative_rewards": True}),
        ("env.train.use_rel_reward", False, {"relative_rewards": False}),
        ("algorithm.bootstrap_type", "always", {"bootstrap_terminated": True}),
        ("algorithm.bootstrap_type", "standard", {"bootstrap_terminated": False}),
    ],
)
def test_keys_of_rewards_have_the_meaning_that_they_have_there(key, value, ours):
    translation = translate(with_key(key, value))
    assert ours.items() <= translation.values["env"].items()
    assert key not in dict(translation.no_effect)


def test_values_of_last_observations_are_listed_where_no_critic_gives_any():
    cfg = with_key("algorithm.bootstrap_type", "always")
    cfg["algorithm"]["adv_type"] = "grpo"
    translation = translate(cfg)
    assert "bootstrap_terminated" not in translation.values["env"]
    assert "has no critic" in dict(translation.no_effect)["algorithm.bootstrap_type"]


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("env.train.ignore_terminations", True, "an episode ends here where its simulator ends it: set it to False"),
        ("env.train.use_step_penalty", True, "steps have no penalty here"),
        ("algorithm.filter_rewards", True, r"RLinf leaves groups out of a step, .* algorithm\.filtering\.enabled"),
    ],
)
def test_values_that_would_change_what_is_learned_are_refused_by_name(key, value, says):
    with pytest.raises(ConfigError, match=rf"{key}: True: {says}"):
        translate(with_key(key, value))
    off = dict(translate(with_key(key, False)).no_effect)
    assert off[key]


def test_bounds_of_groups_are_listed_where_no_group_is_left_out():
    cfg = with_key("algorithm.rewards_lower_bound", 0.5)
    assert "filter_rewards" in dict(translate(cfg).no_effect)["algorithm.rewards_lower_bound"]


def test_terminations_are_ignored_in_evaluations_without_an_error():
    off = dict(translate(with_key("env.eval.ignore_terminations", True)).no_effect)
    assert off["env.eval.ignore_terminations"] == "an episode is evaluated up to where its simulator ends it"


def test_all_that_is_missing_is_named_at_once():
    cfg = with_key("algorithm.filter_rewards", True)
    cfg["env"]["train"]["env_type"] = "libero"
    with pytest.raises(ConfigError) as raised:
        validate_cfg(cfg)
    assert [problem.key for problem in raised.value.problems] == ["algorithm.filter_rewards", "env.train.env_type"]


def test_a_model_that_cannot_be_made_is_named():
    cfg = config()
    cfg["actor"]["model"] |= {"model_type": "cnn_policy"}
    with pytest.raises(ConfigError, match=r"actor\.model\.model_path: is not set, and only an mlp_policy"):
        validate_cfg(cfg)


def test_a_group_is_placed_where_it_was_launched():
    role = LaunchedRole("env", (Process(0, 0, (0, 1)), Process(1, 0, (3,))))
    assert role.selection() == "0-1:0,3:1"
    with pytest.raises(PlacementError, match="its processes have no devices"):
        LaunchedRole("env", (Process(0, 0),)).selection()


def test_reward_models_are_refused():
    with pytest.raises(UnsupportedError, match="use_reward_model"):
        EmbodiedRewardWorker.create_group({})


def python(*argv: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess:
    path = ":".join(filter(None, [str(DIRECTORY), str(ROOT), os.environ.get("PYTHONPATH", "")]))
    env = {**os.environ, "PYTHONPATH": path, **variables}
    return subprocess.run([sys.executable, *argv], capture_output=True, text=True, env=env, cwd=cwd)


def test_the_command_prints_a_directory_with_one_package(capsys):
    assert hotseat(["rlinf-path"]) == 0
    printed = Path(capsys.readouterr().out.strip())
    assert [path.parent.name for path in printed.glob("*/__init__.py")] == ["rlinf"]


def test_workers_of_other_losses_are_refused_by_name(tmp_path):
    done = python("-c", "import rlinf.workers.actor.fsdp_sac_policy_worker", cwd=tmp_path)
    assert "algorithm.loss_type: embodied_sac is not supported" in done.stderr
    done = python("-c", "import rlinf.workers.actor.fsdp_actor_worker_pipeline", cwd=tmp_path)
    assert "runner.use_training_pipeline is not supported" in done.stderr


def test_beside_rlinf_itself_imports_are_refused(tmp_path):
    (tmp_path / "rlinf").mkdir()
    (tmp_path / "rlinf" / "__init__.py").write_text("")
    done = python("-c", "import sys; sys.path.append(sys.argv[1]); import rlinf", str(tmp_path), cwd=ROOT)
    assert f"RLinf itself can be imported too, from {tmp_path}" in done.stderr


PLACEMENTS = {
    "one": [],
    "hybrid": ["~cluster.component_placement", "+cluster.component_placement={actor:0-1,env:0,rollout:1}"],
}
SIZES = [
    "runner.max_epochs=2",
    "env.train.total_num_envs=4",
    "env.train.max_episode_steps=8",
    "runner.logger.log_path=.",
]


@pytest.mark.ray
@pytest.mark.long
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_rlinfs_script_trains_by_a_config_of_the_examples(tmp_path, placement):
    pytest.importorskip("hydra", reason="RLinf's script reads its config by hydra: pip install 'hotseat[hydra]'")
    pytest.importorskip("imageio", reason="gymnasium's MuJoCo needs imageio: pip install 'hotseat[mujoco]'")
    written = tmp_path / "train_embodied_agent.py"
    if "RLINF_SCRIPT" not in os.environ:
        pytest.skip("RLINF_SCRIPT is not set to the path of RLinf's train_embodied_agent.py")
    written.write_text(Path(os.environ["RLINF_SCRIPT"]).read_text())
    examples = ROOT / "examples" / "rlinf"
    done = python(
        str(written),
        "--config-path",
        str(examples / "config"),
        "--config-name",
        "gym_inverted_pendulum_ppo_mlp",
        *SIZES,
        *PLACEMENTS[placement],
        cwd=tmp_path,
        EMBODIED_PATH=str(examples),
    )
    assert done.returncode == 0, done.stderr[-3000:]
    places = {"one": "actor on 0", "hybrid": "actor on 0:0,1:1, rollout on 1:0, env on 0:0"}
    assert places[placement] in " ".join(done.stdout.split())
    run_dir = tmp_path / "gym_inverted_pendulum_ppo_mlp"
    assert (run_dir / "model" / "model.safetensors").is_file()
    steps = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert steps[-1]["step"] == 2


@pytest.mark.long
@pytest.mark.ray
@pytest.mark.slow
def test_a_script_of_its_names_trains_in_the_hybrid_placement(tmp_path):
    pytest.importorskip("omegaconf")
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "walk.yaml").write_text(yaml.safe_dump(config()))
    done = python("script.py", "walk.yaml", cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "no effect here: env.group_name" in done.stderr
    assert "hybrid: actor on 0:0,1:1, rollout on 1:0, env on 0:0" in " ".join(done.stdout.split())
    assert (tmp_path / "results" / "walk" / "model" / "model.safetensors").is_file()
    assert len((tmp_path / "results" / "walk" / "metrics.jsonl").read_text().splitlines()) >= 2
