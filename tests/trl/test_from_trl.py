"""`hotseat.from_trl` with config objects of the installed TRL and PEFT."""

import dataclasses
import subprocess
import sys

import pytest
from trl_cases import trl_config

import hotseat
from hotseat.config import loads, to_yaml
from hotseat.config.batches import batch_algebra
from hotseat.errors import ConfigError

pytestmark = pytest.mark.slow


def translated(name="GRPOConfig", *, num_processes=None, peft_config=None, model="my/model", **values):
    return hotseat.from_trl(
        trl_config(name, **values), model=model, peft_config=peft_config, num_processes=num_processes
    )


def config_of(name="GRPOConfig", **values):
    return translated(name, **values).config


def refused(name="GRPOConfig", **values) -> dict[str, str]:
    """The fields that are refused, with the messages."""
    with pytest.raises(ConfigError) as caught:
        translated(name, **values)
    return {problem.key: problem.message for problem in caught.value.problems}


def as_run(config, *overrides):
    """The config as `hotseat.run` checks it."""
    return loads(to_yaml(config), overrides)


def stand_in(args, *, without=(), world_size=1, **changes):
    """An object of a class with TRL's name, as another version or another launch would make it."""
    names = [field.name for field in dataclasses.fields(args) if field.name not in without]
    made = dataclasses.make_dataclass(type(args).__name__, [*names, "world_size"])
    made.__module__ = type(args).__module__
    return made(**{name: getattr(args, name) for name in names} | changes, world_size=world_size)


def differences(name="GRPOConfig", **values) -> dict[str, str]:
    lines = translated(name, **values).differences
    return dict(line.split(": ", 1) for line in lines if ": " in line)


# --- defaults ---------------------------------------------------------------------------------------------------------


def test_grpos_defaults_are_carried_over():
    assert to_yaml(config_of()) == to_yaml(
        loads(
            """
actor:
  model: my/model
  optimizer:
    learning_rate: 1e-6
    schedule: linear
    min_learning_rate_ratio: 0.0
    warmup_ratio: 0.0
    betas: [0.9, 0.999]
reward: {clip: null}
rollout: {batch_size: 1, samples_per_prompt: 8, max_new_tokens: 512}
data: {input_key: prompt, max_length: 1536, max_lost_fraction: 0.0}
algorithm: {estimator: group_norm, aggregation: token_mean}
train: {batch_size: 8, num_episodes: 3, dtype: bf16, gradient_checkpointing: true}
checkpoint: {every: 500}
log: {every: 10}
"""
        )
    )


@pytest.mark.parametrize(
    ("name", "task", "rate"), [("SFTConfig", "sft", 2e-5), ("DPOConfig", "dpo", 1e-6), ("RewardConfig", "rm", 1e-4)]
)
def test_defaults_of_supervised_training_are_carried_over(name, task, rate):
    config = config_of(name)
    assert (config.task, config.actor.optimizer.learning_rate) == (task, rate)
    assert (config.train.batch_size, config.train.max_epochs, config.data.max_length) == (8, 3, 1024)
    assert (config.actor.optimizer.schedule, config.actor.optimizer.betas) == ("linear", (0.9, 0.999))


@pytest.mark.parametrize("name", ["GRPOConfig", "SFTConfig", "DPOConfig", "RewardConfig"])
def test_no_default_is_refused_or_listed_as_without_effect(name):
    lines = translated(name).differences
    assert [line.split(":")[0] for line in lines if "has no effect here" in line] == ["use_cpu"]


def test_what_differs_by_default_is_listed():
    told = differences()
    assert set(told) >= {"bf16", "scale_rewards", "max_completion_length", "router_aux_loss_coef", "save_total_limit"}
    assert "+ 1e-4, here it is + 1e-9" in told["scale_rewards"]
    assert "more than 1024 tokens" in told["max_completion_length"]


# --- batches ----------------------------------------------------------------------------------------------------------


def test_batches_of_completions_become_prompts_and_samples():
    # 16 completions x 4 accumulated x 2 processes: 128 in an optimizer step and in a rollout, 8 for each of 16 prompts.
    config = config_of(per_device_train_batch_size=16, gradient_accumulation_steps=4, num_processes=2)
    assert (config.rollout.batch_size, config.rollout.samples_per_prompt, config.train.batch_size) == (16, 8, 128)
    assert batch_algebra(config, num_ranks=2).optimizer_steps_per_step == 1


