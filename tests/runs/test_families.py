"""Model families through training and rollout engines. `docs/models.md` has a table of what these tests find.

Every cell of the table is asserted by the test that measures it: who changes what a family can do changes the table.
"""

from __future__ import annotations

import copy
import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from family_cases import BY_NAME, FAMILIES, VOCAB_SIZE, Family
from loop_cases import REWARD, rl_yaml, sft_yaml, write_rows
from model_shells import NO_WEIGHTS
from transformers import PreTrainedModel

from hotseat.algorithms.digest import tensor_digest
from hotseat.config import loads
from hotseat.errors import HotseatError, PlacementError, UnsupportedError, UserError
from hotseat.loop.run import start
from hotseat.observe import read_lines
from hotseat.placement.shapes import from_hf_config
from hotseat.rollout import TransformersEngine
from hotseat.train.backend import Outputs, TrainOptions
from hotseat.train.make import make_backend
from hotseat.types import MicroBatch, Request, Sampling

TABLE = Path(__file__).parents[2] / "docs" / "models.md"
IN_MAKE_TEST = ("Qwen2.5", "Gemma 3")
TEMPERATURE = 0.8
LENGTHS = (23, 9, 17, 2)  # windows are of 5


def each(*, is_long: bool = True) -> list[Any]:
    """A parameter per family: two are `slow`, all others `long`; unless `is_long`, all are `slow`."""
    return [
        pytest.param(
            family,
            id=family.name,
            marks=[
                pytest.mark.long if is_long and family.name not in IN_MAKE_TEST else pytest.mark.slow,
                pytest.mark.skipif(
                    not family.is_in_transformers,
                    reason=f"transformers {transformers.__version__} has no {family.config}",
                ),
            ],
        )
        for family in FAMILIES
    ]


def documented(family: Family) -> dict[str, str]:
    """The family's row of the table in the docs."""
    lines = [line for line in TABLE.read_text().splitlines() if line.startswith("| ")]
    header, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    return next(dict(zip(header, row, strict=True)) for row in rows if row[0] == family.name)


def refusal(cell: str) -> str:
    """The words of the error that a cell quotes."""
    assert cell.startswith("refused: "), f"refused, and the table says {cell}"
    return cell.removeprefix("refused: ")


# --- what is true -----------------------------------------------------------------------------------------------------


def some_segments() -> MicroBatch:
    """Segments of different length, two of which begin with the same context."""
    generator = torch.Generator().manual_seed(0)
    segments = [torch.randint(VOCAB_SIZE, (length,), generator=generator) for length in LENGTHS]
    segments[2][:3] = segments[0][:3]
    masks = [torch.arange(len(segment)) >= min(3, len(segment) - 1) for segment in segments]
    return MicroBatch(
        torch.cat(segments),
        torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0).tolist()]),
        torch.cat(masks),
        torch.rand(sum(LENGTHS), generator=generator),
        {},
        tuple("abcd"),
    )


def plain_log_probs(model: PreTrainedModel, token_ids: torch.Tensor, temperature: float) -> torch.Tensor:
    """Of each token given those before it, from transformers' own forward of this sequence alone."""
    logits = model(input_ids=token_ids[None], use_cache=False).logits[0, :-1].float() / temperature
    found = logits.log_softmax(-1).gather(-1, token_ids[1:, None]).squeeze(-1)
    return torch.cat([torch.zeros(1), found])


def oracle(model: PreTrainedModel) -> PreTrainedModel:
    """A copy with the attention in which transformers leaves nothing out."""
    made = copy.deepcopy(model)
    made.set_attn_implementation("eager")
    return made


class WeightedSum:
    """Of log-probs, so that every token has another gradient."""

    def __call__(self, outputs: Outputs, micro_batch: MicroBatch) -> tuple[torch.Tensor, dict[str, float]]:
        assert outputs.log_probs is not None
        return (outputs.log_probs * micro_batch.weights).sum(), {}


