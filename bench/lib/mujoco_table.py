"""A family of simulators on MuJoCo: a finger among pucks that slide on a table with borders.

All observations differ, so a policy has to read each of them. kwargs: `substeps` of physics in an action, which lasts
1/20 s.
"""

from __future__ import annotations

from collections.abc import Sequence

import mujoco
import numpy as np

from hotseat.envs.simulator import ActionSpec, Observation, SimulatorStep, Task

NUM_PUCKS = 20
ACTION_S = 0.05
EDGE = 0.4
SPEED = 2.0  # metres per second, to which observations are bounded
DIRECTIONS = [(x, y) for x in (-1, 0, 1) for y in (-1, 0, 1)]  # of the finger, in metres per second

_BODY = '<body><joint name="{0}_x" type="slide" axis="1 0 0"/><joint name="{0}_y" type="slide" axis="0 1 0"/>{1}</body>'
_MOTORS = '<actuator><velocity joint="finger_x" kv="40"/><velocity joint="finger_y" kv="40"/></actuator>'
_WALLS = ("{edge} 0 0.02", "-{edge} 0 0.02", "0 {edge} 0.02", "0 -{edge} 0.02")


def _scene(timestep: float) -> str:
    puck = '<geom type="cylinder" size="0.035 0.02" pos="0 0 0.02" mass="0.1"/>'
    bodies = [_BODY.format("finger", '<geom type="capsule" fromto="0 0 0.03 0 0 0.12" size="0.022" mass="1"/>')]
    bodies += [_BODY.format(f"puck_{index}", puck) for index in range(NUM_PUCKS)]
    walls = [
        f'<geom type="box" pos="{pos.format(edge=EDGE)}" size="{"0.01 0.42" if at < 2 else "0.42 0.01"} 0.03"/>'
        for at, pos in enumerate(_WALLS)
    ]
    return (
        f'<mujoco><option timestep="{timestep}"/><default><joint damping="0.02"/></default><worldbody>'
        f"{''.join(walls)}{''.join(bodies)}</worldbody>{_MOTORS}</mujoco>"
    )


class Table:
    """One table. No task ends before its time."""

    is_on_device = False

    def __init__(self, tasks: Sequence[str], max_steps: int, substeps: int):
        self.tasks = [Task(index, name) for index, name in enumerate(tasks)]
        self.action = ActionSpec.numbered(len(DIRECTIONS))
        num_numbers = 2 * (NUM_PUCKS + 1)
        bound = np.repeat(np.array([EDGE, SPEED], dtype=np.float32), [num_numbers, 2])  # places, the finger's velocity
        self.state_bounds = (-bound, bound)
        self._max_steps, self._substeps = max_steps, substeps
        self._model = mujoco.MjModel.from_xml_string(_scene(ACTION_S / substeps))
        self._data = mujoco.MjData(self._model)
        self._num_steps = 0

    def reset(self, task: int, seed: int) -> Observation:
        random = np.random.default_rng(seed)
        cells = random.permutation(25)[: NUM_PUCKS + 1]  # of a grid of 5 by 5, so that nothing overlaps
        places = np.stack([cells % 5, cells // 5], axis=1) * 0.14 - 0.28 + random.uniform(-0.02, 0.02, (len(cells), 2))
        mujoco.mj_resetData(self._model, self._data)
        self._data.qpos[:] = places.reshape(-1)
        self._data.qvel[:] = random.uniform(-0.3, 0.3, self._model.nv)
        self._num_steps = 0
        return self._seen()

    def step(self, action: np.ndarray) -> SimulatorStep:
        self._data.ctrl[:] = DIRECTIONS[int(action[0])]
        mujoco.mj_step(self._model, self._data, nstep=self._substeps)
        self._num_steps += 1
        return SimulatorStep(self._seen(), 0.0, truncated=self._num_steps == self._max_steps)

    def render(self) -> np.ndarray:
        raise NotImplementedError("this table is not drawn")

    def close(self) -> None:
        pass

    def _seen(self) -> Observation:
        return Observation(state=np.concatenate([self._data.qpos, self._data.qvel[:2]]).astype(np.float32))


def make(tasks: Sequence[str], max_steps: int | None = None, substeps: int = 10) -> Table:
    assert max_steps is not None
    return Table(tasks, max_steps, substeps)