def test_a_generation_of_several_optimizer_steps_and_passes():
    # A rollout has 4 x 8 x 1 = 32 completions, 4 for each of 8 prompts; a step has 4 x 2 = 8, so 4 steps, in 3 passes.
    config = config_of(
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        steps_per_generation=8,
        num_generations=4,
        num_iterations=3,
    )
    assert (config.rollout.batch_size, config.rollout.samples_per_prompt, config.train.batch_size) == (8, 4, 8)
    assert config.train.max_epochs == 3
    assert batch_algebra(config, num_ranks=1).optimizer_steps_per_step == 12


def test_generation_batch_size_counts_completions():
    config = config_of(per_device_train_batch_size=8, generation_batch_size=64)
    assert (config.rollout.batch_size, config.train.batch_size) == (8, 8)
    assert "loss_type" in differences(per_device_train_batch_size=8, generation_batch_size=64)


def test_generations_within_an_optimizer_step_are_one_rollout():
    # Two generations of 16 completions by the same weights: 32 completions of 4 prompts.
    config = config_of(per_device_train_batch_size=8, gradient_accumulation_steps=4, steps_per_generation=2)
    assert (config.rollout.batch_size, config.train.batch_size) == (4, 32)
    told = refused(
        per_device_train_batch_size=8, gradient_accumulation_steps=4, steps_per_generation=2, num_iterations=2
    )
    assert "2 generations in an optimizer step" in told["num_iterations"]


def test_an_optimizer_step_over_parts_of_two_rollouts_is_refused():
    told = refused(gradient_accumulation_steps=2, steps_per_generation=3)
    assert "some would learn from two rollouts" in told["steps_per_generation"]


def test_a_generation_batch_of_another_number_of_processes_is_refused():
    assert "made for 1 process, on which" in refused(steps_per_generation=4, num_processes=2)["steps_per_generation"]
    assert config_of(steps_per_generation=4, num_processes=1).rollout.batch_size == 4


def test_a_number_of_processes_multiplies_batches_of_whole_groups():
    args = trl_config("GRPOConfig", per_device_train_batch_size=4, num_generations=4)
    assert hotseat.from_trl(args, num_processes=3).config.rollout.batch_size == 3
    # Launched as two processes, 8 completions are a group; as one, 4 are half of it.
    launched = stand_in(args, world_size=2, num_generations=8, generation_batch_size=8)
    assert hotseat.from_trl(launched).config.rollout.batch_size == 1
    with pytest.raises(ConfigError, match="4 completions in a rollout are not whole groups of num_generations, 8"):
        hotseat.from_trl(launched, num_processes=1)


def test_batches_of_pairs_and_rows():
    for name in ("SFTConfig", "DPOConfig", "RewardConfig"):
        config = config_of(name, per_device_train_batch_size=2, gradient_accumulation_steps=3, num_processes=4)
        assert config.train.batch_size == 24


def test_the_order_of_the_data_is_kept_where_trl_keeps_it():
    assert config_of().data.shuffle
    assert not config_of(shuffle_dataset=False).data.shuffle


def test_passes_are_whole():
    assert config_of(num_train_epochs=2).train.num_episodes == 2
    assert "passes are whole" in refused(num_train_epochs=0.5)["num_train_epochs"]


def test_a_number_of_steps_is_refused_with_the_rows_that_stand_for_it():
    # 100 optimizer steps, 4 of them in a rollout of 8 prompts: 25 rollouts, 200 prompts.
    told = refused(
        max_steps=100,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        steps_per_generation=8,
        num_generations=4,
    )
    assert "data.max_samples=200 " in told["max_steps"]
    assert "data.max_samples=160 " in refused("DPOConfig", max_steps=10, gradient_accumulation_steps=2)["max_steps"]


def test_steps_between_events_become_rollouts():
    values = {
        "steps_per_generation": 4,
        "save_steps": 20,
        "logging_steps": 8,
        "eval_strategy": "steps",
        "eval_steps": 6,
    }
    result = translated(**values)
    assert (result.config.checkpoint.every, result.config.log.every, result.config.eval.every) == (5, 2, 2)
    assert "eval_steps: every 6 optimizer steps there, every 8 here" in result.differences
    assert not [line for line in result.differences if line.startswith(("save_steps", "logging_steps"))]


