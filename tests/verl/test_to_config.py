"""Keys that depend on one another, and what they become."""

import pytest

from hotseat.errors import ConfigError
from hotseat.verl.key_values import AGGREGATIONS, ESTIMATORS, KL_ESTIMATORS, LOSSES
from hotseat.verl.to_config import translate

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
BASE = ["actor_rollout_ref.model.path=m", "critic.model.path=c", f"{ROLLOUT}.name=vllm"]
GRPO = ["algorithm.adv_estimator=grpo", f"{ROLLOUT}.n=2"]


def config(*argv):
    return translate([*BASE, *argv], {}).config


def no_effect(*argv):
    return dict(translate([*BASE, *argv], {}).no_effect)


def refused(*argv):
    with pytest.raises(ConfigError) as caught:
        translate([*BASE, *argv], {})
    return str(caught.value)


@pytest.mark.parametrize(
    ("argv", "placed"),
    [
        ([], {"actor": "1x8", "critic": "@actor", "rollout": "@actor"}),
        (GRPO, {"actor": "1x8", "rollout": "@actor"}),
        (["trainer.nnodes=2", "trainer.n_gpus_per_node=4"], {"actor": "2x4", "critic": "@actor", "rollout": "@actor"}),
        ([*GRPO, f"{ACTOR}.use_kl_loss=True"], {"actor": "1x8", "reference": "@actor", "rollout": "@actor"}),
        ([*GRPO, "trainer.device=cpu", "trainer.n_gpus_per_node=2"], {"actor": "cpu*2", "rollout": "@actor"}),
        ([*GRPO, "trainer.n_gpus_per_node=0"], {"actor": "cpu*1", "rollout": "@actor"}),
    ],
)
def test_all_models_are_on_the_actors_devices(argv, placed):
    assert config(*argv).cluster.component_placement == placed


@pytest.mark.parametrize("theirs", ESTIMATORS)
def test_estimators_have_our_names(theirs):
    found = config(f"algorithm.adv_estimator={theirs}", f"{ROLLOUT}.n=2").algorithm
    assert found.estimator == ESTIMATORS[theirs]


def test_an_estimator_that_is_not_here_is_refused_with_those_that_are():
    said = refused("algorithm.adv_estimator=remax")
    assert "algorithm.adv_estimator: given 'remax', must be one of gae, grpo," in said


def test_grpo_without_the_deviation_keeps_verls_mean_over_tokens():
    found = config(*GRPO, "algorithm.norm_adv_by_std_in_grpo=False").algorithm
    assert (found.estimator, found.std_norm, found.aggregation) == ("group_norm", False, "token_mean")


@pytest.mark.parametrize("theirs", [*AGGREGATIONS])
def test_aggregations_have_our_names(theirs):
    assert config(f"{ACTOR}.loss_agg_mode={theirs}").algorithm.aggregation == AGGREGATIONS[theirs]


@pytest.mark.parametrize("theirs", ["token-sum", "seq-mean-token-sum"])
def test_sums_of_tokens_are_refused(theirs):
    assert f"given '{theirs}', must be one of token-mean" in refused(f"{ACTOR}.loss_agg_mode={theirs}")


def test_the_constant_of_an_aggregation_is_the_longest_answer():
    mode = f"{ACTOR}.loss_agg_mode=seq-mean-token-sum-norm"
    assert config(mode, f"{ACTOR}.loss_scale_factor=512").algorithm.aggregation == "constant"
    assert "give data.max_response_length, or null" in refused(mode, f"{ACTOR}.loss_scale_factor=100")


@pytest.mark.parametrize("theirs", LOSSES)
def test_losses_have_our_names_and_only_vanilla_has_a_dual_clip(theirs):
    found = config(f"{ACTOR}.policy_loss.loss_mode={theirs}").algorithm
    assert found.policy_loss == LOSSES[theirs]
    assert found.dual_clip == (3.0 if theirs == "vanilla" else None)


