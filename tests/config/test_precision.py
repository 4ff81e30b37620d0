"""The type of the computation: what devices are good at, unless it is set; what is slow is said."""

import re

import pytest
import yaml
from loop_cases import make_task, sft_yaml

from hotseat.checks.cpu import engine_dtype_problem, has_bf16_units, slow_dtype
from hotseat.cli.main import main
from hotseat.config import loads, loads_saved, to_saved
from hotseat.config.changes import changes_between
from hotseat.config.precision import dtype_of, idle_in_fp32, with_dtype, with_dtype_of
from hotseat.loop.rl.canary import CanarySettings
from hotseat.loop.run import start
from hotseat.loop.settings.rollout_settings import engine_dtype
from hotseat.loop.settings.training_settings import train_options
from hotseat.machine import has_gpu
from hotseat.observe import read_lines
from hotseat.openrlhf.translate import translate
from hotseat.planning.config_plan import make_plan
from hotseat.train.zero_config import check_zero

WITHOUT = "processor\t: 0\nflags\t\t: fpu sse avx2 avx512f avx512_vnni\nbugs\t: spectre\n"
WITH = {
    "intel": "flags\t\t: fpu avx512f avx512_bf16 amx_tile amx_bf16\n",
    "amd": "flags\t\t: fpu avx512f avx512_bf16\n",
    "arm": "processor\t: 0\nFeatures\t: fp asimd sve i8mm bf16 svebf16\n",
}


def test_unset_is_bf16_on_gpus_and_fp32_on_cpus():
    assert dtype_of(with_dtype(loads(""), has_gpus=True)) == "bf16"
    assert dtype_of(with_dtype(loads(""), has_gpus=False)) == "fp32"
    for has_gpus in (True, False):
        assert dtype_of(with_dtype(loads("train: {dtype: bf16}"), has_gpus)) == "bf16"


def test_engines_trainer_and_canary_have_the_chosen_type():
    cpu, gpu = (with_dtype(loads("actor: {model: m}"), has_gpus) for has_gpus in (False, True))
    assert (engine_dtype(cpu), engine_dtype(gpu)) == ("float32", "bfloat16")
    assert (train_options(cpu, 100).precision, train_options(gpu, 100).precision) == (
        "fp32",
        "bf16_master",
    )
    assert (CanarySettings.of(cpu, False).dtype, CanarySettings.of(gpu, True).dtype) == ("fp32", "bf16")


def test_what_a_run_chose_loads_again_though_options_of_16_bits_were_set():
    config = loads("{train: {fp32_master: false}, rollout: {fp32_head: false}}")
    assert idle_in_fp32(config) == ["train.fp32_master", "rollout.fp32_head"]
    chosen = with_dtype(config, has_gpus=False)
    assert loads_saved(to_saved(chosen)) == chosen
    assert not with_dtype(config, has_gpus=True).train.fp32_master


def test_an_unset_type_is_taken_over_from_a_checkpoint_and_another_is_refused():
    saved = to_saved(with_dtype(loads("train: {fp32_master: false}"), has_gpus=False))
    assert changes_between(saved, loads("train: {fp32_master: false}")) == []
    assert with_dtype_of(loads(""), loads_saved(saved)).train.dtype == "fp32"
    assert with_dtype_of(loads("train: {dtype: bf16}"), loads_saved(saved)).train.dtype == "bf16"
    with pytest.raises(Exception, match="train.dtype: fp32 when the checkpoint was written, now bf16"):
        changes_between(saved, loads("train: {dtype: bf16}"))


def test_a_plan_prices_what_a_run_on_those_machines_would_use():
    """Weights of an engine: 4 bytes on CPUs, 2 on GPUs; the same as where the type is written out."""

    def engine_gib(*overrides: str, inventory: str | None = None, are_devices_logical: bool = False) -> float:
        text = "{actor: {model: org/Llama-3-8B}, cluster: {component_placement: {actor: 0, rollout: 1}}}"
        plan = make_plan(loads(text, overrides), inventory, are_devices_logical=are_devices_logical)
        [group] = [group for group in plan.groups if 1 in group]
        return max(step.used_gib for step in group.steps)

    gpus = engine_gib(inventory="1x2xH100-80G")
    assert gpus == engine_gib("train.dtype=bf16", inventory="1x2xH100-80G")
    assert engine_gib("train.dtype=fp32", inventory="1x2xH100-80G") > 1.5 * gpus
    assert engine_gib() == engine_gib("train.dtype=bf16")
    assert engine_gib(are_devices_logical=True) == engine_gib("train.dtype=fp32", are_devices_logical=True)