# --- optimizer --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "schedule", "least", "warmup"),
    [
        ({"warmup_steps": 0.1}, "linear", 0.0, 0.1),
        ({"lr_scheduler_type": "cosine"}, "cosine", 0.0, 0.0),
        ({"lr_scheduler_type": "constant", "warmup_steps": 0.1}, "constant", None, 0.0),
        ({"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 0.1}, "constant", None, 0.1),
        (
            {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": 0.2}},
            *("cosine", 0.2, 0.0),
        ),
        (
            {
                "lr_scheduler_type": "cosine_with_min_lr",
                "lr_scheduler_kwargs": {"min_lr": 1e-6},
                "learning_rate": 4e-6,
            },
            *("cosine", 0.25, 0.0),
        ),
    ],
)
def test_schedules(values, schedule, least, warmup):
    optimizer = config_of(**values).actor.optimizer
    assert (optimizer.schedule, optimizer.warmup_ratio) == (schedule, warmup)
    assert least is None or optimizer.min_learning_rate_ratio == pytest.approx(least)


@pytest.mark.parametrize("warmup", [0, 0.25])
@pytest.mark.parametrize("kind", ["linear", "cosine"])
def test_learning_rates_are_those_of_transformers(kind, warmup):
    import torch
    from transformers import get_scheduler

    from hotseat.loop.settings.training_settings import train_options

    args = trl_config("GRPOConfig", lr_scheduler_type=kind, warmup_steps=warmup, learning_rate=1.0)
    ours = train_options(hotseat.from_trl(args).config, 12).schedule
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    theirs = get_scheduler(args.lr_scheduler_type, optimizer, args.get_warmup_steps(12), 12)
    for step in range(12):
        if step >= args.get_warmup_steps(12):
            assert ours.learning_rate(step) == pytest.approx(theirs.get_last_lr()[0])
        optimizer.step()
        theirs.step()


def test_what_no_schedule_or_optimizer_has_is_refused():
    assert "give it as such" in refused(warmup_steps=100)["warmup_steps"]
    assert "polynomial" in refused(lr_scheduler_type="polynomial")["lr_scheduler_type"]
    cycles = refused(lr_scheduler_type="cosine", lr_scheduler_kwargs={"num_cycles": 2})
    assert "num_cycles" in cycles["lr_scheduler_kwargs"]
    assert "give a mapping" in refused(lr_scheduler_kwargs="kwargs.json")["lr_scheduler_kwargs"]
    assert "adafactor" in refused(optim="adafactor")["optim"]


# --- precision --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "dtype", "has_masters"),
    [
        ({}, "bf16", True),
        ({"bf16": False}, "fp32", True),
        ({"model_init_kwargs": {"dtype": "bfloat16"}}, "bf16", False),
        ({"bf16": False, "model_init_kwargs": {"dtype": "bfloat16"}}, "bf16", False),
        ({"model_init_kwargs": {"dtype": "float32", "attn_implementation": "sdpa"}}, "bf16", True),
    ],
)
def test_precision(values, dtype, has_masters):
    train = config_of("SFTConfig", **values).train
    assert (train.dtype, train.fp32_master) == (dtype, has_masters)


def test_torchs_own_dtypes_are_taken():
    import torch

    assert not config_of(model_init_kwargs={"dtype": torch.bfloat16}).train.fp32_master


def test_fp16_needs_a_backend_that_scales_the_loss():
    train = config_of(fp16=True).train
    assert (train.dtype, train.backend) == ("fp16", "deepspeed")


def test_arguments_of_loading_a_model():
    assert config_of(model_init_kwargs={"trust_remote_code": True}).trust_remote_code
    assert config_of(trust_remote_code=True).trust_remote_code
    told = refused(model_init_kwargs={"revision": "v2", "quantization_config": {}})
    assert told["model_init_kwargs"].startswith("revision, quantization_config: ")
    assert "dtype auto" in refused(model_init_kwargs={"dtype": "auto"})["model_init_kwargs"]
    assert "the computation is in bf16" in refused(model_init_kwargs={"dtype": "float16"})["model_init_kwargs"]
    assert "give a mapping" in refused(model_init_kwargs="kwargs.json")["model_init_kwargs"]


# --- GRPO -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "aggregation", "policy_loss"),
    [
        ({}, "token_mean", "ppo"),
        ({"loss_type": "grpo"}, "sequence_mean", "ppo"),
        ({"loss_type": "dr_grpo"}, "constant", "ppo"),
        ({"loss_type": "bnpo"}, "token_mean", "ppo"),
        ({"loss_type": "cispo", "epsilon_high": 5.0}, "token_mean", "cispo"),
        ({"loss_type": "sapo"}, "sequence_mean", "sapo"),
        ({"importance_sampling_level": "sequence"}, "token_mean", "gspo"),
        ({"importance_sampling_level": "sequence", "loss_type": "grpo"}, "sequence_mean", "gspo"),
    ],
)
def test_loss_types(values, aggregation, policy_loss):
    algorithm = config_of(**values).algorithm
    assert (algorithm.aggregation, algorithm.policy_loss) == (aggregation, policy_loss)


