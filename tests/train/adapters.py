"""What backends with adapters and moving averages must do besides, in the manner of `conformance`.

Expected values come from weights W + s B A put into the model of transformers, and AdamW written out over A and B.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

from hotseat.algorithms.adapters import merge_apart
from hotseat.algorithms.digest import named_digests
from hotseat.algorithms.nf4 import Nf4Linear, quantise
from hotseat.errors import RunError, UserError
from hotseat.placement.role_names import Part
from hotseat.train.backend import Backend, LoraOptions, Outputs, TrainOptions
from hotseat.train.packing import split_by_count
from hotseat.types import MicroBatch

from .conformance import (
    OPTIONS,
    VOCAB_SIZE,
    ClippedLoss,
    Make,
    PlainTraining,
    Scenario,
    an_update_without_memory_is_made_again_in_smaller_pieces,
    assert_close,
    assert_identical,
    assert_same_training,
    copy_weights,
    plain_outputs,
    share_of,
    some_segments,
    tiny_model,
)

ALPHA, RANK = 12, 3
LORA = replace(OPTIONS, lora=LoraOptions(RANK, ALPHA))
BETA = 0.7
NF4 = replace(LORA, has_nf4=True)
AVERAGED = replace(OPTIONS, average_decay=BETA)


def train(backend: Backend, seeds: Iterator[int] | range) -> None:
    for seed in seeds:
        backend.update(split_by_count(some_segments(seed=seed), 4), ClippedLoss(), 1.0)


def factors_in(directory: Path) -> dict[str, dict[str, Tensor]]:
    """A and B by the name of their weight, as exported."""
    found: dict[str, dict[str, Tensor]] = {}
    for name, tensor in load_file(directory / "adapter" / "adapter_model.safetensors").items():
        module, _, factor = name.removeprefix("base_model.model.").removesuffix(".weight").rpartition(".lora_")
        found.setdefault(f"{module}.weight", {})[factor] = tensor
    return found


class Adapted(nn.Module):
    """A model that computes with W + s B A; its parameters are A and B."""

    def __init__(self, model: PreTrainedModel, factors: dict[str, dict[str, Tensor]]):
        super().__init__()
        self.base = (model.eval(),)  # not a part: frozen
        for name, pair in factors.items():
            for factor, tensor in pair.items():
                self.register_parameter(f"{factor}:{name.replace('.', '/')}", nn.Parameter(tensor.clone()))
        self.names = list(factors)

    def merged(self) -> dict[str, Tensor]:
        factors = dict(self.named_parameters())
        weights = dict(self.base[0].named_parameters())
        for name in self.names:
            a, b = (factors[f"{factor}:{name.replace('.', '/')}"] for factor in "AB")
            weights[name] = weights[name].detach() + ALPHA / RANK * (b @ a)
        return weights

    def forward(self, **inputs: Any) -> Any:
        return torch.func.functional_call(self.base[0], self.merged(), kwargs=inputs)


# --- adapters ---------------------------------------------------------------------------------------------------------


def updates_equal_adamw_on_two_factors(make: Make, directory: Path) -> None:
    for targets, num_adapters in (("all-linear", 14), (("q_proj", "down_proj"), 4), (r".*layers\.1\..*proj", 7)):
        model = tiny_model()
        backend = make(
            copy.deepcopy(model), replace(LORA, lora=LoraOptions(RANK, ALPHA, target_modules=targets, seed=4))
        )
        assert_identical(copy_weights(backend), dict(model.named_parameters()))  # B is zero
        backend.export(directory / f"{num_adapters}")
        factors = factors_in(directory / f"{num_adapters}")
        assert len(factors) == num_adapters
        assert all((pair["A"] != 0).any() and not pair["B"].any() for pair in factors.values())
        reference = PlainTraining(Adapted(model, factors), LORA)
        for step in range(3):
            batch = some_segments(seed=step)
            expected_loss, expected_norm = reference.update(batch, ClippedLoss(), 0.9)
            report = backend.update(split_by_count(batch, 4), ClippedLoss(), 0.9)
            assert report.loss == pytest.approx(expected_loss, abs=1e-6)
            assert report.grad_norm == pytest.approx(expected_norm, rel=1e-4)
        expected = {name: weight.detach() for name, weight in reference.model.merged().items()}
        assert_close(copy_weights(backend), expected)
        # What has no adapter has not moved.
        rest = [name for name in expected if name not in factors]
        assert_identical({name: copy_weights(backend)[name] for name in rest}, {name: expected[name] for name in rest})
        backend.close()


def transposed_weights_are_merged_too(make: Make, directory: Path) -> None:
    """GPT-2 keeps them as [in, out]."""
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCAB_SIZE, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    model, batch = GPT2LMHeadModel(GPT2Config(**sizes)), some_segments()
    backend = make(copy.deepcopy(model), LORA)
    train(backend, range(2))
    weights = copy_weights(backend)
    assert sum(not torch.equal(weights[name], weight) for name, weight in model.named_parameters()) == 8
    model.load_state_dict(weights, strict=False)  # tied
    expected = plain_outputs(model.eval(), batch, 1.0).log_probs.detach()
    torch.testing.assert_close(backend.log_probs([batch], 1.0)[0], expected, rtol=0, atol=1e-5)
    assert backend.digest() == named_digests(weights.items())
    backend.close()


def layouts_and_recomputation_change_nothing(make: Make, directory: Path) -> None:
    assert_same_training(make, replace(LORA, layout="padded"), replace(LORA, layout="packed"))
    assert_same_training(make, LORA, replace(LORA, gradient_checkpointing=True))


def factors_leave_apart_and_add_up_to_the_merged_weights(make: Make, directory: Path) -> None:
    backend = make(tiny_model(), LORA)
    train(backend, range(2))
    merged = copy_weights(backend)
    for dtype in (None, torch.bfloat16):
        apart = {name: tensor.clone() for name, tensor in backend.weights(dtype=dtype, form="apart")}
        alone = {name: tensor.clone() for name, tensor in backend.weights(dtype=dtype, form="adapters")}
        assert_identical(alone, {name: tensor for name, tensor in apart.items() if "lora_" in name})
        assert len(alone) == 2 * 14
        assert backend.digest(dtype=dtype, form="apart") == named_digests(apart.items())
        assert backend.digest(dtype=dtype, form="adapters") == named_digests(alone.items())
        assert {tensor.dtype for tensor in apart.values()} == {dtype or torch.float32}
        if dtype is None:
            assert_close(dict(merge_apart(apart.items())), merged)
    base = dict(tiny_model().named_parameters())
    assert_identical({name: t for name, t in backend.weights(form="apart") if name in base}, base)
    backend.close()


def the_digest_is_of_what_leaves(make: Make, directory: Path) -> None:
    backend = make(tiny_model(), LORA)
    train(backend, range(2))
    for dtype in (None, torch.bfloat16):
        assert backend.digest(dtype=dtype) == named_digests(copy_weights(backend, dtype=dtype).items())
    backend.close()


def adapters_go_on_bit_identically(make: Make, directory: Path) -> None:
    """With dropout, whose random numbers must come back too."""
    options = replace(LORA, lora=LoraOptions(RANK, ALPHA, dropout=0.2), average_decay=BETA)
    backend = make(tiny_model(), options)
    train(backend, range(2))
    backend.save(directory / "state")
    train(backend, range(2, 4))
    with backend.averaged():
        backend.export(directory / "whole")
    expected = copy_weights(backend)
    backend.close()
    resumed = make(tiny_model(), options)
    train(resumed, range(5, 6))
    resumed.load(directory / "state")
    train(resumed, range(2, 4))
    assert_identical(copy_weights(resumed), expected)
    with resumed.averaged():
        resumed.export(directory / "resumed")
    assert_identical(
        load_file(directory / "resumed/model.safetensors"), load_file(directory / "whole/model.safetensors")
    )
    resumed.close()


def a_checkpoint_of_adapters_is_small_and_bound_to_its_base(make: Make, directory: Path) -> None:
    backend, full = make(tiny_model(), LORA), make(tiny_model(), OPTIONS)
    num_adapter_weights = sum(each.numel() for pair in _exported(backend, directory).values() for each in pair.values())
    # Each weight with two moments, and a step count per tensor.
    assert num_adapter_weights * 12 < backend.saved_bytes() < num_adapter_weights * 12 + 1000
    backend.save(directory / "adapters")
    full.save(directory / "full")
    with pytest.raises(RunError, match="saved when all weights were trained, and now adapters are"):
        backend.load(directory / "full")
    with pytest.raises(RunError, match="saved when adapters were trained, and now all weights are"):
        full.load(directory / "adapters")
    model = tiny_model()
    with torch.no_grad():
        model.model.norm.weight[3] += 1e-3
    other = make(model, LORA)
    with pytest.raises(RunError, match=r"not those of the current model: model.norm.weight differs, 1 weights in all"):
        other.load(directory / "adapters")
    for each in (backend, full, other):
        each.close()


def exports_load_in_transformers_and_in_peft(make: Make, directory: Path) -> None:
    tiny_model(tied=False).save_pretrained(directory / "base")
    batch = some_segments()
    backend = make(AutoModelForCausalLM.from_pretrained(directory / "base"), LORA)
    train(backend, range(3))
    backend.export(directory / "export")
    (scored,) = backend.log_probs([batch], 1.0)
    expected = copy_weights(backend)
    backend.close()
    merged = AutoModelForCausalLM.from_pretrained(directory / "export").eval()
    assert_identical(dict(merged.state_dict()), expected)
    base = AutoModelForCausalLM.from_pretrained(directory / "base")
    adapted = PeftModel.from_pretrained(base, directory / "export" / "adapter").eval()
    config = json.loads((directory / "export" / "adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["base_model_name_or_path"]) == (
        RANK,
        ALPHA,
        str(directory / "base"),
    )
    for model in (merged, adapted):
        torch.testing.assert_close(plain_outputs(model, batch, 1.0).log_probs.detach(), scored, rtol=0, atol=1e-5)


class SquaredError:
    def __call__(self, outputs: Outputs, batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
        return (batch.weights * (outputs.values - batch.fields["advantages"]) ** 2).sum(), {}


def a_value_model_trains_its_head_too(make: Make, directory: Path) -> None:
    tiny_model().save_pretrained(directory / "base")
    backend = make(value_model(directory / "base"), replace(LORA, head="value"))
    batch, before = some_segments(), copy_weights(backend)
    for _ in range(3):
        backend.update([batch], SquaredError(), 1.0)
    (values,) = backend.values([batch])
    after = copy_weights(backend)
    moved = {name for name in after if not torch.equal(before[name], after[name])}
    assert moved == {name for name in after if "proj" in name or name == "score.weight"}
    backend.export(directory / "export")
    backend.close()
    merged = AutoModelForSequenceClassification.from_pretrained(directory / "export").eval()
    adapted = PeftModel.from_pretrained(
        value_model(directory / "base", seed=9), directory / "export" / "adapter"
    ).eval()
    last = int(batch.mask.nonzero()[-1])  # a model with one label gives that of the last token: here, the one before
    start = int(batch.offsets[:-1][batch.offsets[:-1] <= last][-1])
    for model in (merged, adapted):
        found = model(input_ids=batch.token_ids[None, start:last]).logits
        assert found.item() == pytest.approx(float(values[last]), abs=1e-5)


def value_model(path: Path, seed: int = 0) -> PreTrainedModel:
    torch.manual_seed(seed)
    return AutoModelForSequenceClassification.from_pretrained(path, num_labels=1, pad_token_id=0)


def updates_of_adapters_without_memory_drop_the_same_when_made_again(make: Make, directory: Path) -> None:
    options = replace(LORA, lora=LoraOptions(RANK, ALPHA, dropout=0.5), average_decay=BETA)
    an_update_without_memory_is_made_again_in_smaller_pieces(make, directory, options)


def dropout_is_for_updates_alone(make: Make, directory: Path) -> None:
    dropping = replace(LORA, lora=LoraOptions(RANK, ALPHA, dropout=0.5))
    results = []
    for options in (dropping, dropping, LORA):
        backend = make(tiny_model(), options)
        train(backend, range(2))
        (scored,) = backend.log_probs([some_segments()], 1.0)
        merged = tiny_model().eval()
        merged.load_state_dict(copy_weights(backend), strict=False)  # tied
        expected = plain_outputs(merged, some_segments(), 1.0).log_probs.detach()
        torch.testing.assert_close(scored, expected, rtol=0, atol=1e-5)
        results.append(copy_weights(backend))
        backend.close()
    assert_identical(results[0], results[1])
    with pytest.raises(AssertionError, match="off by"):
        assert_close(results[0], results[2])


def sixteen_bit_compute_has_a_sixteen_bit_base(make: Make, directory: Path) -> None:
    """What is computed does not change by it, and what leaves has all bits of the adapters."""
    backend = make(tiny_model(), replace(LORA, precision="bf16_master"))
    full = make(tiny_model(), replace(OPTIONS, precision="bf16_master"))
    batch = some_segments()
    torch.testing.assert_close(backend.log_probs([batch], 1.0), full.log_probs([batch], 1.0), rtol=0, atol=0)
    train(backend, range(2))
    weights = copy_weights(backend)
    assert {weight.dtype for weight in weights.values()} == {torch.float32}
    assert {name for name, weight in weights.items() if (weight != weight.bfloat16()).any()} == {
        name for name in weights if "proj" in name
    }
    backend.export(directory / "export")
    assert AutoModelForCausalLM.from_pretrained(directory / "export", dtype="auto").dtype == torch.float32
    for each in (backend, full):
        each.close()


def layers_that_cannot_have_adapters_are_named(make: Make, directory: Path) -> None:
    have = "LlamaForCausalLM has down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj"
    for targets, message in (
        (("q_proj", "query"), f"no layer is called query; {have}$"),
        ("q_proj", f"no layer is called q_proj; {have}; a single word is a pattern for whole names: write a list"),
        (("embed_tokens",), r"model.embed_tokens \(Embedding\) cannot have an adapter: only linear layers below"),
        (("lm_head",), r"lm_head \(Linear\) cannot have an adapter"),
        ((), "no layer is called nothing"),
        ("q_proj|(", r"'q_proj\|\(' is no pattern \(missing \)"),
    ):
        with pytest.raises(UserError, match=message):
            make(tiny_model(), replace(LORA, lora=LoraOptions(RANK, target_modules=targets)))


# --- a base in NF4 ----------------------------------------------------------------------------------------------------


def wide_model() -> LlamaForCausalLM:
    """Make a model whose rows have whole blocks."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB_SIZE, initializer_range=0.1, **sizes))


