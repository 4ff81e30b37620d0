"""RLinf's configs in our keys."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from rlinf_table import main as write_table

from hotseat.cli.main import main
from hotseat.config import loads
from hotseat.errors import ConfigError
from hotseat.rlinf.config_keys import TABLE, translate

DOCUMENT = Path(__file__).parents[2] / "docs" / "rlinf.md"

MATH = """
hydra: {run: {dir: .}}
cluster:
  num_nodes: 1
  num_gpus_per_node: 8
  component_placement: {"actor,rollout": all}
runner: {task_type: math, max_epochs: 5, max_steps: -1, save_interval: 50, val_check_interval: -1, seq_length: 2048,
  experiment_name: grpo-1.5b, output_dir: results}
algorithm: {group_size: 8, n_minibatches: 4, adv_type: grpo, loss_agg_func: token-mean, kl_beta: 0.0,
  ratio_clip_eps: 0.2, entropy_bonus: 0.0, training_batch_size_per_gpu: 2,
  sampling_params: {temperature: 1.0, top_k: 1000000, top_p: 1.0,
  max_new_tokens: 1024}}
rollout: {group_name: RolloutGroup, gpu_memory_utilization: 0.55, model_dir: my-model, model_arch: qwen2.5,
  rollout_backend: sglang}
actor: {group_name: ActorGroup, seed: 1234, training_backend: megatron, model: {precision: bf16, activation: swiglu},
  optim: {lr: 2.0e-5, adam_beta1: 0.9, adam_beta2: 0.98, weight_decay: 0.05, clip_grad: 1.0, overlap_grad_reduce: true}}
data: {type: math, max_prompt_length: 1024, rollout_batch_size: 64, prompt_key: question, train_data_paths: [a.jsonl]}
"""


def test_a_config_for_mathematics_becomes_ours_and_the_rest_is_listed(tmp_path, capsys):
    path = tmp_path / "rlinf.yaml"
    path.write_text(MATH)
    assert main(["rlinf-config", str(path), "reward.function=reward.py"]) == 0
    printed = capsys.readouterr()
    config = loads(printed.out)
    assert (config.actor.model, config.name, config.run_dir, config.seed) == ("my-model", "grpo-1.5b", "results", 1234)
    assert (config.rollout.batch_size, config.rollout.samples_per_prompt, config.train.batch_size) == (64, 8, 128)
    assert (config.algorithm.estimator, config.algorithm.clip_high) == ("group_norm", 0.2)
    assert (config.rollout.top_k, config.rollout.max_new_tokens, config.rollout.memory_share) == (0, 1024, 0.55)
    assert config.actor.optimizer.betas == (0.9, 0.98)
    assert (config.data.path, config.data.input_key, config.checkpoint.every) == ("a.jsonl", "question", 50)
    assert config.cluster.component_placement == {"actor,rollout": "all"}
    lines = printed.err.splitlines()
    assert "no effect here: runner.max_steps because steps follow from the data and runner.max_epochs" in lines
    named = [line.split()[3] for line in lines]
    assert {"hydra.run.dir", "cluster.num_gpus_per_node", "actor.model.activation", "data.type"} <= set(named)
    assert {"rollout.group_name", "rollout.model_arch", "actor.optim.overlap_grad_reduce"} <= set(named)


HYBRID = """
cluster:
  num_nodes: 1
  component_placement:
    actor: 0-7
    env: 0-3
    rollout: 4-7