@pytest.mark.parametrize("kind", ["luspo", "vespo"])
def test_losses_that_do_not_exist_here_are_refused(kind):
    assert kind in refused(loss_type=kind)["loss_type"]


def test_a_mean_over_micro_batches_is_refused_where_there_are_several():
    assert "dapo has that over all" in refused(loss_type="bnpo", gradient_accumulation_steps=2)["loss_type"]


def test_clip_ranges():
    algorithm = config_of(epsilon=0.1).algorithm
    assert (algorithm.clip_low, algorithm.clip_high, algorithm.dual_clip) == (0.1, 0.1, None)
    algorithm = config_of(epsilon=0.2, epsilon_high=0.28, delta=1.5).algorithm
    assert (algorithm.clip_low, algorithm.clip_high, algorithm.dual_clip) == (0.2, 0.28, 1.5)
    algorithm = config_of(loss_type="cispo", epsilon_high=5.0).algorithm
    assert (algorithm.clip_low, algorithm.clip_high) == (1.0, 4.0)


def test_the_gate_of_sapo_has_trls_temperatures():
    algorithm = config_of(loss_type="sapo", sapo_temperature_pos=0.9, sapo_temperature_neg=1.2, epsilon=0.1).algorithm
    assert (algorithm.gate_temperature_pos, algorithm.gate_temperature_neg) == (0.9, 1.2)
    assert "a ratio per token" in str(refused(loss_type="sapo", importance_sampling_level="sequence"))


def test_bounds_that_mean_something_else_are_refused():
    assert "clip good answers" in refused(epsilon_high=0.28, delta=1.2)["delta"]
    assert "above 1" in refused(loss_type="cispo")["epsilon_high"]
    assert "the levels are token and sequence" in refused(importance_sampling_level="turn")["importance_sampling_level"]
    assert "importance_sampling_level" in refused(
        loss_type="cispo", epsilon_high=5.0, importance_sampling_level="sequence"
    )


def test_rewards_that_are_normalised_apart_are_gdpo():
    found = translated(multi_objective_aggregation="normalize_then_sum", scale_rewards="batch")
    assert found.config.algorithm.estimator == "gdpo"
    assert any("give two or more reward.functions" in line for line in found.differences)
    assert "sum_then_normalize or" in refused(multi_objective_aggregation="product")["multi_objective_aggregation"]


def test_beta_is_k3_in_the_loss():
    kl = config_of(beta=0.04, use_bias_correction_kl=False).algorithm.kl
    assert (kl.coef, kl.as_loss, kl.estimator) == (0.04, True, "k3")
    assert "beta=0.04" in refused(beta=0.04)["use_bias_correction_kl"]
    assert config_of(use_bias_correction_kl=True).algorithm.kl.coef == 0


@pytest.mark.parametrize(
    ("scale", "estimator"), [("group", "group_norm"), (True, "group_norm"), ("none", "dr_grpo"), (False, "dr_grpo")]
)
def test_scale_rewards(scale, estimator):
    config = config_of(scale_rewards=scale)
    assert (config.algorithm.estimator, config.algorithm.aggregation) == (estimator, "token_mean")


def test_rewards_scaled_by_the_batch_are_refused():
    assert "batch" in refused(scale_rewards="batch")["scale_rewards"]