def rounded(model: LlamaForCausalLM) -> LlamaForCausalLM:
    """Return the model that computes with what NF4 keeps of the weights of layers."""
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear) and name != "lm_head":
            layer.weight.data = Nf4Linear(layer).dequantised(layer.weight.dtype)
    return model


def updates_beside_nf4_are_those_beside_the_rounded_weights(make: Make, directory: Path) -> None:
    for options in (NF4, replace(NF4, gradient_checkpointing=True)):
        ours, theirs = make(wide_model(), options), make(rounded(wide_model()), LORA)
        for seed in range(3):
            batch = split_by_count(some_segments(seed=seed), 4)
            found, expected = (backend.update(batch, ClippedLoss(), 0.9) for backend in (ours, theirs))
            assert found.loss == pytest.approx(expected.loss, abs=1e-6)
            assert found.grad_norm == pytest.approx(expected.grad_norm, rel=1e-5)
        assert_close(copy_weights(ours), copy_weights(theirs))
        assert ours.digest() == named_digests(copy_weights(ours).items())
        with ours.without_adapters(), theirs.without_adapters():
            scored = [backend.log_probs([some_segments()], 1.0)[0] for backend in (ours, theirs)]
        torch.testing.assert_close(*scored, rtol=0, atol=1e-6)
        for backend in (ours, theirs):
            backend.close()


