"""Auto placement: phases measured under one placement predict the steps of others, and the fastest is chosen."""

from __future__ import annotations

import importlib.util
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from hotseat.cli.main import main
from hotseat.cli.profile import default_factors, measure
from hotseat.config import loads
from hotseat.errors import RunError, UserError
from hotseat.loop.rl.auto_placement import (
    Measurement,
    Profile,
    RolloutShape,
    TurnCosts,
    measurement_of,
    predict,
    predicted_rollout,
    record_prediction,
    shape_of,
    steps_beside_answers,
)
from hotseat.loop.rl.forecast import GroupCost
from hotseat.loop.state.run_dir import ARRIVALS
from hotseat.observe import METRICS, PREDICTION
from hotseat.observe.report.curves import MetricTable
from hotseat.observe.report.key_figures import make_facts, read_prediction
from hotseat.placement.cost import Curve, Reading
from hotseat.planning.candidates import Candidate, Refused, _splits_in_three, candidates
from hotseat.planning.config_plan import make_plan

BENCH = Path(__file__).parents[3] / "bench" / "auto_placement.py"

SMALL = """
cluster: {inventory: 1x8, component_placement: {actor: all, rollout: all}}
actor: {model: Qwen/Qwen2.5-1.5B}
reward: {function: reward.py}
data: {path: prompts.jsonl}
rollout: {batch_size: 16, samples_per_prompt: 4, num_slots: 64}
train: {batch_size: 64, dtype: bf16}
"""
FOUR = SMALL.replace("1x8", "1x4")
LARGER = SMALL.replace("batch_size: 16", "batch_size: 32").replace("batch_size: 64", "batch_size: 128")


def on(placement: str, *overrides: str):
    config = loads(SMALL, [f"cluster.component_placement={placement}", *overrides])
    return config, make_plan(config)


def profile(is_shared: bool = True) -> Profile:
    """Rollouts of 8 and 16 samples per engine take 2 and 3 s, updates of 8 and 16 samples per rank 4 and 8 s."""
    groups = tuple(GroupCost((2.0,) * 4) for _ in range(16))
    return Profile(
        tuple(
            Measurement(1, size, size, phases, 0.5, 0.25, 0.0, 3, is_shared, groups)
            for size, phases in (
                (8.0, {"rollout": 2.0, "prepare": 1.0, "update": 4.0, "sync": 0.25}),
                (16.0, {"rollout": 3.0, "prepare": 2.0, "update": 8.0, "sync": 0.25}),
            )
        ),
        {"model": "m"},
    )


def bench() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench_auto_placement", BENCH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


# --- reading off seconds ----------------------------------------------------------------------------------------------


def test_seconds_are_linear_between_measured_sizes_and_marked_beyond_them():
    curve = Curve.through([(4, 3.0), (2, 1.0), (2, 3.0), (8, 9.0)])
    assert curve.points == ((2, 2.0), (4, 3.0), (8, 9.0))
    assert curve.at(3) == Reading(2.5, False)
    assert curve.at(6) == Reading(6.0, False)
    assert curve.at(10) == Reading(12.0, True)
    assert curve.at(1) == Reading(1.5, True)
    assert Curve(((4, 2.0),)).at(8) == Reading(4.0, True)


def test_seconds_outside_are_at_least_in_proportion_below_and_never_fall_above():
    assert Curve(((2, 1.0), (4, 3.0))).at(1) == Reading(0.5, True)  # the line would be at 0
    assert Curve(((2, 3.0), (4, 2.0))).at(8) == Reading(2.0, True)


# --- predicting -------------------------------------------------------------------------------------------------------


