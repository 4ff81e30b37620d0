"""Which parts stay and which leave, on a device of 100 GiB with sizes chosen by hand."""

from hotseat.placement import Part
from hotseat.placement.flow import Overlap, default_flow, make_steps, parse_flow
from hotseat.placement.memory_terms import RoleMemory, Term
from hotseat.placement.residency import HandOver, Move, Tenant, hand_overs, settle

W, G, O, K, S = Part.WEIGHTS, Part.GRADIENTS, Part.OPTIMIZER, Part.KV_CACHE, Part.SIMULATOR  # noqa: E741


def tenant(role, mode="as_needed", fixed=0.0, work=None, **sizes):
    """A role with parts of these sizes and with this much fixed and, by activity, working memory."""
    by_letter = {"w": W, "g": G, "o": O, "k": K, "s": S}
    parts = {by_letter[letter]: (Term(role, letter, float(gib), ""),) for letter, gib in sizes.items()}
    modes = tuple((part, mode[part] if isinstance(mode, dict) else mode) for part in parts)
    working = {activity: (Term(role, "activations", gib, ""),) for activity, gib in (work or {}).items()}
    return Tenant(role, RoleMemory((Term(role, "context", fixed, ""),), parts, working, ()), modes)


def steps_of(task, *roles, overlap=None):
    return make_steps(default_flow(task, roles, overlap), dict.fromkeys(roles, (0,)))


def table(tenants, steps, capacity=100.0):
    """One row per step: role letters as in the printed plan."""
    holdings, stuck = settle(tenants, steps, capacity)
    assert stuck is None
    rows = {}
    for step, held in zip(steps, holdings, strict=True):
        row = []
        for each in tenants:
            of = {"needed": "", "kept": "", "offloaded": "", "dropped": ""}
            for holding in held:
                if holding.role == each.role:
                    of[holding.state] += holding.part.value[0]
            away = (f"({of['offloaded']})" if of["offloaded"] else "") + (f"[{of['dropped']}]" if of["dropped"] else "")
            row.append(of["needed"].upper() + of["kept"] + away)
        rows[step.name] = " ".join(row)
    return rows


RL = steps_of("rl", "actor", "rollout")  # rollout, prepare, update, sync


def test_where_all_fits_nothing_moves():
    assert table([tenant("actor", w=10, g=10, o=20), tenant("rollout", w=10, k=30)], RL) == {
        "rollout": "wgo WK",
        "prepare": "Wgo wk",
        "update": "WGO wk",
        "sync": "Wgo Wk",
    }


def test_always_leaves_in_every_step_that_does_not_need_it():
    tenants = [tenant("actor", {W: "as_needed", G: "always", O: "always"}, w=10, g=10, o=20),
               tenant("rollout", "always", w=10, k=30)]  # fmt: skip
    assert table(tenants, RL) == {
        "rollout": "w(o)[g] WK",
        "prepare": "W(o)[g] [wk]",
        "update": "WGO [wk]",
        "sync": "W(o)[g] W[k]",
    }


def test_what_can_be_dropped_leaves_before_what_must_be_copied():
    # update needs 10 + 10 + 30 and 20 to work in; with 20 + 30 of the engine that is 30 over the 90 that fit well. Both
    # can be dropped; the cache is used again later than the weights, and it is enough.
    tenants = [tenant("actor", w=10, g=10, o=30, work={"train": 20}), tenant("rollout", w=20, k=30)]
    assert table(tenants, RL)["update"] == "WGO w[k]"


def test_of_what_must_be_copied_the_furthest_next_use_leaves_first():
    # rollout: 5 + 10 + 40 to work in + 20 + 20 = 95. reward is used again in one step, reference in two.
    steps = steps_of("rl", "actor", "rollout", "reward", "reference")
    tenants = [
        tenant("actor", "cannot", w=5),
        tenant("rollout", "cannot", w=5, k=5, work={"generate": 40}),
        tenant("reward", w=20),
        tenant("reference", w=20),
    ]
    assert table(tenants, steps) == {
        "rollout": "w WK w (w)",
        "prepare.0": "w wk W (w)",  # back at its use, not before
        "prepare.1": "w wk w W",
        "prepare.2": "W wk w w",
        "update": "W wk w w",
        "sync": "W Wk w w",
    }


