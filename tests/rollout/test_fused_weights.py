"""vLLM with models of several architectures, whole and over ranks: what a rank holds of a weight, and its digest."""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from transformers import (
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from hotseat.algorithms.digest import combine_digests, tensor_digest
from hotseat.errors import WorkerError
from hotseat.rollout.fused_weights import Piece, pieces
from hotseat.rollout.live_weights import WeightNames
from hotseat.rollout.vllm_engine import VllmEngine
from hotseat.rollout.vllm_internals import _apply_experts, experts_problem, widen_head

from . import conformance
from .conformance import Subject, named_weights, reference_log_probs, request
from .packed_weights import PackedWeights
from .test_transformers_engine import random_model
from .test_vllm_engine import SHAPE, Shared

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]

# --- where the weights are --------------------------------------------------------------------------------------------

HEAD, WIDTH = 4, 6


class Model(nn.Module):
    packed_modules_mapping: ClassVar = {
        "qkv_proj": ["q_proj", "k_proj", "v_proj"],
        "gate_up_proj": ["gate_proj", "up_proj"],
    }

    def __init__(self, **modules: nn.Module):
        super().__init__()
        self.layer = nn.Module()
        for name, module in modules.items():
            self.layer.add_module(name, module)


def found(model: Model, rank: int) -> dict[str, Piece]:
    return {piece.name: piece for piece in pieces(model, rank)}


def check_whole(ranks: list[dict[str, Piece]], whole: dict[str, torch.Tensor]) -> None:
    """Every rank's piece lies where it says, and those that count add up to the digest of the whole."""
    for name, tensor in whole.items():
        for held in ranks:
            piece = held[name]
            assert piece.shape == tuple(tensor.shape)
            window = tuple(slice(at, at + n) for at, n in zip(piece.offset, piece.live.shape, strict=True))
            assert torch.equal(piece.live, tensor[window]), name
        counted = [held[name] for held in ranks if held[name].is_counted]
        assert combine_digests(tensor_digest(p.live, p.offset) for p in counted) == tensor_digest(tensor), name


@pytest.mark.parametrize(("kv_heads", "size"), [(4, 1), (4, 2), (2, 2), (1, 2), (2, 4), (1, 4)])
def test_a_rank_holds_its_heads_of_queries_keys_and_values(kv_heads: int, size: int) -> None:
    from .vllm_layers import Qkv

    heads = 4
    torch.manual_seed(0)
    whole = {}
    for name, count in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
        whole[f"layer.{name}_proj.weight"] = torch.randn(count * HEAD, WIDTH)
        whole[f"layer.{name}_proj.bias"] = torch.randn(count * HEAD)

    def cut(kind: str, rank: int) -> torch.Tensor:
        q, k, v = (whole[f"layer.{name}_proj.{kind}"] for name in "qkv")
        mine = [q.chunk(size)[rank]]
        # Rank r of s uses head r * kv_heads // s: neighbours share one where there are fewer heads than ranks.
        first, count = rank * kv_heads // size, max(1, kv_heads // size)
        mine += [each[first * HEAD : (first + count) * HEAD] for each in (k, v)]
        return torch.cat(mine)

    ranks = [
        found(Model(qkv_proj=Qkv(cut("weight", rank), cut("bias", rank), heads, kv_heads, rank, size)), rank)
        for rank in range(size)
    ]
    check_whole(ranks, whole)


@pytest.mark.parametrize("size", [1, 2])
def test_a_rank_holds_its_rows_of_gate_and_up_and_its_columns_of_down(size: int) -> None:
    from .vllm_layers import Down, GateUp

    torch.manual_seed(0)
    gate, up = torch.randn(8, WIDTH), torch.randn(8, WIDTH)
    down, bias = torch.randn(WIDTH, 8), torch.randn(WIDTH)
    whole = {
        "layer.gate_proj.weight": gate,
        "layer.up_proj.weight": up,
        "layer.down_proj.weight": down,
        "layer.down_proj.bias": bias,
        "layer.norm.weight": torch.ones(WIDTH),
    }
    ranks = []
    for rank in range(size):
        gate_up = torch.cat([gate.chunk(size)[rank], up.chunk(size)[rank]])
        norm = nn.Module()
        norm.weight = nn.Parameter(torch.ones(WIDTH))
        ranks.append(
            found(
                Model(
                    gate_up_proj=GateUp(gate_up, [8, 8], rank, size),
                    down_proj=Down(down.chunk(size, dim=1)[rank], bias, rank, size),
                    norm=norm,
                ),
                rank,
            )
        )
    check_whole(ranks, whole)
    # What every rank holds whole counts once.
    for name in ("layer.norm.weight", "layer.down_proj.bias"):
        assert [held[name].is_counted for held in ranks] == [True, False][:size]


