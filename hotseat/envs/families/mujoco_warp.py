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
from dataclasses import dataclass
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
NEAR = wp.constant(0.062)  # between the centres of finger and puck that touch; their radii are 0.057 together
ON_DISC = wp.constant(0.05)  # between the centres of puck and disc
_EDGE = wp.constant(0.27)  # of the part of the table that the finger reaches
_PLACES = 0.22  # farthest that things lie from the middle
_APART = 0.13  # least between the centres of things
_NUM_SUBSTEPS = 3
_SPEED = wp.constant(1.0)  # metres per second of an action of 1
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


@wp.struct
class _Arrays:
    """State of all worlds, and what the kernels need to know of the run."""

    max_steps: int
    progress: float
    task: wp.array2d[wp.int32]  # whether to push, and which puck
    qpos: wp.array2d[wp.float32]
    qvel: wp.array2d[wp.float32]
    warm: wp.array2d[wp.float32]  # warm start of the solver
    disc: wp.array2d[wp.vec3]
    held: wp.array3d[wp.float32]  # qpos, qvel and warm after the last action
    num_steps: wp.array[wp.int32]
    num_taken: wp.array[wp.int32]  # actions of the chunk
    left: wp.array[wp.float32]  # way to the task's end, in metres
    end: wp.array[wp.int32]


@wp.func
def _distance(arrays: _Arrays, world: int, one: int, x: float, y: float) -> float:
    across = arrays.qpos[world, one] - x
    along = arrays.qpos[world, one + 1] - y
    return wp.sqrt(across * across + along * along)


@wp.func
def _way_left(arrays: _Arrays, world: int) -> float:
    """Return how far the finger is from its puck, and, if it is to be pushed, the puck from the disc."""
    puck = 2 + 2 * arrays.task[world, 1]
    left = _distance(arrays, world, puck, arrays.qpos[world, 0], arrays.qpos[world, 1])
    if arrays.task[world, 0] == 1:
        place = arrays.disc[world, 0]
        left += _distance(arrays, world, puck, place[0], place[1])
    return left


@wp.func
def _keep(arrays: _Arrays, world: int, at: int) -> None:
    arrays.held[world, 0, at] = arrays.qpos[world, at]
    arrays.held[world, 1, at] = arrays.qvel[world, at]
    arrays.held[world, 2, at] = arrays.warm[world, at]


@wp.kernel
def _place(is_new: wp.array[wp.int32], places: wp.array2d[wp.float32], arrays: _Arrays) -> None:
    """Begin an episode in new worlds. places: of finger, red and blue puck, and disc."""
    world = wp.tid()
    if is_new[world] == 0:
        return
    for at in range(6):
        arrays.qpos[world, at] = places[world, at]
        arrays.qvel[world, at] = 0.0
        arrays.warm[world, at] = 0.0
        _keep(arrays, world, at)
    arrays.disc[world, 0] = wp.vec3(places[world, 6], places[world, 7], 0.001)
    arrays.num_steps[world] = 0
    arrays.left[world] = _way_left(arrays, world)


@wp.kernel
def _command(actions: wp.array3d[wp.float32], at: int, arrays: _Arrays, ctrl: wp.array2d[wp.float32]) -> None:
    """Set the finger's velocity; none that leaves the part of the table that it reaches."""
    world, axis = wp.tid()
    value = wp.clamp(actions[world, at, axis], -1.0, 1.0) * _SPEED
    place = arrays.qpos[world, axis]
    if (place > _EDGE and value > 0.0) or (place < -_EDGE and value < 0.0):
        value = 0.0
    ctrl[world, axis] = value


@wp.kernel
def _hold(arrays: _Arrays) -> None:
    """Keep the state of worlds that acted; put that of others back to where it was."""
    world, at = wp.tid()
    if arrays.end[world] == 0:
        _keep(arrays, world, at)
    else:
        arrays.qpos[world, at] = arrays.held[world, 0, at]
        arrays.qvel[world, at] = arrays.held[world, 1, at]
        arrays.warm[world, at] = arrays.held[world, 2, at]


