"""Every file in examples/plans gives the plan, or the refusal, that was worked out by hand.

Residency is written as in the printed table: CAPITALS are at work, small letters are kept on the device, (round) is put
offloaded to the host, [square] is dropped; W weights, G gradients, O optimizer, K kv cache, S simulator.
"""

from pathlib import Path

import pytest

from hotseat.config import load
from hotseat.config.batches import batch_algebra
from hotseat.errors import PlacementError
from hotseat.placement import Part, Plan
from hotseat.planning.config_plan import make_plan, num_data_parallel

PLANS = Path(__file__).parents[2] / "examples" / "plans"
LETTERS = {Part.WEIGHTS: "w", Part.GRADIENTS: "g", Part.OPTIMIZER: "o", Part.KV_CACHE: "k", Part.SIMULATOR: "s"}


def plan_of(name: str, inventory: str | None = None) -> Plan:
    return make_plan(load(PLANS / f"{name}.yaml"), inventory)


def table(plan: Plan, device: int) -> dict[str, dict[str, str]]:
    """Step to role to residency, of one device."""
    group = plan.group_of(device)
    rows = {}
    for step in group.steps:
        roles: dict[str, str] = {}
        for role in group.roles:
            states = {"needed": "", "kept": "", "offloaded": "", "dropped": ""}
            for holding in step.holdings:
                if holding.role == role:
                    states[holding.state] += LETTERS[holding.part]
            text = states["needed"].upper() + states["kept"]
            text += f"({states['offloaded']})" if states["offloaded"] else ""
            text += f"[{states['dropped']}]" if states["dropped"] else ""
            roles[role] = text
        rows[step.step] = roles
    return rows


def devices(plan: Plan) -> dict[str, list[int]]:
    return {role.name: list(role.devices) for role in plan.roles}


def routes(plan: Plan) -> dict[int, tuple[str, tuple[int, ...]]]:
    return {route.rank: (route.kind, route.sources) for route in plan.routes}


EIGHT = list(range(8))


def test_the_hybrid_engine_on_eight_gpus():
    plan = plan_of("hybrid_engine_8", "1x8xA100-80G")
    assert (plan.label, plan.verdict) == ("colocated", "fits")
    assert devices(plan) == {"rollout": EIGHT, "reward": EIGHT, "reference": EIGHT, "actor": EIGHT}
    # Actor and rollout always leave between turns, because the user says so. Reference and reward model, sharded over
    # eight, take 2 GiB each and stay. The engine's weights come back from the actor, so no copy of them is kept.
    assert table(plan, 5) == {
        "rollout": {"rollout": "WK", "reward": "w", "reference": "w", "actor": "(wo)[g]"},
        "prepare.0": {"rollout": "[wk]", "reward": "W", "reference": "w", "actor": "(wo)[g]"},
        "prepare.1": {"rollout": "[wk]", "reward": "w", "reference": "W", "actor": "(wo)[g]"},
        "prepare.2": {"rollout": "[wk]", "reward": "w", "reference": "w", "actor": "W(o)[g]"},
        "update": {"rollout": "[wk]", "reward": "w", "reference": "w", "actor": "WGO"},
        "sync": {"rollout": "W[k]", "reward": "w", "reference": "w", "actor": "W(o)[g]"},
    }
    assert routes(plan) == {rank: ("same_device", (rank,)) for rank in range(8)}
    assert (
        batch_algebra(
            load(PLANS / "hybrid_engine_8.yaml"), num_data_parallel(load(PLANS / "hybrid_engine_8.yaml"), plan)
        ).num_steps
        == 19
    )


