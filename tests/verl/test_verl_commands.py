"""verl's commands: each prints a config that was worked out by hand, and that loads again as what was understood."""

import pytest
import yaml
from verl_cases import COMMANDS, HERE, read_command

from hotseat.config import loads
from hotseat.verl.to_config import translate
from hotseat.verl.verl_command import main

DEFAULTS = ["actor_rollout_ref.model.path=m", "critic.model.path=c", "actor_rollout_ref.rollout.name=vllm"]


def expected(name):
    return yaml.safe_load((HERE / "expected" / f"{name}.yaml").read_text())


@pytest.mark.parametrize("path", COMMANDS, ids=lambda path: path.stem)
def test_a_command_means_what_was_worked_out_by_hand(path):
    assert yaml.safe_load(translate(read_command(path), {}).yaml) == expected(path.stem)


@pytest.mark.parametrize("path", COMMANDS, ids=lambda path: path.stem)
def test_a_command_prints_a_config_that_loads_as_the_same(path, capsys):
    assert main([*read_command(path), "--print_config"], {}) == 0
    assert loads(capsys.readouterr().out) == translate(read_command(path), {}).config


@pytest.mark.parametrize("path", COMMANDS, ids=lambda path: path.stem)
def test_a_command_lacks_nothing(path):
    found = translate(read_command(path), {})
    assert (found.missing, found.unsupported) == ([], [])


def test_verls_defaults_are_taken_over():
    assert yaml.safe_load(translate(DEFAULTS, {}).yaml) == expected("defaults")


def test_every_expected_config_belongs_to_a_command():
    assert {path.stem for path in (HERE / "expected").glob("*.yaml")} == {path.stem for path in COMMANDS} | {"defaults"}


def test_keys_without_effect_in_the_quickstart():
    found = dict(translate(read_command(HERE / "commands" / "quickstart.yaml"), {}).no_effect)
    assert list(found) == [
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu",
        "critic.ppo_micro_batch_size_per_gpu",
        "algorithm.kl_ctrl.kl_coef",
        "trainer.val_before_train",
    ]
    assert found["algorithm.kl_ctrl.kl_coef"] == "algorithm.use_kl_in_reward is false"
