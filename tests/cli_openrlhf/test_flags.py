"""The table of flags is complete, and says nothing that is not so."""

import ast
from pathlib import Path

import pytest
from doc_tables import with_table
from field_readers import find_readers, readings
from openrlhf_table import BEGIN, END, main, render_table

from hotseat.config.load import valid_keys
from hotseat.config.unsupported import UNSUPPORTED
from hotseat.openrlhf.argv import parse
from hotseat.openrlhf.config_draft import ConfigDraft
from hotseat.openrlhf.derive import DERIVED
from hotseat.openrlhf.flags import COMMANDS, TASKS, spellings

ROOT = Path(__file__).parents[2]

# Every word with two dashes in the documents that the product is measured by, with the command it belongs to.
DOCUMENTED = {
    "train_ppo_ray": """
        --actor_learning_rate --actor_num_gpus_per_node --actor_num_nodes --adam_offload --advantage_estimator
        --agent_func_path --apply_chat_template --async_queue_size --async_train --bf16 --ckpt_path --clip_eps_high
        --clip_eps_low --colocate_actor_ref --colocate_all_models --colocate_critic_reward --critic_learning_rate
        --critic_num_gpus_per_node --critic_num_nodes --critic_pretrain --deepspeed_enable_sleep --enforce_eager
        --flash_attn --generate_max_len --gradient_checkpointing --init_kl_coef --input_key --kl_estimator --kl_horizon
        --kl_target --label_key --load_checkpoint --logging_steps --max_epochs --max_samples --max_steps
        --micro_rollout_batch_size --micro_train_batch_size --n_samples_per_prompt --no_advantage_std_norm
        --normalize_reward --packing_samples --pretrain --prompt_data --prompt_max_len --ref_num_gpus_per_node
        --ref_num_nodes --ref_reward_offload --remote_rm_url --reward_clip_range --reward_num_gpus_per_node
        --reward_num_nodes --reward_pretrain --rollout_batch_size --save_hf_ckpt --save_path --save_steps
        --save_value_network --train_batch_size --use_ds_universal_ckpt --use_kl_loss --use_wandb --vllm_enable_sleep
        --vllm_gpu_memory_utilization --vllm_num_engines --vllm_sync_backend --vllm_tensor_parallel_size --wandb_org
        --wandb_project --zero_stage
    """,
    "train_rm": """
        --apply_chat_template --bf16 --chosen_key --dataset --eval_steps --flash_attn --gradient_checkpointing
        --learning_rate --logging_steps --max_epochs --max_len --micro_train_batch_size --pretrain --rejected_key
        --save_path --save_steps --train_batch_size --zero_stage
    """,
    "train_dpo": """
        --apply_chat_template --beta --bf16 --chosen_key --dataset --eval_steps --flash_attn --gradient_checkpointing
        --learning_rate --logging_steps --max_epochs --max_len --micro_train_batch_size --pretrain --rejected_key
        --save_path --save_steps --train_batch_size --zero_stage
    """,
    "ray start": "--head --address --node-ip-address --num-gpus",
    "ray job submit": "--address --runtime-env-json",
    "deepspeed": "--module",
    "docker run": "--runtime --rm --shm-size --cap-add",
}
NOT_OURS = ("ray start", "ray job submit", "deepspeed", "docker run")