def bytes_and_scales_leave_apart(make: Make, directory: Path) -> None:
    backend, plain = make(wide_model(), NF4), dict(wide_model().named_parameters())
    for dtype in (None, torch.float32):
        apart = {name: tensor.clone() for name, tensor in backend.weights(dtype=dtype, form="apart")}
        assert backend.digest(dtype=dtype, form="apart") == named_digests(apart.items())
        assert len(apart) == len(plain) + 14 + 2 * 14
        packed, scales = quantise(plain["model.layers.1.mlp.down_proj.weight"].detach())
        assert torch.equal(apart["model.layers.1.mlp.down_proj.weight"], packed)
        assert torch.equal(apart["model.layers.1.mlp.down_proj.absmax"], scales)
    backend.close()


def a_base_in_nf4_is_offloaded_and_comes_back(make: Make, directory: Path) -> None:
    backend, batch = make(wide_model(), NF4), some_segments()
    if Part.WEIGHTS not in backend.movable:
        return
    before, digest = backend.log_probs([batch], 1.0), backend.digest(form="apart")
    packed = sum(tensor.nbytes for tensor in backend._outgoing.packed())
    moved = backend.offload([Part.WEIGHTS])
    assert moved.num_bytes > packed
    assert all(tensor.untyped_storage().nbytes() == 0 for tensor in backend._outgoing.packed())
    backend.onload([Part.WEIGHTS])
    assert backend.digest(form="apart") == digest
    torch.testing.assert_close(backend.log_probs([batch], 1.0), before, rtol=0, atol=0)
    backend.close()


