"""What `hotseat plan` advises where a config does not fit: settings that exist, and with which it does."""

import itertools
import random
import re

import pytest
import yaml

from hotseat.cli.main import main
from hotseat.config import load, loads
from hotseat.config.load import valid_keys
from hotseat.errors import UserError
from hotseat.planning.advisor import _enough, _Trials, advise, as_yaml
from hotseat.planning.config_plan import make_plan

pytestmark = pytest.mark.slow

LARGE = "actor: {model: meta-llama/Llama-2-70b-hf}\nrollout: {engine: vllm}\n"
SFT = "task: sft\nactor: {model: org/Llama-3-8B}\n"
PPO = (
    "actor: {model: org/Qwen2.5-72B}\nalgorithm: {estimator: gae, kl: {coef: 0.01}}\nrollout: {engine: vllm}\n"
    "cluster: {component_placement: {actor: all}}\n"
)


def merged(first: dict, second: dict) -> dict:
    """What someone makes of a file and of what they paste into it."""
    both = dict(first)
    for key, value in second.items():
        is_section = isinstance(value, dict) and isinstance(both.get(key), dict)
        both[key] = merged(both[key], value) if is_section else value
    return both


def check(text: str, inventory: str) -> list[dict]:
    """The settings of all advice, each of which was pasted and planned anew: it fits."""
    found = advise(loads(text), inventory)
    for advice in found:
        assert set(advice.settings) <= set(valid_keys())
        pasted = loads(yaml.safe_dump(merged(yaml.safe_load(text), yaml.safe_load(as_yaml(advice.settings)))))
        made = make_plan(pasted, advice.inventory or inventory)
        assert made.verdict in ("fits", "tight")
        shares = [step.used_gib / group.memory_gib for group in made.groups for step in group.steps]
        assert max(shares) == advice.used
    return [dict(advice.settings) for advice in found]


def test_seventy_billion_parameters_on_sixteen_devices_fit_with_what_is_advised(tmp_path, capsys):
    path = tmp_path / "run.yaml"
    path.write_text(LARGE)
    assert main(["plan", str(path), "--inventory", "2x8xH100-80G"]) == 2
    out = capsys.readouterr().out
    assert out.startswith("Does not fit: colocated on 2 nodes x 8 H100-80G\n- update does not fit on nodes 0-1: 0-15: ")
    assert out.index("It fits with this") < out.index("\nRoles\n")  # verdict, advice, then the tables
    assert out.count("assumed to be that of Llama-2-70B") == 1
    head = r"It fits with this \(at most \d+% of a device, [\d,]+ GiB of host memory on a node\):\n"
    block = re.search(head + "(.*?)as arguments", out, re.DOTALL)
    path.write_text(yaml.safe_dump(merged(yaml.safe_load(LARGE), yaml.safe_load(block[1]))))
    assert main(["plan", str(path), "--inventory", "2x8xH100-80G"]) == 0
    again = capsys.readouterr().out
    assert "the plan for all 16 devices" not in again  # the placement is part of the advice
    deepspeed = load(path).train.deepspeed
    assert (load(path).train.backend, deepspeed.zero_stage, deepspeed.adam_offload) == ("deepspeed", 3, True)
    path.write_text(LARGE)
    arguments = re.search(r"as arguments: (.*)", out)[1].replace("'", "")
    words = re.findall(r"\S+=(?:\{.*?\}|\S+)", arguments)
    assert main(["plan", str(path), "--inventory", "2x8xH100-80G", *words]) == 0


def test_ppo_of_72_billion_parameters_on_sixteen_devices_fits_with_what_is_advised():
    """Engines of several devices, ZeRO 3 with the optimizer on the host and recomputation, all of them together."""
    [settings] = check(PPO, "2x8xH100-80G")
    assert settings["rollout.tensor_parallel_size"] in (4, 8)
    assert settings["train.deepspeed.zero_stage"] == 3
    assert settings["train.deepspeed.adam_offload"] is True
    assert settings["train.gradient_checkpointing"] is True
    assert settings["rollout.memory_share"] < 0.9
    assert set(settings) - {"train.backend"} == {  # nothing that is not needed
        "rollout.tensor_parallel_size",
        "train.deepspeed.zero_stage",
        "train.deepspeed.adam_offload",
        "train.gradient_checkpointing",
        "rollout.memory_share",
    }