def test_sampling():
    config = config_of(temperature=0.7, top_p=0.9, top_k=20, max_completion_length=2048)
    rollout = config.rollout
    assert (rollout.temperature, rollout.top_p, rollout.top_k, rollout.max_new_tokens) == (0.7, 0.9, 20, 2048)
    assert (config.data.max_length, config.data.max_lost_fraction) == (3072, 0.0)
    assert [config_of(top_k=k).rollout.top_k for k in (None, -1)] == [0, 0]
    assert config_of(mask_truncated_completions=True).algorithm.mask_truncated


def test_masked_answers_count_otherwise_under_a_mean_over_answers():
    values = {"mask_truncated_completions": True}
    assert "mask_truncated_completions" not in differences(**values)
    assert "mask_truncated_completions" in differences(**values, loss_type="grpo")


def test_an_entropy_bonus_needs_the_mean_over_tokens():
    assert config_of(entropy_coef=0.01).algorithm.entropy_coef == 0.01
    assert config_of().algorithm.entropy_coef is None
    assert "entropy_coef" not in differences(entropy_coef=0.01)
    assert "micro-batches" in differences(entropy_coef=0.01, gradient_accumulation_steps=2)["entropy_coef"]
    assert "weighed like the loss" in refused(entropy_coef=0.01, loss_type="grpo")["entropy_coef"]


def test_vllm_and_its_correction():
    config = config_of(use_vllm=True, vllm_tensor_parallel_size=2, vllm_enable_sleep_mode=True)
    rollout, correction = config.rollout, config.algorithm.correction
    assert (rollout.engine, rollout.memory_share, rollout.tensor_parallel_size) == ("vllm", 0.3, 2)
    assert rollout.enable_offload is True
    assert (correction.kind, correction.low, correction.high) == ("seq-icepop", 0.0, 3.0)
    assert config_of(use_vllm=True, vllm_importance_sampling_correction=False).algorithm.correction.kind is None
    assert config_of().algorithm.correction.kind is None


@pytest.mark.parametrize(
    ("mode", "kind"), [("token_truncate", "tis"), ("token_mask", "icepop"), ("sequence_truncate", "seq-tis")]
)
def test_corrections(mode, kind):
    values = {"vllm_importance_sampling_mode": mode, "vllm_importance_sampling_clip_min": 0.5}
    correction = config_of(use_vllm=True, **values).algorithm.correction
    assert (correction.kind, correction.low, correction.high) == (kind, 0.5, 3.0)


def test_what_engines_cannot_do_is_refused():
    assert "vllm_mode" in refused(use_vllm=True, vllm_mode="server")
    assert (
        "name one"
        in refused(use_vllm=True, vllm_importance_sampling_clip_max=None)["vllm_importance_sampling_clip_max"]
    )
    assert (
        "the modes are" in refused(use_vllm=True, vllm_importance_sampling_mode="both")["vllm_importance_sampling_mode"]
    )
    told = refused(use_vllm=True, vllm_importance_sampling_mode="token_mask", importance_sampling_level="sequence")
    assert "one ratio per sequence" in told["vllm_importance_sampling_mode"]


def test_the_length_of_vllms_context_is_that_of_a_sequence():
    assert config_of(use_vllm=True, vllm_max_model_length=4096).data.max_length == 4096
    assert "no room for a prompt" in refused(use_vllm=True, vllm_max_model_length=512)["max_completion_length"]
    assert "name a number" in refused(max_completion_length=None)["max_completion_length"]


# --- SFT, DPO, reward models ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, ("text", None, False, False, False)),
        ({"dataset_text_field": "body"}, ("body", None, False, False, False)),
        ({"completion_only_loss": True}, ("prompt", "completion", False, False, False)),
        ({"completion_only_loss": False}, ("prompt", "completion", True, False, False)),
        ({"assistant_only_loss": True}, ("messages", None, False, True, True)),
    ],
)
def test_rows_of_sft(values, expected):
    data = config_of("SFTConfig", **values).data
    assert (data.input_key, data.output_key, data.pretrain_mode, data.apply_chat_template, data.multiturn) == expected


def test_what_sft_cannot_do_is_refused():
    told = refused("SFTConfig", loss_type="dft", packing=True, max_length=2048, neftune_noise_alpha=5.0)
    assert set(told) == {"loss_type", "packing", "neftune_noise_alpha"}
    assert "batches count rows" in told["packing"]
    assert "max_length" in refused("SFTConfig", max_length=None)
    assert config_of("SFTConfig", loss_type="chunked_nll").task == "sft"


