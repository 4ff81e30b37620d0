"""Runs that train adapters, and runs that keep a moving average."""

from pathlib import Path

import pytest
import torch
from loop_cases import make_task, rl_yaml, sft_yaml
from peft import PeftModel
from safetensors.torch import load_file
from stopped_runs import stopped_after_saving
from transformers import AutoModelForCausalLM, AutoTokenizer

from hotseat.cli.main import main
from hotseat.config import loads
from hotseat.errors import UserError
from hotseat.loop.run import start
from hotseat.observe import read_lines

pytestmark = pytest.mark.slow

LORA = ("train.lora.rank=4", "train.lora.alpha=16")
EMA = ("train.ema.enabled=true", "train.ema.beta=0.5")


@pytest.fixture
def task(tmp_path):
    # Embeddings are frozen: they must be large enough for the layers below to say something.
    return make_task(tmp_path, initializer_range=0.3)


def run(task: Path, yaml: str, *overrides: str) -> list[dict]:
    config = loads(yaml, overrides)
    start(config)
    return read_lines(task / "runs" / config.name / "metrics.jsonl")


def weights(path: Path) -> dict:
    return load_file(path / "model.safetensors")


def moved(before: dict, after: dict) -> set[str]:
    return {name for name in after if not torch.equal(before[name], after[name])}


@pytest.mark.parametrize("backend", ["fsdp", pytest.param("deepspeed", marks=pytest.mark.long)])
def test_examples_are_learned_by_adapters_alone(task, backend):
    options = ("actor.optimizer.learning_rate=0.03", "train.lora.dropout=0.1", f"train.backend={backend}")
    records = run(task, sft_yaml(task), *LORA, *options)
    assert records[-1]["loss"] < records[1]["loss"] - 0.2
    directory = task / "runs" / "sft" / "model"
    base = weights(task / "model")
    assert moved(base, weights(directory)) == {name for name in base if "proj" in name}
    merged = AutoModelForCausalLM.from_pretrained(directory)
    adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(task / "model"), directory / "adapter")
    token_ids = torch.arange(12)[None]
    ours, theirs = (model.eval()(token_ids).logits.log_softmax(-1) for model in (merged, adapted))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


def test_a_policy_of_adapters_learns_and_engines_sample_from_the_merged_weights(task):
    records = run(
        task,
        rl_yaml(task),
        *LORA,
        "train.num_episodes=4",
        "actor.optimizer.learning_rate=0.03",
        "algorithm.kl.coef=0.001",
    )
    first, last = (sum(record["reward"] for record in part) / 2 for part in (records[1:3], records[-2:]))
    assert last > first + 1
    # Adapters have moved far from the reference, the engine with them: digests, canary and log-probs agree.
    assert records[-1]["kl"] > 0.01
    assert [record["version"] for record in records[1:]] == [float(step) for step in range(1, 9)]
    assert max(record["engine_gap"] for record in records[1:]) < 1e-5
    assert max(record["canary_gap"] for record in records[1:]) < 1e-5
    base = weights(task / "model")
    assert moved(base, weights(task / "runs" / "run" / "model")) == {name for name in base if "proj" in name}


@pytest.mark.filterwarnings("ignore::UserWarning")  # a CPU without 16-bit units says so
@pytest.mark.parametrize("backend", ["fsdp", pytest.param("deepspeed", marks=pytest.mark.long)])
def test_16_bit_engines_get_merged_weights_in_16_bits(task, backend):
    train = f"{{backend: {backend}, dtype: bf16, batch_size: 16, micro_batch_size: 8}}"
    records = run(task, rl_yaml(task, train=train), *LORA)
    assert [record["version"] for record in records[1:]] == [1.0, 2.0]  # digests agreed
    assert records[-1]["canary_gap"] < 0.25


@pytest.mark.parametrize("kind", ["rl", pytest.param("sft", marks=pytest.mark.long)])
def test_adapters_and_their_average_resume_from_a_checkpoint(task, kind):
    yaml = rl_yaml if kind == "rl" else sft_yaml
    options = (
        *LORA,
        *EMA,
        "train.lora.dropout=0.1",
        "checkpoint.every=1",
        *(("train.max_epochs=1",) if kind == "sft" else ()),
    )
    run(task, yaml(task, name="whole"), *options)
    with stopped_after_saving():
        run(task, yaml(task, name="broken"), *options)
    assert main(["resume", str(task / "runs" / "broken")]) == 0
    for folder in ("model", "model_ema"):
        whole, broken = (weights(task / "runs" / name / folder) for name in ("whole", "broken"))
        assert not moved(whole, broken)


def test_the_average_is_exported_beside_the_model(task):
    """Two steps: the average is β² of the first weights, β (1 - β) of those after one step, 1 - β of the last."""
    run(task, rl_yaml(task), *EMA, "checkpoint.every=1", "checkpoint.export_each=true", "checkpoint.keep_last=9")
    directory = task / "runs" / "run"
    first, between, last = (
        weights(path) for path in (task / "model", directory / "checkpoints/step-000001/model", directory / "model")
    )
    averaged = weights(directory / "model_ema")
    for name, found in averaged.items():
        expected = 0.25 * first[name] + 0.25 * between[name] + 0.5 * last[name]
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    assert moved(averaged, last)
    assert AutoTokenizer.from_pretrained(directory / "model_ema")("1+2=")["input_ids"]


def test_layers_that_are_not_there_are_named_before_a_model_loads(task):
    for yaml in (rl_yaml(task), sft_yaml(task)):
        with pytest.raises(
            UserError, match=r"train.lora.target_modules: no layer is called query; LlamaForCausalLM has"
        ):
            run(task, yaml, *LORA, "train.lora.target_modules=[q_proj, query]")
    assert not (task / "runs").exists()
