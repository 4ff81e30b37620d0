from placement_cases import refused

from hotseat.placement import Part
from hotseat.placement.flow import (
    Flow,
    Overlap,
    Phase,
    RoleWork,
    check_flow,
    check_runs,
    default_flow,
    make_steps,
    parse_flow,
)

W, G, O, K, S = Part.WEIGHTS, Part.GRADIENTS, Part.OPTIMIZER, Part.KV_CACHE, Part.SIMULATOR  # noqa: E741
PPO = ("actor", "critic", "reference", "reward", "rollout")


def test_the_usual_rl_flow():
    assert default_flow("rl", PPO) == Flow(
        (
            Phase("rollout", (RoleWork("rollout", (W, K)),)),
            Phase(
                "prepare",
                (
                    RoleWork("reward", (W,)),
                    RoleWork("reference", (W,)),
                    RoleWork("critic", (W,)),
                    RoleWork("actor", (W,)),
                ),
                "in_turn",
            ),
            Phase("update", (RoleWork("critic", (W, G, O)), RoleWork("actor", (W, G, O))), "in_turn"),
            Phase("sync", (RoleWork("actor", (W,)), RoleWork("rollout", (W,))), pushes=("rollout",)),
        )
    )


def test_a_separate_inference_role_scores_instead_of_the_actor_and_gets_the_weights():
    flow = default_flow("rl", ("actor", "rollout", "inference", "env"))
    assert [phase.roles for phase in flow.phases] == [
        ("env", "rollout"),
        ("inference",),
        ("actor",),
        ("actor", "rollout", "inference"),
    ]
    assert flow.phases[3].pushes == ("rollout", "inference")


def test_the_usual_embodied_flow_has_simulators_beside_the_engines():
    flow = default_flow("rl", ("actor", "rollout", "env"))
    assert [(phase.name, phase.roles) for phase in flow.phases] == [
        ("rollout", ("env", "rollout")),
        ("prepare", ("actor",)),
        ("update", ("actor",)),
        ("sync", ("actor", "rollout")),
    ]
    flow = default_flow("rl", ("actor", "critic", "rollout", "env", "inference"))
    assert [phase.roles for phase in flow.phases][1:3] == [("critic", "inference"), ("critic", "actor")]


def test_supervised_flows():
    assert default_flow("sft", ("actor",)).phases == (Phase("update", (RoleWork("actor", (W, G, O)),)),)
    assert default_flow("rm", ("reward",)).phases == (Phase("update", (RoleWork("reward", (W, G, O)),)),)
    assert default_flow("rm", ("actor",)).phases == (Phase("update", (RoleWork("actor", (W, G, O)),)),)
    dpo = default_flow("dpo", ("actor", "reference"))
    update = Phase("update", (RoleWork("actor", (W, G, O)),))
    assert dpo.phases == (Phase("prepare", (RoleWork("reference", (W,)),)), update)
    assert default_flow("dpo", ("actor",)).phases == (update,)


def test_the_written_form_of_the_usual_flow():
    written = [
        {"name": "rollout", "run": ["rollout"]},
        {"name": "prepare", "run": ["reward", "reference", "critic", "actor"], "order": "in_turn"},
        {"name": "update", "train": ["critic", "actor"], "order": "in_turn"},
        {"name": "sync", "push": ["rollout"]},
    ]
    assert parse_flow(written, PPO) == default_flow("rl", PPO)
    assert parse_flow(written, PPO, Overlap(2, 1)).overlap == Overlap(2, 1)


def test_parts_can_be_written_out():
    flow = parse_flow(
        [{"name": "a", "run": {"rollout": ["kv_cache", "weights"], "env": ["simulator"]}}], ("rollout", "env")
    )
    assert flow.phases[0].works == (RoleWork("rollout", (W, K)), RoleWork("env", (S,)))
    pushed = parse_flow([{"name": "s", "run": {"actor": ["weights"]}, "push": ["rollout"]}], ("actor", "rollout"))
    assert pushed.phases[0].roles == ("actor", "rollout")


