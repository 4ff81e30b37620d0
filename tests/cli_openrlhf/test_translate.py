"""What flags mean, alone and together."""

import pytest

from hotseat.config import loads
from hotseat.config.resolved import aggregation, kl_estimator, resolved_notes
from hotseat.errors import ConfigError
from hotseat.openrlhf.translate import translate


def rl(*argv, env=None):
    return translate("train_ppo_ray", argv, env or {})


def split(text):
    return rl(*text.split())


def refused(text, command="train_ppo_ray", env=None):
    with pytest.raises(ConfigError) as caught:
        translate(command, text.split() if isinstance(text, str) else text, env or {})
    return [str(problem) for problem in caught.value.problems]


def placement(text):
    return split(text).config.cluster.component_placement


# --- placement --------------------------------------------------------------------------------------------------------


def test_without_colocation_every_role_has_its_own_devices():
    sizes = "--actor_num_nodes 2 --critic_num_gpus_per_node 4 --vllm_num_engines 4 --vllm_tensor_parallel_size 2"
    assert placement(f"{sizes} --reward_pretrain r") == {
        "actor": "2x8",
        "critic": "1x4",
        "reference": "1x8",
        "reward": "1x8",
        "rollout": "4x2",
    }


def test_pairs_share_their_devices():
    found = placement("--colocate_actor_ref --colocate_critic_reward --vllm_num_engines 2 --reward_pretrain r")
    assert found == {"actor": "1x8", "critic": "1x8", "reference": "@actor", "reward": "@critic", "rollout": "2x1"}


def test_all_models_share_the_actors_devices():
    found = split(
        "--colocate_all_models --vllm_num_engines 8 --reward_pretrain r --ref_num_nodes 0 --colocate_actor_ref"
    )
    assert found.config.cluster.component_placement == {
        "actor": "1x8",
        "critic": "@actor",
        "reference": "@actor",
        "reward": "@actor",
        "rollout": "@actor",
    }
    assert found.no_effect == [
        ("--ref_num_nodes", "the reference uses the actor's devices"),
        ("--colocate_actor_ref", "--colocate_all_models says so already"),
    ]


def test_in_async_training_the_engines_keep_devices_of_their_own():
    found = split("--colocate_all_models --async_train --vllm_num_engines 2 --vllm_enable_sleep")
    assert found.config.cluster.component_placement["rollout"] == "2x1"
    assert found.config.cluster.component_placement["critic"] == "@actor"
    assert found.config.rollout.enable_offload is None
    assert ("--vllm_enable_sleep", "the engines have devices of their own") in found.no_effect


@pytest.mark.parametrize(
    ("text", "absent"),
    [
        ("--advantage_estimator rloo --critic_num_nodes 2", "critic"),
        ("--init_kl_coef 0 --ref_num_nodes 2", "reference"),
        ("--remote_rm_url r.py --reward_num_nodes 2", "reward"),
        ("--agent_func_path a.py --reward_pretrain r --reward_num_nodes 2", "reward"),
    ],
)
def test_a_role_that_does_not_exist_is_not_placed(text, absent):
    found = split(text)
    assert absent not in found.config.cluster.component_placement
    assert found.no_effect[-1][0].endswith("_num_nodes")


def test_a_pair_without_its_partner_is_not_a_pair():
    found = split("--colocate_critic_reward --advantage_estimator reinforce --reward_pretrain r")
    assert found.config.cluster.component_placement["reward"] == "1x8"
    assert found.no_effect == [
        ("--colocate_critic_reward", "--advantage_estimator is reinforce, which has no critic"),
    ]


def test_a_reward_model_that_is_sized_but_not_named_is_placed_and_missed():
    found = split("--reward_num_nodes 2")
    assert found.config.cluster.component_placement["reward"] == "2x8"
    assert "--remote_rm_url" in dict(found.missing)


def test_without_engines_the_actors_devices_sample():
    assert placement("")["rollout"] == "@actor"
    found = split("--vllm_num_engines 0")
    assert (found.config.cluster.component_placement["rollout"], found.config.rollout.engine) == (
        "@actor",
        "transformers",
    )


@pytest.mark.parametrize(
    ("text", "engine"),
    [
        ("", "vllm"),
        ("--vllm_num_engines 2", "vllm"),
        ("--colocate_all_models --vllm_num_engines 8", "vllm"),
        ("--vllm_num_engines 0", "transformers"),
        ("--vllm_num_engines 0 --engine vllm", "vllm"),
        ("--vllm_num_engines 2 --engine transformers", "transformers"),
    ],
)
def test_vllm_samples_unless_another_engine_is_asked_for(text, engine):
    assert split(text).config.rollout.engine == engine