"""
OFFLOAD = """
env: {enable_offload: True}
rollout: {enable_offload: True}
actor: {enable_offload: False}
"""


def printed_of(tmp_path, capsys, text):
    (tmp_path / "part.yaml").write_text(text)
    assert main(["rlinf-config", str(tmp_path / "part.yaml")]) == 0
    return capsys.readouterr().out


def test_a_placement_alone_is_printed_with_what_it_means(tmp_path, capsys):
    printed = printed_of(tmp_path, capsys, HYBRID)
    assert yaml.safe_load(printed) == yaml.safe_load(HYBRID)
    assert [line for line in printed.splitlines() if line.startswith("#")][:4] == [
        "# hybrid on 1 node of 8 devices, if it has as many:",
        "#   actor    8 processes on 0-7, shared with env, rollout",
        "#   env      4 processes on 0-3, shared with actor",
        "#   rollout  4 processes on 4-7, shared with actor",
    ]


def test_offload_settings_alone_are_printed_with_what_they_mean(tmp_path, capsys):
    printed = printed_of(tmp_path, capsys, OFFLOAD)
    assert yaml.safe_load(printed) == yaml.safe_load(OFFLOAD)
    assert (
        "# env, rollout: offloaded in every phase that does not need them (unset: where the memory is needed)\n"
        in printed
    )
    assert "# actor: never offloaded (unset: where the memory is needed)\n" in printed


def test_a_placement_on_more_devices_than_there_are_is_refused(tmp_path, capsys):
    (tmp_path / "part.yaml").write_text("cluster: {num_gpus_per_node: 4, component_placement: {actor: 0-7}}")
    assert main(["rlinf-config", str(tmp_path / "part.yaml")]) == 2
    assert "actor" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text", ["", "cluster: {}", "cluster: {num_nodes: 1, other: 2}", "model: {enable_offload: true}"]
)
def test_what_is_neither_a_config_nor_a_part_of_one_is_refused(tmp_path, capsys, text):
    (tmp_path / "part.yaml").write_text(text or "{}")
    assert main(["rlinf-config", str(tmp_path / "part.yaml")]) == 2
    assert "no config of RLinf" in capsys.readouterr().err


EMBODIED = """
cluster: {num_nodes: 1, component_placement: {actor: 0-7, env: 0-3, rollout: 4-7}}
runner: {task_type: embodied, max_epochs: 1000, val_check_interval: -1, save_interval: 40, seq_length: 4096}
algorithm: {group_size: 4, rollout_epoch: 2, reward_type: chunk_level, logprob_type: token_level, adv_type: gae,
  value_clip: 0.2, huber_delta: 10.0, gamma: 0.99, gae_lambda: 0.95, clip_ratio_high: 0.28, clip_ratio_low: 0.2,
  sampling_params: {temperature_train: 1.2, temperature_eval: 0.6},
  entropy_type: token_level, length_params: {max_length: 1024}}
env: {enable_offload: true, train: {total_num_envs: 128, max_episode_steps: 80, auto_reset: true}}
rollout: {backend: huggingface, enable_offload: true, pipeline_stage_num: 2, model: {model_path: my-vla}}
actor: {training_backend: fsdp, micro_batch_size: 40, global_batch_size: 640, enable_offload: true,
  model: {model_path: my-vla, num_action_chunks: 8, is_lora: true, lora_rank: 32},
  optim: {lr: 1.0e-4, value_lr: 3.0e-3, critic_warmup_steps: 3}, fsdp_config: {gradient_checkpointing: true}}
