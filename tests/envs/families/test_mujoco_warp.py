"""MuJoCo Warp on a CPU: batches of worlds conform, a script solves the tasks, and one world changes no other.

Where nobody has used them before, Warp compiles the kernels of the smallest test for a minute of processor time: all
tests that step are long. `test_processes.py` tests batches of worlds without Warp.
"""

from pathlib import Path

import numpy as np
import pytest
import simulator_conformance as conformance

from hotseat.envs.family_loading import SimulatorSettings, import_problem
from hotseat.envs.processes import ProcessEnv, _digest
from hotseat.errors import UserError

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(import_problem("mujoco_warp") is not None, reason="mujoco_warp is not installed"),
]
TASKS = ("reach-red", "push-blue")


def settings(max_steps: int | None = 8, **kwargs) -> SimulatorSettings:
    return SimulatorSettings(
        "mujoco_warp", TASKS, max_steps, {"device": "cpu", "observe": "both", "pixels": 32, **kwargs}
    )


def advise(worlds, where) -> np.ndarray:
    """Return the action of a script that solves the tasks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).parents[3])
        from bench.lib import tabletop_expert  # which loads Warp

    return tabletop_expert.advise(worlds, where)


@pytest.mark.long
def test_the_family_conforms():
    # The camera of pictures for people has kernels of its own, which are compiled when it is first used.
    conformance.check(lambda num_envs: ProcessEnv(settings(), num_envs, timeout_s=600.0))


@pytest.fixture(scope="module")
def worlds():
    from hotseat.envs.families import mujoco_warp

    return mujoco_warp.make_worlds(tuple(mujoco_warp.INSTRUCTIONS), None, 8, observe="both", pixels=32, device="cpu")


@pytest.mark.long
def test_the_script_solves_every_task(worlds):
    where = list(range(8))
    worlds.reset(where, [world % 4 for world in where], [100 + world for world in where])
    ended = {}
    while len(ended) < 8:
        acting = [world for world in where if world not in ended]
        for world, step in zip(acting, worlds.step(acting, advise(worlds, acting)[:, None]), strict=True):
            if step.terminated or step.truncated:
                ended[world] = step
    assert all(step.success and step.rewards[-1] == 1.0 for step in ended.values())


@pytest.mark.long
def test_touching_the_other_puck_fails(worlds):
    worlds.reset([0, 1], [0, 1], [3, 3])
    for _ in range(40):
        advice = advise(worlds, [0])
        both = worlds.step([0, 1], np.stack([advice, advice]))  # the second one was to reach the other puck
        if both[0].terminated:
            break
    assert [step.terminated for step in both] == [True, True]
    assert [step.success for step in both] == [True, False]
    assert [sum(step.rewards) for step in both] == [1.0, 0.0]


@pytest.mark.long
def test_a_world_that_does_not_act_stays_where_it_is(worlds):
    before = worlds.reset([0, 1], [0, 0], [5, 6])
    worlds.step([0], np.full((1, 3, 2), 0.5))
    after = worlds._seen([0, 1])
    assert _digest(after[1]) == _digest(before[1])
    assert _digest(after[0]) != _digest(before[0])


@pytest.mark.long
def test_a_world_that_diverges_is_named_and_begins_again(worlds):
    worlds.reset([0, 1], [0, 0], [5, 6])
    broken = worlds._data.qpos.numpy()
    broken[0, 0] = np.nan
    worlds._data.qpos.assign(broken)
    first, second = worlds.step([0, 1], np.zeros((2, 1, 2)))
    assert isinstance(first, FloatingPointError)
    assert np.isfinite(second.seen.state).all()
    [again] = worlds.reset([0], [0], [5])
    assert np.isfinite(again.state).all()
    assert np.isfinite(worlds.step([0], np.ones((1, 2, 2)))[0].seen.state).all()


@pytest.mark.long
def test_progress_is_rewarded_by_the_metre():
    from hotseat.envs.families import mujoco_warp

    worlds = mujoco_warp.make_worlds(("push-red",), None, 1, progress=2.0, device="cpu")

    def left(seen) -> float:
        finger, red, _, disc = seen.state.astype(np.float64).reshape(4, 2)
        return float(np.linalg.norm(finger - red) + np.linalg.norm(red - disc))

    [before] = worlds.reset([0], [0], [4])
    [step] = worlds.step([0], np.concatenate([advise(worlds, [0])[:, None]] * 3, axis=1))
    assert sum(step.rewards) == pytest.approx(2.0 * (left(before) - left(step.seen)), abs=1e-5)


@pytest.mark.long
def test_the_camera_sees_the_puck_where_it_is(worlds):
    """Red pixels have their middle at the red puck, by the camera's angle and height."""
    [seen] = worlds.reset([0], [0], [9])
    red = (seen.image[..., 0] > 120) & (seen.image[..., 2] < 60) & (seen.image[..., 1] < 80)
    y, x = (each.mean() for each in np.nonzero(red))
    half = 0.9 * np.tan(np.radians(20))  # metres from the middle of the picture to its edge, on the table
    place = np.array([(x + 0.5) / 16 - 1, 1 - (y + 0.5) / 16]) * half
    assert np.abs(place - seen.state[2:4]).max() < 0.03  # a pixel has 2 cm


@pytest.mark.parametrize(
    ("tasks", "kwargs", "message"),
    [
        (("lift-red",), {}, r"env.tasks: no task 'lift-red': choose among reach-red, reach-blue, push-red, push-blue"),
        ((), {}, r"env.tasks: no task is named: choose among"),
        (TASKS, {"observe": "sound"}, r"env.kwargs.observe is 'sound': set it to state, image, both"),
        (TASKS, {"pixels": 4}, r"env.kwargs.pixels is 4: set it to 8 or more"),
    ],
)
def test_what_it_does_not_have_is_refused(tasks, kwargs, message):
    from hotseat.envs.families import mujoco_warp

    with pytest.raises(UserError, match=message):
        mujoco_warp.make_worlds(tasks, None, 1, **kwargs)
