"""From a config to the planner's question."""

import json
import textwrap

import pytest

from hotseat.cli.main import main
from hotseat.cluster import Cluster
from hotseat.config import loads
from hotseat.errors import PlacementError, TooFewDevicesError
from hotseat.machine import has_gpu
from hotseat.placement import Part
from hotseat.placement.memory import estimate
from hotseat.placement.memory_settings import EngineMemory, ForwardMemory, Layout, TrainMemory
from hotseat.placement.shapes import known_shape
from hotseat.planning.config_plan import (
    EngineRoom,
    engine_room,
    is_anything_offloaded,
    make_plan,
    more_engines,
    num_data_parallel,
    plan_on,
)
from hotseat.planning.role_specs import role_specs

LLAMA = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "vocab_size": 100,
}


def specs(text: str) -> dict:
    return {spec.name: spec for spec in role_specs(loads(text))}


@pytest.mark.parametrize(("task", "has_room"), [("sft", 16), ("rl", 24)])
def test_eight_billion_parameters_in_four_bits_fit_on_a_small_card(task, has_room, tmp_path, capsys):
    text = f"""
    task: {task}
    actor: {{model: Qwen/Qwen3-8B}}
    data: {{path: rows.jsonl, max_length: 2048{", output_key: answer" if task == "sft" else ""}}}
    train: {{dtype: bf16, lora: {{rank: 16}}, gradient_checkpointing: true, micro_batch_size: 1, batch_size: 64}}
    """
    if task == "rl":
        text += "reward: {function: r.py}\n    rollout: {engine: vllm, batch_size: 8, memory_share: 0.6}\n"
    path = tmp_path / "run.yaml"
    path.write_text(textwrap.dedent(text))
    asked = ["plan", str(path), "--inventory", f"1x1x{has_room}G"]
    main([*asked, "train.load_in_4bit=true"])
    assert capsys.readouterr().out.startswith("Fits")
    main(asked)
    assert not capsys.readouterr().out.startswith("Fits")


def test_a_role_that_is_not_placed_goes_where_the_actor_is():
    plan = make_plan(loads("algorithm: {kl: {coef: 0.1}}"))
    assert {role.name: role.devices for role in plan.roles} == {"actor": (0,), "rollout": (0,), "reference": (0,)}


def test_a_role_that_the_run_does_not_have_cannot_be_placed():
    with pytest.raises(PlacementError, match="critic is placed, but this run has no critic"):
        make_plan(loads("cluster: {component_placement: {actor: 0, critic: 0}}"))


def test_errors_about_roles_add_the_names_that_the_config_has_for_them():
    names = "component_names: {judgement: critic, policy: rollout}"
    with pytest.raises(
        PlacementError, match=r"no critic: remove it \(by cluster.component_names, critic is judgement\)$"
    ):
        make_plan(loads(f"cluster: {{{names}, component_placement: {{actor: 0, judgement: 0}}}}"))
    with pytest.raises(TooFewDevicesError, match=r"\(by cluster.component_names, rollout is policy\)$"):
        make_plan(loads(f"cluster: {{{names}, inventory: 1x2xA100-80G, component_placement: {{actor: 0, policy: 5}}}}"))
    with pytest.raises(TooFewDevicesError) as error:
        make_plan(loads("cluster: {inventory: 1x2xA100-80G, component_placement: {actor: 0, rollout: 5}}"))
    assert "component_names" not in str(error.value)


def test_offload_is_always_never_or_as_needed():
    assert specs("actor: {enable_offload: true}")["actor"].offload == "always"
    assert specs("actor: {enable_offload: false}")["actor"].offload == "never"
    assert specs("")["actor"].offload is None