@pytest.mark.parametrize(("text", "inventory"), [(PPO, "2x8xH100-80G"), (PPO, "1x8x24G"), (SFT, "1x1x4G")])
def test_few_plans_are_made_whether_or_not_settings_are_found(text, inventory):
    """All combinations of the settings would be thousands."""
    trials = _Trials(loads(text), inventory)
    _enough(loads(text), trials, trials.plan({}))
    assert len(trials._plans) < 300


def test_the_actor_alone_gets_all_devices_where_roles_have_their_own():
    """8B on 2 of 8 devices: sharded over all of them it fits, and the engines stay where they are."""
    text = (
        "actor: {model: org/Llama-3-8B}\nrollout: {engine: vllm, memory_share: 0.4, num_engines: 6}\n"
        "train: {backend: deepspeed, gradient_checkpointing: true, deepspeed: {zero_stage: 3}}\n"
        "cluster: {component_placement: {actor: 0-1, rollout: 2-7}}\n"
    )
    assert {"cluster.component_placement": {"actor": "all", "rollout": "2-7"}} in check(text, "1x8x48G")


def _random_config(rng: random.Random) -> tuple[str, str]:
    width, layers, heads, mlp, vocabulary = rng.choice(
        [
            (512, 4, 8, 1408, 32000),
            (2048, 24, 16, 5632, 128256),
            (4096, 32, 32, 14336, 128256),
            (8192, 80, 64, 29568, 152064),
        ]
    )
    shape = (
        f"{{hidden_size: {width}, num_hidden_layers: {layers}, num_attention_heads: {heads}, num_key_value_heads: 8,"
        f" intermediate_size: {mlp}, vocab_size: {vocabulary}}}"
    )
    zero = f"deepspeed: {{zero_stage: {rng.randint(0, 3)}, adam_offload: {rng.choice(['true', 'false'])}}}"
    train = [rng.choice(["backend: fsdp", f"backend: deepspeed, {zero}"])]
    train += rng.sample(
        ["gradient_checkpointing: true", "micro_batch_size: 8", "fp32_master: false"], rng.randint(0, 2)
    )
    size = rng.choice([1, 1, 2])
    num_nodes, num_devices = rng.choice([(1, 4), (1, 8), (2, 8)])
    half = num_nodes * num_devices // 2
    placement = rng.choice(["actor: all", f"actor: 0-{size}", f"actor: 0-{half - 1}, rollout: {half}-{2 * half - 1}"])
    host = rng.choice(["", "", f"+{rng.choice([64, 256, 1024])}G"])
    return (
        f"actor: {{model: org/one, shape: {shape}}}\n"
        f"algorithm: {{estimator: {rng.choice(['gae', 'group_norm'])}, kl: {{coef: {rng.choice([0, 0.01])}}}}}\n"
        f"data: {{max_length: {rng.choice([1024, 8192])}}}\ntrain: {{{', '.join(train)}}}\n"
        f"rollout: {{engine: vllm, tensor_parallel_size: {size}, memory_share: {rng.choice([0.05, 0.3, 0.6, 0.9])}}}\n"
        f"cluster: {{component_placement: {{{placement}}}}}\n",
        f"{num_nodes}x{num_devices}x{rng.choice([12, 24, 48, 80, 140])}G{host}",
    )


def _combinations(config) -> list[list[str]]:
    """Every combination of the settings in question, as overrides; shares in coarse steps."""
    zero = config.train.deepspeed
    stages = [2, 3] if config.train.backend == "fsdp" else {zero.zero_stage, 2, 3}
    sharded = [
        ["train.backend=deepspeed", f"train.deepspeed.zero_stage={stage}", f"train.deepspeed.adam_offload={offload}"]
        for stage in stages
        for offload in ("true", "false")
    ]
    own = [[]] if config.train.backend == "fsdp" else []
    return [
        [f"rollout.tensor_parallel_size={size}", f"rollout.memory_share={share}", *sharding, *recomputed, *placed]
        for size, share, sharding, recomputed, placed in itertools.product(
            (1, 2, 4, 8),
            (0.1, 0.25, 0.4, 0.6, 0.9),
            own + sharded,
            ([], ["train.gradient_checkpointing=true"]),
            ([], ["cluster.component_placement={actor: all}"]),
        )
    ]