def test_wrong_flows_are_refused_with_the_fix():
    def written(**phase):
        return lambda: parse_flow([{"name": "p", **phase}], ("actor", "rollout", "env"))

    with refused("has no phases"):
        parse_flow([], PPO)
    with refused("no role works in it"):
        written()()
    with refused("unknown role 'acto'"):
        written(run=["acto"])()
    with refused("parts of actor are []", "[weights, kv_cache]"):
        written(run={"actor": []})()
    with refused("unknown part 'weight'", "did you mean 'weights'?"):
        written(run={"actor": ["weight"]})()
    with refused("rollout has no optimizer", "it can have weights, kv_cache"):
        written(run={"rollout": ["optimizer"]})()
    with refused("env has no weights", "it can have simulator"):
        written(train=["env"])()
    with refused("critic works in it but is not placed", "placed are actor, rollout, env"):
        written(run=["critic"])()
    with refused("actor is named twice"):
        written(run=["actor"], train=["actor"])()
    with refused("actor cannot get the actor's weights"):
        written(push=["actor"])()
    with refused("env cannot get the actor's weights"):
        written(run=["env"], push=["env"])()
    with refused("critic cannot get the actor's weights", "rollout, inference or reference"):
        parse_flow([{"name": "s", "push": ["critic"]}], PPO)
    with refused("a push needs both sides at once"):
        written(push=["rollout"], order="in_turn")()
    with refused("a push needs the weights of rollout"):
        written(run={"rollout": ["kv_cache"]}, push=["rollout"])()
    with refused("two phases are named 'a'"):
        parse_flow([{"name": "a", "run": ["actor"]}, {"name": "a", "run": ["actor"]}], PPO)
    with refused("phase 'a.0'", "letters, digits"):
        parse_flow([{"name": "a.0", "run": ["actor"]}], PPO)
    with refused("no role works in it"):
        check_flow(Flow((Phase("p", ()),)), PPO)


def test_roles_that_share_devices_take_turns():
    flow = default_flow("rl", PPO)
    everywhere = dict.fromkeys(PPO, (0, 1))
    assert [(step.name, step.roles) for step in make_steps(flow, everywhere)] == [
        ("rollout", ("rollout",)),
        ("prepare.0", ("reward",)),
        ("prepare.1", ("reference",)),
        ("prepare.2", ("critic",)),
        ("prepare.3", ("actor",)),
        ("update.0", ("critic",)),
        ("update.1", ("actor",)),
        ("sync", ("actor", "rollout")),
    ]


def test_roles_on_separate_devices_go_at_the_same_time():
    flow = default_flow("rl", PPO)
    apart = {role: (index,) for index, role in enumerate(PPO)}
    assert [step.name for step in make_steps(flow, apart)] == ["rollout", "prepare", "update", "sync"]


def test_turns_come_from_pairs_of_roles_that_share():
    # reward with critic, reference with actor: two turns, each with two roles at once.
    devices = {"reward": (0, 1), "critic": (0, 1), "reference": (2, 3), "actor": (2, 3), "rollout": (4,)}
    steps = make_steps(default_flow("rl", PPO), devices)
    assert [(step.name, step.roles) for step in steps] == [
        ("rollout", ("rollout",)),
        ("prepare.0", ("reward", "reference")),
        ("prepare.1", ("critic", "actor")),
        ("update", ("critic", "actor")),
        ("sync", ("actor", "rollout")),
    ]


def test_a_chain_of_sharing_makes_a_chain_of_turns():
    # b shares with a, c shares with b but not with a: c waits for b.
    devices = {"reward": (0,), "reference": (0, 1), "critic": (1,), "actor": (2,), "rollout": (3,)}
    steps = make_steps(default_flow("rl", PPO), devices)
    assert [(step.name, step.roles) for step in steps][1:4] == [
        ("prepare.0", ("reward", "actor")),
        ("prepare.1", ("reference",)),
        ("prepare.2", ("critic",)),
    ]


def test_overlap_lets_the_rollout_go_on_beside_training_but_not_beside_the_push():
    flow = default_flow("rl", ("actor", "rollout"), Overlap(queue=1))
    steps = make_steps(flow, {"actor": (0,), "rollout": (1,)})
    beside = {step.name: tuple(work.role for work in step.beside) for step in steps}
    assert beside == {"rollout": (), "prepare": ("rollout",), "update": ("rollout",), "sync": ()}


# --- flows that a run can follow --------------------------------------------------------------------------------------

ROLLOUT, PREPARE = {"name": "play", "run": ["rollout"]}, {"name": "score", "run": ["reference", "critic", "actor"]}
REWARD, UPDATE = {"name": "grade", "run": ["reward"]}, {"name": "learn", "train": ["critic", "actor"]}
PUSH = {"name": "send", "push": ["rollout"]}


def follow(*phases) -> Flow:
    flow = parse_flow(phases, PPO)
    check_runs(flow, "rl", PPO)
    return flow