def test_deepspeed_keeps_masters_beside_sixteen_bit_weights_and_fsdp_casts_fp32_ones():
    deepspeed = specs("train: {backend: deepspeed, deepspeed: {zero_stage: 1, adam_offload: true}}")["actor"].memory
    assert isinstance(deepspeed, TrainMemory)
    assert (deepspeed.weight_bytes, deepspeed.master_bytes, deepspeed.zero_stage) == (2, 4, 1)
    assert deepspeed.optimizer_offload
    for stage, expected in ((0, 0), (2, 2)):  # what it shards it steps in a copy, in whatever type
        pure = specs(f"train: {{backend: deepspeed, fp32_master: false, deepspeed: {{zero_stage: {stage}}}}}")
        assert pure["actor"].memory.master_bytes == expected
    fsdp = specs("")["actor"].memory
    assert (fsdp.weight_bytes, fsdp.master_bytes, fsdp.compute_bytes, fsdp.zero_stage) == (4, 0, 2, 3)
    pure = specs("train: {fp32_master: false}")["actor"].memory
    assert (pure.weight_bytes, pure.master_bytes, pure.moment_bytes, pure.gradient_bytes) == (2, 0, 2, 2)
    plain = specs("train: {dtype: fp32}")["actor"].memory
    assert (plain.weight_bytes, plain.compute_bytes, plain.moment_bytes) == (4, 4, 4)


def test_the_planner_counts_adapters_and_the_moving_average():
    text = "train: {lora: {rank: 8, target_modules: [q_proj]}, ema: {enabled: true}}\nalgorithm: {estimator: gae}"
    found = specs(text)
    assert (found["actor"].memory.adapter_rank, found["actor"].memory.has_average) == (8, True)
    assert (found["critic"].memory.adapter_rank, found["critic"].memory.has_average) == (8, False)
    [said] = [warning for warning in make_plan(loads(text)).warnings if "lora" in warning]
    assert said == "train.lora.target_modules: the figures are for adapters beside every linear layer"


def test_muon_keeps_one_moment_of_matrices_and_adamw_two_of_the_rest():
    """By hand: a layer of 64 wide attention with one of two heads for keys, an MLP of 128, and 100 words."""
    shape = "{num_hidden_layers: 3, hidden_size: 64, intermediate_size: 128, num_attention_heads: 2,"
    shape += " num_key_value_heads: 1, vocab_size: 100, tie_word_embeddings: true}"
    text = f"actor: {{shape: {shape}, optimizer: {{kind: muon}}}}\ntrain: {{dtype: fp32}}"
    actor = specs(text)["actor"]
    matrices = 3 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128)
    others = 100 * 64 + 64 + 3 * 2 * 64  # embedding, last norm, norms of layers
    assert actor.model.num_parameters == matrices + others
    priced = estimate("actor", actor.memory, actor.model, Layout(1))
    assert priced.part_gib(Part.OPTIMIZER) * 2**30 == pytest.approx(4 * (matrices + 2 * others))
    plain = specs(text.replace("kind: muon", "kind: adamw"))["actor"]
    assert estimate("actor", plain.memory, plain.model, Layout(1)).part_gib(Part.OPTIMIZER) * 2**30 == pytest.approx(
        8 * (matrices + others)
    )


def test_every_teacher_is_counted_the_largest_on_the_device_and_the_others_on_the_host():
    text = "reference: {teachers: {code: Qwen/Qwen2.5-7B, maths: Qwen/Qwen2.5-1.5B, chat: Qwen/Qwen2.5-0.5B}}"
    text += "\nalgorithm: {distill_coef: 1.0}\ntrain: {dtype: bf16}"
    reference = specs(text)["reference"]
    assert reference.model_assumed == "Qwen2.5-7B"
    sizes = [known_shape(f"Qwen2.5-{size}B")[0].num_parameters for size in ("7", "1.5")]
    assert reference.memory.num_waiting == sum(sizes)  # while the smallest has its turn
    priced = estimate("reference", reference.memory, reference.model, Layout(2))
    [waiting] = [term for term in priced.host if "waiting" in term.name]
    assert waiting.gib * 2**30 == pytest.approx(2 * sum(sizes) / 2)  # two bytes each, over two ranks
    assert specs(text.replace("Qwen/Qwen2.5-0.5B", "unheard-of"))["reference"].model is None