def test_a_synchronous_step_is_the_sum_of_its_phases_at_their_sizes():
    shared = predict(*on("{actor: 0-7, rollout: 0-7}"), profile())
    # 8 samples per engine and rank: rollout 2, prepare 1, update 4, sync 0.25, offload and onload 0.5, rest 0.25
    assert (shared.step_s, shared.is_extrapolated) == (8.0, False)
    assert shared.samples_per_s == 8.0
    apart = predict(*on("{actor: 0-3, rollout: 4-7}"), profile())
    assert apart.step_s == 3.0 + 2.0 + 8.0 + 0.25 + 0.25
    few = predict(*on("{actor: 0-5, rollout: 6-7}", "train.batch_size=16"), profile())
    assert few.is_extrapolated
    assert few.phases["rollout"] == 3.0 + 2 * 1.0  # 32 samples per engine
    assert few.phases["update"] == 6.0  # 3 groups of 4 on the rank that has most


def test_with_staleness_the_longer_of_rollout_and_training_is_left():
    config, plan = on(
        "{actor: 0-3, rollout: 4-7}", "overlap.staleness=1", "overlap.order=arrival", "overlap.in_flight=keep"
    )
    # Prepare 2, update 8, sync 0.25 and the rest 0.25 hide the rollout of 3.
    assert predict(config, plan, profile()).step_s == pytest.approx(10.5)


def test_a_profile_survives_its_file_and_names_what_it_lacks(tmp_path):
    path = tmp_path / "profile.json"
    path.write_text(profile().to_json())
    assert Profile.read(path) == profile()
    with pytest.raises(UserError, match="no engines of tensor parallel size 2, it has 1: .* --tensor-parallel 2"):
        Profile.read(path).rollout(2)
    path.write_text("{}")
    with pytest.raises(UserError, match="is no profile"):
        Profile.read(path)
    with pytest.raises(UserError, match="cannot be read"):
        Profile.read(tmp_path / "none.json")
    path.write_text('{"version": 0}')
    with pytest.raises(UserError, match="of another version"):
        Profile.read(path)


def test_a_run_with_a_profile_records_what_is_predicted_for_its_report(tmp_path):
    path, said = tmp_path / "profile.json", []
    path.write_text(profile().to_json())
    config, plan = on("{actor: 0-7, rollout: 0-7}", f"cluster.profile={path}")
    record_prediction(config, plan, tmp_path, said.append)
    assert said == [f"predicted: 8 s per step, by {path}"]
    assert (tmp_path / PREDICTION).is_file()
    assert read_prediction(tmp_path) == 8.0
    assert read_prediction(tmp_path / "elsewhere") is None


# --- enumerating ------------------------------------------------------------------------------------------------------


def test_every_split_of_the_devices_is_tried_and_what_is_not_possible_has_a_reason():
    made = list(candidates(loads(FOUR), None, (1, 2), (0, 1)))
    possible = [each for each in made if isinstance(each, Candidate)]
    assert [str(each) for each in possible] == [
        "actor 0-3, rollout 0-3, staleness 0",
        "actor 0-3, rollout 3, staleness 0",
        "actor 0-3, rollout 2-3, staleness 0",
        "actor 0-3, rollout 1-3, staleness 0",
        "actor 0, rollout 1-3, staleness 0",
        "actor 0, rollout 1-3, staleness 1",
        "actor 0-1, rollout 2-3, staleness 0",
        "actor 0-1, rollout 2-3, staleness 1",
    ]
    refused = [each.because for each in made if isinstance(each, Refused)]
    assert any("does not divide over 3 ranks" in reason for reason in refused)
    assert any("tensor_parallel_size" in reason for reason in refused)  # which the transformers engine does not have
    apart = possible[-1]
    assert (apart.num_engines, apart.num_ranks) == (2, 2)
    assert " ".join(apart.as_yaml().split()) == (
        "cluster: component_placement: actor: 0-1 rollout: 2-3 overlap: staleness: 1"
    )


@pytest.mark.slow
def test_what_does_not_fit_is_refused():
    large = SMALL.replace("Qwen2.5-1.5B", "Qwen2.5-7B").replace("1x8", "1x2x24G")
    made = list(candidates(loads(large), None, (1,), (0,)))
    assert any(each.because == "it does not fit into the devices' memory" for each in made if isinstance(each, Refused))


