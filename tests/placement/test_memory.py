from dataclasses import replace

import pytest
from placement_cases import shape

from hotseat.placement import Part
from hotseat.placement import memory_terms as assumed
from hotseat.placement.memory import estimate, kv_bytes_per_token, layer_activation_bytes
from hotseat.placement.memory_settings import EngineMemory, ForwardMemory, Layout, SimulatorMemory, TrainMemory
from hotseat.placement.shapes import LatentShape, LinearShape, ModelShape

GIB = 2**30
# 340 parameters: 84 outside the layers, 128 in each of two (counted in the test of shapes).
SMALL = ModelShape(2, 4, 6, 2, 1, 2, 10)


def in_bytes(terms):
    return {term.name: round(term.gib * GIB, 3) for term in terms}


def parts(found, part):
    return in_bytes(found.parts[part])


def train(num_procs=4, tensor_parallel=1, model=SMALL, procs_per_device=1, **settings):
    memory = TrainMemory(**({"max_tokens": 8, "micro_batch": 3} | settings))
    layout = Layout(num_procs, tensor_parallel, procs_per_device, device_gib=80.0)
    return estimate("actor", memory, model, layout)


def gradients(found):
    """A part, or memory that an update works with."""
    return in_bytes((*found.parts[Part.GRADIENTS], *found.working["train"]))["gradients"]


def working(found, activity):
    """Without gradients, and without the slack, which must be the stated fraction of the rest."""
    terms = in_bytes(found.working[activity])
    terms.pop("gradients", None)
    slack = terms.pop("allocator slack")
    assert slack == pytest.approx(assumed.ALLOCATOR_SLACK * sum(terms.values()), abs=0.01)
    return terms


def test_fully_sharded_training_counted_by_hand():
    found = train()
    assert parts(found, Part.WEIGHTS) == {"weights": 340 * 2 / 4}
    assert parts(found, Part.GRADIENTS) == {"gradients": 0}  # there are none between updates
    assert gradients(found) == 340 * 4 / 4
    assert parts(found, Part.OPTIMIZER) == {"optimizer moments": 340 * 8 / 4, "master weights": 340 * 4 / 4}
    # 24 tokens. A layer keeps: norms 2 x (4 + 2) x 4, attention 2 x 2 x (4 + 2), MLP 4 x 2 x 6, together 120 bytes.
    assert working(found, "train") == {
        "gathered weights": (84 + 2 * 128) * 2,
        "gradient reduction": (84 + 128) * 4,
        "checkpointed activations": 24 * 2 * 8,
        "recomputed layer": 24 * 120 * 1.5,
        "logits chunk": 24 * 10 * 14,
    }
    # Forward: 2 x 4 + q 4 + k and v 4 + gate and up 12 = 28 values of 2 bytes per token.
    assert working(found, "forward") == {
        "gathered weights": 680,
        "forward activations": 24 * 28 * 2,
        "logits chunk": 24 * 10 * 8,
    }
    assert in_bytes(found.fixed) == {
        "device context": assumed.CONTEXT_GIB * GIB,
        "communicator": round(assumed.COMMUNICATOR_GIB * GIB, 3),
    }


@pytest.mark.parametrize(
    ("backend", "stage", "weights", "of_gradients", "optimizer"),
    [
        ("deepspeed", 0, 680, 1360, 4080),
        ("deepspeed", 1, 680, 1360, 1020),
        ("deepspeed", 2, 680, 340, 1020),
        ("deepspeed", 3, 170, 340, 1020),
        ("fsdp", 0, 680, 1360, 4080),
        ("fsdp", 2, 170, 340, 1020),
        ("fsdp", 3, 170, 340, 1020),
    ],
)
def test_what_each_stage_shards(backend, stage, weights, of_gradients, optimizer):
    found = train(backend=backend, zero_stage=stage)
    assert sum(parts(found, Part.WEIGHTS).values()) == weights
    assert gradients(found) == of_gradients
    assert sum(parts(found, Part.OPTIMIZER).values()) == optimizer