def test_what_vllm_is_told():
    default = split("--vllm_num_engines 2").config.rollout
    assert (default.num_engines, default.tensor_parallel_size, default.memory_share) == (2, 1, 0.95)
    assert (default.enforce_eager, default.prefix_caching, default.weight_transport) == (False, False, "auto")
    old = (
        "--vllm_num_engines 2 --vllm_tensor_parallel_size 4 --vllm_gpu_memory_utilization 0.6 --enforce_eager"
        " --enable_prefix_caching --vllm_sync_backend gloo"
    )
    new = (
        "--vllm.num_engines 2 --vllm.tensor_parallel_size 4 --vllm.gpu_memory_utilization 0.6 --vllm.enforce_eager"
        " --vllm.enable_prefix_caching --vllm.sync_backend gloo"
    )
    for text in (old, new):
        found = split(text)
        rollout = found.config.rollout
        assert (rollout.num_engines, rollout.tensor_parallel_size, rollout.memory_share) == (2, 4, 0.6)
        assert (rollout.enforce_eager, rollout.prefix_caching, rollout.weight_transport) == (True, True, "gloo")
        assert found.config.cluster.component_placement["rollout"] == "2x4"
        assert found.no_effect == []


def test_what_vllm_is_told_does_not_matter_to_the_transformers_engine():
    flags = ("--vllm_gpu_memory_utilization", "--enforce_eager", "--enable_prefix_caching")
    found = split(f"--engine transformers --vllm_num_engines 2 {flags[0]} 0.6 {flags[1]} {flags[2]}")
    assert dict(found.no_effect).keys() == set(flags)


def test_async_training_without_engines_is_refused_by_the_flag_that_is_missing():
    assert dict(split("--async_train").missing)["--vllm_num_engines"].startswith("not set, and --async_train needs")


def test_no_devices_are_processes_on_the_cpu():
    found = placement("--actor_num_gpus_per_node 0 --actor_num_nodes 2 --ref_num_gpus_per_node 0 --vllm_num_engines 3")
    assert (found["actor"], found["reference"], found["rollout"]) == ("cpu*2", "cpu*1", "cpu*3")


def test_a_role_on_no_node_is_refused():
    assert refused("--ref_num_nodes 0") == ["--ref_num_nodes: given 0, must be at least 1"]


def test_transformers_engines_have_one_device_each():
    shared = split("--engine transformers --colocate_all_models --vllm_num_engines 4 --vllm_tensor_parallel_size 2")
    assert shared.config.rollout.num_engines is None
    assert dict(shared.no_effect).keys() == {"--vllm_num_engines", "--vllm_tensor_parallel_size"}
    own = split("--engine transformers --vllm_num_engines 4 --vllm_tensor_parallel_size 2")
    assert (own.config.cluster.component_placement["rollout"], own.config.rollout.num_engines) == ("4x2", None)


def test_the_inventory_is_passed_on():
    found = split("--inventory 4x8xA100-80G")
    assert found.config.cluster.inventory == "4x8xA100-80G"


# --- offload ----------------------------------------------------------------------------------------------------------


def test_sleep_switches_put_parts_aside():
    found = split("--colocate_all_models --vllm_num_engines 8 --vllm_enable_sleep --deepspeed_enable_sleep").config
    assert (found.rollout.enable_offload, found.actor.enable_offload, found.critic.enable_offload) == (True, True, True)
    assert split("").config.actor.enable_offload is None


def test_engines_on_devices_of_their_own_do_not_sleep():
    """OpenRLHF switches it off without a word."""
    found = split("--vllm_num_engines 2 --vllm_enable_sleep --deepspeed_enable_sleep")
    assert found.config.rollout.enable_offload is None
    assert found.config.actor.enable_offload is True
    assert ("--vllm_enable_sleep", "the engines have devices of their own") in found.no_effect


def test_engines_on_the_actors_devices_sleep():
    for text in ("--colocate_all_models --vllm_num_engines 8", ""):
        assert split(f"{text} --vllm_enable_sleep").config.rollout.enable_offload is True
        assert split(text).config.rollout.enable_offload is None  # as the planner finds it needed


def test_reference_and_reward_go_to_the_host():
    found = split("--ref_reward_offload --reward_pretrain r").config
    assert (found.reference.enable_offload, found.reward.enable_offload) == (True, True)
    assert split("--ref_reward_offload").config.reference.enable_offload is True
    nothing = split("--ref_reward_offload --init_kl_coef 0")
    assert nothing.no_effect == [("--ref_reward_offload", "--init_kl_coef is 0, so there is no reference model")]


# --- overlap ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "env", "queue"),
    [
        (["--async_train"], {}, 1),
        (["--async_train"], {"OPENRLHF_ASYNC_QUEUE_SIZE": " 3 "}, 3),
        (["--async_train", "--async_queue_size", "2"], {"OPENRLHF_ASYNC_QUEUE_SIZE": "3"}, 2),
        ([], {}, 0),
    ],
)
def test_a_queue_of_n_lets_samples_be_n_versions_old(argv, env, queue):
    overlap = rl(*argv, env=env).config.overlap
    assert (overlap.queue, overlap.staleness) == (queue - 1 if queue else None, queue)
    assert (overlap.order, overlap.in_flight) == ("prompt", "wait")