def test_training_on_six_gpus_beside_two_engines():
    plan = plan_of("async_6_plus_2", "1x8xA100-80G")
    assert plan.label == "hybrid"  # actor and reference share, rollout does not
    assert devices(plan) == {"rollout": [6, 7], "reference": list(range(6)), "actor": list(range(6))}
    # One batch ahead: while the actor learns, the engines are at work on the next batch.
    assert table(plan, 6) == {
        "rollout": {"rollout": "WK"},
        "prepare.0": {"rollout": "WK"},
        "prepare.1": {"rollout": "WK"},
        "update": {"rollout": "WK"},
        "sync": {"rollout": "Wk"},
    }
    assert table(plan, 0)["update"] == {"reference": "w", "actor": "WGO"}
    assert routes(plan) == {0: ("same_node", (0,)), 1: ("same_node", (0,))}  # the first rank sends to other devices
    config = load(PLANS / "async_6_plus_2.yaml")
    algebra = batch_algebra(config, num_data_parallel(config, plan))
    assert (algebra.num_ranks, algebra.train_micro_batches, algebra.optimizer_steps_per_step) == (6, 2, 8)


def test_overlap_on_shared_devices_is_refused():
    config = load(
        PLANS / "async_6_plus_2.yaml", ["cluster.component_placement.rollout='@actor'", "rollout.num_engines=6"]
    )
    with pytest.raises(PlacementError, match="overlap"):
        make_plan(config, "1x8xA100-80G")


def test_engines_of_two_gpus_take_turns_with_the_actor():
    plan = plan_of("agent_hybrid_tp2", "1x8xA100-80G")
    assert (plan.label, plan.verdict) == ("colocated", "fits")
    assert [process.devices for process in plan.role("rollout").processes] == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert routes(plan) == {rank: ("same_device", (2 * rank, 2 * rank + 1)) for rank in range(4)}


def test_ppo_with_four_models_on_eight_gpus():
    plan = plan_of("ppo_hybrid_8", "1x8xA100-80G")
    assert (plan.label, plan.verdict) == ("colocated", "fits")
    assert [step.name for step in plan.steps] == [
        "rollout",
        *(f"prepare.{turn}" for turn in range(4)),  # reward, reference, critic, actor
        "update.0",  # critic
        "update.1",  # actor
        "sync",
    ]
    assert table(plan, 0)["update.0"] == {
        "rollout": "[wk]",
        "reward": "w",
        "reference": "w",
        "critic": "WGO",
        "actor": "(wo)[g]",
    }


@pytest.mark.parametrize(
    ("name", "needed", "too_few", "enough", "per_role"),
    [
        ("multi_node_40", 40, "4x8", "5x8", 8),
        ("multi_node_80", 80, "8x8", "10x8", 16),
        ("llama70b_separate_80", 80, "8x8", "10x8", 16),
    ],
)
def test_roles_without_colocation_need_what_they_add_up_to(name, needed, too_few, enough, per_role):
    nodes = int(too_few.split("x")[0])
    with pytest.raises(PlacementError) as caught:
        plan_of(name, too_few)
    assert f"need {needed} devices and the inventory has {nodes * 8}" in str(caught.value)
    assert f"{enough.split('x')[0]} nodes of 8 devices would do" in str(caught.value)
    plan = plan_of(name, enough)
    assert plan.label == "disaggregated"
    assert {len(found) for found in devices(plan).values()} == {per_role}
    assert sorted(device for found in devices(plan).values() for device in found) == list(range(needed))
    assert {kind for kind, _ in routes(plan).values()} == {"other_node"}
    # Without an inventory the planner takes as many nodes of eight as it needs: the same.
    assert devices(plan_of(name)) == devices(plan)


def test_seventy_billion_parameters_on_gpus_of_their_own_do_not_fit_eight_a100s_each():
    # 69e9 parameters x 16 bytes over 8 devices are 129 GiB each: weights, gradients, master weights and two moments.
    plan = plan_of("multi_node_40", "5x8xA100-80G")
    assert plan.verdict == "does_not_fit"