def test_fsdp_keeps_whole_gradients_until_the_last_of_several_micro_batches():
    """24 tokens a micro-batch, on 4 ranks: 96 tokens are one each, 97 are not; in fp32 whatever the weights have."""
    one = train(backend="fsdp", batch_tokens=96)
    assert gradients(one) == 340 * 4 / 4
    several = train(backend="fsdp", batch_tokens=97, gradient_bytes=2)
    terms = in_bytes(several.working["train"])
    assert terms["unsharded fp32 gradients, until the last micro-batch"] == 340 * 4
    assert "gradients" not in terms
    # Whole groups go to a rank, so one may have more than an even share.
    uneven = in_bytes(train(backend="fsdp", batch_tokens=96, group_tokens=8).working["train"])
    assert uneven["unsharded fp32 gradients, until the last micro-batch"] == 340 * 4
    # Two ranks that share sequences hold twice as many tokens of a step.
    shared = in_bytes(train(backend="fsdp", batch_tokens=96, sequence_parallel=2).working["train"])
    assert shared["unsharded fp32 gradients, until the last micro-batch"] == 340 * 4
    alone = in_bytes(train(backend="fsdp", num_procs=1, batch_tokens=1000, gradient_bytes=2).working["train"])
    assert alone["gradients"] == 340 * 2  # one rank has them whole in any case
    assert gradients(train(backend="deepspeed", zero_stage=2, batch_tokens=1000)) == 340 * 4 / 4  # sums every one


def test_dtypes():
    pure = train(num_procs=1, weight_bytes=2, gradient_bytes=2, master_bytes=0, moment_bytes=2)
    assert sum(parts(pure, Part.OPTIMIZER).values()) == 340 * 4
    assert "master weights" not in parts(pure, Part.OPTIMIZER)
    cast = train(weight_bytes=4, master_bytes=0)
    assert parts(cast, Part.WEIGHTS) == {"weights": 1360 / 4}
    assert working(cast, "train")["gathered weights"] == 680
    copied = train(num_procs=1, weight_bytes=4, master_bytes=0)
    assert parts(copied, Part.WEIGHTS) == {"weights": 1360, "16-bit copy of the weights": 680}
    assert "gathered weights" not in working(copied, "train")
    assert "gathered weights" not in working(train(num_procs=1), "train")
    assert "gradient reduction" not in working(train(num_procs=1), "train")


def test_layers_that_do_not_recompute_keep_what_they_computed():
    terms = working(train(checkpointed_layers=1), "train")
    assert terms["checkpointed activations"] == 24 * 1 * 8
    assert terms["recomputed layer"] == 24 * 120 * 1.5
    assert terms["activations"] == 24 * 1 * 120 * assumed.COMPILED_ACTIVATIONS
    assert working(train(checkpointed_layers=5), "train") == working(train(), "train")  # the model has two
    kept = train(gradient_checkpointing=False)
    assert working(kept, "train")["activations"] == 2 * terms["activations"]


def test_tensor_and_sequence_parallel_cut_weights_and_tokens():
    found = train(num_procs=4, tensor_parallel=2, sequence_parallel=2)
    assert parts(found, Part.WEIGHTS) == {"weights": (84 + 256 / 2) * 2 / 2}  # what is outside the layers is whole
    terms = working(found, "train")
    assert terms["checkpointed activations"] == 12 * 2 * 8
    assert terms["recomputed layer"] == 12 * (48 + (24 + 48) / 2) * 1.5
    assert terms["logits chunk"] == 12 * 10 * 14