@wp.kernel
def _judge(at: int, arrays: _Arrays, rewards: wp.array2d[wp.float32]) -> None:
    """Count an action, and find out what it is worth, and whether it ends the episode."""
    world = wp.tid()
    if arrays.end[world] != 0:
        return
    arrays.num_taken[world] += 1
    arrays.num_steps[world] += 1
    puck = 2 + 2 * arrays.task[world, 1]
    finger_x = arrays.qpos[world, 0]
    finger_y = arrays.qpos[world, 1]
    for entry in range(6):
        if not wp.isfinite(arrays.qpos[world, entry]):
            arrays.end[world] = 4
            return
    if arrays.task[world, 0] == 1:
        place = arrays.disc[world, 0]
        if _distance(arrays, world, puck, place[0], place[1]) < ON_DISC:
            arrays.end[world] = 1
    elif _distance(arrays, world, puck, finger_x, finger_y) < NEAR:
        arrays.end[world] = 1
    elif _distance(arrays, world, 6 - puck, finger_x, finger_y) < NEAR:
        arrays.end[world] = 2
    now = _way_left(arrays, world)
    rewards[world, at] = arrays.progress * (arrays.left[world] - now)
    arrays.left[world] = now
    if arrays.end[world] == 1:
        rewards[world, at] += 1.0
    if arrays.end[world] == 0 and arrays.num_steps[world] >= arrays.max_steps:
        arrays.end[world] = 3


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