@pytest.mark.parametrize("size", [1, 2])
def test_what_is_one_weight_in_the_checkpoint_too_has_its_own_name(size: int) -> None:
    """As in Phi-3 and GLM-4: queries, keys and values, gate and up. A rank then has several pieces of it."""
    from .vllm_layers import GateUp, Qkv

    torch.manual_seed(0)
    qkv = torch.randn(8 * HEAD, WIDTH)  # 4 heads of queries, 2 of keys, 2 of values
    gate_up = torch.randn(16, WIDTH)
    held: list[Piece] = []
    for rank in range(size):
        mine = torch.cat([part.chunk(size)[rank] for part in qkv.split([4 * HEAD, 2 * HEAD, 2 * HEAD])])
        halves = torch.cat([half.chunk(size)[rank] for half in gate_up.chunk(2)])
        layers = {
            "qkv_proj": Qkv(mine, torch.zeros(len(mine)), 4, 2, rank, size),
            "gate_up_proj": GateUp(halves, [8, 8], rank, size),
        }
        held += pieces(Model(**layers), rank)
    for name, whole in (("layer.qkv_proj.weight", qkv), ("layer.gate_up_proj.weight", gate_up)):
        parts = [piece for piece in held if piece.name == name]
        assert all(piece.shape == tuple(whole.shape) for piece in parts)
        assert combine_digests(tensor_digest(p.live, p.offset) for p in parts) == tensor_digest(whole)


class MixtralForCausalLM(Model):
    """In transformers its `block_sparse_moe` is called `mlp`."""


@pytest.mark.parametrize("size", [1, 2])
def test_a_rank_holds_its_rows_and_columns_of_every_expert_and_takes_new_ones(size: int) -> None:
    from .vllm_layers import Experts

    torch.manual_seed(0)
    gate, up, down = torch.randn(3, 8, WIDTH), torch.randn(3, 8, WIDTH), torch.randn(3, WIDTH, 8)
    whole = {"layer.mlp.experts.gate_up_proj": torch.cat([gate, up], dim=1), "layer.mlp.experts.down_proj": down}
    ranks: list[list[Piece]] = []
    for rank in range(size):
        mine = [each.chunk(size, dim=1)[rank] for each in (gate, up)]
        experts = Experts(torch.cat(mine, dim=1), down.chunk(size, dim=2)[rank].clone(), rank, size)
        block, runner = nn.Module(), nn.Module()
        runner.add_module("routed_experts", experts)
        block.add_module("experts", runner)
        ranks.append(list(pieces(MixtralForCausalLM(block_sparse_moe=block), rank)))
        assert list(pieces(Model(block_sparse_moe=block), rank)) == []  # one of which this is not known
    held = [piece for rank in ranks for piece in rank]
    assert {piece.name for piece in held} == set(whole)
    assert all(piece.live.is_contiguous() for piece in held)  # or it would be copied to be digested
    assert all(piece.is_taken_here and piece.shape == tuple(whole[piece.name].shape) for piece in held)

    def check(whole: dict[str, torch.Tensor]) -> None:
        for name, tensor in whole.items():
            parts = [tensor_digest(p.live, p.offset) for p in held if p.name == name and p.is_counted]
            assert combine_digests(parts) == tensor_digest(tensor), name

    check(whole)
    new = {name: torch.randn_like(tensor) for name, tensor in whole.items()}
    for piece in held:
        with torch.no_grad():
            piece.take(new[piece.name])
    check(new)


class GptOssForCausalLM(Model):
    """The name of a model whose experts have biases."""