def make_or_none(model: PreTrainedModel, layout: str) -> Any:
    """A trainer, or None if the model's layers do not keep packed segments apart."""
    try:
        return make_backend(model, TrainOptions(layout=layout))  # type: ignore[arg-type]
    except UnsupportedError as error:
        if "its layers do not keep segments apart" not in str(error):
            raise
        return None


def kept_gradients(backend: Any) -> dict[str, torch.Tensor]:
    """Filled by the next backward: gradients are gone after an update."""
    kept: dict[str, torch.Tensor] = {}
    for name, weight in backend._weights.items():
        weight.register_post_accumulate_grad_hook(lambda weight, name=name: kept.update({name: weight.grad.clone()}))
    return kept


# --- the trainer ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", each())
def test_log_probs_and_gradients_are_those_of_every_sequence_alone(family: Family) -> None:
    model, batch = family.make_model(), some_segments()
    expected = oracle(model)
    parts = [
        plain_log_probs(expected, batch.token_ids[start:end], TEMPERATURE)
        for start, end in zip(batch.offsets[:-1], batch.offsets[1:], strict=True)
    ]
    log_probs = torch.cat(parts) * batch.mask
    (log_probs * batch.weights).sum().backward()
    gradients = {name: weight.grad for name, weight in expected.named_parameters() if weight.grad is not None}
    norm = torch.stack([gradient.norm() for gradient in gradients.values()]).norm()

    packs = []
    for layout in ("padded", "packed", "shared"):
        backend = make_or_none(copy.deepcopy(model), layout)
        if backend is None:
            continue
        packs.append(layout)
        torch.testing.assert_close(backend.log_probs([batch], TEMPERATURE)[0], log_probs.detach(), rtol=0, atol=1e-4)
        kept = kept_gradients(backend)
        report = backend.update([batch], WeightedSum(), TEMPERATURE)
        assert report.grad_norm == pytest.approx(float(norm), rel=1e-3)
        assert kept.keys() == gradients.keys()
        for name, gradient in gradients.items():
            torch.testing.assert_close(kept[name], gradient, rtol=1e-3, atol=1e-4 * float(norm), msg=name)
        backend.close()
    is_padded = make_backend(model, TrainOptions(optimizer=None)).is_padded
    assert is_padded == (packs != ["padded", "packed", "shared"])
    assert documented(family)["layout"] == ("padded" if is_padded else "packed")


