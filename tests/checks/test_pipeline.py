"""Preflight refuses before a model loads, also what otherwise only a worker would notice."""

import json
import shutil
import sys

import pytest
import torch
import transformers
from loop_cases import make_value_model, ppo_yaml, rl_yaml, rm_yaml, sft_yaml

from hotseat.config import loads
from hotseat.errors import BatchError, DataError, HotseatError, UnsupportedError, UserError
from hotseat.loop.run import start
from hotseat.loop.settings.training_settings import reward_options, train_options
from hotseat.train.model_checks import check_nf4, check_value_head

KL = "{kl: {coef: 0.1}}"
TWO = "{component_placement: {actor: 0-1}}"


def refused(task, text: str, *overrides: str, kind: type[HotseatError] = UserError) -> str:
    with pytest.raises(kind) as caught:
        start(loads(text, overrides))
    assert not (task / "runs").exists()
    return str(caught.value)


def with_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return folder


def test_every_model_is_checked_against_the_options_not_the_actors_alone(task):
    make_value_model(task / "value")
    shutil.copytree(task / "model", task / "other")
    for folder in ("value", "other"):
        with_config(task / folder, num_attention_heads=1, head_dim=16)
    shared = ("train.sequence_parallel_size=2",)
    for text, key in (
        (ppo_yaml(task, cluster=TWO, critic=f"{{model: {task}/value}}"), "critic.model"),
        (rl_yaml(task, cluster=TWO, reward=f"{{model: {task}/value}}"), "reward.model"),
        (rl_yaml(task, cluster=TWO, algorithm=KL, reference=f"{{model: {task}/other}}"), "reference.model"),
    ):
        said = refused(task, text, *shared)
        assert said.startswith(f"{key} '{task}/")
        assert "the model's 1 attention heads do not divide over 2 ranks" in said


@pytest.mark.parametrize("make_yaml", [rl_yaml, sft_yaml])
def test_several_ranks_of_a_model_in_one_process(task, make_yaml):
    """They would wait for each other forever."""
    said = refused(task, make_yaml(task, cluster="{runtime: local, component_placement: {actor: 0-1}}"))
    assert "cluster.runtime is local" in said
    assert "actor has 2 ranks on 0-1" in said


def test_layers_that_a_critic_does_not_have_are_named(task):
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    shutil.copytree(task / "model", task / "neox", ignore=shutil.ignore_patterns("model*", "config*"))
    transformers.GPTNeoXForSequenceClassification(
        transformers.GPTNeoXConfig(vocab_size=16, num_labels=1, pad_token_id=0, **sizes)
    ).save_pretrained(task / "neox")
    said = refused(
        task,
        ppo_yaml(task, critic=f"{{model: {task}/neox}}"),
        "train.lora.rank=2",
        "train.lora.target_modules=[q_proj]",
    )
    assert said.startswith(f"critic.model '{task}/neox': train.lora.target_modules: no layer is called q_proj")


@pytest.mark.parametrize("make_yaml", [rl_yaml, sft_yaml])
def test_layers_that_cannot_be_in_four_bits_are_refused(task, make_yaml):
    qlora = ("train.lora.rank=2", "train.load_in_4bit=true")
    said = refused(task, make_yaml(task), *qlora)
    assert "have a scale for each 64 inputs of a layer, and layers of this model have 16 inputs: unset" in said
    with_config(task / "model", hidden_size=128, head_dim=64, intermediate_size=192)
    with_config(task / "model", model_type="gemma")
    said = refused(task, make_yaml(task), *qlora)
    assert "(train.load_in_4bit) have not been tried with Gemma: choose a model of the kinds llama, mistral" in said


def test_engines_cannot_cut_blocks_of_four_bits():
    sizes = {"hidden_size": 128, "num_attention_heads": 2, "intermediate_size": 192}
    check_nf4(transformers.LlamaConfig(**sizes), 1)
    with pytest.raises(UnsupportedError, match="cut into 2 parts by rollout.tensor_parallel_size, have 96 inputs"):
        check_nf4(transformers.LlamaConfig(**sizes), 2)


def test_a_model_that_has_no_head_of_one_number_is_refused():
    with pytest.raises(UserError, match="transformers has no Mamba with a head of one number: choose another model"):
        check_value_head(transformers.MambaConfig())


def test_a_folder_without_a_model_is_named(task):
    shutil.copytree(task / "demo", task / "empty", ignore=shutil.ignore_patterns("model*", "config*"))
    said = refused(task, rl_yaml(task, algorithm=KL, reference=f"{{model: {task}/empty}}"))
    assert f"reference.model: {task}/empty is no checkpoint: there is no config.json in it" in said


def test_a_reference_that_reads_other_tokens_is_refused(task):
    shutil.copytree(task / "model", task / "other")
    path = task / "other" / "tokenizer.json"
    path.write_text(path.read_text().replace('"7"', '"sept"'))
    said = refused(task, rl_yaml(task, algorithm=KL, reference=f"{{model: {task}/other}}"))
    assert "other' cannot read the tokens of actor.model" in said
    assert "'7' is 9 and absent" in said