def test_a_chat_template_is_a_file():
    data = config_of("RewardConfig", chat_template_path="mine.jinja").data
    assert (data.chat_template, data.apply_chat_template) == ("mine.jinja", True)
    assert "mine" in refused("RewardConfig", chat_template_path="mine")["chat_template_path"]


def test_dpo():
    config = config_of("DPOConfig", beta=0.3, precompute_ref_log_probs=True, max_length=512)
    assert (config.algorithm.dpo.loss, config.algorithm.dpo.beta, config.algorithm.dpo.precompute) == ("dpo", 0.3, True)
    assert (config.data.prompt_key, config.data.max_length, config.data.max_lost_fraction) == ("prompt", 512, 1.0)
    ipo = config_of("DPOConfig", loss_type="ipo").algorithm.dpo
    assert (ipo.loss, ipo.length_normalised) == ("ipo", True)
    assert config_of("DPOConfig", loss_weights=[1.0]).task == "dpo"


def test_other_losses_of_pairs_are_refused():
    assert "hinge" in refused("DPOConfig", loss_type="hinge")["loss_type"]
    told = refused("DPOConfig", loss_type=["sigmoid", "sft"], loss_weights=[1.0, 0.5], sync_ref_model=True)
    assert set(told) == {"loss_type", "loss_weights", "sync_ref_model"}
    assert "center_rewards_coefficient" in refused("RewardConfig", center_rewards_coefficient=0.01)


def test_label_smoothing_has_no_effect_on_dpos_loss_in_either():
    result = translated("DPOConfig", label_smoothing=0.1)
    assert result.config.algorithm.dpo.label_smoothing == 0.0
    assert [line for line in result.differences if line.startswith("label_smoothing: 0.1 has no effect here")]


# --- where a run's files go, and when ---------------------------------------------------------------------------------


def test_the_output_folder_is_the_runs():
    config = config_of(output_dir="out/maths")
    assert (config.run_dir, config.name) == ("out", "maths")
    assert (config_of().run_dir, config_of().name) == ("runs", None)


def test_trackers():
    config = config_of(report_to=["wandb", "trackio", "tensorboard"], run_name="one", project="mine")
    assert (config.log.wandb.enabled, config.log.wandb.run_name) == (True, "one")
    assert (config.log.trackio.project, config.log.trackio.run_name) == ("mine", "one")
    assert not config.log.mlflow.enabled
    assert "comet_ml" in refused(report_to=["comet_ml"])["report_to"]
    assert "kubeflow" in differences(report_to=["kubeflow"])["report_to"]


def test_checkpoints():
    checkpoint = config_of(save_steps=50, save_total_limit=2, save_only_model=True).checkpoint
    assert (checkpoint.every, checkpoint.keep_last, checkpoint.save_state) == (50, 2, False)
    assert config_of(save_strategy="no").checkpoint.every_minutes == 0
    assert "save_strategy" in refused(save_strategy="epoch")
    assert "save_steps" in refused(save_steps=0.1)


def test_evaluations_wait_for_their_data():
    result = translated(eval_strategy="steps", eval_steps=20, num_generations_eval=2, temperature=0.8)
    evaluation = result.config.eval
    assert (evaluation.every, evaluation.samples_per_prompt, evaluation.temperature) == (20, 2, 0.8)
    assert [line for line in result.differences if line.startswith("eval_strategy: set eval.path")]
    with pytest.raises(ConfigError, match="eval.path is not set"):
        as_run(result.config, "data.path=prompts.jsonl")
    assert as_run(result.config, "data.path=prompts.jsonl", "eval.path=held_out.jsonl").eval.every == 20
    assert "eval_strategy" in refused(eval_strategy="epoch")
    assert "a share of all steps" in refused(eval_strategy="steps", eval_steps=0.1)["eval_steps"]


def test_logs():
    assert config_of(logging_steps=5).log.every == 5
    assert "a share of all steps" in differences(logging_steps=0.5)["logging_steps"]
    assert "epoch" in differences(logging_strategy="epoch")["logging_strategy"]


# --- refusals and what has no effect ----------------------------------------------------------------------------------


def test_one_error_names_all_values_that_cannot_be_carried_over():
    told = refused(
        min_p=0.1,
        repetition_penalty=1.1,
        generation_kwargs={"num_beams": 2},
        top_entropy_quantile=0.2,
        sync_ref_model=True,
    )
    assert set(told) == {"min_p", "repetition_penalty", "generation_kwargs", "top_entropy_quantile", "sync_ref_model"}
    assert told["min_p"] == "0.1: engines sample by temperature, top-p and top-k"


