"""The table of keys: every key is mapped, without effect or refused, and what it says of itself is what happens."""

import functools
import re
from pathlib import Path

import pytest
from verl_table import BEGIN, END, render_table

from hotseat.config.load import valid_keys
from hotseat.errors import ConfigError
from hotseat.verl.command_help import WIDTH, render_help
from hotseat.verl.key_values import DERIVED
from hotseat.verl.overrides import parse
from hotseat.verl.to_config import translate
from hotseat.verl.verl_keys import BY_NAME, KEYS, find

DOCS = Path(__file__).parents[2] / "docs" / "verl.md"
BASE = ["actor_rollout_ref.model.path=m", "critic.model.path=c", "actor_rollout_ref.rollout.name=vllm"]
SINGLE = [key for key in KEYS if not key.is_section]
SECTIONS = [key for key in KEYS if key.is_section]
names = pytest.mark.parametrize


def written(value):
    """A value as on a command line."""
    if isinstance(value, list):
        return f"[{','.join(map(written, value))}]"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def by_name(key):
    return key.name


@functools.cache
def yaml_of(*argv):
    return translate(argv, {}).yaml


# A value other than the default, and what it needs beside it to have an effect.
OTHERS = {
    "actor_rollout_ref.actor.strategy": "fsdp2",
    "actor_rollout_ref.actor.policy_loss.loss_mode": "cispo",
    "actor_rollout_ref.actor.loss_agg_mode": "seq-mean-token-mean",
    "actor_rollout_ref.actor.kl_loss_type": "mse",
    "actor_rollout_ref.actor.checkpoint.save_contents": "[hf_model]",
    "actor_rollout_ref.actor.clip_ratio_c": 2.0,
    "actor_rollout_ref.actor.fsdp_config.dtype": "float32",
    "actor_rollout_ref.actor.fsdp_config.model_dtype": "bfloat16",
    "actor_rollout_ref.actor.loss_scale_factor": 512,
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": 4096,
    "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu": 4096,
    "actor_rollout_ref.rollout.name": "hf",
    "actor_rollout_ref.rollout.top_p": 0.9,
    "actor_rollout_ref.rollout.gpu_memory_utilization": 0.7,
    "actor_rollout_ref.rollout.scheduling_policy": "priority",
    "actor_rollout_ref.model.target_modules": "[q_proj]",
    "actor_rollout_ref.model.override_config.attn_implementation": "eager",
    "algorithm.adv_estimator": "rloo",
    "algorithm.kl_penalty": "mse",
    "algorithm.kl_ctrl.type": "adaptive",
    "algorithm.rollout_correction.rollout_is": "token",
    "algorithm.rollout_correction.rollout_is_threshold": "0.5_5.0",
    "algorithm.rollout_correction.rollout_rs": "seq_mean_k1",
    "algorithm.rollout_correction.rollout_rs_threshold": "0.9_1.2",
    "algorithm.gamma": 0.9,
    "algorithm.lam": 0.9,
    "critic.enable": "true",
    "actor_rollout_ref.actor.ppo_mini_batch_size": 128,
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 4,
    "actor_rollout_ref.actor.ulysses_sequence_parallel_size": 2,
    "actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size": 2,
    "trainer.nnodes": 2,
    "trainer.n_gpus_per_node": 4,
    "data.train_batch_size": 512,
    "data.truncation": "left",
    "reward.custom_reward_function.path": "r.py",
    "reward.reward_manager.name": "dapo",
    "trainer.device": "cpu",
    "trainer.logger": "[tensorboard]",
    "trainer.resume_mode": "disable",
}
ANY = {"int": 3, "float": 0.25, "text": "other", "list": "[0.5,0.6]", "any": 7}
GROUPED = ["algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=2"]
IN_REWARD = ["algorithm.use_kl_in_reward=true"]
ADAPTIVE = [*IN_REWARD, "algorithm.kl_ctrl.type=adaptive"]
CORRECTED = ["algorithm.rollout_correction.rollout_is=token"]
PENALISED = ["reward.reward_manager.name=dapo", "reward.reward_kwargs.overlong_buffer_cfg.enable=true"]
PENALISED += ["reward.reward_kwargs.overlong_buffer_cfg.len=64"]
WARM = ["actor_rollout_ref.rollout.val_kwargs.temperature=0.6"]
WITH_LOSS = ["actor_rollout_ref.actor.use_kl_loss=true"]
NEEDS = {
    "actor_rollout_ref.rollout.n": ["algorithm.adv_estimator=grpo"],
    "algorithm.norm_adv_by_std_in_grpo": GROUPED,
    "algorithm.adv_estimator": ["actor_rollout_ref.rollout.n=2"],
    "algorithm.kl_penalty": IN_REWARD,
    "algorithm.kl_ctrl.kl_coef": IN_REWARD,
    "algorithm.kl_ctrl.type": IN_REWARD,
    "algorithm.kl_ctrl.target_kl": ADAPTIVE,
    "algorithm.kl_ctrl.horizon": [
        *ADAPTIVE,
        "data.train_batch_size=8",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
    ],
    "algorithm.rollout_correction.rollout_is_threshold": CORRECTED,
    "algorithm.rollout_correction.rollout_is_batch_normalize": CORRECTED,
    "algorithm.rollout_correction.rollout_rs": ["algorithm.rollout_correction.rollout_rs_threshold=2"],
    "algorithm.rollout_correction.rollout_rs_threshold": [
        "algorithm.rollout_correction.rollout_rs=seq_mean_k1",
        "algorithm.rollout_correction.rollout_rs_threshold=2",
    ],
    "data.truncation": ["data.filter_overlong_prompts=true"],
    "actor_rollout_ref.actor.kl_loss_coef": WITH_LOSS,
    "actor_rollout_ref.actor.kl_loss_type": WITH_LOSS,
    "actor_rollout_ref.actor.clip_ratio": ["actor_rollout_ref.actor.clip_ratio_low=null"],
    "actor_rollout_ref.actor.loss_scale_factor": ["actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum-norm"],
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": ["actor_rollout_ref.actor.use_dynamic_bsz=true"],
    "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu": [
        "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=true"
    ],
    "actor_rollout_ref.rollout.limit_images": ["data.image_key=images"],
    "actor_rollout_ref.actor.freeze_vision_tower": ["data.image_key=images"],
    "actor_rollout_ref.model.lora_rank": GROUPED,
    "actor_rollout_ref.model.lora_alpha": [*GROUPED, "actor_rollout_ref.model.lora_rank=8"],
    "actor_rollout_ref.model.target_modules": [*GROUPED, "actor_rollout_ref.model.lora_rank=8"],
    "actor_rollout_ref.model.override_config.attn_implementation": ["actor_rollout_ref.model.use_remove_padding=false"],
    "actor_rollout_ref.actor.optim.min_lr_ratio": ["actor_rollout_ref.actor.optim.lr_scheduler_type=cosine"],
    "critic.optim.min_lr_ratio": ["critic.optim.lr_scheduler_type=cosine"],
    "actor_rollout_ref.actor.checkpoint.save_contents": ["trainer.save_freq=1"],
    "reward.custom_reward_function.name": ["reward.custom_reward_function.path=r.py"],
    "reward.reward_kwargs.overlong_buffer_cfg.enable": [PENALISED[0], PENALISED[2]],
    "reward.reward_kwargs.overlong_buffer_cfg.len": PENALISED,
    "reward.reward_kwargs.overlong_buffer_cfg.penalty_factor": PENALISED,
    "reward.reward_manager.name": PENALISED[1:],
}
for leaf in ("param_offload", "optimizer_offload", "offload_policy"):
    NEEDS[f"actor_rollout_ref.ref.fsdp_config.{leaf}"] = WITH_LOSS