def test_sizes_to_measure_reach_from_all_engines_to_few():
    assert default_factors(loads(SMALL)) == [1.0, 2.0, 4.0]
    alone = loads(SMALL, ["cluster.component_placement={actor: 0, rollout: 0}"])
    assert default_factors(alone) == [0.125, 0.25, 0.5, 1.0]


# --- the commands -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_plan_auto_prints_the_five_fastest_as_yaml(tmp_path, capsys):
    path, config = tmp_path / "profile.json", tmp_path / "run.yaml"
    path.write_text(profile().to_json())
    config.write_text(FOUR)
    assert main(["plan", str(config), "--auto", str(path)]) == 0
    printed = capsys.readouterr().out
    assert "As configured: " in printed
    assert printed.count("component_placement:") == 5
    assert "# 1:" in printed
    assert "does not divide over 3 ranks" in " ".join(printed.split())  # lines are wrapped


def test_profile_and_auto_are_for_reinforcement_learning(tmp_path, capsys):
    config = tmp_path / "run.yaml"
    config.write_text("task: sft\nactor: {model: m}\ndata: {path: a.jsonl, output_key: output}\n")
    assert main(["profile", str(config)]) == 2
    assert "measures the phases of task rl" in capsys.readouterr().err
    assert main(["plan", str(config), "--auto", "profile.json"]) == 2
    assert "the task of this config is sft" in capsys.readouterr().err
    assert main(["profile", str(config), "--sizes", "a"]) == 2
    assert "is no list of numbers" in capsys.readouterr().err
    assert main(["profile", str(config), "--sizes", "1,0"]) == 2
    assert "all numbers have to be above 0" in capsys.readouterr().err
    assert main(["profile", str(config), "--tensor-parallel", "1.5"]) == 2
    assert "'1.5': all numbers have to be whole" in capsys.readouterr().err


def test_a_size_that_cannot_be_measured_keeps_what_was_measured_before():
    """The second run fails."""
    kept = []

    def start(config):
        if kept:
            raise RunError("no memory is left")
        run_dir = Path(config.run_dir) / config.name
        run_dir.mkdir()
        (run_dir / METRICS).write_text('{"step": 2, "step_s": 3.0}\n')
        (run_dir / ARRIVALS).write_text('{"step": 2, "event": "taken", "groups": []}\n')

    with pytest.raises(RunError, match="no memory is left"):
        measure(loads(SMALL), start, [1.0, 2.0], [1], lambda text: None, kept.append)
    assert [[each.step_s for each in profile.measurements] for profile in kept] == [[3.0]]


def test_configs_with_roles_that_are_not_measured_are_refused(tmp_path, capsys):
    file, path = tmp_path / "run.yaml", tmp_path / "profile.json"
    path.write_text(profile().to_json())
    apart = FOUR.replace("actor: all, rollout: all", "actor: 0-1, inference: 2-3, rollout: 2-3")
    file.write_text(apart)
    for command in (["profile", str(file)], ["plan", str(file), "--auto", str(path)]):
        assert main(command) == 2
        assert "this config has the role inference: `hotseat profile` does not" in capsys.readouterr().err
    with pytest.raises(UserError, match="the profile was measured without simulators"):
        predict(loads(SIMULATED), make_plan(loads(SIMULATED)), profile())


# --- simulators -------------------------------------------------------------------------------------------------------

SIMULATED = """
cluster: {inventory: 1x4, component_placement: {actor: 0-3, env: 0-1, rollout: 2-3}}
actor: {model: Qwen/Qwen2.5-1.5B}
env: {path: gym, tasks: [CartPole-v1], num_envs: 16}
data: {max_length: 64}
rollout: {batch_size: 16, samples_per_prompt: 4}
train: {batch_size: 64, dtype: bf16}
"""