def test_at_equal_distance_the_largest_leaves_first():
    written = [{"name": "a", "run": ["rollout"]}, {"name": "b", "run": ["reward", "reference"]}]
    roles = ("rollout", "reward", "reference")
    steps = make_steps(parse_flow(written, roles), dict.fromkeys(roles, (0,)))
    engine = tenant("rollout", "cannot", w=10, k=20, work={"generate": 20})
    assert table([engine, tenant("reward", w=20), tenant("reference", w=21)], steps)["a"] == "WK w (w)"
    assert table([engine, tenant("reward", w=21), tenant("reference", w=20)], steps)["a"] == "WK (w) w"


def test_a_part_leaves_no_earlier_than_it_must():
    # 5 + 40 + 20 + 30 = 95 are too much everywhere. reward is away from prepare.1 round to the next prepare.0, so
    # reference has room in the rollout and leaves only for prepare.0.
    steps = steps_of("rl", "actor", "rollout", "reward", "reference")
    tenants = [
        tenant("actor", "cannot", w=5),
        tenant("rollout", "cannot", w=15, k=25),
        tenant("reward", w=20),
        tenant("reference", w=30),
    ]
    rows = table(tenants, steps)
    assert rows["rollout"] == "w WK (w) w"
    assert rows["prepare.0"] == "w wk W (w)"
    assert rows["prepare.1"] == "w wk (w) W"


def test_a_part_that_left_stays_away_until_it_is_needed():
    steps = steps_of("rl", "actor", "critic", "rollout")
    # update.0 takes 5 + 80 of the critic: the actor's optimizer must be away then, and comes for update.1.
    tenants = [
        tenant("actor", w=5, o=40),
        tenant("critic", w=5, o=40, work={"train": 35}),
        tenant("rollout", "cannot", w=5, k=0),
    ]
    rows = table(tenants, steps)
    assert rows["update.0"].startswith("w(o) WO")
    assert rows["update.1"].startswith("WO w")


def test_an_eviction_that_a_later_one_made_needless_is_undone():
    # rollout: 40 to work in + 30 + 30 = 100, so reference would leave. But prepare.1 works in 40, so reward must leave
    # there until its next use, and with reward gone the rollout has room for reference.
    steps = steps_of("rl", "actor", "rollout", "reward", "reference")
    tenants = [
        tenant("actor", "cannot", w=0),
        tenant("rollout", "cannot", w=0, k=0, work={"generate": 40}),
        tenant("reward", w=30),
        tenant("reference", w=30, work={"forward": 40}),
    ]
    assert [row.split()[2:] for row in table(tenants, steps).values()] == [
        ["(w)", "w"],
        ["W", "w"],
        ["(w)", "W"],
        ["(w)", "w"],
        ["(w)", "w"],
        ["(w)", "w"],
    ]


def test_copies_are_kept_and_drops_made_when_either_would_do():
    # 100 in all: always over by 10, and always there are gradients or a cache that nobody will read again.
    steps = steps_of("rl", "actor", "critic", "rollout")
    tenants = [tenant("actor", w=10, g=10, o=20), tenant("critic", w=10, g=10, o=20), tenant("rollout", w=10, k=10)]
    rows = table(tenants, steps)
    assert all("(" not in row for row in rows.values())


def test_comfort_is_sought_where_it_can_be_had_and_the_rest_is_taken_otherwise():
    # 95 with everything: over the comfortable 90, so the optimizer leaves in rollout.
    tenants = [tenant("actor", w=5, g=0, o=20), tenant("rollout", "cannot", w=20, k=50)]
    assert table(tenants, RL)["rollout"] == "wg(o) WK"
    # The engine alone needs 92: comfort cannot be had, so what fits into 100 stays.
    tenants = [tenant("actor", w=2, g=0, o=3), tenant("rollout", "cannot", w=20, k=72)]
    assert table(tenants, RL)["rollout"] == "wgo WK"


def test_an_engine_alone_on_its_devices_may_fill_them():
    assert table([tenant("rollout", w=30, k=65)], RL) == {
        "rollout": "WK",
        "prepare": "wk",
        "update": "wk",
        "sync": "Wk",
    }


def test_weights_that_the_next_use_overwrites_are_dropped_others_copied():
    tenants = [tenant("actor", "always", w=10, g=1, o=1), tenant("rollout", "always", w=10, k=10)]
    rows = table(tenants, RL)
    assert rows["prepare"] == "W(o)[g] [wk]"
    no_push = make_steps(
        parse_flow([{"name": "a", "run": ["rollout"]}, {"name": "b", "train": ["actor"]}], ("actor", "rollout")),
        {"actor": (0,), "rollout": (0,)},
    )
    assert table(tenants, no_push)["b"] == "WGO (w)[k]"


