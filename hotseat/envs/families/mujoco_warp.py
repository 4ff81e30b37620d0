"""MuJoCo Warp: a table-top to reach and push on, many worlds at once on one device.

A finger moves over a table with a red and a blue puck and a green disc. Tasks: `reach-red` and `reach-blue` end when
the finger touches a puck, and succeed if it is the right one; `push-red` and `push-blue` succeed when that puck lies on
the disc. Where things lie comes from the seed. Actions are the finger's velocity.

Everything is on the device: physics, rewards, ends of episodes, and pictures of a camera above the table, which MuJoCo
Warp ray-traces (no OpenGL). One call carries out a chunk of actions in all worlds: a graph of Warp, of CUDA or of its
own for CPUs, so that Python launches nothing. Worlds that do not act are held. A world's results do not depend on the
others.

Warp compiles its kernels once, in a minute or more, and keeps them in the user's cache directory (WARP_CACHE_PATH).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mujoco
import mujoco_warp as mjw
import numpy as np
import warp as wp

from hotseat.envs.simulator import ActionSpec, Observation, Task, Worlds, WorldStep
from hotseat.errors import UserError

PUCKS = ("red", "blue")
INSTRUCTIONS = {
    **{f"reach-{puck}": f"reach the {puck} puck" for puck in PUCKS},
    **{f"push-{puck}": f"push the {puck} puck onto the green disc" for puck in PUCKS},
}
OBSERVATIONS = ("state", "image", "both")
MAX_STEPS = 40
NEAR = 0.062  # between the centres of finger and puck that touch; their radii are 0.057 together
ON_DISC = 0.05  # between the centres of puck and disc
_EDGE = 0.27  # of the part of the table that the finger reaches
_PLACES = 0.22  # farthest that things lie from the middle
_APART = 0.13  # least between the centres of things
_NUM_SUBSTEPS = 3
_SPEED = 1.0  # metres per second of an action of 1
_VIEW = 160  # pixels of a picture for display

# Ends of episodes, as the device counts them.
_ACTING, _SUCCESS, _FAILURE, _LATE, _BROKEN = range(5)

SCENE = """
<mujoco model="table">
  <option timestep="0.02" integrator="Euler" iterations="10" ls_iterations="20" gravity="0 0 0">
    <flag eulerdamp="disable"/>
  </option>
  <visual><headlight ambient="0.5 0.5 0.5" diffuse="0.5 0.5 0.5" specular="0 0 0"/></visual>
  <default>
    <geom condim="1"/>
    <default class="puck">
      <joint type="slide" damping="10" range="-0.3 0.3" limited="true"/>
      <geom type="capsule" fromto="0 0 0.035 0 0 0.05" size="0.035" mass="0.4"/>
    </default>
  </default>
  <worldbody>
    <camera name="above" pos="0 0 0.9" xyaxes="1 0 0 0 1 0" fovy="40"/>
    <camera name="side" pos="0 -0.6 0.6" xyaxes="1 0 0 0 0.7071 0.7071" fovy="48"/>
    <geom type="plane" size="0.45 0.45 0.01" rgba="0.75 0.7 0.6 1" contype="0" conaffinity="0"/>
    <body name="disc" mocap="true" pos="0 0 0.001">
      <geom type="cylinder" size="0.06 0.001" rgba="0.2 0.7 0.3 1" contype="0" conaffinity="0"/>
    </body>
    <body name="finger">
      <joint name="finger_x" type="slide" axis="1 0 0"/>
      <joint name="finger_y" type="slide" axis="0 1 0"/>
      <geom type="capsule" fromto="0 0 0.03 0 0 0.12" size="0.022" rgba="0.1 0.1 0.1 1" mass="1"/>
    </body>
    <body name="red" childclass="puck">
      <joint axis="1 0 0"/><joint axis="0 1 0"/>
      <geom rgba="0.85 0.15 0.1 1"/>
    </body>
    <body name="blue" childclass="puck">
      <joint axis="1 0 0"/><joint axis="0 1 0"/>
      <geom rgba="0.1 0.25 0.9 1"/>
    </body>
  </worldbody>
  <actuator><velocity joint="finger_x" kv="40"/><velocity joint="finger_y" kv="40"/></actuator>