def turns_of(size: float, stretch: float = 1.25) -> TurnCosts:
    """A simulator steps in 0.5 s; an answer takes 1 s, and 0.25 s for each request."""
    return TurnCosts(size, size, 0.5 * size, 1 + 0.25 * size, 10.0, stretch)


def test_rollouts_in_simulators_are_predicted_from_turns_of_one_stage():
    costs = [turns_of(4), turns_of(8), turns_of(16)]

    apart = frozenset({(1, 0), (0, 1)})

    def rollout_s(num_stages: int, on_devices: frozenset[tuple[int, int]] = apart, num_engines: int = 2) -> float:
        shape = RolloutShape(64, 32, 2, num_engines, num_stages, on_devices)
        reading = predicted_rollout(costs, shape)
        assert not reading.is_extrapolated
        return reading.seconds

    # 64 samples of 10 turns in 32 simulators are 20 rounds, which were seen to take 1.25 times as long.
    assert rollout_s(1) == 25 * (8 + 5)
    assert rollout_s(2) == 25 * (2 * 4)  # two times 8 simulators; the answers take two times 3 s meanwhile
    assert rollout_s(4) == 25 * (4 * 2)
    assert rollout_s(2, frozenset({(1, 1)})) == 25 * (2 * 4 + 2 * 3)
    # Where one of two engines shares a device with simulators, the other waits.
    assert rollout_s(2, frozenset({(1, 1), (1, 0), (0, 1)})) == 25 * (2 * 4 + 2 * 3)
    assert rollout_s(2, frozenset({(2, 0), (0, 1)})) == 25 * (2 * 2 * 4)  # two env processes on one device
    # One engine: it answers both processes at once if it is kept busy, in two times 5 s.
    assert rollout_s(2, num_engines=1) == 25 * (2 * 5)
    # Four engines, two for each process, answer 4 requests each in 2 s.
    assert rollout_s(2, num_engines=4) == 25 * (2 * 4)
    assert rollout_s(1, num_engines=4) == 25 * (8 + 3)
    assert predicted_rollout(costs, RolloutShape(64, 128, 1, 1, 1)).is_extrapolated


def test_recorded_runs_of_a_real_simulator_and_policy_are_predicted_within_15_percent():
    """Profile and steps as recorded in bench/results/cpu_auto_placement_pair.txt, of 64 samples of 18 turns."""
    profiled = [  # simulators, seconds of the rollout, of a step of all simulators, of the policy's answers
        (8, 1.96, 0.0372, 0.0708),
        (16, 2.83, 0.0679, 0.0884),
        (32, 4.64, 0.121, 0.135),
        (64, 8.69, 0.247, 0.235),
    ]
    costs = [
        TurnCosts(size, size, env_s, policy_s, 18.0, rollout_s / (18 * (env_s + policy_s)))
        for size, rollout_s, env_s, policy_s in profiled
    ]
    training_s = 0.02 + 0.31 + 0.52
    apart, shared, in_part = {(1, 0), (0, 1)}, {(1, 1)}, {(1, 1), (1, 0)}
    measured = [  # env processes, engines, stages, what devices have, seconds of a step
        (2, 2, 1, shared, 6.45),
        (2, 2, 2, shared, 7.26),
        (2, 1, 1, in_part, 7.47),
        (1, 1, 1, apart, 8.88),
        (2, 1, 4, in_part, 9.82),
        (1, 1, 4, shared, 11.43),
    ]
    for num_env_ranks, num_engines, num_stages, on_devices, step_s in measured:
        shape = RolloutShape(64, 64, num_env_ranks, num_engines, num_stages, frozenset(on_devices))
        predicted = predicted_rollout(costs, shape)
        assert not predicted.is_extrapolated
        assert predicted.seconds + training_s == pytest.approx(step_s, rel=0.15)