def test_activations_without_checkpointing_and_padding():
    terms = working(train(gradient_checkpointing=False, packing=False), "train")
    assert terms["activations"] == pytest.approx(24 * 2 * 120 * assumed.COMPILED_ACTIVATIONS)
    eager = working(train(gradient_checkpointing=False, is_compiled=False), "train")
    assert eager["activations"] == pytest.approx(24 * 2 * 120 * assumed.EAGER_ACTIVATIONS)
    assert terms["attention mask"] == 3 * 8 * 8 * 2
    many = working(train(max_tokens=2**25, micro_batch=1), "train")
    assert many["logits chunk"] == assumed.LOGITS_CHUNK_ELEMENTS // 10 * 10 * 14
    exact = working(train(weight_bytes=4, compute_bytes=4), "train")
    assert exact["logits chunk"] == 24 * 10 * 12  # gradients are not rounded
    assert "logits chunk" not in working(train(model=SMALL.with_scalar_head()), "train")
    assert working(train(forward_micro_batch=1), "forward")["forward activations"] == 8 * 28 * 2


def test_the_optimizer_step_counts_where_it_takes_more_than_the_backward_pass():
    few = working(train(num_procs=1, max_tokens=1, micro_batch=1, backend="deepspeed"), "train")
    assert few == {"optimizer step": 340 * 4}
    assert "optimizer step" not in working(train(num_procs=1, max_tokens=1, micro_batch=1), "train")  # it is fused


def test_deepspeed_buckets():
    large = shape("Llama-3-8B")
    terms = working(train(model=large, backend="deepspeed", num_procs=8), "train")
    assert terms["gathered weights"] == 1e9 * 2
    assert terms["gradient reduction"] == 5e8 * 4


def test_a_model_that_deepspeed_compiles_has_gradients_and_buckets_twice():
    settings = {"num_procs": 1, "backend": "deepspeed", "zero_stage": 2, "gradient_bytes": 2, "max_tokens": 4096}
    plain, whole = (working(train(**settings, is_whole=is_whole), "train") for is_whole in (False, True))
    more = {"gradients so far": 340 * 2, "gradient reduction": 2 * 340 * 2}
    assert whole == plain | more


def test_adapters_counted_by_hand():
    # Rank 3 beside 7 layers: q 4 + 4, k and v 4 + 2, output 4 + 4, gate, up and down 4 + 6: 58, twice, times 3.
    assert SMALL.num_adapter_parameters(3) == 348
    assert SMALL.with_scalar_head().num_adapter_parameters(3) == 348 + 4
    found = train(adapter_rank=3, weight_bytes=4, master_bytes=0, has_average=True)
    assert parts(found, Part.WEIGHTS) == {"weights": 340 * 2 / 4, "adapters": 348 * 4 / 4}
    assert gradients(found) == 348 * 4 / 4
    assert parts(found, Part.OPTIMIZER) == {"optimizer moments": 348 * 8 / 4}
    assert working(found, "train")["gradient reduction"] == 348 * 4
    assert in_bytes(found.working["push"])["merging"] == (348 + 2 * 4 * 6) * 4
    assert in_bytes(found.host)["moving average (pinned)"] == 348
    for stage in (1, 2, 3):  # cut as the optimizer is, where all ranks have the weights too
        plain = train(has_average=True, backend="deepspeed", zero_stage=stage)
        assert in_bytes(plain.host)["moving average (pinned)"] == 340


def test_two_snapshots_of_all_that_is_trained_lie_on_the_host():
    def snapshots(**settings) -> float:
        return in_bytes(train(has_snapshots=True, **settings).host)[assumed.SNAPSHOTS]

    # Of 340 parameters on 4 ranks: fp32 weights and two moments; adapters alone, with their average.
    assert snapshots(weight_bytes=4, master_bytes=0) == 2 * 12 * 340 / 4
    assert snapshots(adapter_rank=3, weight_bytes=4, master_bytes=0, has_average=True) == 2 * 16 * 348 / 4
    assert assumed.SNAPSHOTS not in in_bytes(train().host)


def test_experts_get_no_adapters():
    mixture = ModelShape(2, 4, 6, 2, 1, 2, 10, num_experts=4, experts_per_token=2, shared_expert_size=5)
    # Attention as above; of the MLPs, only the expert that all tokens take: 3 x (4 + 5).
    assert mixture.num_adapter_parameters(1) == 2 * (28 + 27)