def test_values_outside_of_our_ranges_name_the_field():
    assert refused(temperature=-1.0)["temperature"].startswith("rollout.temperature: ")
    assert refused(epsilon=1.5)["epsilon"].startswith("algorithm.clip_low: ")
    assert "beta" in refused("DPOConfig", beta=0.0)


def test_values_that_change_nothing_are_listed():
    told = differences(dataloader_num_workers=4, cast_lm_head_to_fp32=True, vllm_group_port=1234)
    assert told["dataloader_num_workers"].startswith("4 has no effect here: rows are tokenised")
    assert {"cast_lm_head_to_fp32", "vllm_group_port"} <= set(told)


def test_whole_numbers_are_defaults_too_and_secrets_are_not_shown():
    result = translated(repetition_penalty=1, hub_token="hf_secret")
    assert "secret" not in "".join(result.differences)
    assert [line for line in result.differences if line.startswith("hub_token: a value has no effect")]


def test_counts_by_which_others_are_divided_are_at_least_one():
    told = refused("DPOConfig", num_processes=0, gradient_accumulation_steps=0)
    assert told == dict.fromkeys(("gradient_accumulation_steps", "num_processes"), "given 0, must be at least 1")


def test_other_batches_of_the_accelerator_are_refused():
    assert "split_batches" in refused(accelerator_config={"split_batches": True})["accelerator_config"]
    assert "data_seed" in refused(data_seed=7)
    assert config_of(data_seed=42, accelerator_config={"even_batches": False}).seed == 42


@pytest.mark.parametrize(
    "values",
    [
        {"push_to_hub": True},
        {"load_best_model_at_end": True, "eval_strategy": "steps"},
        {"resume_from_checkpoint": "x"},
    ],
)
def test_what_would_be_missed_is_refused(values):
    assert next(iter(values)) in refused(**values)


def test_other_kernels():
    config = config_of(torch_compile=True, use_liger_kernel=True, gradient_checkpointing=False)
    assert (config.train.compile, config.train.liger_kernel, config.train.gradient_checkpointing) == (True, True, False)
    assert config_of().train.compile is None


def test_experts():
    assert config_of(router_aux_loss_coef=0.01).algorithm.aux_loss_coef == 0.01
    assert "router_aux_loss_coef" not in differences(router_aux_loss_coef=0.01)


# --- which objects are taken ------------------------------------------------------------------------------------------


def test_configs_of_other_trainers_are_refused():
    with pytest.raises(ConfigError, match=r"RLOOConfig is no config that is known here: GRPOConfig, SFTConfig"):
        hotseat.from_trl(trl_config("RLOOConfig"))
    with pytest.raises(ConfigError, match="builtins.dict"):
        hotseat.from_trl({})


def test_a_config_of_trls_experiments_that_inherits_is_refused():
    from trl import GRPOConfig

    made = dataclasses.make_dataclass("OtherConfig", [("factor", float, 2.0)], bases=(GRPOConfig,))
    made.__module__ = "trl.experimental.other.other_config"
    with pytest.raises(ConfigError, match=r"trl\.experimental\.other\.other_config\.OtherConfig"):
        hotseat.from_trl(made(use_cpu=True))


def test_a_users_class_that_inherits_is_taken_and_its_own_fields_are_not():
    from trl import GRPOConfig

    made = dataclasses.make_dataclass("MyConfig", [("factor", float, 2.0)], bases=(GRPOConfig,))
    assert hotseat.from_trl(made(use_cpu=True)).config.task == "rl"
    with pytest.raises(ConfigError, match=r"factor: 3.0: no field of TRL"):
        hotseat.from_trl(made(use_cpu=True, factor=3.0))


def test_fields_that_a_version_lacks_are_listed():
    # Without the field, the KL is not multiplied by the ratio.
    older = stand_in(trl_config("GRPOConfig", beta=0.1), without=["use_bias_correction_kl"])
    result = hotseat.from_trl(older)
    assert result.config.algorithm.kl.coef == 0.1
    assert [line for line in result.differences if line.endswith("read as unset: use_bias_correction_kl")]


