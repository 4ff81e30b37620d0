"""The use of the machine: what the system's files say, and a record of bounded size."""

import json
import os
import time
from pathlib import Path

import pytest

from hotseat.machine import processor_seconds, used_bytes
from hotseat.observe import machine_use
from hotseat.observe.machine_use import MachineUse, UseHistory, summary

TICKS = os.sysconf("SC_CLK_TCK")


def write(system: Path, **files: str) -> Path:
    for name, text in files.items():
        path = system / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return system


def test_processors_work_in_user_kernel_and_interrupts_but_not_while_idle_waiting_or_stolen(tmp_path):
    stat = f"cpu  {3 * TICKS} {TICKS} {2 * TICKS} 99999 88888 {TICKS} 0 {TICKS} 0 0\ncpu0 1 1\ncpu1 1 1\nintr 5\n"
    assert processor_seconds(write(tmp_path, proc__stat=stat)) == (7.0, 2.0)


def test_in_a_container_with_a_limit_they_are_its_own(tmp_path):
    write(tmp_path, proc__stat="cpu  1 1 1 1 1 1 1 1 0 0\ncpu0 1\n")
    group = {"cpu_dot_max": "150000 100000\n", "cpu_dot_stat": "usage_usec 2500000\nuser_usec 1\n"}
    write(tmp_path, **{f"sys__fs__cgroup__{name}": text for name, text in group.items()})
    assert processor_seconds(tmp_path) == (2.5, 1.5)


def test_without_these_files_nothing_is_known(tmp_path):
    assert (processor_seconds(tmp_path), used_bytes(tmp_path)) == (None, 0)


def test_memory_that_can_be_had_is_not_in_use(tmp_path):
    write(tmp_path, proc__meminfo="MemTotal: 1000 kB\nMemFree: 100 kB\nMemAvailable: 400 kB\n")
    assert used_bytes(tmp_path) == 600 << 10


def test_a_process_that_works_is_seen():
    use = MachineUse({1: lambda: (0.75, 3 << 30), 2: lambda: (None, None)})
    assert "machine/cpu" not in use.sample()
    until = time.process_time() + 0.3
    while time.process_time() < until:
        pass
    figures = use.sample()
    assert 0 < figures["machine/cpu"] <= 1
    assert figures["machine/memory"] > 0
    assert (figures["machine/device 1/busy"], figures["machine/device 1/memory"]) == (0.75, 3.0)
    assert not [name for name in figures if "device 2" in name]


def test_shares_are_averaged_and_of_memory_the_most_counts():
    samples = [{"machine/cpu": 0.2, "machine/memory": 5.0}, {"machine/cpu": 0.4, "machine/memory": 3.0}, {}]
    assert summary(samples) == {"machine/cpu": pytest.approx(0.3), "machine/memory": 5.0}


class Clock:
    """Stands in for `time` in the module."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    time = monotonic


def test_the_record_covers_a_whole_run_and_never_grows_beyond_its_size(tmp_path, monkeypatch):
    clock = Clock()
    monkeypatch.setattr(machine_use, "time", clock)
    path, sizes = tmp_path / "machine.jsonl", []
    history = UseHistory(path, 2.0, max_lines=8)
    for number in range(1000):
        if number == 500:  # the run is resumed
            history = UseHistory(path, 2.0, max_lines=8)
        clock.now += 2.0
        history.add(number, {"machine/cpu": number / 1000, "machine/memory": float(number)})
        sizes.append(len(path.read_text().splitlines()) if path.exists() else 0)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert max(sizes) <= 9
    assert len(lines) >= 4
    assert lines[0]["time"] - lines[0]["over_s"] < 10  # from the beginning
    assert lines[-1]["time"] >= 2000 - 2 * lines[-1]["over_s"]  # to the end
    assert [line["step"] for line in lines] == sorted(line["step"] for line in lines)
    for line in lines:  # the mean of the steps that it covers, and their highest
        assert line["machine/cpu"] == pytest.approx((line["step"] - line["over_s"] / 4) / 1000, abs=0.02)
        assert line["machine/memory"] == line["step"]


def test_a_damaged_record_is_no_hindrance(tmp_path):
    path = tmp_path / "machine.jsonl"
    path.write_text("nonsense\n")
    history = UseHistory(path, 0.0)
    history.add(1, {"machine/cpu": 0.5})
    assert json.loads(path.read_text().splitlines()[-1])["step"] == 1