def test_only_what_is_trained_has_to_be_a_mixture_of_experts(task):
    config = loads("{algorithm: {aux_loss_coef: 0.01}, train: {dtype: fp32}}")
    assert train_options(config, 10).aux_loss_coefficient == 0.01
    assert train_options(config, 10, is_trained=False).aux_loss_coefficient == 0
    assert reward_options(config).aux_loss_coefficient == 0


@pytest.mark.parametrize("make", [rl_yaml, sft_yaml, rm_yaml])
def test_what_the_backend_does_not_have_is_refused(task, make, monkeypatch):
    text = make(task, train="{backend: deepspeed, dtype: bf16, batch_size: 4, micro_batch_size: 2}")
    assert "only stage 3 shards weights" in refused(task, text, "train.deepspeed.zpg=2")
    assert "summed in fp32 with ZeRO stage 1" in refused(
        task, text, "train.deepspeed.zero_stage=1", "train.deepspeed.grad_accum_dtype=fp32"
    )
    on_two = make(task, cluster=TWO, train="{backend: deepspeed, dtype: bf16, batch_size: 4, micro_batch_size: 2}")
    said = refused(task, on_two, "train.deepspeed.zero_stage=3", "train.deepspeed.zpg=3")
    assert "train.deepspeed.zpg is 3, and the 2 ranks of actor cannot be divided into groups of that size" in said
    said = refused(task, on_two, "train.deepspeed.tensor_parallel_size=2")
    assert "'s 1 key-value heads do not divide over 2 ranks: set it to 1" in said
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    assert "DeepSpeed is not installed: install it with `pip install hotseat[deepspeed]`" in refused(task, text)


# --- settings and data ------------------------------------------------------------------------------------------------


def test_missing_inputs_are_refused_at_once(task):
    said = refused(task, rl_yaml(task), "algorithm.distill_coef=1")
    assert "reference.model: not set: it is the teacher from which algorithm.distill_coef has the policy learn" in said
    message = refused(task, rl_yaml(task, reward=""), "actor.model=null", "rollout.samples_per_prompt=1")
    assert "actor.model: not set" in message
    assert "reward.function: no source of rewards" in message
    assert "rollout.samples_per_prompt: 1: a group of one" in message


def test_what_is_not_built_is_refused_by_name(task):
    said = refused(task, rl_yaml(task), "use_modelscope=true", kind=UnsupportedError)
    assert "use_modelscope: ModelScope" in said


def test_kernels_that_cannot_run_are_refused_before_a_model_loads(task, monkeypatch):
    said = refused(task, rl_yaml(task), "train.liger_kernel=true")
    assert "train.liger_kernel: Liger is not installed: pip install 'hotseat[liger]'" in said
    monkeypatch.setattr("hotseat.train.liger.is_installed", lambda: True)
    monkeypatch.setattr("hotseat.train.liger.check_liger", lambda config: None)
    said = refused(task, rl_yaml(task), "train.liger_kernel=true", "train.compile=true")
    assert "train.liger_kernel and train.compile are both true" in said
    assert "its kernels need a CUDA device" in refused(task, rl_yaml(task), "train.liger_kernel=true")


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without CUDA")
def test_a_compiler_for_cuda_is_refused_without(task):
    options = ("train.backend=deepspeed", "train.deepspeed.deepcompile=true")
    assert "it does not go together with packed sequences in fp32" in refused(
        task, rl_yaml(task), *options, kind=UnsupportedError
    )
    said = refused(task, rl_yaml(task), *options, "train.packing=false")
    assert "train.deepspeed.deepcompile is true, and DeepSpeed compiles only for CUDA devices" in said


def test_batches_that_do_not_divide_are_refused(task):
    assert "train.batch_size 5 does not divide the 16 samples" in refused(
        task, rl_yaml(task), "train.batch_size=5", kind=BatchError
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without CUDA")
def test_nccl_without_cuda_is_refused(task):
    message = refused(
        task,
        rl_yaml(task, cluster="{runtime: local, component_placement: {actor: 0, rollout: 1}}"),
        "rollout.weight_transport=nccl",
    )
    assert "rollout.weight_transport is nccl" in message


def test_fewer_prompts_than_a_step_are_refused(task):
    message = refused(task, rl_yaml(task), "rollout.batch_size=16", "train.batch_size=64", kind=BatchError)
    assert "8 rows in 1 pass are fewer than the 16 of one step" in message


def test_a_bad_row_is_named(task):
    with (task / "prompts.jsonl").open("a") as file:
        file.write('{"input": 3, "label": "1"}\n')
    assert "prompts.jsonl:9" in refused(task, rl_yaml(task), kind=DataError)


def test_a_model_that_is_not_there_is_named(task):
    assert "actor.model" in refused(task, rl_yaml(task), f"actor.model={task}/nowhere")


@pytest.mark.parametrize("name", ["../out", "a/b", "/abs"])
def test_a_name_cannot_leave_the_run_directory(task, name):
    """Scenario 47."""
    assert "give one plain word" in refused(task, rl_yaml(task), f"name={name}")