"""


def test_a_config_for_simulators_becomes_ours_and_counts_episodes(tmp_path, capsys):
    path = tmp_path / "rlinf.yaml"
    path.write_text(EMBODIED)
    assert main(["rlinf-config", str(path), "env.path=babyai", "eval.every=5", "env.eval_seeds=8"]) == 0
    printed = capsys.readouterr()
    config = loads(printed.out)
    # 128 simulators play two episodes each; four episodes are a group.
    assert (config.env.num_envs, config.rollout.batch_size, config.rollout.samples_per_prompt) == (32, 64, 4)
    assert (config.env.chunk, config.env.max_steps, config.rollout.pipeline_stage_num) == (8, 80, 2)
    assert (config.algorithm.time_step, config.algorithm.ratio_step) == ("chunk", "token")
    assert config.algorithm.estimator == "gae"
    assert (config.critic.value_clip, config.critic.warmup_steps) == (0.2, 3)
    assert config.critic.optimizer.learning_rate == 3e-3
    assert (config.rollout.temperature, config.eval.temperature, config.rollout.engine) == (1.2, 0.6, "transformers")
    assert config.train.lora.rank == 32
    default = loads("")
    for name in ("batch_size", "micro_batch_size", "num_episodes"):
        assert getattr(config.train, name) == getattr(default.train, name)
    reasons = {line.split()[3]: line for line in printed.err.splitlines()}
    assert "it counts chunks of actions" in reasons["actor.global_batch_size"]
    assert "steps follow from env.tasks, env.num_seeds" in reasons["runner.max_epochs"]
    assert {"algorithm.entropy_type", "algorithm.huber_delta", "env.train.auto_reset"} <= reasons.keys()
    assert not {"actor.model.lora_rank", "algorithm.rollout_epoch"} & reasons.keys()
    assert not {"algorithm.reward_type", "algorithm.logprob_type"} & reasons.keys()


@pytest.mark.parametrize(
    ("types", "steps"),
    [
        (
            {"reward_type": "chunk_level", "logprob_type": "action_level"},
            {"time_step": "chunk", "ratio_step": "action"},
        ),
        (
            {"reward_type": "action_level", "logprob_type": "token_level"},
            {"time_step": "action", "ratio_step": "token"},
        ),
        ({"reward_type": "chunk_level", "logprob_type": "chunk_level"}, {"time_step": "chunk"}),
        ({"logprob_type": "chunk_level"}, {"time_step": "chunk"}),
        ({"reward_type": "action_level"}, {"time_step": "action"}),
        ({"reward_type": None, "logprob_type": "token_level"}, {"time_step": "token"}),
    ],
)
def test_the_units_of_rewards_and_of_ratios_are_taken(types, steps):
    assert translate({"runner": {}, "algorithm": types}).values["algorithm"] == steps


@pytest.mark.parametrize(
    ("types", "message"),
    [
        (
            {"reward_type": "action_level", "logprob_type": "chunk_level"},
            "algorithm.logprob_type: chunk_level is longer than .* set reward_type to chunk_level",
        ),
        ({"logprob_type": "sequence_token_level"}, "'sequence_token_level' has no counterpart here; .* token_level"),
        ({"reward_type": "token_level"}, "algorithm.reward_type: 'token_level' has no counterpart here"),
    ],
)
def test_units_without_a_counterpart_are_refused(types, message):
    with pytest.raises(ConfigError, match=message):
        translate({"runner": {}, "algorithm": types})


def test_episodes_of_a_step_that_make_no_whole_groups_are_refused():
    values = {
        "runner": {"task_type": "embodied"},
        "env": {"train": {"total_num_envs": 6}},
        "algorithm": {"group_size": 4},
    }
    with pytest.raises(ConfigError, match="6 episodes of a step .* are no multiple of 4"):
        translate(values)


def test_keys_whose_counterpart_has_no_effect_are_listed(tmp_path, capsys):
    path = tmp_path / "rlinf.yaml"
    path.write_text(EMBODIED.replace("adv_type: gae", "adv_type: grpo"))
    assert main(["rlinf-config", str(path), "env.path=babyai"]) == 0
    printed = capsys.readouterr()
    assert "critic" not in printed.out
    reasons = {line.split()[3] for line in printed.err.splitlines()}
    assert {"algorithm.value_clip", "algorithm.gae_lambda", "actor.optim.value_lr"} <= reasons
    assert "algorithm.sampling_params.temperature_eval" in reasons  # nothing is evaluated


def test_epochs_without_simulators_are_listed():
    for task in ("embodied", "reasoning"):
        values = {"runner": {"task_type": task}, "algorithm": {"rollout_epoch": 2}}
        assert "algorithm.rollout_epoch" in dict(translate(values).no_effect)


# What RLinf computes: its estimators, then `normalize_advantages` over the batch, whichever the estimator was.
@pytest.mark.parametrize(
    ("algorithm", "ours", "without_effect"),
    [
        ({"adv_type": "grpo"}, {"estimator": "group_norm"}, []),
        ({"adv_type": "grpo", "normalize_advantages": False}, {"estimator": "group_norm"}, []),
        (
            {"adv_type": "grpo", "normalize_advantages": True},
            {"estimator": "group_norm", "batch_norm": True},
            [],
        ),
        ({"adv_type": "gae", "normalize_advantages": True}, {"estimator": "gae"}, []),
        ({"adv_type": "gae", "normalize_advantages": False}, {"estimator": "gae", "batch_norm": False}, []),
        ({"adv_type": "reinpp", "normalize_advantages": True}, {"estimator": "reinforce"}, []),
        (
            {"adv_type": "reinpp", "normalize_advantages": False},
            {"estimator": "reinforce"},
            ["algorithm.normalize_advantages"],
        ),
        ({"adv_type": "reinpp", "gamma": 0.9}, {"estimator": "reinforce"}, ["algorithm.gamma"]),
        ({"adv_type": "reinpp", "use_reinpp_baseline": True}, {"estimator": "reinforce_baseline"}, []),
        ({"adv_type": "reinpp", "use_reinpp_baseline": False}, {"estimator": "reinforce"}, []),
        (
            {"adv_type": "grpo", "use_reinpp_baseline": True},
            {"estimator": "group_norm"},
            ["algorithm.use_reinpp_baseline"],
        ),
        ({"adv_type": "raw"}, {"estimator": "reinforce", "batch_norm": False}, []),
        ({"adv_type": "raw", "normalize_advantages": False}, {"estimator": "reinforce", "batch_norm": False}, []),
        ({"adv_type": "raw", "normalize_advantages": True}, {"estimator": "reinforce"}, []),
        ({"adv_type": "raw", "gamma": 0.9}, {"estimator": "reinforce", "batch_norm": False}, ["algorithm.gamma"]),
    ],
)
def test_an_estimator_and_its_normalisation_are_taken(algorithm, ours, without_effect):
    translation = translate({"runner": {}, "algorithm": algorithm})
    assert translation.values["algorithm"] == ours
    assert [key for key, _ in translation.no_effect] == without_effect
    assert translation.values["reward"] == {"clip": None}  # RLinf does not clip


@pytest.mark.parametrize(
    ("algorithm", "kl"),
    [
        (
            {"adv_type": "grpo", "kl_beta": 0.1, "kl_penalty_type": "low_var_kl"},
            {"coef": 0.1, "estimator": "k3", "as_loss": True},
        ),
        ({"adv_type": "reinpp", "kl_beta": 0.1}, {"coef": 0.1, "as_loss": True}),
        (
            {"adv_type": "reinpp", "kl_beta": 0.0, "reinpp_kl_beta": 0.2, "kl_penalty_type": "kl"},
            {"coef": 0.2, "estimator": "k1"},
        ),
        ({"adv_type": "grpo", "kl_beta": 0.0}, {"coef": 0.0}),
    ],
)
def test_the_kl_is_in_the_loss_or_in_the_reward_of_reinpp(algorithm, kl):
    translation = translate({"runner": {}, "algorithm": algorithm})
    assert (translation.values["algorithm"]["kl"], translation.no_effect) == (kl, [])


def test_a_kl_that_rlinf_leaves_out_is_listed_and_one_in_both_places_is_refused():
    translation = translate({"runner": {}, "algorithm": {"adv_type": "grpo", "reinpp_kl_beta": 0.2}})
    assert [key for key, _ in translation.no_effect] == ["algorithm.reinpp_kl_beta"]
    assert "kl" not in translation.values["algorithm"]
    both = {"adv_type": "reinpp", "kl_beta": 0.1, "reinpp_kl_beta": 0.2}
    with pytest.raises(ConfigError, match="reinpp_kl_beta: 0.2, and algorithm.kl_beta is 0.1: .* set one of them to 0"):
        translate({"runner": {}, "algorithm": both})


def test_places_of_keys_in_newer_configs_are_known():
    values = {
        "runner": {"task_type": "embodied"},
        "cluster": {"component_placement": {"env": "0-3"}},
        "algorithm": {"group_size": 2, "update_epoch": 8},
        "env": {"train": {"total_num_envs": 8, "rollout_epoch": 2}},
        "rollout": {
            "generation_backend": "huggingface",
            "sampling_params": {"temperature_train": 1.2, "temperature_eval": 0.6, "top_k": 0},
        },
        "actor": {"model": {"is_lora": True, "lora_rank": 32}},
    }
    translation = translate(values)
    assert [key for key, _ in translation.no_effect] == ["runner.task_type"]
    ours = translation.values
    assert (ours["train"]["max_epochs"], ours["rollout"]["batch_size"], ours["env"]["num_envs"]) == (8, 8, 2)
    assert (ours["rollout"]["temperature"], ours["rollout"]["top_k"], ours["eval"]["temperature"]) == (1.2, 0, 0.6)
    assert ours["rollout"]["engine"] == "transformers"
    assert ours["train"]["lora"] == {"rank": 32, "alpha": 32}  # RLinf scales adapters by 1


def test_an_estimator_without_counterpart_is_refused():
    with pytest.raises(ConfigError, match="algorithm.adv_type: 'opd' has no counterpart here; .* grpo, gae"):
        translate({"runner": {}, "algorithm": {"adv_type": "opd"}})


@pytest.mark.parametrize(
    ("algorithm", "clips"),
    [
        ({"ratio_clip_eps": 0.1}, (0.1, 0.1)),
        ({"clip_ratio_low": 0.3, "ratio_clip_eps": 0.1}, (0.3, 0.1)),
        ({"ratio_clip_eps": 0.1, "clip_ratio_low": 0.3}, (0.3, 0.1)),
        ({"clip_ratio_high": 0.4, "ratio_clip_eps": 0.1, "clip_ratio_low": None}, (0.1, 0.4)),
    ],
)
def test_the_common_clip_range_gives_way_in_any_order(algorithm, clips):
    found = translate({"runner": {}, "algorithm": algorithm}).values["algorithm"]
    assert (found["clip_low"], found["clip_high"]) == clips


@pytest.mark.parametrize(
    ("cluster", "num_envs"),
    [
        ({"component_placement": {"env": "0-3", "rollout": "4-7"}}, 16),
        ({"component_placement": {"env,rollout": "0-1,3:2-3"}}, 16),
        ({"component_placement": {"env": 0}}, 64),
        ({"component_placement": {"env": {"node_group": "a", "placement": "0-7"}}}, 8),
        ({"component_placement": {"actor,env,rollout": "all"}, "num_nodes": 1, "num_gpus_per_node": 8}, 8),
    ],
)
def test_simulators_are_divided_among_the_processes_of_env(cluster, num_envs):
    values = {"runner": {}, "cluster": cluster, "env": {"train": {"total_num_envs": 64}}}
    assert translate(values).values["env"]["num_envs"] == num_envs


def test_simulators_that_cannot_be_divided_are_named():
    values = {"runner": {}, "env": {"train": {"total_num_envs": 64}}}
    for placement in ({}, {"env": "all"}, {"env": "@actor"}):
        translation = translate({**values, "cluster": {"component_placement": placement}})
        assert "env" not in translation.values
        [(key, because)] = translation.no_effect
        assert (key, "set env.num_envs to 64 divided by them" in because) == ("env.train.total_num_envs", True)
    with pytest.raises(ConfigError, match="64 simulators cannot be divided evenly among 3 processes of env"):
        translate({**values, "cluster": {"component_placement": {"env": "0-2"}}})


def test_a_file_that_is_not_rlinfs_is_refused(tmp_path, capsys):
    path = tmp_path / "ours.yaml"
    path.write_text("actor: {model: m}\n")
    assert main(["rlinf-config", str(path)]) == 2
    assert "has no section runner, so it is no config of RLinf" in capsys.readouterr().err


def test_interpolations_are_resolved(tmp_path, capsys):
    pytest.importorskip("omegaconf")
    path = tmp_path / "rlinf.yaml"
    path.write_text(
        MATH.replace(
            "max_new_tokens: 1024", "max_new_tokens: '${subtract:${runner.seq_length},${data.max_prompt_length}}'"
        )
    )
    assert main(["rlinf-config", str(path), "reward.function=reward.py", "run_dir=elsewhere"]) == 0
    config = loads(capsys.readouterr().out)
    assert (config.rollout.max_new_tokens, config.run_dir) == (1024, "elsewhere")
    path.write_text("runner: {seq_length: '${nothing.there}'}\n")
    assert main(["rlinf-config", str(path)]) == 2
    assert "an interpolation cannot be resolved" in capsys.readouterr().err


def test_the_table_in_the_docs_is_up_to_date(tmp_path):
    copy = tmp_path / "rlinf.md"
    copy.write_text(DOCUMENT.read_text())
    write_table([str(copy)])
    assert copy.read_text() == DOCUMENT.read_text(), "run: python scripts/rlinf_table.py docs/rlinf.md"
    assert len({key.theirs for key in TABLE}) == len(TABLE)