# Every old-style flag of OpenRLHF that our reference names, {a,b} written out.
OLD_STYLE = {
    "train_ppo_ray": """
        actor_num_nodes actor_num_gpus_per_node critic_num_nodes critic_num_gpus_per_node ref_num_nodes
        ref_num_gpus_per_node reward_num_nodes reward_num_gpus_per_node colocate_all_models colocate_actor_ref
        colocate_critic_reward ref_reward_offload vllm_num_engines vllm_tensor_parallel_size vllm_sync_backend
        vllm_sync_with_ray enable_prefix_caching enforce_eager vllm_enable_sleep vllm_gpu_memory_utilization async_train
        async_queue_size partial_rollout agent_func_path rollout_batch_size micro_rollout_batch_size
        n_samples_per_prompt vllm_generate_batch_size train_batch_size micro_train_batch_size num_episodes max_epochs
        use_dynamic_batch train_max_tokens_per_gpu rollout_max_tokens_per_gpu prompt_max_len generate_max_len
        temperature top_p zero_stage adam_offload zpg deepcompile overlap_comm grad_accum_dtype deepspeed_enable_sleep
        ds_tensor_parallel_size ring_attn_size ring_head_stride packing_samples load_in_4bit lora_rank lora_alpha
        lora_dropout target_modules use_liger_kernel flash_attn bf16 value_head_prefix actor_learning_rate
        critic_learning_rate eps_clip eps_clip_low_high dual_clip policy_loss_type entropy_loss_coef aux_loss_coef
        value_clip save_value_network freezing_actor_steps advantage_estimator gamma lambd no_advantage_std_norm
        enable_vllm_is_correction vllm_is_truncated_threshold vllm_is_correction_type init_kl_coef kl_target kl_horizon
        kl_estimator use_kl_loss dynamic_filtering dynamic_filtering_reward_range reward_pretrain remote_rm_url
        normalize_reward reward_clip_range overlong_buffer_len overlong_penalty_factor stop_properly_penalty_coef
        save_path ckpt_path save_steps save_hf_ckpt disable_ds_ckpt max_ckpt_num max_ckpt_mem load_checkpoint
        best_metric_key use_ds_universal_ckpt enable_ema ema_beta prompt_data prompt_data_probs prompt_split input_key
        label_key input_template apply_chat_template max_samples image_key max_images_per_prompt eval_dataset
        eval_split eval_steps eval_temperature eval_n_samples_per_prompt use_wandb use_tensorboard use_ms seed
        full_determinism clip_eps_low clip_eps_high max_steps critic_pretrain pretrain local_rank
    """,
    "train_sft": """
        pretrain_mode multiturn input_key output_key tokenizer_chat_template packing_samples ring_attn_size
        ring_head_stride ds_tensor_parallel_size lora_rank lora_alpha lora_dropout target_modules aux_loss_coef
        local_rank
    """,
    "train_rm": "loss loss_type margin_loss margin_loss_enable compute_fp32_loss compute_fp32_loss_enable"
    " value_head_prefix local_rank",
    "train_dpo": "beta ipo ipo_enable label_smoothing nll_loss_coef ref_offload local_rank",
}
NEWER_STYLE = """
    train.colocate_all train.colocate_actor_ref train.colocate_critic_reward ref.offload reward.offload
    train.async_enable train.async_queue_size train.partial_rollout_enable train.agent_func_path
    train.dynamic_batch_enable train.max_tokens_per_gpu rollout.max_tokens_per_gpu data.max_len rollout.max_new_tokens
    ds.enable_sleep ds.tensor_parallel_size ds.ring_attn_size ds.ring_attn_head_stride ds.lora.rank ds.lora.alpha
    ds.lora.dropout ds.lora.target_modules ds.attn_implementation ds.param_dtype ds.experts_implementation
    actor.adam.lr critic.adam.lr actor.optim critic.optim actor.muon.lr critic.muon.momentum actor.adam.betas
    critic.adam.eps actor.adam.weight_decay critic.lr_scheduler actor.lr_warmup_ratio critic.min_lr_ratio
    actor.max_norm actor.entropy_coef critic.freezing_steps algo.advantage.estimator
    algo.advantage.is_correction_enable algo.kl.init_coef algo.dynamic_filtering_enable algo.dynamic_filtering_range
    reward.remote_url reward.normalize_enable ckpt.output_dir ckpt.path ckpt.save_hf ckpt.load_enable
    ds.use_universal_ckpt logger.wandb.key logger.tensorboard_dir
"""