def test_a_flow_names_divides_and_arranges_the_usual_work():
    flow = follow(
        ROLLOUT,
        REWARD,
        {"name": "base", "run": ["reference"]},
        {"name": "rest", "run": ["critic", "actor"], "order": "in_turn"},
        {"name": "first", "train": ["critic"]},
        {"name": "then", "train": ["actor"]},
        PUSH,
    )
    kinds = ["rollout", "prepare", "prepare", "prepare", "update", "update", "sync"]
    assert [phase.kind for phase in flow.phases] == kinds
    assert {step.name: step.kind for step in make_steps(flow, dict.fromkeys(PPO, (0,)))}["rest.1"] == "prepare"


def test_a_flow_without_work_that_is_usual_is_refused():
    with refused("flow: critic has no work under run, which it has in 'prepare' usually: add it"):
        follow(ROLLOUT, REWARD, {"name": "score", "run": ["reference", "actor"]}, UPDATE, PUSH)


def test_a_role_without_any_work_is_refused():
    with refused("flow: reference has no work under run, which it has in 'prepare' usually: add it"):
        follow(ROLLOUT, REWARD, {"name": "score", "run": ["critic", "actor"]}, UPDATE, PUSH)
    with refused("flow: rollout has no work under run, which it has in 'rollout' usually: add it"):
        follow(REWARD, PREPARE, UPDATE)


def test_work_that_is_not_usual_is_refused():
    with refused("flow: phase 'play': reference has no work with the roles under run, which can be rollout: give it"):
        follow({"name": "play", "run": ["rollout", "reference"]}, REWARD, PREPARE, UPDATE, PUSH)
    with refused("flow: phase 'more': actor does the same in phase 'learn': take it out of one of them"):
        follow(ROLLOUT, REWARD, PREPARE, UPDATE, {"name": "more", "train": ["actor"]}, PUSH)


def test_work_in_another_order_is_refused():
    with refused("flow: phase 'score' comes after 'learn': samples are made, scored and learned from"):
        follow(ROLLOUT, REWARD, UPDATE, PREPARE, PUSH)
    with refused("flow: phase 'grade': reward works before reference of phase 'score': write its phase first"):
        follow(ROLLOUT, PREPARE, REWARD, UPDATE, PUSH)


def test_work_in_another_order_within_turns_is_refused():
    late = {"name": "base", "run": ["reference", "critic"]}
    with refused("flow: phase 'base': reference works before actor of phase 'own': write its phase first"):
        follow(ROLLOUT, REWARD, {"name": "own", "run": ["actor"]}, late, UPDATE, PUSH)
    turns = {"name": "score", "run": ["reference", "reward", "critic", "actor"], "order": "in_turn"}
    with refused("flow: phase 'score': reward works before reference: write it first"):
        follow(ROLLOUT, turns, UPDATE, PUSH)
    with refused("flow: phase 'learn': critic works before actor: write it first"):
        follow(ROLLOUT, REWARD, PREPARE, {"name": "learn", "train": ["actor", "critic"], "order": "in_turn"}, PUSH)


def test_work_without_parts_that_it_uses_is_refused():
    with refused("flow: phase 'play': rollout works without its kv_cache: add kv_cache to its parts"):
        follow({"name": "play", "run": {"rollout": ["weights"]}}, REWARD, PREPARE, UPDATE, PUSH)
    half = {"name": "learn", "run": ["critic"], "train": ["actor"], "order": "in_turn"}
    with refused("flow: phase 'learn': critic works without its gradients, optimizer: name it under train"):
        follow(ROLLOUT, REWARD, PREPARE, half, PUSH)


def test_a_push_only_pushes_and_to_all():
    with refused("flow: phase 'send': actor does not learn in it: take it out of train"):
        follow(ROLLOUT, REWARD, PREPARE, UPDATE, {"name": "send", "train": ["actor"], "push": ["rollout"]})
    roles = ("actor", "inference", "rollout")
    send = {"name": "send", "run": ["inference"], "push": ["rollout"]}
    flow = parse_flow(
        [ROLLOUT, {"name": "old", "run": ["inference"]}, {"name": "learn", "train": ["actor"]}, send], roles
    )
    with refused("flow: phase 'send': inference gets the actor's weights in it: name it under push"):
        check_runs(flow, "rl", roles)


def test_simulators_and_engines_work_at_the_same_time():
    score, learn = {"name": "score", "run": ["actor"]}, {"name": "learn", "train": ["actor"]}
    for phases in (
        [{"name": "play", "run": ["env", "rollout"], "order": "in_turn"}],
        [{"name": "play", "run": ["env"]}, {"name": "answer", "run": ["rollout"]}],
    ):
        roles = ("actor", "env", "rollout")
        flow = parse_flow([*phases, score, learn, PUSH], roles)
        with refused("env and rollout work at the same time: write one phase, with order together"):
            check_runs(flow, "rl", roles)