def test_offload_moves_terms_to_the_host():
    found = train(optimizer_offload=True, backend="deepspeed")
    assert sum(parts(found, Part.OPTIMIZER).values()) == 0
    assert sum(parts(found, Part.GRADIENTS).values()) == 0
    host = in_bytes(found.host)
    assert host["optimizer moments (pinned)"] == 680
    assert host["master weights (pinned)"] == 340
    assert host["gradients (pinned)"] == 340
    assert host["process"] == assumed.HOST_PROCESS_GIB * GIB
    assert gradients(train(optimizer_offload=True)) == 340


def test_scoring_models():
    full = estimate("reference", ForwardMemory(8, 3), SMALL, Layout(4, device_gib=80.0))
    assert parts(full, Part.WEIGHTS) == {"weights": 680}
    assert "gathered weights" not in working(full, "forward")
    assert in_bytes(full.fixed).keys() == {"device context"}
    cut = estimate("reference", ForwardMemory(8, 3, is_sharded=True, packing=False), SMALL, Layout(4, device_gib=80.0))
    assert parts(cut, Part.WEIGHTS) == {"weights": 170}
    assert working(cut, "forward") == {
        "gathered weights": 680,
        "forward activations": 24 * 28 * 2,
        "attention mask": 3 * 64 * 2,
        "logits chunk": 24 * 10 * 8,
    }


def engine(share=None, device_gib=80.0, tensor_parallel=1, model=SMALL, procs_per_device=1, **settings):
    memory = EngineMemory(**({"max_tokens": 100, "slots": 5} | settings))
    layout = Layout(4, tensor_parallel, procs_per_device, share, device_gib)
    return estimate("rollout", memory, model, layout)


def test_an_engine_without_a_share_takes_cache_for_its_slots():
    # A token: 2 (key, value) x 2 layers x 1 head x 2 x 2 bytes = 16 bytes.
    found = engine()
    assert parts(found, Part.WEIGHTS) == {"weights": 680}
    assert parts(found, Part.KV_CACHE) == {"kv cache": 5 * 100 * 16}
    assert parts(engine(kept_prompts=8), Part.KV_CACHE) == {"kv cache": (5 + 8) * 100 * 16}
    assert found.min_share is None
    # 500 tokens x 28 values x 2 bytes, 5 slots x 10 logits x 6 bytes
    assert in_bytes(found.working["generate"]) == {"engine workspace": 500 * 56 + 5 * 10 * 6}
    assert in_bytes(found.fixed)["engine buffers"] == assumed.ENGINE_BUFFERS_GIB * GIB
    assert in_bytes(found.fixed)["captured graphs"] == round(2 * assumed.CUDA_GRAPH_GIB_PER_LAYER * GIB, 3)
    assert "captured graphs" not in in_bytes(engine(cuda_graphs=False).fixed)


def test_an_engine_with_layers_in_fp8_takes_half_for_them():
    model = shape("Llama-3-8B")
    found = engine(model=model, layer_bytes=1, kv_bytes=1)
    in_layers = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
    assert parts(found, Part.WEIGHTS) == {
        "weights": 2 * (model.num_parameters - in_layers),
        "weights of layers": in_layers,
    }
    assert parts(found, Part.KV_CACHE) == {"kv cache": 5 * 100 * 65_536}
    # What it computes with stays in 16 bits.
    assert in_bytes(found.working["generate"]) == in_bytes(engine(model=model).working["generate"])