def test_gspo_has_the_mean_of_sequences_as_in_verl():
    argv = [f"{ACTOR}.policy_loss.loss_mode=gspo", f"{ACTOR}.loss_agg_mode=token-mean"]
    assert config(*argv).algorithm.aggregation == "sequence_mean"
    assert f"{ACTOR}.loss_agg_mode" in no_effect(*argv)


def test_clip_ratio_counts_only_where_a_side_is_null():
    assert no_effect(f"{ACTOR}.clip_ratio=0.3")[f"{ACTOR}.clip_ratio"].startswith("clip_ratio_low and clip_ratio_high")
    found = config(f"{ACTOR}.clip_ratio=0.3", f"{ACTOR}.clip_ratio_low=null", f"{ACTOR}.clip_ratio_high=0.28").algorithm
    assert (found.clip_low, found.clip_high) == (0.3, 0.28)


@pytest.mark.parametrize("theirs", KL_ESTIMATORS)
def test_a_kl_in_the_loss(theirs):
    found = config(*GRPO, f"{ACTOR}.use_kl_loss=True", f"{ACTOR}.kl_loss_type={theirs}", f"{ACTOR}.kl_loss_coef=0.01")
    kl = found.algorithm.kl
    assert (kl.coef, kl.as_loss, kl.estimator) == (0.01, True, KL_ESTIMATORS[theirs])
    assert kl.allow_k1_loss == (kl.estimator == "k1")


def test_a_kl_in_the_reward():
    kl = config("algorithm.use_kl_in_reward=True").algorithm.kl
    assert (kl.coef, kl.as_loss, kl.estimator, kl.target) == (0.001, False, "k1", None)
    small = ["data.train_batch_size=64", f"{ACTOR}.ppo_mini_batch_size=64"]
    kl = config("algorithm.use_kl_in_reward=True", "algorithm.kl_ctrl.type=adaptive", *small).algorithm.kl
    assert (kl.target, kl.horizon) == (0.1, 10000)


@pytest.mark.parametrize("word", ["abs", "full", "k3+"])
def test_other_estimates_of_the_kl_are_refused(word):
    assert f"given '{word}', must be one of kl," in refused(f"{ACTOR}.use_kl_loss=True", f"{ACTOR}.kl_loss_type={word}")


def test_a_kl_in_reward_and_loss_is_refused():
    assert "in the reward or in the loss" in refused("algorithm.use_kl_in_reward=True", f"{ACTOR}.use_kl_loss=True")


@pytest.mark.parametrize(
    ("argv", "kind", "low", "high"),
    [
        (["rollout_is=token"], "tis", 0.0, 2.0),
        (["rollout_is=sequence", "rollout_is_threshold=3"], "seq-tis", 0.0, 3.0),
        (["rollout_is=token", "rollout_is_threshold=0.5_5.0"], "icepop", 0.5, 5.0),
        (["rollout_is=sequence", "rollout_is_threshold='0.5_5.0'"], "seq-icepop", 0.5, 5.0),
    ],
)
def test_the_correction_of_the_gap_to_the_engine(argv, kind, low, high):
    found = config(*GRPO, *(f"algorithm.rollout_correction.{word}" for word in argv)).algorithm.correction
    assert (found.kind, found.low, found.high) == (kind, low, high)


def test_rejected_answers():
    at = "algorithm.rollout_correction"
    found = config(*GRPO, f"{at}.rollout_rs=seq_mean_k1", f"{at}.rollout_rs_threshold=0.9_1.1").algorithm.correction
    assert (found.reject, found.reject_low, found.reject_high) == ("k1", 0.9, 1.1)
    assert "is null: give a number" in refused(f"{at}.rollout_rs=seq_mean_k3")
    assert "must be one of seq_mean_k1" in refused(f"{at}.rollout_rs=token_k1", f"{at}.rollout_rs_threshold=2")