def _is_advice_complete(seed: int, num_tried: int) -> bool | None:
    """Whether something is advised if any of some random combinations fits; None if the config itself fits."""
    rng = random.Random(seed)
    text, inventory = _random_config(rng)
    try:
        if make_plan(loads(text), inventory).verdict != "does_not_fit":
            return None
    except UserError:
        return None
    if any(advice.inventory is None for advice in advise(loads(text), inventory)):
        check(text, inventory)
        return True

    def fits(overrides: list[str]) -> bool:
        try:
            return make_plan(loads(text, overrides), inventory).verdict in ("fits", "tight")
        except UserError:
            return False

    tried = _combinations(loads(text))
    return not any(map(fits, rng.sample(tried, min(num_tried, len(tried)))))


def test_advice_is_found_wherever_a_random_combination_of_settings_fits():
    assert False not in [_is_advice_complete(seed, 8) for seed in range(4)]


@pytest.mark.long
def test_advice_is_found_wherever_any_combination_of_settings_fits():
    outcomes = [_is_advice_complete(seed, 10_000) for seed in range(4, 20)]
    assert False not in outcomes
    assert outcomes.count(True) >= 5


def test_an_engine_that_cannot_be_cut_is_replaced_by_vllm():
    """The transformers engine, which is the default, holds 128 GiB of weights on each device, whatever is set."""
    [settings] = check("actor: {model: meta-llama/Llama-2-70b-hf}\n", "2x8xH100-80G")
    assert settings["rollout.engine"] == "vllm"
    assert settings["rollout.tensor_parallel_size"] in (2, 4, 8)
    assert settings["train.deepspeed.adam_offload"] is True


def test_a_size_that_only_the_transformers_engine_takes_is_not_replaced():
    text = "actor: {model: meta-llama/Llama-2-70b-hf}\nrollout: {num_slots: 4}\n"
    assert check(text, "2x8xH100-80G") == []


def test_the_advice_of_the_issue_is_found_too():
    """With DeepSpeed, and sizes that OpenRLHF's commands set: checkpointing, one sequence, offload."""
    text = "actor: {model: meta-llama/Llama-2-70b-hf}\n" + (
        "rollout: {engine: vllm, tensor_parallel_size: 8, micro_batch_size: 16}\n"
        "train: {backend: deepspeed, micro_batch_size: 8, deepspeed: {zero_stage: 2}}\n"
    )
    [settings] = check(text, "2x8xH100-80G")
    assert settings["train.deepspeed.zero_stage"] == 3
    assert settings["train.deepspeed.adam_offload"] is True
    assert settings["train.micro_batch_size"] == "auto"


@pytest.mark.parametrize(
    ("more", "inventory", "settings"),
    [
        # 64 sequences of 8,192 tokens: fewer of them, or their activations computed again.
        (
            "data: {max_length: 8192}\ntrain: {micro_batch_size: 16, gradient_checkpointing: true}\n"
            "cluster: {component_placement: {actor: 0-7}}",
            "1x8xH200",
            {"train.micro_batch_size": "auto"},
        ),
        (
            "cluster: {component_placement: {actor: 0}}\ntrain: {gradient_checkpointing: true}",
            "1x8xA100-80G",
            {"cluster.component_placement": {"actor": "all"}},
        ),
    ],
)
def test_single_settings_are_named_one_by_one(more, inventory, settings):
    assert settings in check(SFT + more, inventory)


def test_an_engine_whose_share_is_too_small_gets_a_larger_one():
    text = (
        "actor: {model: org/Llama-3-8B}\nrollout: {engine: vllm, memory_share: 0.01}\n"
        "cluster: {component_placement: {actor: 0, rollout: 1}}\n"
    )
    assert check(text, "1x2xH200") == [{"rollout.memory_share": 0.15}]  # 0.13 of 139 GiB are its weights and buffers