def test_layers_in_nf4_are_counted_with_their_scales_and_whole_on_every_rank():
    model, nf4 = shape("Llama-3-8B"), 0.5 + 2 / 64
    in_layers = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
    weights = parts(train(num_procs=4, model=model, adapter_rank=16, layer_bytes=nf4), Part.WEIGHTS)
    assert weights["weights"] == round(2 * (model.num_parameters - in_layers) / 4, 3)
    assert weights["weights of layers"] == in_layers * nf4
    found = engine(model=model, layer_bytes=nf4, is_nf4=True)
    assert parts(found, Part.WEIGHTS)["weights of layers"] == in_layers * nf4
    # Gate and up, 4096 x 14336 each, as indices of 2 B, 32-bit numbers and 16-bit ones.
    plain = in_bytes(engine(model=model).working["generate"])["engine workspace"]
    assert in_bytes(found.working["generate"])["engine workspace"] == plain + 2 * 4096 * 14336 * 8
    scores = in_bytes(train(num_procs=1, model=model, adapter_rank=16, layer_bytes=nf4).working["forward"])
    assert scores["dequantised weight"] == 4096 * 14336 * 8


def test_an_engine_with_a_share_fills_it_exactly():
    found = engine(share=0.5, model=shape("Llama-3-8B"), slots=5000)
    used = sum(t.gib for terms in found.parts.values() for t in terms)
    used += sum(t.gib for t in found.working["generate"]) + assumed.ENGINE_BUFFERS_GIB
    assert used == pytest.approx(40.0)  # context and graphs come on top
    beside = assumed.CONTEXT_GIB + 32 * assumed.CUDA_GRAPH_GIB_PER_LAYER
    assert sum(t.gib for t in found.fixed) == pytest.approx(assumed.ENGINE_BUFFERS_GIB + beside)
    assert found.min_share < 0.5


def test_a_cache_is_at_most_twice_what_slots_need():
    for tensor_parallel in (1, 2):
        found = engine(share=0.5, model=shape("Llama-3-8B"), tensor_parallel=tensor_parallel)
        assert parts(found, Part.KV_CACHE) == {"kv cache": 2 * 5 * 100 * 131_072 / tensor_parallel}


def test_tensor_parallel_cuts_weights_and_cache_until_heads_run_out():
    model = shape("Llama-3-8B")  # 8 key-value heads
    assert kv_bytes_per_token(model, 2) == 2 * 32 * 8 * 128 * 2
    assert kv_bytes_per_token(model, 2, tp=8) == 2 * 32 * 1 * 128 * 2
    assert kv_bytes_per_token(model, 2, tp=16) == 2 * 32 * 1 * 128 * 2
    found = engine(tensor_parallel=2, model=model)
    assert parts(found, Part.WEIGHTS)["weights"] == model.num_parameters
    assert "communicator" in in_bytes(found.fixed)


def test_layers_with_linear_attention_have_states_and_no_kv_cache():
    # 8 layers, 6 of them with 4 states of 16 x 8 numbers and 3 tokens of 2 x 2 x 16 + 4 x 8 channels.
    linear = LinearShape(6, num_key_heads=2, num_value_heads=4, key_dim=16, value_dim=8, kernel=4)
    model = replace(shape("Llama-3-8B"), num_layers=8, linear=linear)
    assert kv_bytes_per_token(model, 2) == 2 * 2 * 8 * 128 * 2
    states = 6 * 4 * (4 * 16 * 8 + 3 * 96)
    assert linear.state_bytes == states
    cache = engine(model=model).parts[Part.KV_CACHE][0]
    assert cache.gib * GIB == pytest.approx(5 * (100 * 8192 + states))
    assert "B of states)" in cache.formula
    assert "linear attention" in in_bytes(engine(model=model).working["forward"])