def test_units_for_bf16_are_read_from_the_flags_of_the_cpu():
    assert has_bf16_units(WITHOUT) is False
    for text in WITH.values():
        assert has_bf16_units(text) is True
    assert has_bf16_units("") is None


def test_bf16_on_a_cpu_without_units_for_it_is_reported_with_what_to_set():
    said = slow_dtype(loads("train: {dtype: bf16}"), WITHOUT)
    assert said.startswith("train.dtype is bf16, and this CPU has no units for it")
    assert "Set train.dtype to fp32 or leave it unset; in OpenRLHF's commands, give --param_dtype fp32" in said
    assert slow_dtype(loads("train: {dtype: fp32}"), WITHOUT) is None
    assert slow_dtype(loads("train: {dtype: bf16}"), WITH["amd"]) is None
    assert slow_dtype(loads("train: {dtype: bf16}"), "") is None


def test_vllm_in_bf16_is_refused_on_an_arm_cpu_without_units_for_it():
    config = loads("{train: {dtype: bf16}, rollout: {engine: vllm}}")
    problem = engine_dtype_problem(config, WITHOUT, "aarch64")
    assert problem is not None
    assert re.search("needs a CPU with units for bf16, .* or set rollout.engine to transformers", problem)
    assert engine_dtype_problem(config, WITHOUT, "x86_64") is None
    assert engine_dtype_problem(config, WITH["arm"], "aarch64") is None
    assert engine_dtype_problem(loads("{train: {dtype: fp32}, rollout: {engine: vllm}}"), WITHOUT, "aarch64") is None
    assert engine_dtype_problem(loads("train: {dtype: bf16}"), WITHOUT, "aarch64") is None


def test_openrlhf_commands_keep_their_type_and_its_way_out_works():
    flags = ["--pretrain", "m", "--dataset", "d", "--backend", "fsdp"]
    assert translate("train_sft", [*flags, "--bf16"], {}).config.train.dtype == "bf16"
    assert slow_dtype(translate("train_sft", [*flags, "--bf16"], {}).config, WITHOUT) is not None
    for given in ([], ["--bf16"]):
        assert translate("train_sft", [*flags, *given, "--param_dtype", "fp32"], {}).config.train.dtype == "fp32"


def test_a_reference_in_bf16_has_no_adam_to_offload():
    config = loads("train: {dtype: bf16, backend: deepspeed, deepspeed: {zero_stage: 3, adam_offload: true}}")
    assert train_options(config, 10).zero.adam_offload
    reference = train_options(config, 10, is_trained=False)
    assert not reference.zero.adam_offload
    check_zero(reference)


@pytest.mark.slow
def test_a_run_records_what_it_chose_and_says_it(tmp_path):
    task = make_task(tmp_path)
    expected = "bf16" if has_gpu() else "fp32"
    start(loads(sft_yaml(task, train="{batch_size: 4, micro_batch_size: 2}")))
    assert yaml.safe_load((task / "runs" / "sft" / "config.yaml").read_text())["train"]["dtype"] == expected
    texts = [event["text"] for event in read_lines(task / "runs" / "sft" / "events.jsonl")]
    where = "GPUs" if has_gpu() else "CPUs"
    assert f"train.dtype: {expected}, for {where} (it is unset)" in texts


@pytest.mark.slow
def test_a_run_in_bf16_resumes_in_bf16_though_dtype_is_unset(tmp_path):
    task = make_task(tmp_path)
    made = "{dtype: bf16, batch_size: 4, micro_batch_size: 2, max_epochs: 2}"
    unset = made.replace("dtype: bf16, ", "").replace("max_epochs: 2", "max_epochs: 3")
    checkpoints = ("checkpoint.every=3",)
    start(loads(sft_yaml(task, train=made), checkpoints))
    events = task / "runs" / "sft" / "events.jsonl"
    warned = [event for event in read_lines(events) if event["kind"] == "warning" and "no units" in event["text"]]
    assert len(warned) == (not has_gpu() and slow_dtype(loads("train: {dtype: bf16}")) is not None)
    start(loads(sft_yaml(task, train=unset), (*checkpoints, "checkpoint.resume=true")))
    texts = [event["text"] for event in read_lines(events)]
    assert "train.dtype: bf16, as in the checkpoint (it is unset)" in texts
    assert main(["resume", str(task / "runs" / "sft")]) == 0
    assert loads_saved((task / "runs" / "sft" / "config.yaml").read_text()).train.dtype == "bf16"