def test_only_the_actor_sends_weights():
    found = specs("algorithm: {estimator: gae}")
    assert found["actor"].memory.sends_weights
    assert not found["critic"].memory.sends_weights
    assert not specs("task: sft")["actor"].memory.sends_weights


def test_an_engine_has_its_share_its_size_and_its_parts():
    spec = specs("rollout: {engine: vllm, tensor_parallel_size: 2, memory_share: 0.4, enforce_eager: true}")["rollout"]
    assert (spec.tensor_parallel, spec.share) == (2, 0.4)
    assert isinstance(spec.memory, EngineMemory)
    assert not spec.memory.cuda_graphs
    assert spec.can_offload == {Part.WEIGHTS, Part.KV_CACHE}
    assert specs("rollout: {engine: vllm}")["rollout"].share == 0.9
    assert specs("")["rollout"].share is None
    assert spec.memory.kept_prompts == 0
    assert specs("")["rollout"].memory.kept_prompts == 8


JUDGED = "reward: {judge: {rubric: r.txt, model: Qwen/Qwen2.5-7B-Instruct, max_tokens: 256"


def test_a_judge_without_an_endpoint_is_an_engine_with_a_model_and_a_length_of_its_own():
    text = f"{JUDGED}, engine: {{kind: vllm, tensor_parallel_size: 2, memory_share: 0.5}}}}}}"
    judge = specs(f"{text}\ndata: {{max_length: 1000}}\ntrain: {{dtype: bf16}}")["judge"]
    assert judge.is_engine
    assert (judge.on, judge.tensor_parallel, judge.share) == ("@actor", 2, 0.5)
    assert judge.can_offload == {Part.WEIGHTS, Part.KV_CACHE}
    assert judge.model_assumed == "Qwen2.5-7B"
    assert judge.memory.max_tokens == 1000 + 256 + 1024  # the answer, the verdict, the rubric
    assert "judge" not in specs(f"{JUDGED}, url: 'http://127.0.0.1:8000/v1'}}}}")


def test_a_judge_works_between_rollout_and_the_actor_and_keeps_its_weights():
    actor = "actor: {model: Qwen/Qwen2.5-7B-Instruct}"
    made = make_plan(loads(f"{JUDGED}}}}}\n{actor}", ["cluster.component_placement={actor: 0-7}"]), "1x8xH100-80G")
    order = [(step.phase, step.roles) for step in made.steps]
    assert order.index(("prepare", ("judge",))) == order.index(("rollout", ("rollout",))) + 1
    assert order.index(("prepare", ("judge",))) < order.index(("prepare", ("actor",)))
    [sync] = [step for step in made.steps if step.pushes]
    assert "judge" not in sync.roles
    judged = [hold for step in made.groups[0].steps for hold in step.holdings if hold.role == "judge"]
    states = {hold.state for hold in judged if hold.part == Part.WEIGHTS}
    assert "offloaded" in states
    assert "dropped" not in states  # nobody sends it its weights again
    text = f"{JUDGED}, engine: {{enable_offload: false}}}}}}\n{actor}"
    with pytest.raises(PlacementError, match=r"reward\.judge\.engine\.enable_offload is false: unset it"):
        make_plan(loads(text, ["cluster.component_placement={actor: 0-7}", "train.micro_batch_size=1"]), "1x8xH100-80G")


def test_a_reference_is_sharded_under_fsdp_and_zero_3_only():
    base = "algorithm: {kl: {coef: 0.1}}\n"
    assert isinstance(specs(base)["reference"].memory, ForwardMemory)
    assert specs(base)["reference"].memory.is_sharded
    assert not specs(base + "train: {backend: deepspeed}")["reference"].memory.is_sharded
    assert specs(base + "train: {backend: deepspeed, deepspeed: {zero_stage: 3}}")["reference"].memory.is_sharded