@dataclass(eq=False)
class _Chunk:
    """Buffers of chunks with some number of actions, and the graph that carries them out."""

    actions: Any  # [num_worlds, K, 2]
    rewards: Any  # [num_worlds, K]
    graph: Any = None


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
        self.tasks = [Task(index, name) for index, name in enumerate(tasks)]
        self.state_bounds = None
        if observe != "image":
            self.state_bounds = (np.full(8, -0.3, dtype=np.float32), np.full(8, 0.3, dtype=np.float32))
        self.is_on_device = self._device.is_cuda
        self._kinds = np.array([(name.startswith("push"), PUCKS.index(name.split("-")[1])) for name in tasks])
        self.playing = np.zeros(num_worlds, dtype=np.int64)  # task of each world
        self._chunks: dict[int, _Chunk] = {}  # by the number of actions
        with wp.ScopedDevice(self._device):
            self._host_model = mujoco.MjModel.from_xml_string(SCENE)
            self._model = mjw.put_model(self._host_model)
            if deterministic and self.is_on_device:  # on a CPU worlds are stepped one after another
                self._model.opt.deterministic = int(mjw.DeterminismType.ALL)
            self._model.opt.warn_overflow = 0  # what could overflow has room for the most that can be
            # At most 3 pairs touch at 2 points each, and 4 joints have limits.
            self._data = mjw.make_data(self._host_model, nworld=num_worlds, nconmax=6, njmax=12)
            self._cameras = {}  # by name
            if observe != "state":
                self._cameras["above"] = _Camera(self._host_model, "above", num_worlds, pixels)
            self._arrays = arrays = _Arrays()
            arrays.max_steps, arrays.progress = max_steps, progress
            arrays.qpos, arrays.qvel, arrays.warm = self._data.qpos, self._data.qvel, self._data.qacc_warmstart
            arrays.disc = self._data.mocap_pos
            arrays.held = wp.zeros((num_worlds, 3, 6), dtype=wp.float32)
            arrays.task = wp.zeros((num_worlds, 2), dtype=wp.int32)
            arrays.left = wp.zeros(num_worlds, dtype=wp.float32)
            for name in ("num_steps", "num_taken", "end"):
                setattr(arrays, name, wp.zeros(num_worlds, dtype=wp.int32))
        # Kernels are compiled or loaded before the first episode, whose deadline is short.
        everywhere = list(range(num_worlds))
        self.reset(everywhere, [0] * num_worlds, everywhere)
        self.step(everywhere, np.zeros((num_worlds, 1, 2)))

    @property
    def num_worlds(self) -> int:
        return len(self.playing)

    def reset(self, where: Sequence[int], tasks: Sequence[int], seeds: Sequence[int]) -> list[Observation]:
        is_new = np.zeros(self.num_worlds, dtype=np.int32)
        places = np.zeros((self.num_worlds, 8), dtype=np.float32)
        is_new[list(where)] = 1
        self.playing[list(where)] = tasks
        for world, seed in zip(where, seeds, strict=True):
            places[world] = _places(seed).reshape(-1)
        with wp.ScopedDevice(self._device):
            self._arrays.task.assign(self._kinds[self.playing].astype(np.int32))
            wp.launch(_place, dim=self.num_worlds, inputs=[wp.array(is_new), wp.array(places), self._arrays])
            self._look()
        return self._seen(where)

    def step(self, where: Sequence[int], actions: np.ndarray) -> list[WorldStep | Exception]:
        end = np.full(self.num_worlds, _LATE, dtype=np.int32)
        end[list(where)] = _ACTING
        everywhere = np.zeros((self.num_worlds, *actions.shape[1:]), dtype=np.float32)
        everywhere[list(where)] = actions
        self.step_all(end, everywhere)
        taken, rewards = self._arrays.num_taken.numpy(), self._chunks[actions.shape[1]].rewards.numpy()
        ends = self._arrays.end.numpy()
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
            if length not in self._chunks:
                shape = (self.num_worlds, length)
                actions_of = wp.zeros((*shape, 2), dtype=wp.float32)
                chunk = self._chunks[length] = _Chunk(actions_of, wp.zeros(shape, dtype=wp.float32))
                # All kernels are loaded by a chunk in which no world acts: none may be while a graph is captured.
                self._arrays.end.assign(np.full(self.num_worlds, _LATE, dtype=np.int32))
                self._act(chunk)
                with wp.ScopedCapture() as capture:
                    self._act(chunk)
                chunk.graph = capture.graph
            chunk = self._chunks[length]
            chunk.actions.assign(np.ascontiguousarray(actions, dtype=np.float32))
            self._arrays.end.assign(end)
            wp.capture_launch(chunk.graph)

    def render(self, where: Sequence[int]) -> list[np.ndarray]:
        with wp.ScopedDevice(self._device):
            if "side" not in self._cameras:
                self._cameras["side"] = _Camera(self._host_model, "side", self.num_worlds, _VIEW)
            self._look("side")
            pictures = self._cameras["side"].frames.numpy()
        return [pictures[world].copy() for world in where]  # on a CPU `pictures` is the camera's own memory

    def state(self) -> np.ndarray:
        """Return places of all worlds: [num_worlds, 8]."""
        disc = self._data.mocap_pos.numpy()[:, 0, :2]
        return np.concatenate([self._data.qpos.numpy(), disc], axis=1)

    def close(self) -> None:
        self._chunks.clear()

    # --- inside -------------------------------------------------------------------------------------------------------

    def _act(self, chunk: _Chunk) -> None:
        chunk.rewards.zero_()
        self._arrays.num_taken.zero_()
        for at in range(chunk.rewards.shape[1]):
            inputs = [chunk.actions, at, self._arrays, self._data.ctrl]
            wp.launch(_command, dim=(self.num_worlds, 2), inputs=inputs)
            for _ in range(_NUM_SUBSTEPS):
                mjw.step(self._model, self._data)
            wp.launch(_hold, dim=(self.num_worlds, 6), inputs=[self._arrays])
            wp.launch(_judge, dim=self.num_worlds, inputs=[at, self._arrays, chunk.rewards])
        self._look()

    def _look(self, camera: str = "above") -> None:
        """Take pictures of where things are now: a step of physics ends with newer places than its kinematics."""
        if camera in self._cameras:
            mjw.fwd_kinematics(self._model, self._data)
            self._cameras[camera].take(self._model, self._data)

    def _seen(self, where: Sequence[int]) -> list[Observation]:
        state = self.state()
        pictures = self._cameras["above"].frames.numpy() if "above" in self._cameras else None
        return [
            Observation(
                instruction=INSTRUCTIONS[self.tasks[self.playing[world]].name],
                state=None if self.state_bounds is None else state[world],
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