def test_an_engine_that_is_too_large_is_cut():
    text = (
        "actor: {model: meta-llama/Llama-2-70b-hf}\nrollout: {engine: vllm}\n"
        "train: {backend: deepspeed, gradient_checkpointing: true, deepspeed: {zero_stage: 3, adam_offload: true}}\n"
        "cluster: {component_placement: {actor: 0-7, rollout: 8-15}}\n"
    )
    found = check(text, "2x8xH100-80G")
    assert {"rollout.tensor_parallel_size": 2} in found or {"rollout.tensor_parallel_size": 4} in found


def test_more_devices_are_named_where_no_setting_is_enough():
    [advice] = advise(loads(SFT, ["actor.model=meta-llama/Llama-2-70b-hf"]), "1x2x24G")
    nodes = int(advice.inventory.split("x")[0])
    assert advice.inventory == f"{nodes}x2x24G"
    assert nodes > 1
    check(SFT.replace("org/Llama-3-8B", "meta-llama/Llama-2-70b-hf"), "1x2x24G")


def test_advice_says_that_nothing_helps(tmp_path, capsys):
    (tmp_path / "run.yaml").write_text(SFT.replace("org/Llama-3-8B", "meta-llama/Llama-2-70b-hf"))
    assert main(["plan", str(tmp_path / "run.yaml"), "--inventory", "1x1x4G"]) == 2
    out = " ".join(capsys.readouterr().out.split())
    assert "No setting that was tried makes it fit, nor do more devices of this sort: use a smaller model" in out


def test_the_host_memory_of_an_inventory_bounds_what_is_offloaded(tmp_path, capsys):
    """14 bytes of each of 8.03 billion weights: fp32 master, two moments, bf16 gradients; and 2 GiB a process."""
    path = tmp_path / "run.yaml"
    path.write_text(
        SFT
        + "train: {backend: deepspeed, gradient_checkpointing: true, deepspeed: {zero_stage: 3, adam_offload: true}}\n"
        "cluster: {component_placement: {actor: all}}\n"
    )
    assert main(["plan", str(path), "--inventory", "1x8xH100-80G"]) == 0
    assert main(["plan", str(path), "--inventory", "1x8xH100-80G+256G"]) == 0
    assert "105 GiB 121 GiB of 256" in " ".join(capsys.readouterr().out.split())
    assert main(["plan", str(path), "--inventory", "1x8xH100-80G+64G"]) == 2
    out = " ".join(capsys.readouterr().out.split())
    assert "Does not fit: colocated on 1 node x 8 H100-80G with 64 GiB of host memory" in out
    assert (
        "the host memory of node 0 does not fit: 121 of 64 GiB on a node, most of it for actor optimizer moments" in out
    )
    settings = [advice.settings for advice in advise(load(path), "1x8xH100-80G+64G")]
    assert {"train.deepspeed.adam_offload": False} in settings  # the devices have room for it


def test_an_update_that_is_too_large_because_of_unsharded_gradients_says_so(tmp_path, capsys):
    """8.03 billion gradients of 4 bytes are 29.9 GiB on every rank."""
    path = tmp_path / "run.yaml"
    path.write_text(
        SFT + "data: {max_length: 8192}\ntrain: {batch_size: 256}\ncluster: {component_placement: {actor: all}}\n"
    )
    assert main(["plan", str(path), "--inventory", "1x8x40G"]) == 2
    out = " ".join(capsys.readouterr().out.split())
    assert "29.9 GiB of it are unsharded fp32 gradients" in out
    assert "Without them: train.backend=deepspeed with train.deepspeed.zero_stage=3 (or 2)" in out
    assert any(advice.settings.get("train.backend") == "deepspeed" for advice in advise(load(path), "1x8x40G"))


def test_inventories_that_take_too_long_to_search_are_not(tmp_path, capsys):
    (tmp_path / "run.yaml").write_text(SFT + "cluster: {component_placement: {actor: 0-7}}\n")
    assert main(["plan", str(tmp_path / "run.yaml"), "--inventory", "129x8x4G"]) == 2
    out = " ".join(capsys.readouterr().out.split())
    assert "What would make it fit is searched for up to 1,024 devices: plan fewer nodes to see it" in out