@pytest.mark.parametrize(
    ("placement", "on_devices", "steps_beside"),
    [
        ("{actor: 0-3, env: 0-1, rollout: 2-3}", {(1, 0), (0, 1)}, False),
        ("{actor: 0-3, env: 0-3, rollout: 0-3}", {(1, 1)}, False),
        # Engine 1 is on the device of the second env process and serves the first.
        ("{actor: 0-3, env: 0-1, rollout: 0-3}", {(1, 1), (0, 1)}, True),
        ("{actor: 0-3, env: 0, rollout: 0-3}", {(1, 1), (0, 1)}, False),
        ("{actor: 0-3, env: 0-3, rollout: 2-3}", {(1, 1), (1, 0)}, True),
        ("{actor: 0, env: 1-3, rollout: 1-3}", {(1, 1)}, False),
        ("{actor: 0-3, env: '0-1:0-3', rollout: 2-3}", {(2, 0), (0, 1)}, False),
        ("{actor: 0-3, env: cpu*2, rollout: 2-3}", {(1, 0), (0, 1)}, False),
    ],
)
def test_the_work_of_simulators_and_engines_on_the_same_device_adds_up(placement, on_devices, steps_beside):
    config = loads(SIMULATED, [f"cluster.component_placement={placement}", "env.num_envs=12"])
    plan = make_plan(config)
    assert shape_of(config, plan).on_devices == on_devices
    assert steps_beside_answers(plan) == steps_beside


def test_an_actor_on_fewer_devices_takes_as_long_as_its_samples():
    turns = [replace(turns_of(size), turns_per_sample=1.0) for size in (8, 16)]
    measured = [replace(each, turns=cost) for each, cost in zip(profile().measurements, turns, strict=True)]

    def phases(actor: str) -> tuple[float, float, bool]:
        config = loads(
            SIMULATED, [f"cluster.component_placement={{actor: {actor}, env: 0-3, rollout: 0-3}}", "env.num_envs=8"]
        )
        predicted = predict(config, make_plan(config), Profile(tuple(measured), {}))
        return predicted.phases["update"], predicted.phases["rollout"], predicted.is_extrapolated

    # 16 samples per rank take 8 s, 32 take 16 s; the rollout, on four devices, takes as long.
    assert phases("0-3") == (8.0, phases("0-3")[1], False)
    assert phases("0-1") == (16.0, phases("0-3")[1], True)