@pytest.mark.parametrize("size", [1, 2])
def test_experts_with_biases_are_swapped_and_their_sinks_cut(size: int) -> None:
    """As transformers has gpt-oss: [experts, in, out], and columns of gate and up in turn."""
    from .vllm_layers import Experts

    torch.manual_seed(0)
    inner = 8
    whole = {
        "layer.mlp.experts.gate_up_proj": torch.randn(3, WIDTH, 2 * inner),
        "layer.mlp.experts.gate_up_proj_bias": torch.randn(3, 2 * inner),
        "layer.mlp.experts.down_proj": torch.randn(3, inner, WIDTH),
        "layer.mlp.experts.down_proj_bias": torch.randn(3, WIDTH),
        "layer.mlp.sinks": torch.randn(4),
    }
    gate_up, gate_up_bias, down, down_bias, sinks = whole.values()
    held: list[Piece] = []
    biases = []
    for rank in range(size):
        mine = gate_up.chunk(size, dim=2)[rank].mT.contiguous()
        experts = Experts(mine, down.chunk(size, dim=1)[rank].mT.contiguous(), rank, size, has_bias=True)
        experts.w13_bias = nn.Parameter(gate_up_bias.chunk(size, dim=1)[rank].clone())
        experts.w2_bias = nn.Parameter(down_bias.clone() if rank == 0 else torch.zeros_like(down_bias))
        biases.append(experts.w2_bias)
        block = nn.Module()
        block.add_module("experts", experts)
        block.num_attention_heads, block.sinks = 4, nn.Parameter(sinks.chunk(size)[rank].clone())
        held += pieces(GptOssForCausalLM(mlp=block), rank)

    def check() -> None:
        assert {piece.name for piece in held} == set(whole)
        for name, tensor in whole.items():
            parts = [tensor_digest(p.live, p.offset) for p in held if p.name == name and p.is_counted]
            assert combine_digests(parts) == tensor_digest(tensor), name
            assert all(torch.equal(p.live, p.window(tensor)) for p in held if p.name == name)

    check()
    whole = {name: torch.randn_like(tensor) for name, tensor in whole.items()}
    with torch.no_grad():
        for bias in biases:
            bias.fill_(torch.nan)  # as memory may be that was dropped and is there again
        for piece in held:
            assert piece.shape == tuple(whole[piece.name].shape)
            assert piece.is_taken_here == (not piece.name.endswith("sinks"))
            piece.take(whole[piece.name])
    check()
    assert all(bias.eq(0).all() for bias in biases[1:]), "ranks add up what they give: the first one's bias counts once"


@torch.inference_mode()
def test_experts_of_gpt_oss_are_computed_on_a_cpu_as_transformers_does() -> None:
    """Large inputs, so that the caps of its activation matter."""
    torch.manual_seed(0)
    config = GptOssConfig(hidden_size=WIDTH, intermediate_size=8, num_local_experts=3, num_experts_per_tok=2)
    theirs = GptOssExperts(config)
    for weight in theirs.parameters():
        weight.normal_(std=3.0)
    hidden, ids = torch.randn(5, WIDTH) * 3, torch.tensor([[0, 1], [2, 0], [1, 2], [0, 2], [1, 0]])
    weights, output = torch.rand(5, 2), torch.empty(5, WIDTH)
    _apply_experts(
        SimpleNamespace(w1_bias=theirs.gate_up_proj_bias, w2_bias=theirs.down_proj_bias),
        output=output,
        hidden_states=hidden,
        w1=theirs.gate_up_proj.mT.contiguous(),
        w2=theirs.down_proj.mT.contiguous(),
        topk_weights=weights,
        topk_ids=ids,
        activation=SimpleNamespace(value="swigluoai"),
        apply_router_weight_on_input=False,
    )
    torch.testing.assert_close(output, theirs(hidden, ids, weights), rtol=1e-4, atol=1e-3)


@torch.inference_mode()
def test_a_vllm_without_a_type_for_the_head_gets_float32_logits_too() -> None:
    from .vllm_layers import Head, Logits

    wide = SimpleNamespace(hf_config=SimpleNamespace(head_dtype="float32"))
    head = Head(torch.tensor([[1.0, 0.0625], [1.0, 0.0]]).bfloat16())
    hidden = torch.tensor([[16.0, 1.0]]).bfloat16()
    other = torch.tensor([[3.0, 0.0]])  # of another rank; the last is padding of the vocabulary
    logits = Logits(3, [other])
    assert widen_head(Model(head=head, logits=logits), wide) is None
    got = logits(head, hidden)
    assert got is not None
    assert got.tolist() == [[16.0625, 16.0, 3.0]]
    assert got.is_contiguous()
    elsewhere = Logits(3, None)  # a rank that does not get them
    assert widen_head(Model(head=head, logits=elsewhere), wide) is None
    assert elsewhere(head, hidden) is None


def test_what_computes_its_logits_another_way_is_left_or_refused() -> None:
    from .vllm_layers import Head, Logits

    wide = SimpleNamespace(hf_config=SimpleNamespace(head_dtype="float32"))
    head, logits = Head(torch.ones(2, 2)), Logits(2, [])
    assert widen_head(Model(head=head, logits=logits), SimpleNamespace(hf_config=SimpleNamespace())) is None
    assert "_get_logits" not in vars(logits)  # not asked for
    newer = Logits(2, [])
    newer.head_dtype = torch.float32
    assert widen_head(Model(head=head, logits=newer), wide) is None
    assert "_get_logits" not in vars(newer)  # vLLM does it
    head.quant_method = SimpleNamespace()  # quantized
    problem = widen_head(Model(head=head, logits=logits), wide)
    assert "has the head of this Model in SimpleNamespace, which gives no float32 logits" in str(problem)
    assert "set rollout.fp32_head to false" in str(problem)