for section in ("actor_rollout_ref.actor", "critic"):
    for leaf in ("lr_scheduler_type", "warmup_style"):
        OTHERS[f"{section}.optim.{leaf}"] = "cosine"
# Which change nothing: what they say holds already.
LISTED = (
    "actor_rollout_ref.actor.strategy",
    "actor_rollout_ref.actor.loss_scale_factor",
    "critic.enable",
    "data.truncation",
)


def other(key):
    if key.name in OTHERS:
        return OTHERS[key.name]
    if key.kind == "bool":
        return written(not parse([])[key.name])
    return ANY[key.kind]


# --- the table itself ------------------------------------------------------------------------------------------------


def test_names_are_unique():
    every = [name for key in KEYS for name in key.names]
    assert len(every) == len(set(every)) == len(BY_NAME)


@names("key", KEYS, ids=by_name)
def test_a_key_is_mapped_or_without_effect_or_refused(key):
    assert sum(map(bool, (key.sets, key.because, key.refused))) == 1
    assert key.by is None or (key.sets and key.by in DERIVED)
    assert all(field in valid_keys() for field in key.sets)
    assert key.same_as is None or key.same_as in BY_NAME


def test_every_derived_field_belongs_to_a_key():
    assert {key.by for key in KEYS if key.by} == set(DERIVED) - {"keys without use"}


