"""What the driver of thousands of devices spends, with stand-ins for engines and trainers, and everything else real.

Planner, pacer, driver, Ray's calls, eight rollout hosts with their reward functions, the ledger and all files are the
product's own, started as `hotseat run` starts them. Engines and trainers are stand-ins (`lib/simulated`) in a few
processes: they answer and learn nothing, in the time that one H200 was measured to take. Half of the devices train, a
rank each; the others are engines of eight devices. What is measured here is therefore the driver alone; devices that
are simulated take their time, and all processes share the cores of this machine, so seconds of a step say little.

    python bench/scale.py [--devices 64 512 4096] [--samples 16384] [--staleness 0 1] [--steps 4] [--speed 1]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from lib.simulated import register
from lib.simulated.costs import NUM_SLOTS, SPEED
from lib.sums import make_sums
from rich.console import Console
from rich.table import Table

from hotseat.config import Config, loads
from hotseat.loop.start import start
from hotseat.loop.steering import Steering
from hotseat.planning.config_plan import make_plan

HERE = Path(__file__).resolve().parent
GROUP_SIZE = 8
NUM_HOSTS = 8
DEVICES_PER_ENGINE = 8
MAX_NEW_TOKENS = 160

CONFIG = """
task: rl
name: scale
run_dir: {directory}
cluster:
  runtime: simulated
  inventory: {inventory}
  component_placement: {{actor: 0-{last_trainer}, rollout: {first_engine}-{last_device}}}
overlap: {overlap}
actor: {{model: {directory}/model, optimizer: {{learning_rate: 1e-5, schedule: constant}}}}
data: {{path: {directory}/prompts.jsonl, label_key: label, max_length: 192, max_samples: {num_prompts}}}
reward: {{function: {directory}/reward.py}}
rollout:
  engine: simulated
  tensor_parallel_size: {devices_per_engine}
  batch_size: {batch_size}
  samples_per_prompt: {group_size}
  max_new_tokens: {max_new_tokens}
  num_slots: {num_slots}
  num_hosts: {num_hosts}
train: {{backend: simulated, dtype: bf16, batch_size: {num_samples}}}
checkpoint: {{every_minutes: 0}}
"""

# Which part of the driver's work a function does: file below hotseat/, function. The outermost that is listed counts.
PARTS = {
    ("loop/rl/tickets.py", "admit"): "admission",
    ("loop/rl/tickets.py", "begin"): "admission",
    ("loop/rl/groups.py", "begin"): "admission",
    ("loop/rl/overlapped.py", "_begin"): "admission",
    ("data/order.py", "next"): "admission",
    ("loop/rl/stream.py", "take"): "groups",
    ("loop/rl/overlapped.py", "take"): "groups",
    ("loop/rl/overlapped.py", "weight_update"): "groups",
    ("loop/rl/phases.py", "_shares"): "batches",
    ("loop/rl/phases.py", "_make_experience"): "advantages",
    ("loop/rl/stream.py", "release"): "batches",
    ("loop/rl/overlapped.py", "release"): "batches",
    ("loop/rl/phases.py", "run"): "update, push",
    ("loop/rl/step_metrics.py", "of_step"): "metrics",
    ("loop/rl/sample_log.py", "record"): "ledger, samples",
    ("observe/journal.py", "step"): "events",
}


REWARD = """
import random


def reward_func(queries, prompts, labels):
    return [random.Random(query).random() for query in queries]