def test_a_shape_comes_from_the_config_the_model_directory_or_the_name(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"num_hidden_layers": 3}))
    assert specs(f"actor: {{model: {tmp_path}}}")["actor"].model.num_layers == 3
    assert specs(f"actor: {{model: {tmp_path}, shape: {json.dumps(LLAMA)}}}")["actor"].model.num_layers == 2
    assumed = specs("actor: {model: org/Llama-3-8b-mine}")["actor"]
    assert (assumed.model_assumed, assumed.model.num_layers) == ("Llama-3-8B", 32)
    assert specs("actor: {model: org/unheard-of}")["actor"].model is None


def test_a_critic_is_shaped_like_the_reward_model_with_a_scalar_head():
    text = f"algorithm: {{estimator: gae}}\nactor: {{shape: {json.dumps(LLAMA)}}}\n"
    text += f"reward: {{model: r, shape: {json.dumps(LLAMA | {'num_hidden_layers': 5})}}}"
    found = specs(text)
    assert found["critic"].model.num_layers == 5
    assert found["critic"].model.num_parameters < found["reward"].model.num_parameters + 100


@pytest.mark.parametrize(
    ("stored", "why"),
    [
        ({"model_type": "gpt2", "n_layer": 2, "n_embd": 16, "vocab_size": 16}, "model config lacks num_hidden_layers"),
        (
            LLAMA | {"kv_lora_rank": 256, "model_type": "minicpm3"},
            "is of minicpm3: the latent attention of",
        ),
        (LLAMA | {"num_attention_heads": 0}, "model config lacks num_attention_heads"),
    ],
)
def test_a_model_that_the_planner_cannot_describe_runs_all_the_same(tmp_path, stored, why):
    (tmp_path / "config.json").write_text(json.dumps(stored))
    text = f"actor: {{model: {tmp_path}}}\ncritic: {{model: {tmp_path}}}\nalgorithm: {{estimator: gae}}"
    made = make_plan(loads(text), "1x1xH100-80G")
    assert [role.name for role in made.roles] == ["actor", "rollout", "critic"]
    assert all(
        sum(f"{name}.model: " in line and why in line for line in made.warnings) == 1 for name in ("actor", "critic")
    )
    assert any("memory is not checked on devices 0" in line for line in made.warnings)