</mujoco>
"""


def make_worlds(tasks: Sequence[str], max_steps: int | None, num_worlds: int, **kwargs: Any) -> Tabletop:
    """Make a batch of worlds. kwargs: of `Tabletop`."""
    return Tabletop(tasks, max_steps or MAX_STEPS, num_worlds, **kwargs)


# --- on the device ----------------------------------------------------------------------------------------------------


@wp.func
def _distance(qpos: wp.array2d[wp.float32], world: int, one: int, x: float, y: float) -> float:
    across = qpos[world, one] - x
    along = qpos[world, one + 1] - y
    return wp.sqrt(across * across + along * along)


@wp.func
def _way_left(task: wp.array2d[wp.int32], qpos: wp.array2d[wp.float32], disc: wp.array2d[wp.vec3], world: int) -> float:
    """Return how far the finger is from its puck, and, if it is to be pushed, the puck from the disc."""
    puck = 2 + 2 * task[world, 1]
    left = _distance(qpos, world, puck, qpos[world, 0], qpos[world, 1])
    if task[world, 0] == 1:
        place = disc[world, 0]
        left += _distance(qpos, world, puck, place[0], place[1])
    return left


@wp.kernel
def _place(
    is_new: wp.array[wp.int32],
    places: wp.array2d[wp.float32],  # finger, red, blue, disc
    task: wp.array2d[wp.int32],  # whether to push, and which puck
    held: wp.array3d[wp.float32],  # positions, velocities, warm start of the solver
    qpos: wp.array2d[wp.float32],
    qvel: wp.array2d[wp.float32],
    warm: wp.array2d[wp.float32],
    disc: wp.array2d[wp.vec3],
    num_steps: wp.array[wp.int32],
    left: wp.array[wp.float32],
) -> None:
    world = wp.tid()
    if is_new[world] == 0:
        return
    for at in range(6):
        qpos[world, at] = places[world, at]
        qvel[world, at] = 0.0
        warm[world, at] = 0.0
        held[world, 0, at] = places[world, at]
        held[world, 1, at] = 0.0
        held[world, 2, at] = 0.0
    disc[world, 0] = wp.vec3(places[world, 6], places[world, 7], 0.001)
    num_steps[world] = 0
    left[world] = _way_left(task, qpos, disc, world)


@wp.kernel
def _command(
    actions: wp.array3d[wp.float32],
    at: int,
    edge: float,
    speed: float,
    qpos: wp.array2d[wp.float32],
    ctrl: wp.array2d[wp.float32],
) -> None:
    """Set the finger's velocity; none that leaves the part of the table that it reaches."""
    world, axis = wp.tid()
    value = wp.clamp(actions[world, at, axis], -1.0, 1.0) * speed
    place = qpos[world, axis]
    if (place > edge and value > 0.0) or (place < -edge and value < 0.0):
        value = 0.0
    ctrl[world, axis] = value


@wp.kernel
def _hold(
    end: wp.array[wp.int32],
    held: wp.array3d[wp.float32],
    qpos: wp.array2d[wp.float32],
    qvel: wp.array2d[wp.float32],
    warm: wp.array2d[wp.float32],
) -> None:
    """Keep the state of worlds that acted; put that of others back to where it was."""
    world, at = wp.tid()
    if end[world] == 0:
        held[world, 0, at] = qpos[world, at]
        held[world, 1, at] = qvel[world, at]
        held[world, 2, at] = warm[world, at]
    else:
        qpos[world, at] = held[world, 0, at]
        qvel[world, at] = held[world, 1, at]
        warm[world, at] = held[world, 2, at]