"""


def inventory_of(num_devices: int) -> str:
    return f"{-(-num_devices // 8)}x8xH200"


def config_text(directory: Path, num_devices: int, num_samples: int, staleness: int, num_steps: int) -> str:
    half = num_devices // 2
    batch_size = num_samples // GROUP_SIZE
    overlap = f"{{staleness: {staleness}, order: arrival, in_flight: keep}}" if staleness else "{staleness: 0}"
    return CONFIG.format(
        directory=directory,
        inventory=inventory_of(num_devices),
        last_trainer=half - 1,
        first_engine=half,
        last_device=num_devices - 1,
        overlap=overlap,
        num_prompts=batch_size * num_steps,
        devices_per_engine=DEVICES_PER_ENGINE,
        batch_size=batch_size,
        group_size=GROUP_SIZE,
        max_new_tokens=MAX_NEW_TOKENS,
        num_slots=NUM_SLOTS,
        num_hosts=NUM_HOSTS,
        num_samples=num_samples,
    )


# --- measuring --------------------------------------------------------------------------------------------------------


class PartSampler:
    """Attributes the processor time of this process, its other threads included, to what the main thread does."""

    PERIOD_S = 0.02

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self.own_s = 0.0  # processor time of the sampling itself
        self._main = threading.main_thread().ident
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    @contextmanager
    def running(self) -> Iterator[None]:
        self._thread.start()
        try:
            yield
        finally:
            self._ended.set()
            self._thread.join()

    def _run(self) -> None:
        before_s = time.process_time()
        while not self._ended.wait(self.PERIOD_S):
            now_s = time.process_time()
            assert self._main is not None
            self.seconds[part_of(sys._current_frames().get(self._main))] += now_s - before_s
            before_s = now_s
            self.own_s = time.thread_time()


def part_of(frame: FrameType | None) -> str:
    """Return the part that a stack belongs to, by the innermost of its functions that stands in the table."""
    while frame is not None:
        file = frame.f_code.co_filename.rpartition("/hotseat/")[2]
        part = PARTS.get((file, frame.f_code.co_name))
        if part is not None:
            return part
        frame = frame.f_back
    return "other"


@dataclass
class Watching(Steering):
    """Notes after each step what the driver has used."""

    sampler: PartSampler
    rows: list[dict[str, Any]] = field(default_factory=list)

    def stepped(self, step: int, metrics: Mapping[str, Any]) -> Mapping[str, float]:
        parts, self.sampler.seconds = self.sampler.seconds, Counter()
        facts = {
            "rss_mib": resident_mib(),
            "cpu_s": time.process_time() - self.sampler.own_s,
            "main_s": main_thread_s(),
            "ray_s": ray_threads_s(),
        }
        self.rows.append({"step": step, "parts": dict(parts), "step_s": metrics.get("step_s")} | facts)
        return {}


def resident_mib() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def main_thread_s() -> float:
    ident = threading.main_thread().ident
    assert ident is not None
    return time.clock_gettime(time.pthread_getcpuclockid(ident))


def ray_threads_s() -> float:
    """Return the processor time of the threads of this process that Python does not know: they are Ray's."""
    known = {str(thread.native_id) for thread in threading.enumerate()}
    total = 0.0
    for task in Path("/proc/self/task").iterdir():
        if task.name not in known:
            total += int((task / "schedstat").read_text().split()[0]) / 1e9
    return total


def measure(text: str, num_devices: int) -> dict[str, Any]:
    """Plan and run a config in this process; return what it took."""
    register()
    config = loads(text)
    plan_s, plan_cpu_s = planned(config, num_devices)
    sampler = PartSampler()
    watching = Watching(sampler)
    with sampler.running():
        start(config, steering=watching)
    return {"plan_s": plan_s, "plan_cpu_s": plan_cpu_s, "rows": watching.rows}


def planned(config: Config, num_devices: int) -> tuple[float, float]:
    """Return the seconds of a plan for real machines of so many devices, by the clock and of processor time."""
    inventory = inventory_of(num_devices)
    started_s, started_cpu_s = time.monotonic(), time.process_time()
    make_plan(config, inventory)
    return time.monotonic() - started_s, time.process_time() - started_cpu_s


# --- the table --------------------------------------------------------------------------------------------------------