@pytest.mark.parametrize("family", each())
def test_what_leaves_the_trainer_in_16_bits_is_what_an_engine_in_16_bits_holds(family: Family, tmp_path: Path) -> None:
    """Of the same files. What transformers keeps in 32 bits, such as the correction of DeepSeek's experts, stays so."""
    folder = family.write(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    held = {name: tensor_digest(tensor) for name, tensor in loaded.state_dict().items()}
    for precision in ("bf16", "bf16_master"):
        backend = make_backend(folder, TrainOptions(precision=precision))  # type: ignore[arg-type]
        sent = backend.digest(dtype=torch.bfloat16)
        assert {name: tensor_digest(tensor) for name, tensor in backend.weights(dtype=torch.bfloat16)} == sent
        assert sent == {name: held[name] for name in sent}
        tied = {"lm_head.weight"} if loaded.config.tie_word_embeddings else set()
        assert held.keys() - sent.keys() == tied
        backend.close()


@pytest.mark.parametrize("family", each(is_long=False))
def test_memory_is_priced_by_the_number_of_parameters_or_is_said_to_be_unknown(family: Family) -> None:
    config = getattr(transformers, family.config)()  # sizes of a real model
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    count = sum(weight.numel() for weight in model.parameters())
    if documented(family)["memory in the plan"] == "yes":
        assert from_hf_config(config.to_dict()).num_parameters == pytest.approx(count, rel=1e-3)
    else:
        assert documented(family)["memory in the plan"] == "no: the plan says so"
        with pytest.raises(PlacementError, match="memory is not checked"):
            from_hf_config(config.to_dict())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quantization_config": {"quant_method": "mxfp4"}}, "its weights are quantized \\(mxfp4\\), and only weights"),
        ({"layer_types": ["chunked_attention", "full_attention"]}, "Llama has layers with attention inside chunks"),
        (
            {
                "rope_parameters": {
                    "rope_type": "longrope",
                    "original_max_position_embeddings": 8,
                    "rope_theta": 10000.0,
                    "short_factor": [1.0] * 16,
                    "long_factor": [2.0] * 16,
                },
            },
            "beyond 8 tokens the angles of longrope .* data.max_length, which is 16, to at most 8",
        ),
        (
            {
                "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
                "max_position_embeddings": 8,
            },
            "beyond 8 tokens the angles of dynamic NTK scaling .* data.max_length, which is 16, to at most 8",
        ),
    ],
    ids=["quantized", "chunked", "longrope", "dynamic"],
)
def test_what_cannot_be_trained_is_refused_before_a_model_loads(
    settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    task = make_task(tmp_path, BY_NAME["Llama 3"], with_weights=False)
    path = task / "model" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    with pytest.raises(UserError, match=f"actor.model .*: {message}"):
        run(sft_yaml(task))


# --- the transformers engine ------------------------------------------------------------------------------------------


def check_engine(engine: Any, model: PreTrainedModel, label: str) -> None:
    """Log-probs of sampled tokens and scores are those of the model, for sequences several windows long."""
    truth = oracle(model)
    requests = [
        Request(f"{label}-{length}", tuple(range(2, 2 + length)), Sampling(24, TEMPERATURE), seed=length)
        for length in (3, 9, 12, 2, 7)
    ]
    for request, completion in zip(requests, engine.generate(requests), strict=True):
        tokens = [*request.token_ids, *completion.token_ids]
        with torch.no_grad():
            expected = plain_log_probs(truth, torch.tensor(tokens), TEMPERATURE).tolist()
        assert list(completion.log_probs) == pytest.approx(expected[len(request.token_ids) :], abs=1e-4)
        assert engine.score([tokens], TEMPERATURE)[0] == pytest.approx(expected, abs=1e-4)


def weights_of(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """What a trainer sends: every weight once, tied ones under their first name."""
    firsts: dict[int, str] = {}
    tensors = model.state_dict(keep_vars=True)
    for name, tensor in tensors.items():
        firsts.setdefault(id(tensor), name)
    return {name: tensors[name].detach() for name in firsts.values()}


@pytest.mark.parametrize("family", each())
def test_the_transformers_engine_samples_and_scores_as_the_model_does(family: Family) -> None:
    model = family.make_model()
    cell = documented(family)["GRPO, transformers engine"]
    if cell != "yes":
        with pytest.raises(UnsupportedError, match=refusal(cell)):
            TransformersEngine(model, max_length=48, num_slots=4)
        return
    engine = TransformersEngine(copy.deepcopy(model), max_length=48, num_slots=4)
    try:
        check_engine(engine, model, "loaded")
        pushed = family.make_model(seed=1)
        sent = weights_of(pushed)
        engine.load_weights(list(sent.items()), 1)
        digests = engine.digest()
        assert {name: digests[name] for name in sent} == {name: tensor_digest(tensor) for name, tensor in sent.items()}
        check_engine(engine, pushed, "pushed")
    finally:
        engine.close()


# --- whole runs -------------------------------------------------------------------------------------------------------


def make_task(directory: Path, family: Family, *, with_weights: bool = True) -> Path:
    """Files of a run: model, prompts, a reward that counts sevens, and examples of sevens."""
    if with_weights:
        family.write(directory / "model")
    else:
        from hotseat.demo import make_tokenizer

        make_tokenizer().save_pretrained(directory / "model")
        family.make_config().save_pretrained(directory / "model")
        (directory / "model" / "model.safetensors").write_bytes(NO_WEIGHTS)
    rows = [{"input": f"{a}+{a + 1}=", "label": str(a)} for a in range(1, 9)]
    write_rows(directory / "prompts.jsonl", rows)
    write_rows(directory / "examples.jsonl", [{"input": row["input"], "output": "777777"} for row in rows])
    (directory / "reward.py").write_text(REWARD)
    return directory


def run(text: str, *overrides: str) -> list[dict[str, Any]]:
    config = loads(text, overrides)
    start(config)
    return read_lines(Path(config.run_dir) / config.name / "metrics.jsonl")


def check_run(records: Sequence[dict[str, Any]]) -> None:
    """Two rollouts: trainer and engine agree about the samples and about the weights of every push."""
    steps = [record for record in records if "engine_gap_max" in record]
    assert [record["version"] for record in steps] == [1.0, 2.0]
    assert all(record["engine_gap_max"] < 1e-4 for record in steps)


ACTOR = "actor.optimizer.learning_rate=1e-3"
ONE_EPISODE = "train.num_episodes=1"  # over eight prompts, four for each rollout


@pytest.mark.parametrize("family", each())
def test_a_family_learns_from_examples_and_by_reinforcement(family: Family, tmp_path: Path) -> None:
    task, row = make_task(tmp_path, family), documented(family)
    records = run(sft_yaml(task), ACTOR)
    assert records[-1]["loss"] < records[1]["loss"] / 2
    assert row["SFT"] == "yes"
    rollout = "{batch_size: 4, samples_per_prompt: 4, max_new_tokens: 8, num_slots: 8}"
    text = rl_yaml(task, rollout=rollout)
    assert row["LoRA"] == "yes"
    if row["GRPO, transformers engine"] == "yes":
        check_run(run(text, ACTOR, ONE_EPISODE))
        check_run(run(text, ACTOR, ONE_EPISODE, "name=lora", "train.lora.rank=2"))
    else:
        with pytest.raises(UserError, match=f"actor.model .*{refusal(row['GRPO, transformers engine'])}"):
            run(text, ACTOR, ONE_EPISODE)
        records = run(sft_yaml(task), ACTOR, "name=sft-lora", "train.lora.rank=2")
        assert records[-1]["loss"] < records[1]["loss"]


VLLM = "{engine: vllm, batch_size: 4, samples_per_prompt: 4, max_new_tokens: 8}"


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
@pytest.mark.parametrize("family", each())
def test_a_family_is_pushed_to_vllm_and_samples_what_the_trainer_has(
    family: Family, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    task, row = make_task(tmp_path, family), documented(family)
    if row["GRPO, vLLM"] != "yes":
        with pytest.raises(HotseatError, match=refusal(row["GRPO, vLLM"])):
            run(rl_yaml(task, rollout=VLLM), ACTOR, ONE_EPISODE)
        return
    check_run(run(rl_yaml(task, rollout=VLLM), ACTOR, ONE_EPISODE))
    # The run says so where some weights have no digest.
    assert ("have no digest" in capsys.readouterr().out) == (row["digests in vLLM"] != "all")


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["rollout.quantization=fp8", "train.dtype=bf16"], "quantization: fp8 has not been tried: unset it"),
        (
            ["rollout.kv_cache_dtype=fp8", "train.dtype=bf16"],
            "kv_cache_dtype: fp8 has not been tried: unset it",
        ),
        (["rollout.lora_sync=adapter", "train.lora.rank=2"], "lora_sync: adapter has not been tried: set it to merged"),
    ],
    ids=["weights", "cache", "adapters"],
)
def test_what_latent_attention_has_not_been_tried_with_is_refused(
    options: list[str], message: str, tmp_path: Path
) -> None:
    task = make_task(tmp_path, BY_NAME["DeepSeek-V2"], with_weights=False)
    with pytest.raises(UserError, match=f"DeepseekV2 has latent attention, with which .*{message}"):
        run(rl_yaml(task, rollout=VLLM), *options)


def test_the_table_has_a_row_for_every_family_and_none_besides() -> None:
    rows = [line.split("|")[1].strip() for line in TABLE.read_text().splitlines() if line.startswith("| ")]
    assert rows == ["family", *BY_NAME]