def test_a_step_that_is_one_micro_batch_needs_no_whole_gradients():
    """8B over 8 x 40 GiB with FSDP: 30 GiB of whole gradients do not fit beside the shards, 3.7 do."""
    text = SFT + (
        "data: {max_length: 512}\ntrain: {batch_size: 64, micro_batch_size: 1, gradient_checkpointing: true}\n"
        "cluster: {component_placement: {actor: all}}\n"
    )
    assert make_plan(loads(text), "1x8x40G").verdict == "does_not_fit"
    assert {"train.micro_batch_size": "auto"} in check(text, "1x8x40G")


def test_batch_sizes_that_divide_go_on_dividing():
    """Six ranks do not divide 128 samples: that placement is not advised."""
    text = SFT + "cluster: {component_placement: {actor: 0}}\ntrain: {batch_size: 128}\n"
    for settings in check(text, "1x6x40G"):
        assert "cluster.component_placement" not in settings


# --- without a placement, without an inventory ------------------------------------------------------------------------


def test_a_plan_without_a_placement_is_for_all_devices_and_says_so(tmp_path, capsys):
    (tmp_path / "run.yaml").write_text("actor: {model: org/Llama-3-8B}\nrollout: {engine: vllm, memory_share: 0.5}\n")
    assert main(["plan", str(tmp_path / "run.yaml"), "--inventory", "2x8xH100-80G"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "nodes 0-1: 0-15" in out
    assert "none is set, so this is the plan for all 16 devices; a run without one uses one device" in out
    assert "cluster: {component_placement: {actor: all}}" in out
    assert main(["explain", str(tmp_path / "run.yaml"), "--inventory", "2x8xH100-80G"]) == 0
    assert "16 data-parallel ranks" in capsys.readouterr().out
    placed = ["cluster.component_placement={actor: 0-3}", "--inventory", "1x8xH100-80G"]
    assert main(["plan", str(tmp_path / "run.yaml"), *placed]) == 0
    assert "none is set" not in capsys.readouterr().out


def test_without_devices_the_size_of_micro_batches_is_not_known(tmp_path, capsys):
    path = str(tmp_path / "run.yaml")
    (tmp_path / "run.yaml").write_text("actor: {model: org/Llama-3-8B}\n")
    assert main(["plan", path]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "micro-batches: their size is not known without the devices: give --inventory, such as 1x8xH100-80G" in out
    assert main(["explain", path]) == 0
    assert "as many tokens as fit on the device, chosen when the run starts" in capsys.readouterr().out
    (tmp_path / "run.yaml").write_text("actor: {model: some/thing}\n")
    assert main(["plan", path, "--inventory", "1x1xH200"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "not known without the shape of every model: name one that is at hand, or set actor.shape" in out
    assert main(["plan", path, "train.micro_batch_size=4", "rollout.micro_batch_size=4"]) == 0
    assert "micro-batches:" not in capsys.readouterr().out


@pytest.mark.long
def test_where_nothing_fits_no_budget_is_called_the_largest_that_does(tmp_path, capsys):
    (tmp_path / "run.yaml").write_text(LARGE)
    assert main(["plan", str(tmp_path / "run.yaml"), "--inventory", "1x1x24G"]) == 2
    out = " ".join(capsys.readouterr().out.split())
    assert "the largest that fits" not in out
    assert "(the plan does not fit, and larger ones would make it worse)" in out


def test_engines_that_do_not_divide_the_devices_name_the_keys_to_set(tmp_path, capsys):
    (tmp_path / "run.yaml").write_text(LARGE)
    assert main(["plan", str(tmp_path / "run.yaml"), "rollout.tensor_parallel_size=8"]) == 2
    assert capsys.readouterr().err == (
        "hotseat: rollout: its 1 device cannot be cut into engines of tensor parallel size 8: set"
        " rollout.tensor_parallel_size to 1, or cluster.component_placement.actor to a number of devices that 8"
        " divides\n"
    )