def test_a_profile_without_shared_devices_says_that_it_lacks_offload(tmp_path, capsys):
    apart = profile(is_shared=False)
    assert apart.moves_s is None
    assert predict(*on("{actor: 0-7, rollout: 0-7}"), apart).lacks_moves
    assert not predict(*on("{actor: 0-3, rollout: 4-7}"), apart).lacks_moves
    assert not predict(*on("{actor: 0-7, rollout: 0-7}"), profile()).lacks_moves
    path, config = tmp_path / "profile.json", tmp_path / "run.yaml"
    path.write_text(apart.to_json())
    config.write_text(FOUR)
    assert main(["plan", str(config), "--auto", str(path)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "Offload and onload are missing where rollout and training share devices" in said


def test_turns_are_read_from_a_run_with_one_stage(tmp_path):
    config = loads(SIMULATED)
    plan = make_plan(config)
    (tmp_path / METRICS).write_text('{"step": 2, "step_s": 30.0, "time/rollout": 20.0}\n')
    # Two samples, of 10 turns each: 4 s for simulators and 8 s for the policy, the episodes took 12 s.
    seconds = '"seconds": [[12.0, 12.0, 0.5]], "num_turns": 20, "policy_s": 16.0'
    taken = f'{{"step": 2, "event": "taken", "groups": [[0, 1]], {seconds}}}\n'
    (tmp_path / ARRIVALS).write_text(taken)
    measured = measurement_of(config, plan, tmp_path)
    # 64 samples in 32 simulators are 20 rounds of 1.2 s, 24 s in all.
    assert measured.turns == TurnCosts(16.0, 16.0, pytest.approx(0.4), 0.8, 10.0, pytest.approx(20 / 24))
    path = tmp_path / "profile.json"
    path.write_text(Profile((measured,), {}).to_json())
    assert Profile.read(path).turns(1) == [measured.turns]
    wide = replace(measured, tensor_parallel_size=2, turns=turns_of(8))
    assert Profile((measured, wide), {}).turns(2) == [turns_of(8)]  # engines of another size have another pace
    with pytest.raises(UserError, match="the profile has no engines of tensor parallel size 4, it has 1, 2"):
        Profile((measured, wide), {}).turns(4)
    staged = loads(SIMULATED, ["rollout.pipeline_stage_num=2"])
    assert measurement_of(staged, make_plan(staged), tmp_path).turns is None


@pytest.mark.slow
def test_placements_of_simulators_have_stages_and_the_same_number_of_them():
    config = loads(SIMULATED)
    made = list(candidates(config, None, (1,), (0,)))
    possible = [each for each in made if isinstance(each, Candidate)]
    assert len(made) == 3 * 23  # ways to place one, two or four processes with simulators, in 1, 2 and 4 stages
    names = [str(each) for each in possible]
    assert "actor 0-3, rollout 2-3, env 0-1 with 1 stage, staleness 0" in names
    assert "actor 0-3, rollout 1-3, env 0 with 4 stages, staleness 0" in names
    assert "actor 0-1, rollout 3, env 2 with 2 stages, staleness 0" in names
    # Each env process has the device of one of its own engines, not that of another's.
    [on_part] = [each for each in possible if str(each) == "actor 0-3, rollout 0-3, env 0,2 with 2 stages, staleness 0"]
    assert not steps_beside_answers(on_part.plan)
    assert "env: 0,2\n" in on_part.as_yaml()
    assert {each.config.env.num_envs * len(each.plan.role("env").processes) for each in possible} == {32}
    # Three processes cannot have as many simulators each.
    assert not any("env 0-2" in name for name in names)


def test_two_devices_have_27_placements_of_simulators():
    text = SIMULATED.replace("1x4", "1x2").replace(
        "actor: 0-3, env: 0-1, rollout: 2-3", "actor: 0-1, env: 0, rollout: 1"
    )
    made = [each for each in candidates(loads(text), None, (1,), (0,)) if isinstance(each, Candidate)]
    assert len({str(each) for each in made}) == len(made) == 27
    kinds = []
    for each in made[::3]:  # in 1, 2 and 4 stages each
        placement = each.settings["cluster.component_placement"]
        kinds.append((placement["actor"], placement["env"], placement["rollout"]))
    assert kinds == [
        ("0-1", "0-1", "0-1"),
        ("0-1", "0", "1"),
        ("0-1", "0", "0-1"),
        ("0-1", "0-1", "1"),
        ("0", "0", "0"),
        ("0", "0-1", "0-1"),
        ("0", "0", "1"),
        ("1", "0", "1"),
        ("0", "1", "1"),
    ]


@pytest.mark.parametrize("num_devices", [1, 2, 3, 4, 6, 8])
def test_no_arrangement_of_devices_is_enumerated_twice(num_devices):
    def kind(split: tuple[range, range, range]) -> tuple[tuple[tuple[bool, ...], int], ...]:
        """Count the devices that have the same roles."""
        roles = [tuple(device in part for part in split) for device in range(num_devices)]
        return tuple(sorted(Counter(roles).items()))

    kinds = [kind(split) for split in _splits_in_three(num_devices)]
    assert len(set(kinds)) == len(kinds)
    assert len(kinds) <= 80


def test_short_runs_of_a_profile_scale_simulators_and_have_one_stage():
    config = loads(SIMULATED, ["rollout.pipeline_stage_num=2", "env.eval_seeds=3"])
    assert default_factors(config) == [0.25, 0.5, 1.0, 2.0]
    runs = []

    def start(short):
        runs.append(short)
        raise RunError("that will do")

    said: list[str] = []
    for factor in (0.25, 2.0):
        with pytest.raises(RunError):
            measure(config, start, [factor], [1], said.append, print)
    assert said == []
    beside = loads(SIMULATED, ["cluster.component_placement={actor: 0-3, env: 0-1, rollout: 1}"])
    with pytest.raises(RunError):
        measure(beside, start, [1.0], [1], said.append, print)
    assert "include waiting for the other" in said.pop()
    runs.pop()
    facts = [(each.env.num_envs, each.rollout.pipeline_stage_num, each.rollout.batch_size) for each in runs]
    assert facts == [(4, 1, 4), (32, 1, 32)]
    assert [(each.env.num_seeds, each.env.eval_seeds, each.train.num_episodes) for each in runs] == [
        (4, 0, 4),
        (32, 0, 4),
    ]


@pytest.mark.slow
def test_what_cannot_be_measured_or_placed_is_refused(tmp_path, capsys):
    with pytest.raises(UserError, match=r"a batch 0\.01 times as large is no whole number: rollout.batch_size is 16"):
        measure(loads(SMALL), lambda config: None, [0.01], [1], print, print)
    config, plan = on("{actor: 0-7, rollout: 0-7}")
    (tmp_path / METRICS).write_text("")
    (tmp_path / ARRIVALS).write_text("")
    with pytest.raises(UserError, match="made no step after its first, so there is nothing to measure"):
        measurement_of(config, plan, tmp_path)
    path, file = tmp_path / "profile.json", tmp_path / "run.yaml"
    path.write_text(profile().to_json())
    file.write_text(FOUR.replace("1x4", "1x1"))
    assert main(["plan", str(file), "--auto", str(path), "train.micro_batch_size=3"]) == 2
    assert "no placement is possible:" in capsys.readouterr().err


def test_the_report_compares_the_prediction_with_the_steps_after_the_first():
    steps = np.array([9.0, 4.0, 6.0])
    table = MetricTable(np.arange(1, 4), {"step_s": steps}, {"step_s": np.ones(3, bool)})
    shown = {fact["label"]: (fact["value"], fact["note"]) for fact in make_facts(table, None, predicted_s=4.5)}
    assert shown["Predicted step"] == ("4.5 s", "by a profile; measured 5 s (mean after the first), -10%")
    empty = MetricTable(np.arange(0), {}, {})
    facts = make_facts(empty, None, predicted_s=4.5)
    assert ("4.5 s", "by a profile; not measured yet") in [(fact["value"], fact["note"]) for fact in facts]


# --- how good it is ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_steps_are_predicted_within_15_percent_and_the_choice_is_within_5_of_the_best():
    result = bench().compare(6, 6, True, text=LARGER, sizes=(1,), staleness=(0, 1))
    assert result.num_enumerated >= 20
    assert result.spread >= 2
    assert max(abs(row.error) for row in result.rows) <= 0.15
    assert result.loss_of_choice <= 0.05


@pytest.mark.slow
def test_a_profile_is_measured_by_short_runs(task, tmp_path, capsys):
    from loop_cases import rl_yaml

    config, output = tmp_path / "run.yaml", tmp_path / "profile.json"
    config.write_text(rl_yaml(task))
    assert main(["profile", str(config), "-o", str(output), "--sizes", "0.5,1"]) == 0
    found = Profile.read(output)
    assert [each.samples_per_engine for each in found.measurements] == [8.0, 16.0]
    for each in found.measurements:
        assert each.num_steps == 3
        assert each.step_s == pytest.approx(sum(each.phases.values()) + each.moves_s + each.other_s)
        assert len(each.groups) == 3 * each.samples_per_engine / 4
    assert not (task / "runs").exists()