def test_latent_values_are_cached_on_every_rank_and_made_into_keys_and_values_by_some_engines():
    # 2 heads with keys of 6 + 4 and values of 5, of 8 latent values and 4 with positions.
    latent = LatentShape(2, q_rank=3, kv_rank=8, nope_dim=6, rope_dim=4, value_dim=5)
    model = replace(shape("Llama-3-8B"), latent=latent)
    assert kv_bytes_per_token(model, 2) == kv_bytes_per_token(model, 2, tp=4) == 32 * (8 + 4) * 2
    expanded = "keys and values of latent ones"
    assert expanded not in in_bytes(engine(model=model).working["generate"])
    made = in_bytes(engine(model=model, expands_latent=True).working["generate"])[expanded]
    assert made == 5 * 100 * (2 * 10 + 2 * 11) * 2
    plain = layer_activation_bytes(replace(model, latent=replace(latent, q_rank=0)), 2)
    assert plain - layer_activation_bytes(replace(model, hidden_size=0, latent=None), 2) == pytest.approx(
        2 * (4 + 2) * 4096 + 2 * (2 * 20 + 22 + 10) + (4 + 4) * 8 - 2 * 2 * (4096 + 1024)
    )


def test_a_share_too_small_to_start_with():
    found = engine(share=0.1, model=shape("Llama-3-8B"))
    rest = 14.96 + 1.0  # weights, and more with the rest of the workspace
    assert found.min_share > rest / 80
    kv = found.parts[Part.KV_CACHE][0].gib
    assert kv == pytest.approx(100 * 2 * 32 * 8 * 128 * 2 / GIB)


def test_processes_that_share_a_device_add_up():
    one, two = engine(), engine(procs_per_device=2)
    assert two.part_gib(Part.WEIGHTS) == 2 * one.part_gib(Part.WEIGHTS)
    assert two.fixed[0].formula.startswith("2 processes x (")


def test_simulators():
    given = estimate("env", SimulatorMemory(12.0), None, Layout(4, device_gib=80.0))
    assert given.part_gib(Part.SIMULATOR) == 12.0
    assert [term.gib for term in given.host] == [assumed.HOST_PROCESS_GIB]
    shared = estimate("env", None, None, Layout(4, share=0.25, device_gib=80.0))
    assert shared.part_gib(Part.SIMULATOR) == 20.0 - assumed.CONTEXT_GIB
    assert estimate("env", None, None, Layout(4, share=0.25)) is None
    assert estimate("env", None, None, Layout(4, device_gib=80.0)) is None


def test_on_a_device_of_unknown_memory_only_shares_are_unknown():
    assert engine(device_gib=None).part_gib(Part.WEIGHTS) * GIB == 680
    assert engine(share=0.5, device_gib=None) is None


def test_what_is_not_known_is_not_estimated():
    assert estimate("actor", None, SMALL, Layout(1, device_gib=80.0)) is None
    assert estimate("actor", TrainMemory(8), None, Layout(1, device_gib=80.0)) is None


def test_a_role_without_a_device_has_no_context():
    assert estimate("actor", TrainMemory(8), SMALL, Layout(2, has_device=False)).fixed == ()


def test_every_term_shows_its_arithmetic():
    found = train()
    for terms in (found.fixed, *found.parts.values(), *found.working.values(), found.host):
        for term in terms:
            assert term.formula
    assert found.parts[Part.WEIGHTS][0].formula == "340 parameters x 2 B / 4 ranks"
    share = engine(share=0.5, model=shape("Llama-3-8B"), slots=5000).parts[Part.KV_CACHE][0].formula
    assert share.startswith("0.5 x 80 GiB - ")
    assert share.endswith("tokens of 131,072 B")
    useful = engine(share=0.5, model=shape("Llama-3-8B")).parts[Part.KV_CACHE][0].formula
    assert useful == "2 x 5 slots x 100 tokens x 131,072 B, less than the share of 0.5 allows"


def test_the_rule_of_thumb_of_sixteen_bytes_a_parameter():
    # bf16 weights and gradients, fp32 master and two moments: 2 + 2 + 4 + 8
    found = train(num_procs=8, model=shape("Llama-3-8B"), gradient_bytes=2)
    total = sum(found.part_gib(part) for part in (Part.WEIGHTS, Part.OPTIMIZER)) + gradients(found) / GIB
    assert total == pytest.approx(8.03e9 * 16 / 8 / GIB, rel=1e-3)