def test_defaults_that_are_given_change_nothing():
    line = parse([])
    # The default image key is a column that data may have, and vLLM's arguments are passed on where they are given.
    keys = [key for key in SINGLE if key.name != "data.image_key" and key.by != "engine arguments"]
    given = {key.name: line[key.name] for key in keys if line[key.name] is not None}
    found = translate([*(f"{name}={written(value)}" for name, value in given.items()), *BASE], {})
    assert found.yaml == yaml_of(*BASE)


# --- what happens to a key -------------------------------------------------------------------------------------------


@names("key", [key for key in SINGLE if key.effect == "mapped"], ids=by_name)
def test_a_mapped_key_changes_the_config(key):
    needs = [*BASE, *NEEDS.get(key.name, ())]
    before = yaml_of(*needs)
    after = translate([*needs, f"{key.name}={other(key)}"], {})
    listed = [name for name, _ in after.no_effect]
    if key.name in LISTED:
        assert after.yaml == before
        return
    assert after.yaml != before
    assert key.name not in listed


@names("key", [key for key in SINGLE if key.effect == "mapped"], ids=by_name)
def test_a_mapped_key_that_changes_nothing_is_listed(key):
    """Whatever else the command says: a key changes the config, or is listed, or is refused by name."""
    before = yaml_of(*BASE)
    try:
        after = translate([*BASE, f"{key.name}={other(key)}"], {})
    except ConfigError as error:
        said = str(error)
    else:
        said = "".join(name for name, _ in after.no_effect + after.missing)
        if after.yaml != before or key.name == "actor_rollout_ref.actor.strategy":  # both values are FSDP2
            return
    assert key.name.rpartition(".")[2] in said


def test_keys_without_effect_are_listed_with_their_reasons():
    keys = [key for key in SINGLE if key.effect == "without effect"]
    after = translate([*BASE, *WITH_LOSS, *(f"{key.name}=7" for key in keys)], {})
    assert after.yaml == yaml_of(*BASE, *WITH_LOSS)
    assert dict(after.no_effect) == {key.name: key.because for key in keys}


def test_refused_keys_are_refused_by_name_and_say_what_would_fit():
    keys = [key for key in SINGLE if key.effect == "refused"]
    with pytest.raises(ConfigError) as caught:
        translate([*BASE, *WITH_LOSS, *WARM, *(f"{key.name}=unfit" for key in keys)], {})
    said = {problem.key: problem.message for problem in caught.value.problems}
    assert list(said) == [key.name for key in keys]
    for key in keys:
        assert said[key.name].startswith("given unfit")
        assert said[key.name].endswith(f": {key.refused}")


@names("key", SECTIONS, ids=by_name)
def test_a_section_stands_for_all_keys_below_it(key):
    name = f"{key.name}.something.below"
    assert find(name) is key
    if key.refused:
        with pytest.raises(ConfigError, match=re.escape(f"{name}: given 1: {key.refused}")):
            translate([*BASE, *WITH_LOSS, f"{name}=1"], {})
    elif key.because:
        found = dict(translate([*BASE, f"+{name}=1"], {}).no_effect)
        assert list(found) == [name]


@names("alias", [name for key in SINGLE for name in key.aliases])
def test_an_older_name_is_known(alias):
    assert alias in BY_NAME


# --- help and documentation ------------------------------------------------------------------------------------------


def test_the_help_names_every_key():
    text = render_help()
    assert all(key.name in text for key in KEYS)
    assert all(len(line) <= max(WIDTH, len(line.split("  (")[0])) or "(default" in line for line in text.splitlines())


def test_the_counts_in_the_documentation_are_those_of_the_table():
    document = DOCS.read_text()
    table = document.partition(BEGIN)[2].partition(END)[0].strip()
    assert table == render_table(), "python scripts/verl_table.py docs/verl.md"