# What no flag of OpenRLHF's says. A new field is either named here or gets a flag.
WITHOUT_A_FLAG = {
    "actor.rope_scaling",
    "actor.shape",
    "agent.command",
    "agent.containers",
    "agent.environment.arguments",
    "agent.environment.family",
    "agent.environment.name",
    "agent.environment.num_processes",
    "agent.gateway.advertise_url",
    "agent.gateway.bind",
    "agent.history",
    "agent.max_concurrent",  # OPENRLHF_ASYNC_NUM_TASKS
    "agent.on_timeout",
    "agent.pass_env",
    "agent.preload",
    "agent.python",
    "agent.sampling",
    "agent.tool_parser",
    "agent.turn_length",  # set beside --agent_func_path
    "algorithm.batch_norm",
    "algorithm.aggregation",  # set beside --advantage_estimator dr_grpo
    "algorithm.correction.normalise",
    "algorithm.correction.reject",
    "algorithm.correction.reject_high",
    "algorithm.correction.reject_low",
    *(f"algorithm.distill.{key}" for key in ("coef", "divergence", "beta", "top_k", "tail", "temperature")),
    "algorithm.distill.answer_key",
    "algorithm.distill.sampled",
    "algorithm.distill.teacher_input_key",
    "algorithm.distill_coef",
    "algorithm.dpo.gamma",
    "algorithm.dpo.length_normalised",
    "algorithm.dpo.precompute",
    "algorithm.gate_temperature_neg",
    "algorithm.gate_temperature_pos",
    "algorithm.kl.allow_k1_loss",  # set beside --use_kl_loss --kl_estimator k1
    "algorithm.mask_truncated",
    "algorithm.time_step",
    "algorithm.ratio_step",
    "algorithm.turn_credit",
    "checkpoint.background",
    "checkpoint.keep_final",
    "checkpoint.memory_every",
    "checkpoint.memory_path",
    "checkpoint.push_private",
    "checkpoint.push_to_hub",
    "cluster.call_timeout_s",
    "cluster.component_names",
    "components",
    "cluster.node_groups",
    "cluster.num_nodes",
    "cluster.ray_dashboard",
    "cluster.profile",
    "cluster.runtime",
    "cluster.silence_timeout_s",
    "cluster.threads_per_process",
    "critic.shape",
    "data.chat_template_kwargs",
    "data.max_image_bytes",
    "data.max_image_pixels",
    "data.sampler",
    "data.shuffle",
    "env.bins",
    "env.bootstrap_terminated",
    "env.chunk",
    "env.enable_offload",
    "env.eval_seeds",
    "env.films",
    "env.images",
    "env.kwargs",
    "env.max_steps",
    "env.memory_gib",
    "env.num_envs",
    "env.num_processes",
    "env.num_seeds",
    "env.path",
    "env.relative_rewards",
    "env.reward",
    "env.reward_scale",
    "env.step_timeout_s",
    "env.tasks",
    "eval.graders",
    "eval.max_samples",
    "eval.reward",
    "eval.sets",
    "flow",
    "inference.enable_offload",
    "log.endpoint.host",
    "log.endpoint.port",
    "log.keep_rollouts",
    "log.mlflow.enabled",
    "log.mlflow.experiment",
    "log.mlflow.run_name",
    "log.mlflow.uri",
    "log.openrlhf_names",
    "log.samples_every",
    "log.samples_per_step",
    "log.trackio.enabled",
    "log.trackio.group",
    "log.trackio.project",
    "log.trackio.run_name",
    "log.trackio.space",
    "name",
    "reference.engine",
    "reference.teacher_weights",
    "reference.teachers",
    "reward.functions",
    "reward.parts",
    "reward.graders",
    "reward.kwargs",
    "reward.judge.choices",
    "reward.judge.combine",
    "reward.judge.engine.enable_offload",
    "reward.judge.engine.enforce_eager",
    "reward.judge.engine.kind",
    "reward.judge.engine.max_length",
    "reward.judge.engine.memory_share",
    "reward.judge.engine.num_engines",
    "reward.judge.engine.num_slots",
    "reward.judge.engine.shape",
    "reward.judge.engine.tensor_parallel_size",
    "reward.judge.max_open_requests",
    "reward.judge.max_tokens",
    "reward.judge.model",
    "reward.judge.name",
    "reward.judge.pattern",
    "reward.judge.request",
    "reward.judge.retries",
    "reward.judge.rubric",
    "reward.judge.scale",
    "reward.judge.temperature",
    "reward.judge.timeout_s",
    "reward.judge.url",
    "reward.judge.votes",
    "reward.judge.weight",
    "reward.max_failed_fraction",
    "reward.max_memory_gib",
    "reward.max_open_requests",
    "reward.retokenize",
    "reward.retries",
    "reward.sandbox.command",
    "reward.sandbox.max_concurrent",
    "reward.sandbox.max_cpu_s",
    "reward.sandbox.max_memory_mib",
    "reward.sandbox.max_output_kib",
    "reward.sandbox.max_processes",
    "reward.sandbox.python",
    "reward.sandbox.timeout_s",
    "reward.shape",
    "reward.timeout_s",
    "rollout.canary.drift_factor",
    "rollout.canary.num_tokens",
    "rollout.canary.rounding_factor",
    "rollout.chosen_tokens_per_device",
    "rollout.engine_args",
    "rollout.fp32_head",
    "rollout.kv_cache_dtype",
    "rollout.lora_sync",
    "rollout.max_thinking_tokens",
    "rollout.num_hosts",
    "rollout.oversample",
    "rollout.num_slots",
    "rollout.pipeline_stage_num",
    "rollout.quantization",
    "rollout.routing_replay",
    "rollout.stop",
    "rollout.top_k",
    "run.max_restarts",
    "run.standby",
    "train.checkpointed_layers",
    "train.chosen_tokens_per_device",
    "train.compile",
    "train.fp32_master",
    "train.max_skipped_steps",
    "train.on_spike",
    "train.spike_factor",
    "trust_remote_code",
}


def all_flags():
    return [(command, flag) for command, flags in COMMANDS.items() for flag in flags]


@pytest.mark.parametrize("command", [name for name in DOCUMENTED if name not in NOT_OURS])
def test_every_documented_flag_is_known(command):
    assert not set(DOCUMENTED[command].split()) - set(spellings(command))