def test_nothing_moves_where_memory_is_unknown():
    tenants = [tenant("actor", w=90, g=90, o=90), tenant("rollout", "always", w=90, k=90)]
    assert table(tenants, RL, capacity=None)["update"] == "WGO [wk]"
    assert table(tenants, RL, capacity=None)["rollout"] == "wgo WK"
    unknown = [Tenant("actor", None, ((W, "as_needed"), (G, "as_needed"), (O, "as_needed"))), tenants[1]]
    assert table(unknown, RL)["rollout"] == "wgo WK"
    assert settle(unknown, RL, 100.0)[0][0][0].gib is None


def test_a_part_in_the_way_that_may_not_leave_is_reported():
    tenants = [tenant("actor", "never", fixed=1.0, w=10, g=10, o=30), tenant("rollout", w=20, k=60)]
    _, stuck = settle(tenants, RL, 100.0)
    # rollout needs 80 + 1; the actor keeps 50, so 50 are free of it.
    assert (stuck.step, stuck.role, stuck.part, stuck.mode) == (0, "actor", O, "never")
    assert (stuck.gib, stuck.needed_gib, stuck.free_gib) == (30.0, 81.0, 50.0)


def test_a_step_too_large_by_itself_is_nobody_elses_fault():
    tenants = [tenant("actor", "never", w=10, g=10, o=30), tenant("rollout", w=20, k=90)]
    assert settle(tenants, RL, 100.0)[1] is None


def test_hand_overs_say_what_leaves_what_comes_and_wrap_around():
    tenants = [tenant("actor", {W: "as_needed", G: "always", O: "always"}, w=10, g=10, o=20),
               tenant("rollout", "always", w=10, k=30)]  # fmt: skip
    found = hand_overs(tenants, RL, settle(tenants, RL, 100.0)[0])
    assert found == (
        HandOver(
            "rollout", "prepare", ("rollout",), ("actor",),
            leaves=(Move("rollout", W, "dropped", 10.0), Move("rollout", K, "dropped", 30.0)),
        ),
        HandOver(
            "prepare", "update", ("actor",), ("actor",),
            comes=(Move("actor", G, "allocated", 10.0), Move("actor", O, "restored", 20.0)),
        ),
        HandOver(
            "update", "sync", ("actor",), ("actor", "rollout"),
            leaves=(Move("actor", G, "dropped", 10.0), Move("actor", O, "copied", 20.0)),
            comes=(Move("rollout", W, "pushed", 10.0),),
        ),
        HandOver(
            "sync", "rollout", ("actor", "rollout"), ("rollout",),
            comes=(Move("rollout", K, "allocated", 30.0),), is_next_iteration=True,
        ),
    )  # fmt: skip


def test_a_device_that_one_role_keeps_has_no_hand_over():
    tenants = [tenant("actor", w=10, g=10, o=20)]
    steps = make_steps(default_flow("sft", ("actor",)), {"actor": (0,)})
    assert hand_overs(tenants, steps, settle(tenants, steps, 100.0)[0]) == ()


def test_a_hand_over_skips_steps_in_which_the_device_is_idle():
    # A device of rollout alone is idle between rollout and sync: what leaves and what comes is one hand-over.
    tenants = [tenant("rollout", "always", w=10, k=30)]
    first, second = hand_overs(tenants, RL, settle(tenants, RL, 100.0)[0])
    assert (first.from_step, first.to_step, first.to_roles) == ("rollout", "sync", ("rollout",))
    assert first.leaves == (Move("rollout", W, "dropped", 10.0), Move("rollout", K, "dropped", 30.0))
    assert first.comes == (Move("rollout", W, "pushed", 10.0),)
    assert (second.from_step, second.to_step, second.is_next_iteration) == ("sync", "rollout", True)


def test_overlap_keeps_the_engine_at_work_beside_training():
    steps = make_steps(default_flow("rl", ("actor", "rollout"), Overlap(1)), {"actor": (0,), "rollout": (1,)})
    assert table([tenant("rollout", "always", w=10, k=30)], steps) == {
        "rollout": "WK",
        "prepare": "WK",
        "update": "WK",
        "sync": "W[k]",
    }
