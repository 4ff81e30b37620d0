"""The order in which roles start where engines measure the free memory of their devices."""

from types import SimpleNamespace

from phase_fakes import FakeGroup

from hotseat.config import loads
from hotseat.loop.rl.launch import _Launching
from hotseat.loop.rl.role_records import LaunchContext
from hotseat.model_source import ModelSource
from hotseat.planning.config_plan import make_plan
from hotseat.rollout.kinds import EngineSettings

CONFIG = """
actor: {model: none}
algorithm: {estimator: gae}
reward: {judge: {rubric: is it good, model: none, engine: {kind: vllm, enable_offload: true}}}
rollout: {engine: vllm, enable_offload: true}
components: {filter: {path: 'a:B'}}
data: {max_length: 16}
train: {dtype: bf16, batch_size: 8, micro_batch_size: 4}
"""


class Cluster:
    """Launches fakes, and logs what it is told and what they are called."""

    runtime = "ray"
    nodes = (SimpleNamespace(num_devices=1, device_bytes=80 << 30),)

    def __init__(self, log: list[str]):
        self._log = log

    def prepare(self, name, cls, **options):
        self._log.append(f"prepare {name} as {cls.__name__}")

    def launch(self, name, cls, *, args, wait, **options):
        self._log.append(f"launch {name}")
        worker = SimpleNamespace(offload=lambda parts: None, onload=lambda parts: None)
        group = FakeGroup(name, lambda rank: worker, 1, self._log)
        group.ready = lambda: self._log.append(f"ready {name}")
        return group

    def device_memory(self, device):
        return SimpleNamespace(used=3 << 30)


def test_engines_that_measure_their_devices_start_one_at_a_time_before_models_load():
    log: list[str] = []
    config = loads(CONFIG)
    engine = EngineSettings(ModelSource("none"), 16, 4, (1,), "bfloat16", 1, engine="vllm")
    launch = LaunchContext(
        config,
        make_plan(config, "1x1xA100-80G"),
        Cluster(log),
        schedule_length=1,
        engines={"rollout": engine, "judge": engine},
        host=SimpleNamespace(spool=None),
        folder_proof=None,
        samples=True,
    )
    assert launch.measures_its_device
    assert not launch.warms_models_up
    journal = SimpleNamespace(say=lambda text: log.append(text))
    _Launching(launch, SimpleNamespace(watch=lambda group, started_s: None), journal).launch_all()
    assert log[: log.index("launch actor")] == [
        "launch rollout",
        "launch agents",
        "prepare actor as ActorWorker",
        "prepare critic as CriticWorker",
        "ready rollout",
        "rollout.offload",
        "launch judge",
        "ready judge",
        "judge.offload",
        "rollout.onload",
        "device 0: 3.0 GiB in use after the engines started",
    ]
    assert log[log.index("launch actor") :][:3] == ["launch actor", "launch critic", "launch filter"]
    assert log.count("judge.offload") == 1