def adapters_beside_nf4_go_on_bit_identically_on_the_same_base_alone(make: Make, directory: Path) -> None:
    backend = make(wide_model(), NF4)
    train(backend, range(2))
    backend.save(directory / "state")
    train(backend, range(2, 4))
    resumed = make(wide_model(), NF4)
    resumed.load(directory / "state")
    train(resumed, range(2, 4))
    assert_identical(copy_weights(resumed), copy_weights(backend))
    changed = wide_model()
    with torch.no_grad():
        changed.model.layers[0].mlp.up_proj.weight[3, 7] = 0.9
    other, plain = make(changed, NF4), make(wide_model(), LORA)
    with pytest.raises(RunError, match=r"not those of the current model: model.layers.0.mlp.up_proj.weight differs"):
        other.load(directory / "state")
    with pytest.raises(RunError, match=r"not those of the current model: "):
        plain.load(directory / "state")
    for each in (backend, resumed, other, plain):
        each.close()


def a_base_in_nf4_is_exported_merged(make: Make, directory: Path) -> None:
    rounded(wide_model()).save_pretrained(directory / "rounded")
    batch = some_segments()
    backend = make(wide_model(), NF4)
    train(backend, range(3))
    backend.export(directory / "export")
    (scored,) = backend.log_probs([batch], 1.0)
    backend.close()
    merged = AutoModelForCausalLM.from_pretrained(directory / "export").eval()
    base = AutoModelForCausalLM.from_pretrained(directory / "rounded")
    adapted = PeftModel.from_pretrained(base, directory / "export" / "adapter").eval()
    for model in (merged, adapted):
        torch.testing.assert_close(plain_outputs(model, batch, 1.0).log_probs.detach(), scored, rtol=0, atol=1e-5)