def test_experts_that_a_kernel_reorders_or_that_are_not_computed_here_are_refused() -> None:
    from .vllm_layers import Experts

    def problem(method: Any, activation: str = "silu") -> str | None:
        kind = SimpleNamespace(value=activation)
        experts = Experts(torch.randn(3, 8, WIDTH), torch.randn(3, WIDTH, 4), 0, 1, activation=kind)
        experts.quant_method = method
        return experts_problem(Model(experts=experts))

    cpu = SimpleNamespace(name="CPU")
    ours = SimpleNamespace(unquantized_backend=cpu, experts_cls=SimpleNamespace(apply=_apply_experts))
    theirs = SimpleNamespace(unquantized_backend=cpu, experts_cls=SimpleNamespace(apply=print))
    assert problem(ours) is None
    assert "keeps the experts of this Model as its CPU kernels want them" in str(problem(theirs))
    assert "as its SimpleNamespace wants them" in str(problem(SimpleNamespace()))  # quantized
    assert problem(ours, activation="swigluoai") is None
    assert "have the activation relu2, which is not computed with vLLM on a CPU" in str(problem(ours, "relu2"))


def test_a_fused_parameter_of_an_unknown_layout_is_no_piece() -> None:
    """Its weights are then missing from the digest, which the trainer notices, rather than digested wrongly."""
    from .vllm_layers import Qkv

    odd = Qkv(torch.randn(5, WIDTH), torch.randn(5), 4, 4, 0, 1)
    assert found(Model(qkv_proj=odd), 0) == {}


# --- whole models -----------------------------------------------------------------------------------------------------

UNTIED = {**SHAPE, "tie_word_embeddings": False}
SUBSET = [
    conformance.token_ids_go_in_and_come_out,
    conformance.log_probs_are_those_of_the_model_at_the_sampling_temperature,
    conformance.scores_are_those_of_the_model,
    conformance.new_weights_leave_nothing_of_the_old_ones,
    conformance.the_digest_is_of_the_live_weights_and_names_what_changed,
    conformance.a_load_in_buckets_counts_when_it_is_finished,
    conformance.a_load_that_is_not_complete_is_not_served,
]


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(LlamaConfig(**UNTIED), marks=pytest.mark.long),  # the whole suite has it, tied
        # Its norms of queries and keys are also in the one with experts, its MLP in every other model.
        pytest.param(Qwen3Config(**UNTIED, head_dim=32), marks=pytest.mark.long),
        Qwen3MoeConfig(**UNTIED, head_dim=32, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32),
        pytest.param(MixtralConfig(**UNTIED, num_local_experts=4), marks=pytest.mark.long),
        pytest.param(
            Qwen2MoeConfig(
                **UNTIED,
                num_experts=4,
                num_experts_per_tok=2,
                moe_intermediate_size=32,
                shared_expert_intermediate_size=32,
                decoder_sparse_step=1,
            ),
            marks=pytest.mark.long,
        ),
        pytest.param(Qwen2Config(**UNTIED), marks=pytest.mark.long),
        pytest.param(MistralConfig(**UNTIED, sliding_window=None), marks=pytest.mark.long),
        pytest.param(Qwen3Config(**SHAPE, head_dim=32, tie_word_embeddings=True), marks=pytest.mark.long),
        GptOssConfig(**UNTIED, head_dim=32, num_local_experts=4, num_experts_per_tok=2, sliding_window=16),
    ],
    ids=["llama", "qwen3", "qwen3-experts", "mixtral", "qwen2-experts", "qwen2", "mistral", "qwen3-tied", "gpt-oss"],
)
def test_digests_and_scores_are_those_of_the_hugging_face_model(config: PretrainedConfig, tmp_path: Path) -> None:
    made = Shared(tmp_path, config)
    try:
        files = {name: tensor_digest(tensor) for name, tensor in named_weights(random_model(config, 0))}
        with made.engine(loads=False) as engine:
            assert engine.digest() == files  # as vLLM's own loader put them
        with made.engine() as engine:
            for seed, version in ((0, 0), (1, 1)):
                model = random_model(config, seed)
                engine.load_weights(named_weights(model), version)
                assert engine.digest() == {name: tensor_digest(tensor) for name, tensor in named_weights(model)}
                [completion] = engine.generate([request("a", max_new_tokens=24)])
                tokens = [*request("a").token_ids, *completion.token_ids]
                for temperature in (1.0, 0.7):
                    expected = reference_log_probs(model, tokens, temperature)
                    assert engine.score([tokens], temperature)[0] == pytest.approx(expected, abs=3e-4)
    finally:
        made.end()