def test_a_broken_model_config_is_named(tmp_path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(PlacementError, match=r"config.json is not JSON"):
        make_plan(loads(f"actor: {{model: {tmp_path}}}"))
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(PlacementError, match=r"config.json does not hold a model config"):
        make_plan(loads(f"actor: {{model: {tmp_path}}}"))


def test_ranks_divide_into_replicas():
    for sharing in ("sequence_parallel_size: 2", "backend: deepspeed, deepspeed: {tensor_parallel_size: 2}"):
        text = f"cluster: {{component_placement: {{actor: 0-7}}}}\ntrain: {{{sharing}}}"
        assert num_data_parallel(loads(text), make_plan(loads(text))) == 4
    odd = loads("cluster: {component_placement: {actor: 0-2}}\ntrain: {sequence_parallel_size: 2}")
    with pytest.raises(PlacementError, match="3 processes cannot be cut into groups of 2"):
        make_plan(odd)


def test_ranks_that_share_layers_are_not_compiled_and_those_that_score_share_them_too():
    found = specs("train: {backend: deepspeed, deepspeed: {tensor_parallel_size: 2}}\nalgorithm: {kl: {coef: 0.1}}")
    assert [found[role].tensor_parallel for role in ("actor", "reference", "rollout")] == [2, 2, 1]
    assert not found["actor"].memory.is_compiled


def test_more_nodes_than_the_inventory_are_refused_and_fewer_are_used():
    text = "cluster: {num_nodes: 2, component_placement: {actor: all}}"
    with pytest.raises(PlacementError, match=r"cluster.num_nodes is 2, the inventory has 1 node"):
        make_plan(loads(text), "1x8")
    assert len(make_plan(loads(text), "4x8").role("actor").devices) == 16


def test_a_flow_of_ones_own_is_taken():
    text = """
flow:
  - {name: rollout, run: [rollout]}
  - {name: update, train: [actor]}
  - {name: sync, push: [rollout]}
"""
    assert [step.name for step in make_plan(loads(text)).steps] == ["rollout", "update", "sync"]


SLEEPING = f"rollout: {{engine: vllm, enable_offload: true}}\nactor: {{shape: {json.dumps(LLAMA)}}}"


def away(plan) -> set:
    """(role, part) of everything that is off its device at some time."""
    holdings = (holding for group in plan.groups for step in group.steps for holding in step.holdings)
    return {(holding.role, holding.part) for holding in holdings if not holding.is_resident}


def test_on_cpus_vllm_offloads_nothing_and_the_plan_notes_it_once():
    config = loads(SLEEPING)
    said = "rollout.enable_offload: no effect here: on a CPU vLLM cannot offload its weights and its cache"
    on_cpus = make_plan(config, "1x1", are_devices_logical=True)
    assert away(on_cpus) == set()
    assert on_cpus.warnings.count(said) == 1
    # A cluster whose devices are only not known yet is another matter.
    planned = make_plan(config, "1x1")
    assert {("rollout", Part.WEIGHTS), ("rollout", Part.KV_CACHE)} <= away(planned)
    assert said not in planned.warnings
    silent = make_plan(loads("rollout: {engine: vllm}"), "1x1", are_devices_logical=True)
    assert not any("no effect" in warning for warning in silent.warnings)
    shared = make_plan(loads("rollout: {engine: vllm, memory_share: 0.5}"), "1x1", are_devices_logical=True)
    assert any(warning.startswith("rollout.memory_share: no effect here") for warning in shared.warnings)


@pytest.mark.parametrize(("hidden", "layers", "count"), [(576, 30, 3), (1536, 28, 2), (4096, 32, 1)])
def test_another_engine_is_recommended_for_small_models(hidden, layers, count):
    sizes = f"hidden_size: {hidden}, num_hidden_layers: {layers}, intermediate_size: {4 * hidden}"
    actor = f"actor: {{shape: {{model_type: llama, vocab_size: 49152, num_attention_heads: 8, {sizes}}}}}"

    def notes(on="0", **settings):
        rollout = {"engine": "vllm", "batch_size": 32, "samples_per_prompt": 8, "memory_share": 0.1} | settings
        placed = f"cluster: {{component_placement: {{actor: 1, rollout: '{on}'}}}}"
        config = loads(f"{actor}\n{placed}\nrollout: {json.dumps(rollout)}")
        return more_engines(config, make_plan(config, "1x3"))

    assert len(notes()) == len(notes("0,2")) == (count > 1)
    if count > 1:
        assert f"unset rollout.memory_share, and the run starts {count} engines on a device" in notes()[0]
        assert "unset rollout.num_engines and rollout.memory_share" in notes(num_engines=1)[0]
        assert "unset" not in notes(memory_share=None)[0]
    without = loads(f"task: sft\n{actor}")
    assert more_engines(without, make_plan(without, "1x1")) == []
    assert notes("0:0-1") == notes("0:0-1", num_engines=2) == notes(num_engines=2) == notes(batch_size=4) == []


def test_on_cpus_the_transformers_engine_offloads_its_parts():
    plan = make_plan(loads("rollout: {enable_offload: true}"), "1x1", are_devices_logical=True)
    assert {("rollout", Part.WEIGHTS), ("rollout", Part.KV_CACHE)} <= away(plan)


@pytest.mark.skipif(has_gpu(), reason="here devices are not logical")
def test_a_run_without_accelerators_knows_that_it_has_none():
    with Cluster("local", num_devices=1) as cluster:
        plan = plan_on(loads(SLEEPING), cluster)
    assert away(plan) == set()
    assert any(warning.startswith("rollout.enable_offload: no effect") for warning in plan.warnings)


def test_second_copies_are_counted_on_the_devices_that_there_are():
    text = (
        "cluster: {component_placement: {actor: all}}\ntrain: {backend: deepspeed, deepspeed: {zero_stage: 3, zpg: 6}}"
    )
    make_plan(loads(text))  # on nodes that are only assumed
    make_plan(loads(text), "2x6")
    with pytest.raises(PlacementError, match="train.deepspeed.zpg is 6, and the 8 ranks of actor cannot be divided"):
        make_plan(loads(text), "1x8")


SMALL_ENGINE = """
actor: {shape: {hidden_size: 576, num_hidden_layers: 30, num_attention_heads: 9, num_key_value_heads: 3,
  intermediate_size: 1536, vocab_size: 49152}}
data: {max_length: 192}
rollout: {engine: vllm, memory_share: 0.6}
"""


def test_the_cache_of_a_small_engine_is_what_its_sequences_can_use():
    config = loads(SMALL_ENGINE)
    made = make_plan(config, "1x1xH200")
    room = engine_room(config, made)
    # 512 slots x 192 tokens x (key and value x 30 layers x 3 heads x 64 x 2 bytes), twice
    assert room is not None
    assert room.cache_gib == pytest.approx(2 * 512 * 192 * 2 * 30 * 3 * 64 * 2 / 2**30)
    assert room.cache_gib < room.share * 141 < 20
    assert not is_anything_offloaded(made)
    offloading = loads(SMALL_ENGINE.replace("0.6", "0.6, enable_offload: true"))
    assert is_anything_offloaded(make_plan(offloading, "1x1xH200"))


def test_models_that_fit_beside_everything_score_at_the_same_time():
    config = loads(SMALL_ENGINE + "algorithm: {kl: {coef: 0.1}}")
    assert [step.roles for step in make_plan(config, "1x1xH200").steps if step.phase == "prepare"] == [
        ("reference", "actor")
    ]
    in_turn = [("reference",), ("actor",)]
    for machines, is_logical, override in (
        ("1x1xH200", True, ""),  # processes share CPUs
        ("1x1", False, ""),  # memory is not known
        ("1x1xH200", False, "reference: {enable_offload: true}"),
    ):
        made = make_plan(
            loads(SMALL_ENGINE + "algorithm: {kl: {coef: 0.1}}\n" + override), machines, are_devices_logical=is_logical
        )
        assert [step.roles for step in made.steps if step.phase == "prepare"] == in_turn


def test_the_cache_of_a_large_engine_fills_its_share():
    config = loads(SMALL_ENGINE.replace("max_length: 192", "max_length: 8192"))
    assert engine_room(config, make_plan(config, "1x1xH200")) == EngineRoom(0.6)
    assert engine_room(config, make_plan(config, "1x1")) == EngineRoom(0.6)  # of unknown devices
    on_cpu = config.model_copy(update={"cluster": loads("cluster: {component_placement: {actor: cpu*1}}").cluster})
    assert engine_room(on_cpu, make_plan(on_cpu, "cpu")) == EngineRoom(0.6)  # of processes without devices
    assert engine_room(loads(""), make_plan(loads(""), "1x1xH200")) is None  # the transformers engine has no share


def test_engines_on_one_device_divide_the_default_share():
    def shares(text, machines="1x1xH200"):
        role = make_plan(loads(text), machines).role("rollout")
        return [(process.devices, role.share) for process in role.processes]

    sizes = "hidden_size: 4096, num_hidden_layers: 4, num_attention_heads: 32, intermediate_size: 14336"
    vllm = f"actor: {{shape: {{{sizes}, vocab_size: 49152}}}}\n"
    two = vllm + "rollout: {engine: vllm, num_engines: 2}"
    placed = vllm + "cluster: {component_placement: {actor: 0, rollout: '0:0-1'}}\nrollout: {engine: vllm}"
    assert shares(two) == shares(placed) == [((0,), 0.45)] * 2
    assert shares(two + "\ncluster: {component_placement: {actor: 0-1}}", "1x2xH200") == [((0,), 0.9), ((1,), 0.9)]
    assert shares(two.replace("2}", "2, memory_share: 0.3}")) == [((0,), 0.3)] * 2
    with pytest.raises(PlacementError, match="sum to 1.20, over 1 .rollout 2 x 0.6.: set rollout.memory_share to at"):
        shares(two.replace("2}", "2, memory_share: 0.6}"))