def test_variables_of_scripts_written_for_openrlhf_are_answered():
    found = rl(env={"VLLM_USE_V1": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"})
    assert dict(found.no_effect).keys() >= {"VLLM_USE_V1", "PYTORCH_NVML_BASED_CUDA_CHECK"}
    assert not rl(env={}).no_effect


def test_a_partial_rollout_goes_on_over_a_push_and_is_trained_as_it_arrives():
    overlap = rl("--async_train", "--partial_rollout", "--engine", "transformers").config.overlap
    assert (overlap.order, overlap.in_flight) == ("arrival", "keep")
    overlap = rl("--async_train", "--partial_rollout", "--engine", "vllm").config.overlap
    assert (overlap.order, overlap.in_flight) == ("arrival", "recompute")


def test_a_partial_rollout_on_shared_devices_is_carried_over_the_training():
    overlap = rl("--colocate_all_models", "--partial_rollout", "--vllm_num_engines", "8").config.overlap
    assert (overlap.staleness, overlap.queue, overlap.order, overlap.in_flight) == (1, None, "arrival", "recompute")


def test_a_queue_without_async_training_has_no_effect():
    argv = ["--async_queue_size", "2", "--partial_rollout", "--vllm_num_engines", "2"]
    found = rl(*argv, env={"OPENRLHF_ASYNC_QUEUE_SIZE": "3"})
    because = "--async_train is not given"
    assert ("--async_queue_size", because) in found.no_effect
    assert ("OPENRLHF_ASYNC_QUEUE_SIZE", because) in found.no_effect
    assert "--partial_rollout" in dict(found.no_effect)


def test_the_number_of_episodes_in_flight_comes_from_the_environment():
    assert rl(env={"OPENRLHF_ASYNC_NUM_TASKS": "16"}).config.agent.max_concurrent == 16


@pytest.mark.parametrize("text", ["many", "-1", "0", "1.5", "²"])
def test_a_variable_that_is_no_number_is_refused(text):
    env = {"OPENRLHF_ASYNC_NUM_TASKS": text, "OPENRLHF_ASYNC_QUEUE_SIZE": text}
    assert sorted(refused("--async_train", env=env)) == [
        f"OPENRLHF_ASYNC_NUM_TASKS: given {text!r}, must be a whole number of at least 1",
        f"OPENRLHF_ASYNC_QUEUE_SIZE: given {text!r}, must be a whole number of at least 1",
    ]


def test_an_empty_variable_is_none():
    assert rl("--async_train", env={"OPENRLHF_ASYNC_QUEUE_SIZE": ""}).config.overlap.queue == 0


# --- rewards and models -----------------------------------------------------------------------------------------------


def test_rewards_come_from_a_file_a_server_or_several():
    assert split("--remote_rm_url ./r.py").config.reward.function == "./r.py"
    one = split("--remote_rm_url http://h:5000/get_reward").config.reward
    assert (one.url, one.timeout_s, one.retries) == ("http://h:5000/get_reward", None, None)  # 180 s, five attempts
    assert split("--remote_rm_url http://a,https://b").config.reward.url == ["http://a", "https://b"]


@pytest.mark.parametrize("url", ["host:5000", "a.py,b.py", "a.py,http://h"])
def test_a_reward_that_is_neither_is_refused(url):
    assert refused(f"--remote_rm_url {url}") == [
        f"--remote_rm_url: given {url!r}, must be one .py file, or addresses that begin with http:// or https://,"
        " joined by commas"
    ]


def test_a_remote_reward_scores_the_episodes_to_which_an_agent_gives_none():
    found = split("--agent_func_path a.py --remote_rm_url r.py --reward_pretrain m")
    assert (found.config.agent.path, found.config.reward.function) == ("a.py", "r.py")
    assert found.config.reward.model is None
    assert found.no_effect == [("--reward_pretrain", "rewards come from --agent_func_path")]
    assert split("--agent_func_path a.py --remote_rm_url http://h/s").config.reward.url == "http://h/s"


def test_the_deadlines_of_agents_have_flags():
    agent = split(
        "--agent_func_path a.py --agent_timeout 60 --agent_turn_timeout 5 --agent_tool_timeout 7"
    ).config.agent
    assert (agent.timeout_s, agent.turn_timeout_s, agent.tool_timeout_s) == (60, 5, 7)
    assert split("--agent_func_path a.py").config.agent.timeout_s == 1200


def test_rewards_have_one_source():
    found = split("--agent_func_path a.py --reward_pretrain m")
    assert (found.config.reward.function, found.config.reward.model) == (None, None)
    assert found.no_effect == [("--reward_pretrain", "rewards come from --agent_func_path")]
    assert ("--reward_pretrain", "rewards come from --remote_rm_url") in split(
        "--remote_rm_url r.py --reward_pretrain m"
    ).no_effect


def test_a_reward_range_is_symmetric_or_has_two_ends():
    assert split("--reward_clip_range 5").config.reward.clip == (-5.0, 5.0)
    assert split("--reward_clip_range -1 2e-1").config.reward.clip == (-1.0, 0.2)
    assert split("").config.reward.clip == (-10.0, 10.0)


def test_a_penalty_of_zero_is_not_no_penalty():
    assert split("").config.reward.truncation_penalty is None
    assert split("--stop_properly_penalty_coef 0").config.reward.truncation_penalty == 0.0
    assert split("--stop_properly_penalty_coef -0.5").config.reward.truncation_penalty == -0.5


def test_a_length_in_tokens_may_be_written_as_a_float():
    assert split("--overlong_buffer_len 512.0").config.reward.overlong.buffer_length == 512
    assert refused("--overlong_buffer_len 512.5") == ["--overlong_buffer_len: given 512.5, must be a whole number"]


def test_no_critic_is_fine_unless_the_estimator_needs_one():
    found = split("--critic_pretrain None --advantage_estimator reinforce")
    assert "--critic_pretrain" in dict(found.no_effect)
    assert refused("--critic_pretrain None") == [
        "--critic_pretrain: None is no critic, and --advantage_estimator gae needs one: choose another estimator"
    ]


def test_the_actor_is_frozen_for_exactly_as_many_steps_as_given():
    assert split("--freezing_actor_steps 5").config.critic.warmup_steps == 5
    assert split("--freezing_actor_steps -1").config.critic.warmup_steps == 0


# --- lengths, batches, types ------------------------------------------------------------------------------------------


def lengths(text):
    config = split(text).config
    return config.data.prompt_max_length, config.rollout.max_new_tokens, config.data.max_length


def test_lengths_add_up():
    assert lengths("--prompt_max_len 512 --generate_max_len 3000") == (512, 3000, 3512)
    assert lengths("") == (1024, 1024, 2048)
    assert lengths("--max_len 4096") == (1024, 1024, 4096)


def test_the_newer_spelling_has_the_newer_lengths():
    assert lengths("--data.max_len 4096") == (None, None, 4096)
    assert lengths("--rollout.max_new_tokens 100") == (None, 100, 2048)


def test_the_newer_spelling_has_the_newer_defaults():
    old, new = split("").config, split("--ds.zero_stage 2").config
    assert (old.train.dtype, old.train.micro_batch_size, old.rollout.micro_batch_size) == ("fp32", 4, 8)
    assert (new.train.dtype, new.train.micro_batch_size, new.rollout.micro_batch_size) == ("bf16", 1, 1)


def test_types_of_computation():
    assert split("--bf16").config.train.dtype == "bf16"
    found = split("--bf16 --param_dtype fp16")
    assert found.config.train.dtype == "fp16"
    assert found.no_effect == [("--bf16", "--param_dtype is given")]


def test_a_token_budget_takes_the_place_of_micro_batches():
    found = split("--use_dynamic_batch --micro_train_batch_size 2 --rollout_max_tokens_per_gpu 9000")
    assert (found.config.train.max_tokens_per_device, found.config.rollout.max_tokens_per_device) == (16192, 9000)
    assert found.config.train.packing
    assert found.no_effect == [("--micro_train_batch_size", "--use_dynamic_batch sets the size of micro-batches")]
    assert split("--train_max_tokens_per_gpu 9").no_effect == [
        ("--train_max_tokens_per_gpu", "--use_dynamic_batch is not given")
    ]


def test_packing_is_off_unless_something_asks_for_it():
    assert not split("").config.train.packing
    assert split("--packing_samples").config.train.packing
    assert split("--ring_attn_size 2").config.train.packing


def test_more_prompts_in_flight_than_a_batch_has():
    """Prompts for two batches at a time, with two such in the queue: four batches ahead, trained beside two others."""

    def ahead(text: str) -> tuple[int, int]:
        overlap = split(f"--async_train --vllm_num_engines 2 {text}").config.overlap
        assert overlap.queue is not None
        return overlap.queue, overlap.staleness

    assert ahead("--vllm_generate_batch_size 1024") == ahead("") == (0, 1)
    assert ahead("--vllm_generate_batch_size 2048") == ahead("--vllm_generate_batch_size 1500") == (1, 3)
    assert ahead("--vllm_generate_batch_size 2048 --async_queue_size 2") == (3, 5)
    assert split("--vllm_generate_batch_size 1024").config.overlap.staleness == 0
    assert refused("--vllm_generate_batch_size 8") == [
        "--vllm_generate_batch_size: 8 is below --rollout_batch_size, 1024"
    ]
    assert refused("--vllm_generate_batch_size 2048") == [
        "--vllm_generate_batch_size: 2048 is above --rollout_batch_size, 1024: sampling ahead of training takes"
        " --async_train"
    ]


def test_minus_one_is_never_and_a_hundred_million_is_all():
    config = split("--save_steps -1 --max_samples 100000000 --max_ckpt_mem 1e9").config
    assert (config.checkpoint.every, config.data.max_samples, config.checkpoint.max_gib) == (None, None, None)
    assert split("--save_steps 5").config.checkpoint.every == 5
    assert refused("--save_steps 0") == ["--save_steps: given 0, must be above 0"]


# --- maths ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "low", "high", "without_effect"),
    [
        ("", 0.2, 0.2, []),
        ("--eps_clip 0.1", 0.1, 0.1, []),
        ("--eps_clip_low_high 0.2 0.28 --eps_clip 0.1", 0.2, 0.28, ["--eps_clip"]),
        ("--clip_eps_low 0.3", 0.3, 0.2, []),
        ("--clip_eps_high 0.3 --eps_clip 0.1", 0.1, 0.3, []),
        ("--clip_eps_low 0.1 --clip_eps_high 0.3 --eps_clip 0.5", 0.1, 0.3, ["--eps_clip"]),
    ],
)
def test_clipping(text, low, high, without_effect):
    found = split(text)
    assert (found.config.algorithm.clip_low, found.config.algorithm.clip_high) == (low, high)
    assert [name for name, _ in found.no_effect] == without_effect


@pytest.mark.parametrize(
    ("text", "kind", "low", "high"),
    [
        ("--enable_vllm_is_correction", "tis", 0.0, 2.0),
        ("--enable_vllm_is_correction --vllm_is_truncated_threshold 3", "tis", 0.0, 3.0),
        ("--enable_vllm_is_correction --vllm_is_correction_type icepop", "icepop", 0.5, 5.0),
        ("--algo.advantage.is_correction_enable", "tis", 0.5, 5.0),
        ("--enable_vllm_is_correction --vllm_is_truncated_threshold 0.1 9", "tis", 0.1, 9.0),
    ],
)
def test_correction(text, kind, low, high):
    correction = split(text).config.algorithm.correction
    assert (correction.kind, correction.low, correction.high) == (kind, low, high)


def test_gspo_is_corrected_by_its_own_ratio_as_in_openrlhf():
    found = split("--policy_loss_type gspo --enable_vllm_is_correction --vllm_is_correction_type icepop")
    assert found.config.algorithm.correction.kind == "rollout-ratio"
    because = "gspo takes its ratio to the engine's probabilities, as OpenRLHF does"
    assert found.no_effect == [("--vllm_is_correction_type", because)]


@pytest.mark.parametrize(
    ("text", "used", "num_notes"),
    [
        ("--policy_loss_type gspo", "sequence_mean", 0),
        ("--policy_loss_type gspo --advantage_estimator dr_grpo", "sequence_mean", 0),
        ("--advantage_estimator dr_grpo", "token_mean", 1),  # OpenRLHF's; the paper's is constant
        ("--advantage_estimator group_norm", "token_mean", 0),
    ],
)
def test_losses_are_aggregated_as_in_openrlhf(text, used, num_notes):
    config = split(text).config
    assert aggregation(config) == used
    assert len(resolved_notes(config)) == num_notes


@pytest.mark.parametrize(
    ("text", "used", "is_allowed"),
    [
        ("", "k1", False),
        ("--kl_estimator k3", "k3", False),
        ("--use_kl_loss --kl_estimator k2", "k2", False),
        ("--use_kl_loss", "k1", True),
    ],
)
def test_the_kl_estimator_is_openrlhfs_and_k1_as_a_loss_is_warned_of_once(text, used, is_allowed):
    config = split(text).config
    assert kl_estimator(config) == used
    assert config.algorithm.kl.allow_k1_loss is is_allowed
    warnings = [note for note in resolved_notes(config) if "k1 as a loss" in note]
    assert len(warnings) == is_allowed
    assert all(note.startswith("warning: ") and "--kl_estimator" in note for note in warnings)


def test_a_correction_that_is_not_enabled_has_no_effect():
    found = split("--vllm_is_correction_type icepop --vllm_is_truncated_threshold 3")
    because = "--enable_vllm_is_correction is not given"
    assert found.no_effect == [("--vllm_is_correction_type", because), ("--vllm_is_truncated_threshold", because)]


@pytest.mark.parametrize(
    ("name", "schedule", "warmup", "least"),
    [
        ("cosine_with_min_lr", "cosine", 0.03, 0.1),
        ("cosine", "cosine", 0.03, 0.0),
        ("linear", "linear", 0.03, 0.0),
        ("constant_with_warmup", "constant", 0.03, 0.1),  # the last has no meaning there and stays at its default
        ("constant", "constant", 0.0, 0.1),
    ],
)
def test_schedules_of_transformers(name, schedule, warmup, least):
    for command in ("train_ppo_ray", "train_sft"):
        optimizer = translate(command, ["--lr_scheduler", name], {}).config.actor.optimizer
        found = (optimizer.schedule, optimizer.warmup_ratio, optimizer.min_learning_rate_ratio)
        assert found == (schedule, warmup, least)


def test_a_schedule_that_does_not_warm_up_ignores_the_warm_up():
    found = split("--lr_scheduler constant --lr_warmup_ratio 0.1 --min_lr_ratio 0.2")
    because = "--lr_scheduler is constant"
    assert found.no_effect == [("--lr_warmup_ratio", because), ("--min_lr_ratio", because)]
    one_of_two = split("--actor.lr_scheduler constant --lr_warmup_ratio 0.1")
    assert one_of_two.no_effect == []
    assert one_of_two.config.critic.optimizer.warmup_ratio == 0.1


def test_an_unknown_schedule_is_refused():
    known = "cosine_with_min_lr, cosine, linear, constant_with_warmup, constant"
    assert refused("--lr_scheduler cubic") == [f"--lr_scheduler: given 'cubic', must be one of {known}"]


def test_optimizers_together_and_one_by_one():
    config = split("--max_norm 2 --critic.max_norm 3 --l2 0.1 --actor.optim muon --actor.muon.lr 0.01").config
    assert (config.actor.optimizer.max_grad_norm, config.critic.optimizer.max_grad_norm) == (2.0, 3.0)
    assert (config.actor.optimizer.weight_decay, config.critic.optimizer.weight_decay) == (0.1, 0.1)
    assert (config.actor.optimizer.kind, config.actor.optimizer.muon.learning_rate) == ("muon", 0.01)


def test_lora_modules_are_names_or_all():
    assert split("--lora_rank 8 --target_modules q_proj v_proj --bf16").config.train.lora.target_modules == [
        "q_proj",
        "v_proj",
    ]
    assert split("--lora_rank 8 --target_modules q_proj").config.train.lora.target_modules == ["q_proj"]
    assert split("--lora_rank 8 --target_modules all-linear").config.train.lora.target_modules == "all-linear"


@pytest.mark.parametrize("flag", ["--no_advantage_std_norm", "--algo.advantage.no_std_norm"])
def test_a_group_is_divided_by_its_deviation_whatever_the_switch_says(flag):
    """OpenRLHF drops only the deviation of the batch, which gae, reinforce and reinforce_baseline divide by."""
    estimator = "--algo.advantage.estimator" if flag.startswith("--algo") else "--advantage_estimator"
    found = split(f"{estimator} group_norm {flag} --rollout_batch_size 64")
    assert found.config.algorithm.std_norm
    because = f"{estimator} group_norm divides by the group's deviation in any case, as in OpenRLHF; dr_grpo does not"
    assert [(name, why.removesuffix(" divide")) for name, why in found.no_effect] == [(flag, because)]
    for other in ("gae", "reinforce", "reinforce_baseline"):
        found = split(f"{estimator} {other} {flag}")
        assert (found.config.algorithm.std_norm, found.no_effect) == (False, [])
    for other in ("rloo", "dr_grpo"):
        [(name, because)] = split(f"{estimator} {other} {flag}").no_effect
        assert (name, "does not divide by a deviation" in because) == (flag, True)


# --- the rest ---------------------------------------------------------------------------------------------------------


def test_images_have_a_column_once_there_may_be_any():
    given = "--max_images_per_prompt 2 --advantage_estimator rloo --engine transformers --actor.freeze_visual_encoder"
    config = split(given).config
    assert (config.data.image_key, config.data.max_images_per_prompt) == ("images", 2)
    assert config.train.freeze_visual_encoder
    why = "--max_images_per_prompt is 0"
    no_effect = split("--image_key pictures --freeze_visual_encoder").no_effect
    assert no_effect == [("--image_key", why), ("--freeze_visual_encoder", why)]
    assert split("--max_images_per_prompt 2 --advantage_estimator rloo").config.rollout.engine == "vllm"


def test_a_template_without_a_place_for_the_prompt_is_left_out():
    found = translate("train_sft", ["--input_template", "Q:"], {})
    assert found.config.data.input_template is None
    assert found.no_effect == [("--input_template", "it has no {} for the prompt, which goes without a template")]
    assert translate("train_sft", [], {}).config.data.input_template == "User: {}\nAssistant: "
    assert translate("train_sft", ["--apply_chat_template"], {}).config.data.input_template is None


def test_a_choice_of_attention_is_passed_on_unless_it_is_what_happens_anyway():
    assert split("--attn_implementation eager").config.train.attention == "eager"
    found = split("--attn_implementation flash_attention_2 --flash_attn")
    assert found.config.train.attention is None
    assert [name for name, _ in found.no_effect] == ["--attn_implementation", "--flash_attn"]
    assert split("--attn_implementation eager --flash_attn").no_effect == [
        ("--flash_attn", "--attn_implementation is eager")
    ]


@pytest.mark.parametrize(
    ("given", "happens"),
    [
        ("--bf16 --packing_samples", "on GPUs packed sequences go through torch's flash attention in any case"),
        ("--bf16 --use_dynamic_batch", "on GPUs packed sequences go through torch's flash attention in any case"),
        ("--bf16", "--packing_samples is not given: rows are padded, and torch chooses the kernel"),
        ("--packing_samples", "training is in fp32, for which torch has no flash attention"),
        ("--ds.param_dtype bf16", "--ds.packing_samples is not given: rows are padded"),
    ],
)
def test_the_note_on_flash_attention_says_what_happens_in_this_run(given, happens):
    [(name, because)] = split(f"{given} --flash_attn").no_effect
    assert name == "--flash_attn"
    assert happens in because


@pytest.mark.parametrize("command", ["train_ppo_ray", "train_sft"])
def test_four_bits_are_for_adapters_and_noted_without(command):
    plain = translate(command, ["--load_in_4bit"], {})
    [(name, because)] = plain.no_effect
    assert (name, plain.unsupported) == ("--load_in_4bit", [])
    assert because == "--lora_rank is 0: there are no adapters, so all weights are trained, and none are in 4 bits"
    adapters = translate(command, ["--load_in_4bit", "--lora_rank", "8"], {})
    assert adapters.unsupported == adapters.no_effect == []
    assert adapters.config.train.load_in_4bit


@pytest.mark.parametrize("argv", [["--use_wandb", "s3cret"], ["--use_wandb=s3cret"], ["--logger.wandb.key", "s3cret"]])
def test_a_key_reaches_the_environment_and_nothing_else(argv):
    found = rl(*argv)
    assert found.secrets == {"WANDB_API_KEY": "s3cret"}
    assert found.config.log.wandb.enabled
    assert found.config.log.wandb.project == "openrlhf_train_ppo"
    assert "s3cret" not in found.yaml + repr(found)
    twice = rl(*argv, "--use_wandb", "other", "--zero_stage", "2")
    assert "s3cret" not in str(twice.no_effect)


def test_a_login_stands_before_a_key():
    there = rl("--use_wandb", "s3cret", env={"WANDB_API_KEY": "mine"})
    assert there.secrets == {}
    assert there.no_effect == [("the key given to --use_wandb", "WANDB_API_KEY is set already")]
    assert rl("--use_wandb", "True").secrets == {}
    assert rl("--use_wandb", "").config.log.wandb.enabled is False


def test_the_wandb_names_have_no_effect_without_wandb():
    assert split("--wandb_project p").no_effect == [("--wandb_project", "--use_wandb is false")]


def test_deepspeed_options_have_no_effect_under_fsdp():
    found = split("--backend fsdp --zero_stage 3 --adam_offload --zpg 8")
    assert found.config.train.deepspeed == loads("").train.deepspeed
    assert found.no_effect == [(name, "--backend is fsdp") for name in ("--zero_stage", "--adam_offload", "--zpg")]


def test_a_transport_matters_only_between_devices():
    assert split("--vllm_sync_backend nccl --vllm_num_engines 2").config.rollout.weight_transport == "nccl"
    shared = split("--vllm_sync_backend nccl --vllm_num_engines 8 --colocate_all_models")
    assert shared.config.rollout.weight_transport == "auto"
    assert [name for name, _ in shared.no_effect] == ["--vllm_sync_backend"]


def test_normalisation_needs_a_reward_model():
    found = split("--remote_rm_url r.py --normalize_reward")
    assert found.no_effect == [
        ("--normalize_reward", "rewards do not come from a model (--reward_pretrain is not set)")
    ]


def test_what_comes_later_holds_and_what_came_before_is_named():
    found = split(
        "--zero_stage 3 --ds.zero_stage 1 --eps_clip_low_high 0.1 0.2 --eps_clip_low_high 0.2 0.3 --bf16 --bf16"
    )
    assert found.config.train.deepspeed.zero_stage == 1
    assert found.config.algorithm.clip_high == 0.3
    assert found.no_effect == [
        ("--zero_stage 3", "--ds.zero_stage 1 comes later"),
        ("--eps_clip_low_high 0.1 0.2", "--eps_clip_low_high 0.2 0.3 comes later"),
    ]


def test_flags_are_named_as_the_user_spells_them():
    found = split("--critic.adam.lr 1e-5 --algo.advantage.estimator rloo")
    because = "--algo.advantage.estimator is rloo, which has no critic; only gae has one"
    assert found.no_effect == [("--critic.adam.lr", because)]


@pytest.mark.parametrize("text", ["1e6", "010", "yes", "null", "a: b", "{token}", "# x", "é\n"])
def test_text_that_yaml_would_read_otherwise_survives(text):
    found = rl("--pretrain", text)
    assert loads(found.yaml) == found.config
    assert found.config.actor.model == text


def test_supervised_commands_keep_openrlhfs_defaults():
    made = {name: translate(name, [], {}).config for name in ("train_sft", "train_rm", "train_dpo")}
    rates = {name: config.actor.optimizer.learning_rate for name, config in made.items()}
    assert rates == {"train_sft": 5e-6, "train_rm": 9e-6, "train_dpo": 1e-5}
    assert {config.data.max_samples for config in made.values()} == {1_000_000}
    assert [config.data.max_length for config in made.values()] == [2048, 512, 512]
    assert [config.train.max_epochs for config in made.values()] == [2, 1, 1]


def test_a_reference_of_its_own_for_dpo():
    found = translate("train_dpo", ["--ref_pretrain", "m", "--ref_offload", "--beta", "0.2", "--ipo"], {}).config
    assert (found.reference.model, found.reference.enable_offload) == ("m", True)
    assert (found.algorithm.dpo.beta, found.algorithm.dpo.loss) == (0.2, "ipo")


def test_dpo_with_adapters_places_no_reference_unless_it_is_named():
    adapters = ["--lora_rank", "8"]
    assert translate("train_dpo", adapters, {}).config.cluster.component_placement == {"actor": "all"}
    named = translate("train_dpo", [*adapters, "--ref_pretrain", "m"], {}).config
    assert named.cluster.component_placement == {"actor": "all", "reference": "@actor"}
    assert translate("train_dpo", [*adapters, "--ref_offload"], {}).no_effect == [
        (
            "--ref_offload",
            "--lora_rank is above 0 and --ref_pretrain is not set: the model without adapters is the reference",
        )
    ]


def test_an_engine_has_no_effect_on_supervised_training():
    assert translate("train_sft", ["--engine", "transformers"], {}).no_effect == [
        ("--engine", "task is sft; this is for rl")
    ]


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--zero_stag", "3"], "--zero_stag: unknown flag; did you mean --zero_stage?"),
        (["--micro_train", "4"], "--micro_train: unknown flag; did you mean --micro_train_batch_size?"),
        (["--zero-stage=3"], "--zero-stage: unknown flag; did you mean --zero_stage?"),
        (["--print-config"], "--print-config: unknown flag; did you mean --print_config?"),
        (["--nonsense", "1", "2"], "--nonsense: unknown flag; --help lists all there are"),
        (["--beta", "1"], "--beta: unknown flag; train_dpo has it, train_ppo_ray does not"),
        (["--"], "--: unknown flag; --help lists all there are"),
        (["--print_config=no"], "--print_config: takes no value, given no"),
        (["-x"], "-x: unknown flag; --help lists all there are"),
        (["--zero_stage"], "--zero_stage: takes a value, given none"),
        (["--zero_stage", "--bf16"], "--zero_stage: takes a value, given none"),
        (["--zero_stage", "two"], "--zero_stage: given 'two', must be a whole number"),
        (["--zero_stage", "1e0"], "--zero_stage: given '1e0', must be a whole number"),
        (["--zero_stage", "7"], "--zero_stage: given 7, must be at most 3"),
        (["--top_p", "high"], "--top_p: given 'high', must be a number"),
        (["--temperature", "nan"], "--temperature: given nan, must be a finite number"),
        (["--kl_estimator", "k4"], "--kl_estimator: given 'k4', must be one of k1, k2, k3"),
        (["--actor.optim", "sgd"], "--actor.optim: given 'sgd', must be one of adam, muon"),
        (["--eps_clip_low_high", "0.1"], "--eps_clip_low_high: takes two values, given 0.1"),
        (["--eps_clip_low_high=0.1"], "--eps_clip_low_high: takes two values, given 0.1"),
        (["--reward_clip_range"], "--reward_clip_range: takes one or two values, given none"),
        (["--target_modules", "--bf16"], "--target_modules: takes at least one value, given none"),
        (["--bf16=true"], "--bf16: takes no value, given true: writing the flag turns it on"),
        (["--bf16", "true"], "'true' stands after --bf16, which takes no value: writing the flag turns it on"),
        (["x"], "'x' stands before any flag"),
        (["--zero_stage", "3", "4"], "'4' stands after --zero_stage 3, which is complete"),
        (["--use_wandb", "a", "b"], "there is one value too many after --use_wandb"),
        (["--async_train", "--async_queue_size", "0"], "--async_queue_size: given 0, must be at least 1"),
        (["--reward_clip_range", "1", "-1"], "--reward_clip_range: [1.0, -1.0]: the first must be below the second"),
        (["--input_key", ""], "--input_key: given nothing, must be text"),
        (["--eps_clip_low_high", "0", "0.2"], "--eps_clip_low_high: given 0.0, must be above 0.0"),
        (["--eps_clip_low_high", "1.5", "0.2"], "--eps_clip_low_high: given 1.5, must be at most 1.0"),
        (["--eps_clip_low_high", "0.2", "0"], "--eps_clip_low_high: given 0.0, must be above 0.0"),
        (["--kl_target", "0"], "--kl_target: given 0.0, must be above 0.0"),
        (
            ["--enable_vllm_is_correction", "--vllm_is_truncated_threshold", "2", "2"],
            "--vllm_is_truncated_threshold: 2.0 is not below high, 2.0: a ratio of probabilities is kept between them,"
            " usually 0.5 and 5",
        ),
        (
            ["--overlong_buffer_len", "21", "--generate_max_len", "20"],
            "--overlong_buffer_len: 21 is above the 20 tokens that an episode may sample: set it to 20 or less, or"
            " raise --generate_max_len",
        ),
        (
            ["--kl_target", "1", "--kl_horizon", "6", "--rollout_batch_size", "4", "--n_samples_per_prompt", "8"],
            "--kl_horizon: 6 is too short for steps of 32 samples: one of them could turn the coefficient negative;"
            " set it above 6.4",
        ),
    ],
)
def test_what_is_wrong_is_said_by_flag(argv, message):
    assert refused(argv) == [message]