@pytest.mark.parametrize("command", OLD_STYLE)
def test_every_flag_of_the_reference_is_known(command):
    assert not {f"--{name}" for name in OLD_STYLE[command].split()} - set(spellings(command))


def test_the_newer_spellings_are_known():
    assert not {f"--{name}" for name in NEWER_STYLE.split()} - set(spellings("train_ppo_ray"))


@pytest.mark.parametrize("command", COMMANDS)
def test_a_spelling_means_one_flag(command):
    every = [spelling for flag in COMMANDS[command] for spelling in flag.spellings]
    assert len(every) == len(set(every))


def test_every_field_that_a_flag_sets_exists():
    known = set(valid_keys())
    assert not [(flag.name, key) for _, flag in all_flags() for key in flag.sets if key not in known]


def test_every_flag_does_something_or_says_why_not():
    for _, flag in all_flags():
        said = [bool(flag.sets), flag.because is not None, flag.read_by is not None]
        assert said.count(True) == 1, flag.name


def test_every_field_is_set_by_a_flag_or_known_to_have_none():
    by_flags = {key for _, flag in all_flags() for key in flag.sets}
    assert set(valid_keys()) - by_flags - {"task"} == WITHOUT_A_FLAG


def test_what_works_fields_out_exists_and_sets_only_what_the_table_says():
    used = {flag.by for _, flag in all_flags() if flag.by}
    assert used == set(DERIVED)
    beyond = {"cluster.component_placement", "agent.max_concurrent"}
    for command in COMMANDS:
        for name in {flag.by for flag in COMMANDS[command] if flag.by}:
            draft = ConfigDraft(parse(command, []), {}, task=TASKS[command])
            DERIVED[name](draft)
            said = {key for flag in COMMANDS[command] if flag.by == name for key in flag.sets}
            assert set(draft.fields) <= said | beyond, name


@pytest.fixture(scope="module")
def readers():
    return find_readers()


@pytest.mark.slow
def test_every_reader_of_a_field_exists(readers):
    named = {*readers.values(), *(flag.read_by for _, flag in all_flags() if flag.read_by)}
    assert named
    functions: dict[str, set[str]] = {}
    for reader in named:
        file, _, function = reader.partition(":")
        if file not in functions:
            nodes = ast.walk(ast.parse((ROOT / file).read_text()))
            functions[file] = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
        assert function in functions[file], reader


@pytest.mark.slow
def test_every_field_that_a_flag_sets_is_read_or_belongs_to_what_is_not_built(readers):
    assert not {key for _, flag in all_flags() for key in flag.sets if key not in readers and key not in UNSUPPORTED}


def test_a_reading_is_found_through_assignments_and_sections():
    source = """
def one(config: Config, other):
    train, log = config.train, config.log
    return train.batch_size, other.seed, log.wandb.enabled

class Two:
    def three(self):
        return self._config.seed

def four(data: DataConfig):
    return data.path
"""
    assert set(readings(source, frozenset(valid_keys()))) == {
        ("train.batch_size", "one"),
        ("log.wandb.enabled", "one"),
        ("seed", "three"),
        ("data.path", "four"),
    }


def test_the_documented_table_is_what_the_flags_say():
    document = (ROOT / "docs" / "openrlhf.md").read_text()
    hint = "run: python scripts/openrlhf_table.py docs/openrlhf.md"
    assert document == with_table(document, render_table(), BEGIN, END), hint


def test_the_table_names_every_spelling():
    table = render_table()
    for _, flag in all_flags():
        assert all(f"`{spelling}`" in table for spelling in flag.spellings)


def test_the_table_is_for_users():
    rows = {line.split("`")[1]: line.split(" | ")[-1] for line in render_table().splitlines()[2:]}
    assert not [name for name, meaning in rows.items() if "hotseat/" in meaning]
    assert rows["--lora_rank"] == "Rank of the adapters; 0 trains all weights. |"
    assert rows["--remote_rm_url"].endswith("or the address of a reward server. |")
    assert rows["--load_in_4bit"].startswith("Keep the frozen weights of linear layers in NF4")
    unbuilt = {name for name, meaning in rows.items() if "not built yet" in meaning.lower()}
    assert unbuilt == set()
    assert rows["--flash_attn"].startswith("no effect: ")
    assert rows["--local_rank"] == "set by `deepspeed` and `torchrun` for each process |"
    assert all(meaning.strip(" |") for meaning in rows.values())


def test_the_table_is_written_between_its_marks(tmp_path):
    document = tmp_path / "page.md"
    document.write_text(f"above\n{BEGIN}\nold\n{END}\nbelow\n")
    main([str(document)])
    text = document.read_text()
    assert text.startswith(f"above\n{BEGIN}\n| flag |")
    assert text.endswith(f"|\n{END}\nbelow\n")
    assert "old\n" not in text