@wp.kernel
def _judge(
    at: int,
    near: float,
    on_disc: float,
    max_steps: int,
    progress: float,
    task: wp.array2d[wp.int32],
    qpos: wp.array2d[wp.float32],
    disc: wp.array2d[wp.vec3],
    num_steps: wp.array[wp.int32],
    left: wp.array[wp.float32],
    num_taken: wp.array[wp.int32],
    rewards: wp.array2d[wp.float32],
    end: wp.array[wp.int32],
) -> None:
    world = wp.tid()
    if end[world] != 0:
        return
    num_taken[world] += 1
    num_steps[world] += 1
    puck = 2 + 2 * task[world, 1]
    other = 6 - puck
    for entry in range(6):
        if not wp.isfinite(qpos[world, entry]):
            end[world] = 4
            return
    if task[world, 0] == 1:
        place = disc[world, 0]
        if _distance(qpos, world, puck, place[0], place[1]) < on_disc:
            end[world] = 1
    elif _distance(qpos, world, puck, qpos[world, 0], qpos[world, 1]) < near:
        end[world] = 1
    elif _distance(qpos, world, other, qpos[world, 0], qpos[world, 1]) < near:
        end[world] = 2
    now = _way_left(task, qpos, disc, world)
    rewards[world, at] = progress * (left[world] - now)
    left[world] = now
    if end[world] == 1:
        rewards[world, at] += 1.0
    if end[world] == 0 and num_steps[world] >= max_steps:
        end[world] = 3


@wp.kernel
def _unpack(packed: wp.array2d[wp.uint32], frames: wp.array4d[wp.uint8]) -> None:
    world, y, x = wp.tid()
    value = packed[world, y * frames.shape[2] + x]
    frames[world, y, x, 0] = wp.uint8((value >> wp.uint32(16)) & wp.uint32(255))
    frames[world, y, x, 1] = wp.uint8((value >> wp.uint32(8)) & wp.uint32(255))
    frames[world, y, x, 2] = wp.uint8(value & wp.uint32(255))


class _Camera:
    """Pictures of all worlds by one camera: `frames` is [num_worlds, H, W, 3] uint8 on the device."""

    def __init__(self, model: Any, name: str, num_worlds: int, pixels: int):
        self._context = mjw.create_render_context(
            model, nworld=num_worlds, cam_res=(pixels, pixels), render_rgb=True, render_depth=False, cam_active=[name]
        )
        self.frames = wp.zeros((num_worlds, pixels, pixels, 3), dtype=wp.uint8)

    def take(self, model: Any, data: Any) -> None:
        mjw.refit_bvh(model, data, self._context)
        mjw.render(model, data, self._context)
        wp.launch(_unpack, dim=self.frames.shape[:3], inputs=[self._context.rgb_data], outputs=[self.frames])


# --- worlds -----------------------------------------------------------------------------------------------------------