def test_the_model_is_a_name():
    assert config_of(model="my/model").actor.model == "my/model"
    assert config_of(model=None).actor.model is None
    assert "object" in refused(model=object())["model"]


def test_the_config_runs_with_data_and_rewards():
    config = as_run(config_of(), "data.path=prompts.jsonl", "reward.function=reward.py")
    assert (config.data.path, config.rollout.samples_per_prompt, config.reward.clip) == ("prompts.jsonl", 8, None)


def test_neither_trl_nor_torch_is_imported_with_the_name():
    code = "import sys, hotseat; hotseat.from_trl; print(sorted({'trl', 'peft', 'torch', 'ray'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert result.stdout.strip() == "[]", result.stderr


@pytest.mark.parametrize("has_adapters", [False, True])
def test_a_translated_grpo_run_learns(task, has_adapters):
    # 4 prompts x 4 answers in a step, 8 prompts, 2 passes
    args = trl_config(
        *("GRPOConfig",),
        output_dir=str(task / "out" / "grpo"),
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        num_generations=4,
        max_completion_length=4,
        num_train_epochs=2,
        learning_rate=1e-2,
        logging_steps=1,
        beta=0.01,
        use_bias_correction_kl=False,
        bf16=False,
        report_to=[],
    )
    adapters = lora(r=2, target_modules="all-linear") if has_adapters else None
    config = hotseat.from_trl(args, model=task / "model", peft_config=adapters).config
    own = [f"data.path={task}/prompts.jsonl", "data.input_key=input", "data.label_key=label", "data.max_length=16"]
    run = hotseat.run(config, *own, f"reward.function={task}/reward.py", "cluster.runtime=local")
    assert run.path == task / "out" / "grpo"
    steps, rates = run.curve("learning_rate")
    assert (steps, rates[0]) == ([1, 2, 3, 4], pytest.approx(1e-2))
    assert rates == sorted(rates, reverse=True)
    assert all("kl" in record for record in run.metrics()[1:])


def test_a_translated_dpo_run_learns(task):
    args = trl_config(
        *("DPOConfig",),
        output_dir=str(task / "out" / "dpo"),
        per_device_train_batch_size=4,
        max_length=16,
        num_train_epochs=1,
        logging_steps=1,
        bf16=False,
        report_to=[],
    )
    config = hotseat.from_trl(args, model=task / "model").config
    run = hotseat.run(config, f"data.path={task}/pairs.jsonl", "cluster.runtime=local")
    _, losses = run.curve("loss")
    assert losses[0] == pytest.approx(0.6931, abs=1e-3)


# --- adapters ---------------------------------------------------------------------------------------------------------


def lora(**values):
    from peft import LoraConfig

    return LoraConfig(**{"target_modules": ["v_proj", "q_proj"]} | values)


def test_adapters():
    adapters = config_of(peft_config=lora(r=16, lora_alpha=32, lora_dropout=0.05, task_type="CAUSAL_LM")).train.lora
    assert (adapters.rank, adapters.alpha, adapters.dropout) == (16, 32, 0.05)
    assert adapters.target_modules == ["q_proj", "v_proj"]
    assert config_of(peft_config=lora(target_modules="all-linear")).train.lora.target_modules == "all-linear"
    assert (config_of(peft_config=lora()).train.lora.rank, config_of(peft_config=lora()).train.lora.alpha) == (8, 8)


def test_other_options_of_adapters_are_refused_by_name():
    told = refused(peft_config=lora(use_rslora=True, modules_to_save=["lm_head"], rank_pattern={"q": 2}, bias="all"))
    assert set(told) == {f"peft_config.{name}" for name in ("use_rslora", "modules_to_save", "rank_pattern", "bias")}
    assert "q_proj" in refused(peft_config=lora(target_modules=None))["peft_config.target_modules"]


def test_adapters_without_a_rank_are_refused():
    assert "has no effect: train.lora.rank is 0" in refused(peft_config=lora(r=0))["peft_config.lora_alpha"]


def test_other_methods_of_peft_are_refused():
    from peft import LoHaConfig

    assert "LoHaConfig" in refused(peft_config=LoHaConfig())["peft_config"]


def test_a_reward_model_and_pairs_take_adapters():
    for name in ("SFTConfig", "DPOConfig", "RewardConfig"):
        assert config_of(name, peft_config=lora(r=4)).train.lora.rank == 4