def test_a_mini_batch_counts_prompts_as_in_verl():
    found = config(*GRPO, "data.train_batch_size=64", f"{ACTOR}.ppo_mini_batch_size=16", f"{ROLLOUT}.n=5")
    assert (found.rollout.batch_size, found.rollout.samples_per_prompt, found.train.batch_size) == (64, 5, 80)
    assert "given 256 prompts, must divide data.train_batch_size, 8" in refused("data.train_batch_size=8")
    said = refused("data.train_batch_size=64", f"{ACTOR}.ppo_mini_batch_size=48")
    assert "given 48 prompts, must divide data.train_batch_size, 64" in said
    said = refused(f"{ACTOR}.ppo_micro_batch_size_per_gpu=3")
    assert "given 256 prompts of 1 samples, which 8 ranks do not share evenly in micro-batches of 3" in said


def test_micro_batches_by_samples_or_by_tokens():
    found = config(f"{ACTOR}.ppo_micro_batch_size_per_gpu=4", f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=8")
    assert (found.train.micro_batch_size, found.rollout.micro_batch_size) == (4, 8)
    argv = [f"{ACTOR}.use_dynamic_bsz=True", f"{ACTOR}.ppo_micro_batch_size_per_gpu=4"]
    found = config(*argv)
    assert (found.train.max_tokens_per_device, found.rollout.max_tokens_per_device) == (16384, 16384)
    assert f"{ACTOR}.ppo_micro_batch_size_per_gpu" in no_effect(*argv)


def test_the_norm_of_gradients_under_each_of_its_names():
    assert config(f"{ACTOR}.grad_clip=0.5").actor.optimizer.max_grad_norm == 0.5
    assert config(f"{ACTOR}.optim.clip_grad=0.5").actor.optimizer.max_grad_norm == 0.5
    assert "give one of them" in refused(f"{ACTOR}.grad_clip=0.5", f"{ACTOR}.optim.clip_grad=0.2")


def test_a_cosine_schedule_under_both_of_its_names():
    for leaf in ("lr_scheduler_type", "warmup_style"):
        argv = [f"{ACTOR}.optim.{leaf}=cosine", f"{ACTOR}.optim.min_lr_ratio=0.2"]
        found = config(*argv, f"{ACTOR}.optim.lr_warmup_steps_ratio=0.1").actor.optimizer
        assert (found.schedule, found.min_learning_rate_ratio, found.warmup_ratio) == ("cosine", 0.2, 0.1)
    assert "give actor_rollout_ref.actor.optim.lr_warmup_steps_ratio" in refused(f"{ACTOR}.optim.lr_warmup_steps=10")


def test_the_first_step_of_the_actor_is_that_of_verl():
    assert [config(f"trainer.critic_warmup={steps}").critic.warmup_steps for steps in (0, 1, 5)] == [0, 0, 4]


def test_evaluations():
    assert config("trainer.val_before_train=False").eval.path is None  # test_freq is -1
    found = config("trainer.test_freq=5", f"{ROLLOUT}.val_kwargs.n=8", f"{ROLLOUT}.val_kwargs.temperature=0.7").eval
    assert (found.every, found.samples_per_prompt, found.temperature) == (5, 8, 0.7)
    top_p, warm = f"{ROLLOUT}.val_kwargs.top_p=0.7", f"{ROLLOUT}.val_kwargs.temperature=0.6"
    assert "give 1, or val_kwargs.temperature 0" in refused(top_p, warm)
    assert list(no_effect(top_p)) == [f"{ROLLOUT}.val_kwargs.top_p"]  # of greedy evaluations


def test_several_files_and_names_that_are_none():
    found = config("data.train_files=[a.parquet, ~/b.parquet]", "data.val_files=null")
    assert (found.data.path, found.eval.path) == ("a.parquet,~/b.parquet", None)
    assert "no name of a file may have a comma" in refused("data.train_files='a,b.parquet'")
    assert "copy it to one" in refused("data.train_files=hdfs://a/b.parquet")


def test_long_prompts_are_dropped_or_refused_and_never_cut():
    assert config().data.max_lost_fraction == 0.0
    assert config("data.filter_overlong_prompts=True", "data.truncation=left").data.max_lost_fraction == 1.0
    assert "prompts are not cut" in refused("data.truncation=left")


def test_images_are_taken_where_the_column_is_named():
    assert config().data.image_key is None
    found = config("data.image_key=images", f"{ROLLOUT}.limit_images=4").data
    assert (found.image_key, found.max_images_per_prompt) == ("images", 4)
    assert config("data.image_key=null").data.image_key is None


def test_a_reward_file_with_its_arguments():
    found = config("reward.custom_reward_function.path=my/r.py", "+reward.custom_reward_function.reward_kwargs.bonus=2")
    assert (found.reward.function, found.reward.kwargs) == ("my/r.py:compute_score", {"bonus": 2})
    older = config("custom_reward_function.path=my/r.py", "custom_reward_function.name=f")
    assert older.reward.function == "my/r.py:f"
    assert "must be a Python file" in refused("reward.custom_reward_function.path=pkg://mine")


def test_the_built_in_scoring_with_its_arguments():
    found = config("reward.compute_score_kwargs={method: flexible}").reward
    assert (found.function, found.kwargs) == ("verl_score", {"method": "flexible"})


def test_a_source_of_rewards_of_our_own_config_replaces_the_function():
    found = config("hotseat.reward.model=rm")
    assert (found.reward.function, found.reward.model) == (None, "rm")
    argv = ["hotseat.agent.path=a.py", "reward.custom_reward_function.path=r.py"]
    assert no_effect(*argv)["reward.custom_reward_function.path"] == "hotseat.agent.path says where rewards come from"


def test_the_penalty_on_long_answers_under_its_older_names():
    argv = ["reward_model.reward_manager=dapo", "+reward_model.reward_kwargs.max_resp_len=512"]
    argv += [
        f"+reward_model.reward_kwargs.overlong_buffer_cfg.{word}" for word in ("enable=True", "len=64", "log=False")
    ]
    found = config(*argv).reward.overlong
    assert (found.buffer_length, found.penalty_factor) == (64, 1.0)
    said = refused("reward.reward_manager.name=prime")
    assert "reward.reward_manager.name: given 'prime', must be one of naive" in said


def test_checkpoints():
    found = config("trainer.save_freq=5", "trainer.max_actor_ckpt_to_keep=2").checkpoint
    assert (found.every, found.keep_last, found.resume) == (5, 2, True)
    assert config("trainer.save_freq=5", "trainer.resume_mode=disable").checkpoint.resume is False
    assert "given 'resume_path', must be one of auto, disable" in refused("trainer.resume_mode=resume_path")
    contents = f"{ACTOR}.checkpoint.save_contents"
    found = config("trainer.save_freq=5", f"{contents}=[model,optimizer,extra,hf_model]").checkpoint
    assert (found.export_each, found.save_state) == (True, True)
    assert "[hf_model]" in refused("trainer.save_freq=5", f"{contents}=[model]")


def test_trackers():
    found = config("trainer.logger=[console,mlflow]", "trainer.project_name=p", "trainer.experiment_name=e").log
    assert (found.wandb.enabled, found.mlflow.enabled) == (False, True)
    assert (found.mlflow.experiment, found.mlflow.run_name) == ("p", "e")
    assert "trainer.logger: given 'swanlab', must be one of console" in refused("trainer.logger=[swanlab]")


def test_the_engine_of_transformers_has_no_tensor_parallelism():
    found = translate([*BASE, f"{ROLLOUT}.name=hf", f"{ROLLOUT}.tensor_model_parallel_size=4"], {})
    assert (found.config.rollout.engine, found.config.rollout.tensor_parallel_size) == ("transformers", 1)
    assert f"{ROLLOUT}.tensor_model_parallel_size" in dict(found.no_effect)
    assert "must be one of vllm, hf" in refused(f"{ROLLOUT}.name=sglang")


def test_agent_loops_and_tools_are_refused_with_what_would_fit():
    said = refused(f"{ROLLOUT}.agent.default_agent_loop=tool_agent", f"{ROLLOUT}.multi_turn.enable=True")
    assert said.count("give hotseat.agent.path=FILE.py") == 2


def test_a_key_of_another_model_must_agree_with_the_actors():
    said = refused("critic.ppo_mini_batch_size=32")
    assert "critic.ppo_mini_batch_size: given 32, but actor_rollout_ref.actor.ppo_mini_batch_size is 256" in said
    assert config("critic.ppo_mini_batch_size=256").train.batch_size == 256


def test_a_critic_beside_adapters_has_some_too():
    lora = "actor_rollout_ref.model.lora_rank=8"
    assert "give critic.model.lora_rank=8" in refused(lora)
    assert "given 0, but actor_rollout_ref.model.lora_rank is 8" in refused(lora, "critic.model.lora_rank=0")
    assert config(lora, "critic.model.lora_rank=8").train.lora.rank == 8
    assert config(*GRPO, lora).train.lora.rank == 8


def test_keys_of_models_that_are_absent_have_no_effect():
    found = no_effect(*GRPO, "critic.ppo_mini_batch_size=32", "critic.optim.lr=1", "trainer.critic_warmup=5")
    assert set(found.values()) == {"algorithm.adv_estimator grpo has no critic"}
    assert "leave it out" in refused(*GRPO, "critic.enable=True")


def test_a_key_of_our_own_config_comes_last():
    found = config("hotseat.rollout.batch_size=7", "hotseat.reward.clip=[-1, 1]", "hotseat.eval=null")
    assert (found.rollout.batch_size, found.reward.clip, found.eval.path) == (7, (-1.0, 1.0), None)
    assert "hotseat.rollout.batch_size: given 0" in refused("hotseat.rollout.batch_size=0")


def test_messages_about_the_config_are_in_verls_keys():
    found = translate([f"{ROLLOUT}.name=vllm", *GRPO], {})
    assert found.missing == [("actor_rollout_ref.model.path", "not set: give a checkpoint directory or a hub name")]
    said = found.rename_keys("set eval.path or rollout.top_p, or data.sampler")
    assert said == f"set data.val_files or {ROLLOUT}.top_p, or hotseat.data.sampler"
    # A mini-batch of verl counts prompts, and a share of rows is none of its keys.
    assert found.rename_keys("train.batch_size, data.max_lost_fraction") == (
        "hotseat.train.batch_size, hotseat.data.max_lost_fraction"
    )


def test_a_wrong_value_is_named_by_the_key_that_has_it():
    assert "algorithm.kl_ctrl.kl_coef: given -1" in refused(
        "algorithm.use_kl_in_reward=True", "algorithm.kl_ctrl.kl_coef=-1"
    )
    said = refused("trainer.test_freq=5", "data.val_files=[a, b]", "hotseat.eval.split=3")
    assert "hotseat.eval.split: given 3, must be text" in said


def test_names_that_look_like_numbers_are_texts():
    found = config("trainer.project_name=1", "trainer.experiment_name=2.5")
    assert (found.log.wandb.project, found.checkpoint.path) == ("1", "checkpoints/1/2.5")


def test_what_a_run_lacks_is_named():
    assert dict(translate([], {}).missing) == {
        "actor_rollout_ref.model.path": "not set: give a checkpoint directory or a hub name",
        "actor_rollout_ref.rollout.name": "not set: give vllm, or hf for the engine of transformers",
        "critic.model.path": "not set, and algorithm.adv_estimator gae needs a critic",
    }


def test_a_group_of_one_is_named_by_the_key_of_its_size():
    assert f"{ROLLOUT}.n" in dict(translate([*BASE, "algorithm.adv_estimator=grpo"], {}).missing)