class Tabletop(Worlds):
    """A batch of table-tops on one device.

    observe: `state` (places of the finger, the pucks and the disc), `image` (the camera's picture, and no state), or
    both. pixels: edge of the picture. device: of Warp, such as cpu or cuda:0; None takes the first CUDA device if there
    is one. progress: reward of each metre of way to the task's end, besides 1 for success. deterministic: equal bits in
    every run on a CUDA device too, which costs some speed.
    """

    action = ActionSpec((-1.0, -1.0), (1.0, 1.0))
    num_state_values = None

    def __init__(
        self,
        tasks: Sequence[str],
        max_steps: int,
        num_worlds: int,
        observe: str = "state",
        pixels: int = 64,
        device: str | None = None,
        progress: float = 0.0,
        deterministic: bool = True,
    ):
        unknown = [task for task in tasks if task not in INSTRUCTIONS]
        if not tasks or unknown:
            what = f"no task {unknown[0]!r}" if unknown else "no task is named"
            raise UserError(f"env.tasks: {what}: choose among {', '.join(INSTRUCTIONS)}")
        if observe not in OBSERVATIONS:
            raise UserError(f"env.kwargs.observe is {observe!r}: set it to {', '.join(OBSERVATIONS)}")
        if pixels < 8:
            raise UserError(f"env.kwargs.pixels is {pixels}: set it to 8 or more")
        wp.config.log_level = wp.LOG_WARNING
        wp.init()
        self._device = wp.get_device(device) if device is not None else wp.get_preferred_device()
        self.is_on_device = self._device.is_cuda
        self.tasks = [Task(index, name) for index, name in enumerate(tasks)]
        self.state_bounds = None
        if observe != "image":
            self.state_bounds = (np.full(8, -0.3, dtype=np.float32), np.full(8, 0.3, dtype=np.float32))
        self.num_worlds, self._max_steps, self._progress = num_worlds, max_steps, progress
        self._sees, self._feels = observe != "state", observe != "image"
        self._kinds = np.array([(name.startswith("push"), PUCKS.index(name.split("-")[1])) for name in tasks])
        self.playing = np.zeros(num_worlds, dtype=np.int64)  # task of each world
        self._graphs: dict[int, Any] = {}  # by the number of actions of a chunk
        self._side: _Camera | None = None
        with wp.ScopedDevice(self._device):
            self._host_model = mujoco.MjModel.from_xml_string(SCENE)
            self._model = mjw.put_model(self._host_model)
            if deterministic and self.is_on_device:  # on a CPU worlds are stepped one after another
                self._model.opt.deterministic = int(mjw.DeterminismType.ALL)
            self._model.opt.warn_overflow = 0  # what could overflow has room for the most that can be
            # At most 3 pairs touch at 2 points each, and 4 joints have limits.
            self._data = mjw.make_data(self._host_model, nworld=num_worlds, nconmax=6, njmax=12)
            self._above = _Camera(self._host_model, "above", num_worlds, pixels) if self._sees else None
            self._held = wp.zeros((num_worlds, 3, 6), dtype=wp.float32)
            self._task = wp.zeros((num_worlds, 2), dtype=wp.int32)
            self._num_steps = wp.zeros(num_worlds, dtype=wp.int32)
            self._left = wp.zeros(num_worlds, dtype=wp.float32)  # way to the task's end, in metres
            self._num_taken = wp.zeros(num_worlds, dtype=wp.int32)
            self._end = wp.zeros(num_worlds, dtype=wp.int32)
            self._buffers: dict[int, tuple[Any, Any]] = {}  # actions and rewards, by the number of actions of a chunk
        # Kernels are compiled or loaded before the first episode, whose deadline is short.
        everywhere = list(range(num_worlds))
        self.reset(everywhere, [0] * num_worlds, everywhere)
        self.step(everywhere, np.zeros((num_worlds, 1, 2)))

    def reset(self, where: Sequence[int], tasks: Sequence[int], seeds: Sequence[int]) -> list[Observation]:
        is_new = np.zeros(self.num_worlds, dtype=np.int32)
        places = np.zeros((self.num_worlds, 8), dtype=np.float32)
        is_new[list(where)] = 1
        self.playing[list(where)] = tasks
        for world, seed in zip(where, seeds, strict=True):
            places[world] = _places(seed).reshape(-1)
        with wp.ScopedDevice(self._device):
            self._task.assign(self._kinds[self.playing].astype(np.int32))
            data = self._data
            wp.launch(
                _place,
                dim=self.num_worlds,
                inputs=[wp.array(is_new), wp.array(places), self._task, self._held],
                outputs=[data.qpos, data.qvel, data.qacc_warmstart, data.mocap_pos, self._num_steps, self._left],
            )
            self._look()
        return self._seen(where)

    def step(self, where: Sequence[int], actions: np.ndarray) -> list[WorldStep | Exception]:
        end = np.full(self.num_worlds, _LATE, dtype=np.int32)
        end[list(where)] = _ACTING
        everywhere = np.zeros((self.num_worlds, *actions.shape[1:]), dtype=np.float32)
        everywhere[list(where)] = actions
        self.step_all(end, everywhere)
        taken, rewards = self._num_taken.numpy(), self._buffers[actions.shape[1]][1].numpy()
        ends = self._end.numpy()
        results: list[WorldStep | Exception] = []
        for world, seen in zip(where, self._seen(where), strict=True):
            how = int(ends[world])
            if how == _BROKEN:
                results.append(FloatingPointError("the simulation diverged: a position is not finite"))
                continue
            results.append(
                WorldStep(
                    seen,
                    rewards[world, : taken[world]].astype(np.float64).tolist(),
                    terminated=how in (_SUCCESS, _FAILURE),
                    truncated=how == _LATE,
                    success=how == _SUCCESS,
                )
            )
        return results

    def step_all(self, end: np.ndarray, actions: np.ndarray) -> None:
        """Carry out a chunk in the worlds whose entry of `end` is 0; results stay on the device: [num_worlds, K, 2]."""
        length = actions.shape[1]
        with wp.ScopedDevice(self._device):
            if length not in self._buffers:
                shape = (self.num_worlds, length)
                self._buffers[length] = wp.zeros((*shape, 2), dtype=wp.float32), wp.zeros(shape, dtype=wp.float32)
            self._buffers[length][0].assign(np.ascontiguousarray(actions, dtype=np.float32))
            self._end.assign(end)
            if length not in self._graphs:
                # All kernels are loaded by a chunk in which no world acts: none may be while a graph is captured.
                self._end.assign(np.full(self.num_worlds, _LATE, dtype=np.int32))
                self._act(length)
                self._end.assign(end)
                with wp.ScopedCapture() as capture:
                    self._act(length)
                self._graphs[length] = capture.graph
            wp.capture_launch(self._graphs[length])

    def render(self, where: Sequence[int]) -> list[np.ndarray]:
        with wp.ScopedDevice(self._device):
            if self._side is None:
                self._side = _Camera(self._host_model, "side", self.num_worlds, _VIEW)
            mjw.fwd_kinematics(self._model, self._data)
            self._side.take(self._model, self._data)
            pictures = self._side.frames.numpy()
        return [pictures[world].copy() for world in where]  # on a CPU `pictures` is the camera's own memory

    def state(self) -> np.ndarray:
        """Return places of all worlds: [num_worlds, 8]."""
        disc = self._data.mocap_pos.numpy()[:, 0, :2]
        return np.concatenate([self._data.qpos.numpy(), disc], axis=1)

    def close(self) -> None:
        self._graphs.clear()

    # --- inside -------------------------------------------------------------------------------------------------------

    def _act(self, length: int) -> None:
        model, data = self._model, self._data
        actions, rewards = self._buffers[length]
        rewards.zero_()
        self._num_taken.zero_()
        state = [data.qpos, data.qvel, data.qacc_warmstart]
        for at in range(length):
            wp.launch(_command, dim=(self.num_worlds, 2), inputs=[actions, at, _EDGE, _SPEED, data.qpos, data.ctrl])
            for _ in range(_NUM_SUBSTEPS):
                mjw.step(model, data)
            wp.launch(_hold, dim=(self.num_worlds, 6), inputs=[self._end, self._held], outputs=state)
            wp.launch(
                _judge,
                dim=self.num_worlds,
                inputs=[at, NEAR, ON_DISC, self._max_steps, self._progress, self._task, data.qpos, data.mocap_pos],
                outputs=[self._num_steps, self._left, self._num_taken, rewards, self._end],
            )
        self._look()

    def _look(self) -> None:
        """Take pictures of where things are now: a step of physics ends with newer places than its kinematics."""
        if self._above is not None:
            mjw.fwd_kinematics(self._model, self._data)
            self._above.take(self._model, self._data)

    def _seen(self, where: Sequence[int]) -> list[Observation]:
        state = self.state()
        pictures = self._above.frames.numpy() if self._above is not None else None
        return [
            Observation(
                instruction=INSTRUCTIONS[self.tasks[self.playing[world]].name],
                state=state[world] if self._feels else None,
                image=None if pictures is None else pictures[world].copy(),
            )
            for world in where
        ]


def _places(seed: int) -> np.ndarray:
    """Return where finger, red and blue puck and disc begin: [4, 2], all apart from each other."""
    random = np.random.default_rng(seed)
    while True:
        places = random.uniform(-_PLACES, _PLACES, (4, 2))
        apart = np.linalg.norm(places[:, None] - places[None], axis=2) + np.eye(4)
        if apart.min() > _APART:
            return places.astype(np.float32)