def run_apart(text: str, num_devices: int, speed: float, folder: Path) -> dict[str, Any]:
    """Measure in a process of its own, so that memory is that of one run."""
    config, result = folder / "config.yaml", folder / "result.json"
    config.write_text(text)
    command = [sys.executable, __file__, "--one", str(config), str(result), "--devices", str(num_devices)]
    paths = [str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH", "")]
    env = os.environ | {SPEED: str(speed), "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    log = folder / "log.txt"
    with log.open("w") as file:
        ended = subprocess.run(command, env=env, stdout=file, stderr=subprocess.STDOUT, check=False)
    if ended.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {ended.returncode}:\n{log.read_text()[-6000:]}")
    measured: dict[str, Any] = json.loads(result.read_text())
    return measured


def mean_of(rows: list[dict[str, Any]], name: str) -> float:
    return sum(row[name] for row in rows) / len(rows)


def spent_per_step(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Return processor seconds of a step after the first: of the driver, its main thread, and Ray's threads in it."""
    return {name: (rows[-1][name] - rows[0][name]) / (len(rows) - 1) for name in ("cpu_s", "main_s", "ray_s")}


def show(measured: Mapping[tuple[int, int], dict[str, Any]], num_samples: int) -> None:
    """Print a table of all runs, and one of what their drivers spent on what."""
    title = f"SIMULATED devices, {num_samples:,} samples a step; the driver and {NUM_HOSTS} rollout hosts are real"
    names = ("devices", "staleness", "plan s", "driver CPU s/step", "of which main thread", "Ray's threads")
    table = Table(*names, "MiB after step 1", "after the last", "step s here", title=title)
    parts = Table(
        "devices", "staleness", *dict.fromkeys(PARTS.values()), "other", title="driver CPU ms of a step, by part"
    )
    for (num_devices, staleness), each in measured.items():
        rows = [row for row in each["rows"] if row["step"] >= 1]
        steady, spans = rows[1:], len(rows) - 1
        spent_s = spent_per_step(rows)
        cells = [f"{num_devices:,}", str(staleness)]
        table.add_row(
            *cells,
            f"{each['plan_s']:.2f}",
            *(f"{seconds:.2f}" for seconds in spent_s.values()),
            f"{rows[0]['rss_mib']:.0f}",
            f"{rows[-1]['rss_mib']:.0f}",
            f"{mean_of(steady, 'step_s'):.1f}",
        )
        spent: Counter[str] = Counter()
        for row in steady:
            spent.update(row["parts"])
        shown = [f"{1e3 * spent[name] / spans:.0f}" for name in (*dict.fromkeys(PARTS.values()), "other")]
        parts.add_row(*cells, *shown)
    console = Console(width=130)
    console.print(table)
    console.print(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, nargs="+", default=[64, 512, 4096])
    parser.add_argument("--samples", type=int, default=16_384)
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--steps", type=int, default=4, help="at least 2: the first imports and connects")
    parser.add_argument("--speed", type=float, default=1.0, help="simulated seconds of devices in one second here")
    parser.add_argument("--one", nargs=2, metavar=("CONFIG", "RESULT"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        config, result = map(Path, arguments.one)
        result.write_text(json.dumps(measure(config.read_text(), arguments.devices[0])))
        return
    measured = {}
    for num_devices in arguments.devices:
        for staleness in arguments.staleness:
            with tempfile.TemporaryDirectory() as name:
                folder = Path(name)
                make_sums(folder, arguments.samples // GROUP_SIZE * arguments.steps, 1024, REWARD)
                text = config_text(folder, num_devices, arguments.samples, staleness, arguments.steps)
                measured[num_devices, staleness] = run_apart(text, num_devices, arguments.speed, folder)
            seconds = spent_per_step([row for row in measured[num_devices, staleness]["rows"] if row["step"] >= 1])
            print(f"{num_devices} devices, staleness {staleness}: {seconds['cpu_s']:.2f} s a step", file=sys.stderr)
    show(measured, arguments.samples)


if __name__ == "__main__":
    main()
