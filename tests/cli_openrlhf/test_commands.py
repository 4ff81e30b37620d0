"""Commands as people run them: each prints a config that loads again as what was understood."""

import pytest
import yaml
from command_files import COMMANDS, EXPECTED, FRAGMENTS, HERE, read_command

from hotseat.config import loads
from hotseat.errors import PlacementError
from hotseat.openrlhf.argv import parse
from hotseat.openrlhf.run_command import main
from hotseat.openrlhf.translate import translate
from hotseat.planning.config_plan import make_plan


@pytest.mark.parametrize("path", COMMANDS, ids=lambda path: path.stem)
def test_a_command_prints_a_config_that_loads_as_the_same(path, capsys):
    command, argv, env = read_command(path)
    assert main(command, [*argv, "--print_config"], env) == 0
    printed = capsys.readouterr().out
    assert loads(printed) == translate(command, argv, env).config


@pytest.mark.parametrize("path", EXPECTED, ids=lambda path: path.stem)
def test_a_command_of_each_kind_means_what_was_worked_out_by_hand(path):
    command, argv, env = read_command(HERE / "commands" / f"{path.stem}.sh")
    assert yaml.safe_load(translate(command, argv, env).yaml) == yaml.safe_load(path.read_text())


def test_every_kind_of_command_has_a_config_written_by_hand():
    tasks = {(yaml.safe_load(path.read_text()).get("task", "rl")) for path in EXPECTED}
    assert tasks == {"rl", "sft", "rm", "dpo"}


@pytest.mark.parametrize("fragment", FRAGMENTS)
def test_a_handful_of_flags_goes_through(fragment, capsys):
    assert main("train_ppo_ray", [*fragment.split(), "--print_config"], {}) == 0
    loads(capsys.readouterr().out)


def test_ppo_becomes_grpo_by_one_flag_at_the_end():
    command, argv, env = read_command(HERE / "commands" / "ppo_hybrid_quick_start.sh")
    found = translate(command, [*argv, "--advantage_estimator", "group_norm"], env)
    assert "critic" not in found.config.cluster.component_placement
    assert ("--critic_num_nodes", "--advantage_estimator is group_norm, which has no critic") in found.no_effect


def test_flags_without_effect_in_the_hybrid_engine_command():
    command, argv, env = read_command(HERE / "commands" / "hybrid_engine.sh")
    assert translate(command, argv, env).no_effect == [
        ("--ref_num_nodes", "the reference uses the actor's devices"),
        ("--ref_num_gpus_per_node", "the reference uses the actor's devices"),
        ("--reward_num_nodes", "the reward uses the actor's devices"),
        ("--reward_num_gpus_per_node", "the reward uses the actor's devices"),
        ("--ckpt_path", "--save_steps is not set, so no checkpoint is made"),
        ("--save_hf_ckpt", "--save_steps is not set, so no checkpoint is made"),
        (
            "--critic_learning_rate",
            "--advantage_estimator is reinforce_baseline, which has no critic; only gae has one",
        ),
        ("--vllm_sync_backend", "rollout is on the actor's devices, where weights are handed over in memory"),
    ]


def placed(name):
    command, argv, env = read_command(HERE / "commands" / f"{name}.sh")
    return translate(command, argv, env).config


def num_devices(plan):
    return len({device for role in plan.roles for device in role.devices})


@pytest.mark.parametrize(
    ("name", "inventory", "devices"),
    [
        ("hybrid_engine", "1x8", 8),
        ("async_agent", "1x8", 8),
        ("sync_agent_hybrid", "1x8", 8),
        ("ppo_70b_hybrid", "2x8", 16),
        ("ppo_70b_separate", "10x8", 80),
        ("ppo_four_nodes", "5x8", 40),
        ("ppo_two_nodes_colocated", "2x8", 16),
        ("ppo_eight_nodes", "10x8", 80),
    ],
)
def test_a_command_takes_as_many_devices_as_its_roles_have_together(name, inventory, devices):
    assert num_devices(make_plan(placed(name), inventory)) == devices


@pytest.mark.parametrize(
    ("name", "inventory", "need"),
    [("ppo_four_nodes", "4x8", 40), ("ppo_eight_nodes", "8x8", 80), ("ppo_70b_separate", "8x8", 80)],
)
def test_separate_roles_do_not_fit_a_cluster_counted_without_the_engines(name, inventory, need):
    with pytest.raises(PlacementError, match=f"need {need} devices"):
        make_plan(placed(name), inventory)


def test_what_a_script_wraps_around_the_module_is_not_seen():
    command, argv, env = read_command(HERE / "commands" / "async_minimal.sh")
    assert (command, env) == ("train_ppo_ray", {"VLLM_USE_V1": "1"})
    assert list(parse(command, argv).arguments) == ["--agent_func_path", "--async_train", "--async_queue_size"]