def test_all_models_share_two_nodes_and_no_engine_crosses_them():
    plan = plan_of("hybrid_16", "2x8")
    assert plan.label == "colocated"
    assert [process.devices for process in plan.role("rollout").processes] == [
        (0, 1, 2, 3),
        (4, 5, 6, 7),
        (8, 9, 10, 11),
        (12, 13, 14, 15),
    ]
    assert [process.node for process in plan.role("rollout").processes] == [0, 0, 1, 1]


def test_seventy_billion_parameters_in_turn_use_the_actors_sixteen_devices():
    plan = plan_of("llama70b_hybrid_16", "2x8xA100-80G")
    assert set(map(tuple, devices(plan).values())) == {tuple(range(16))}
    assert plan.verdict == "does_not_fit"  # without gradient checkpointing
    update = next(step for step in plan.group_of(0).steps if step.step == "update.1")
    assert update.verdict == "does_not_fit"
    config = load(PLANS / "llama70b_hybrid_16.yaml")
    eased = ["train.gradient_checkpointing=true", "train.micro_batch_size=1", "train.deepspeed.adam_offload=true"]
    assert make_plan(load(PLANS / "llama70b_hybrid_16.yaml", eased), "2x8xA100-80G").verdict != "does_not_fit"
    assert config.train.deepspeed.zero_stage == 3


def test_simulators_and_engines_make_room_for_training():
    plan = plan_of("embodied_hybrid_8")
    assert plan.label == "hybrid"
    assert devices(plan) == {"rollout": [4, 5, 6, 7], "env": [0, 1, 2, 3], "actor": EIGHT}
    assert table(plan, 0) == {
        "rollout": {"env": "S", "actor": "(wo)[g]"},
        "prepare": {"env": "(s)", "actor": "W(o)[g]"},
        "update": {"env": "(s)", "actor": "WGO"},
        "sync": {"env": "(s)", "actor": "W(o)[g]"},
    }
    assert table(plan, 4) == {
        "rollout": {"rollout": "WK", "actor": "(wo)[g]"},
        "prepare": {"rollout": "[wk]", "actor": "W(o)[g]"},
        "update": {"rollout": "[wk]", "actor": "WGO"},
        "sync": {"rollout": "W[k]", "actor": "W(o)[g]"},
    }
    assert routes(plan) == {rank: ("same_device", (rank + 4,)) for rank in range(4)}
    handed = [(h.from_step, h.to_step, h.from_roles, h.to_roles) for h in plan.group_of(0).hand_overs]
    assert handed == [
        ("rollout", "prepare", ("env",), ("actor",)),
        ("prepare", "update", ("actor",), ("actor",)),
        ("update", "sync", ("actor",), ("actor",)),
        ("sync", "rollout", ("actor",), ("env",)),
    ]


def test_log_probs_have_a_turn_of_their_own_where_inference_is_placed():
    plan = plan_of("embodied_inference_4", "1x4")
    assert plan.label == "hybrid"
    assert [(step.name, step.roles) for step in plan.steps] == [
        ("rollout", ("env", "rollout")),
        ("prepare", ("inference",)),
        ("update", ("actor",)),
        ("sync", ("actor", "rollout", "inference")),
    ]
    assert devices(plan) == {"rollout": [2, 3], "env": [0, 1], "inference": [0, 1, 2, 3], "actor": [0, 1, 2, 3]}


def test_pools_have_devices_and_variables_of_their_own():
    plan = plan_of("pools", "2x8xA100-80G,2x4x4090,1xcpu")
    assert devices(plan) == {"rollout": list(range(16, 24)), "env": [], "actor": list(range(16))}
    assert len(plan.role("env").processes) == 16
    assert {process.node for process in plan.role("env").processes} == {4}
    assert plan.inventory.nodes[4].env == (("MUJOCO_GL", "egl"),)
    assert {kind for kind, _ in routes(plan).values()} == {"other_node"}


def test_every_example_is_tested_here():
    tested = Path(__file__).read_text()
    for path in PLANS.glob("*.yaml"):
        assert f'"{path.stem}"' in tested, path.name