def test_everything_that_is_wrong_is_said_at_once():
    assert len(refused("--zero_stag 1 --top_p x --kl_estimator")) == 3
    assert len(refused("--zero_stage 9 --top_p 2 --critic_pretrain None --async_train --async_queue_size 0")) == 4


@pytest.mark.parametrize(
    ("argv", "value"),
    [
        (["--stop_properly_penalty_coef", "-1e-3"], -1e-3),
        (["--stop_properly_penalty_coef", "-.5"], -0.5),
        (["--stop_properly_penalty_coef=-0.5"], -0.5),
    ],
)
def test_negative_numbers_are_values(argv, value):
    assert rl(*argv).config.reward.truncation_penalty == value


def test_text_may_look_like_a_flag_if_it_has_a_space_or_an_equals_sign():
    assert rl("--input_template", "-- {} --").config.data.input_template == "-- {} --"
    assert rl("--input_template=--{}").config.data.input_template == "--{}"
    assert rl("--input_template=a=b{}").config.data.input_template == "a=b{}"


# --- starting ---------------------------------------------------------------------------------------------------------


def test_a_group_of_one_prints_but_does_not_start():
    found = split("--advantage_estimator group_norm")
    assert dict(found.missing)["--n_samples_per_prompt"].startswith("1: a group of one has no advantage")


def test_what_is_not_built_is_named_by_flag_and_default():
    found = split("--advantage_estimator gae --use_ms")
    assert dict(found.unsupported) == {
        "--use_ms": "ModelScope; fetch the model with `modelscope download`, and give its folder",
    }
    for command in ("train_dpo", "train_rm"):
        assert not translate(command, ["--backend", "fsdp"], {}).unsupported