@pytest.fixture(
    scope="module",
    params=[
        # Biases, an output layer of its own, and fewer heads of keys and values than ranks.
        Qwen2Config(**{**UNTIED, "num_key_value_heads": 1}),
        pytest.param(LlamaConfig(**SHAPE, tie_word_embeddings=True), marks=pytest.mark.long),
        pytest.param(MixtralConfig(**UNTIED, num_local_experts=4), marks=pytest.mark.long),
    ],
    ids=["qwen2-one-kv-head", "llama-tied", "mixtral"],
)
def cut(request: Any) -> Iterator[Shared]:
    """A model over two ranks, each a process."""
    with tempfile.TemporaryDirectory() as directory:
        made = Shared(Path(directory), request.param, tensor_parallel_size=2)
        pids = [child.pid for child in multiprocessing.active_children()]
        assert len(pids) == 2
        yield made
        made.end()
        deadline = time.monotonic() + 60
        while set(pids) & {child.pid for child in multiprocessing.active_children()}:  # which collects who has ended
            assert time.monotonic() < deadline, f"of the processes {pids} some are left"
            time.sleep(0.05)


@pytest.mark.long
@pytest.mark.parametrize("check", SUBSET, ids=lambda check: check.__name__)
def test_two_ranks_conform(cut: Shared, check: Any) -> None:
    check(Subject(engine=cut.engine, model=lambda n: random_model(cut.config, n), is_bit_exact=False, tolerance=3e-4))


@pytest.mark.long
def test_what_is_packed_is_unpacked_by_the_ranks(cut: Shared, tmp_path: Path) -> None:
    model = random_model(cut.config, 2)
    with cut.engine() as engine:
        engine.begin_load(1)
        engine.load_bucket(PackedWeights(list(named_weights(model)), tmp_path))  # type: ignore[arg-type]
        engine.finish_load()
        assert engine.digest() == {name: tensor_digest(tensor) for name, tensor in named_weights(model)}
    assert {int(path.name) for path in tmp_path.iterdir()} == {c.pid for c in multiprocessing.active_children()}


@pytest.mark.long
def test_who_owns_an_engine_hears_at_once_that_a_rank_died(tmp_path: Path) -> None:
    """And so does, in the end, who waits for a request."""
    lost = threading.Event()
    made = Shared(tmp_path, LlamaConfig(**SHAPE), tensor_parallel_size=2, when_lost=lost.set)
    with made.engine(max_length=600) as engine:
        future = engine.submit(request("a", max_new_tokens=500))
        conformance.sample_some(engine)
        os.kill(multiprocessing.active_children()[1].pid or 0, signal.SIGKILL)
        assert lost.wait(30)
        with pytest.raises(WorkerError, match="the engine's thread died"):
            future.result(60)
    made.end()
    assert not multiprocessing.active_children()


class FakeCore:
    """Two ranks that keep what they are sent."""

    is_cpu, vocab_size, tensor_parallel_size = True, 67, 2
    sees_images, placeholder_ids = False, frozenset[int]()

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def call(self, method: str, *arguments: Any, timeout_s: float | None = None) -> list[Any]:
        if method == "hotseat_load":
            self.sent += arguments
        started = {"bytes": {}, "undigested": []}
        return [started if method == "hotseat_start" else None] * self.tensor_parallel_size

    def drain(self) -> list[Any]:
        return []

    def forget_cache(self) -> None: ...

    def close(self) -> None: ...


def test_views_of_one_buffer_go_to_the_ranks_with_their_own_bytes_alone() -> None:
    """A bucket's tensors are views of its bytes. Pickled with all of them each, they would take its size squared."""
    core, buffer = FakeCore(), torch.arange(12.0)
    engine = VllmEngine(core, WeightNames({}, {}), max_length=8, num_slots=1)  # type: ignore[arg-type]
    try:
        engine.begin_load(1)
        engine.load_bucket((name, part) for name, part in zip("abc", buffer.split(4), strict=True))
        [named] = core.sent
        assert [(name, tensor.tolist()) for name, tensor in named] == [
            ("a", [0, 1, 2, 3]),
            ("b", [4, 5, 6, 7]),
            ("c", [8, 9, 10, 11]),
        ]
        assert [tensor.untyped_storage().nbytes() for _, tensor in named] == [16, 16, 16]
    finally:
        engine.close()