def sixteen_bit_compute_exports_sums_that_are_rounded_once(make: Make, directory: Path) -> None:
    backend = make(wide_model(), replace(NF4, precision="bf16_master"))
    train(backend, range(2))
    backend.export(directory / "export")
    expected = {name: weight.bfloat16() for name, weight in copy_weights(backend, dtype=torch.float32).items()}
    assert_identical(load_file(directory / "export" / "model.safetensors"), expected)
    backend.close()


# --- the moving average -----------------------------------------------------------------------------------------------


def the_average_is_written_out(make: Make, directory: Path) -> None:
    """Over updates that count, begun with the first weights; the live ones are left alone."""
    bad = some_segments()
    bad = replace(bad, weights=bad.weights * torch.inf)
    for options in (AVERAGED, replace(AVERAGED, precision="bf16_master")):
        backend = make(tiny_model(), options)
        expected = copy_weights(backend)
        for seed in range(2):
            train(backend, range(seed, seed + 1))
            expected = {name: BETA * expected[name] + (1 - BETA) * now for name, now in copy_weights(backend).items()}
            assert backend.update([bad], ClippedLoss(), 1.0).is_skipped
        before = copy_weights(backend)
        with backend.averaged():
            backend.export(directory / options.precision)
        assert_identical(copy_weights(backend), before)
        averaged = load_file(directory / options.precision / "model.safetensors")
        assert_close(averaged, expected)
        with pytest.raises(AssertionError, match="off by"):
            assert_close(averaged, before)
        backend.close()
    plain = make(tiny_model(), OPTIONS)
    with pytest.raises(RunError, match="a moving average that was not asked for"), plain.averaged():
        pass
    plain.close()


ONE_RANK: tuple[Callable[[Make, Path], None], ...] = (
    updates_equal_adamw_on_two_factors,
    transposed_weights_are_merged_too,
    layouts_and_recomputation_change_nothing,
    the_digest_is_of_what_leaves,
    factors_leave_apart_and_add_up_to_the_merged_weights,
    adapters_go_on_bit_identically,
    a_checkpoint_of_adapters_is_small_and_bound_to_its_base,
    exports_load_in_transformers_and_in_peft,
    a_value_model_trains_its_head_too,
    dropout_is_for_updates_alone,
    updates_of_adapters_without_memory_drop_the_same_when_made_again,
    sixteen_bit_compute_has_a_sixteen_bit_base,
    layers_that_cannot_have_adapters_are_named,
    updates_beside_nf4_are_those_beside_the_rounded_weights,
    bytes_and_scales_leave_apart,
    a_base_in_nf4_is_offloaded_and_comes_back,
    adapters_beside_nf4_go_on_bit_identically_on_the_same_base_alone,
    a_base_in_nf4_is_exported_merged,
    sixteen_bit_compute_exports_sums_that_are_rounded_once,
    the_average_is_written_out,
)


# --- scenarios of several ranks ---------------------------------------------------------------------------------------


def _trains(options: TrainOptions) -> Scenario:
    """Three updates; what is then exported, the weights or their average."""

    def scenario(make: Make, rank: int, num_ranks: int, directory: Path) -> dict[str, Any]:
        backend = make(wide_model() if options.has_nf4 else tiny_model(), options)
        for step in range(3):
            work = split_by_count(some_segments(12, seed=step), 3)
            backend.update(share_of(work, (3, 1), rank, num_ranks), ClippedLoss(), 0.9)
        live = copy_weights(backend, bucket_bytes=5000)
        path = directory / f"export-{options.average_decay}-{options.lora is not None}-{options.has_nf4}-{num_ranks}"
        with backend.averaged() if options.average_decay is not None else nullcontext():
            backend.export(path)
        backend.close()
        exported = load_file(path / "model.safetensors")
        if options.average_decay is None:
            assert_identical(exported, live)
        return {"weights": exported}

    return scenario


def save_alone(make: Make, directory: Path) -> None:
    """What one rank saves, for a group to load."""
    backend = make(tiny_model(), LORA)
    train(backend, range(2))
    backend.save(directory / "adapters-alone")
    backend.close()


def _digests(make: Make, rank: int, num_ranks: int, directory: Path) -> dict[str, Any]:
    """The same adapters have the same digest, sharded or whole, and it is that of the weights that leave."""
    if num_ranks == 1:
        save_alone(make, directory)
    backend = make(tiny_model(), LORA)
    backend.load(directory / "adapters-alone")
    found = {"digest": backend.digest(), "half": backend.digest(dtype=torch.bfloat16)}
    assert found["half"] == named_digests(copy_weights(backend, dtype=torch.bfloat16, bucket_bytes=3000).items())
    backend.close()
    return found


def _goes_on(make: Make, rank: int, num_ranks: int, directory: Path) -> dict[str, Any]:
    """From its own checkpoint, dropout and average included."""
    options = replace(LORA, lora=LoraOptions(RANK, ALPHA, dropout=0.2), average_decay=BETA)
    results = []
    for part in ("first", "again"):
        backend = make(tiny_model(), options)
        if part == "first":
            backend.update([some_segments(seed=rank)], ClippedLoss(), 1.0)
            backend.save(directory / f"adapters-{num_ranks}")
        else:
            backend.load(directory / f"adapters-{num_ranks}")
        backend.update([some_segments(seed=rank + 2)], ClippedLoss(), 1.0)
        with backend.averaged():
            backend.export(directory / f"{part}-{num_ranks}")
        results.append(copy_weights(backend))
        backend.close()
    assert_identical(results[1], results[0])
    first, again = (load_file(directory / f"{part}-{num_ranks}/model.safetensors") for part in ("first", "again"))
    assert_identical(again, first)
    return {}


SCENARIOS: dict[str, Scenario] = {
    "trains_adapters": _trains(LORA),
    "trains_adapters_checkpointed": _trains(replace(LORA, gradient_checkpointing=True)),
    "trains_beside_nf4": _trains(NF4),
    "averages": _trains(AVERAGED),
    "averages_adapters": _trains(replace(LORA, average_decay=BETA)),
    "digests_of_adapters": _digests,
    "goes_on_with_adapters": _goes_on,
}


def _exported(backend: Backend, directory: Path) -> dict[str, dict[str, Tensor]]:
    backend.export(directory / "export")
    return factors_in(directory / "export")
