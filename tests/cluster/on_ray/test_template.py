"""Workers that are forked from a template are like others, and what cannot be forked starts as an ordinary process."""

from __future__ import annotations

import importlib
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cluster_workers import Plain
from waiting import wait_until

from hotseat.cluster import Cluster, Process, start_ahead, started_template
from hotseat.cluster.on_ray import forked, template_process
from hotseat.cluster.on_ray import template as template_module
from hotseat.cluster.on_ray.template import SWITCH, Template
from hotseat.cluster.on_ray.template_process import differing, has_open, load
from hotseat.openmp import thread_env
from hotseat.processes.supervisor import end_marked, marked, process_state


class Forked(Plain):
    """Answers about the process that it is in."""

    def parent(self) -> int:
        return os.getppid()

    def loaded(self) -> bool:
        return "xml.dom.minidom" in sys.modules

    def draws(self) -> tuple[float, float]:
        import numpy

        return random.random(), float(numpy.random.random())

    def group(self) -> int:
        return os.getpgid(0)


@pytest.mark.long
@pytest.mark.ray
@pytest.mark.slow
def test_workers_are_forks_with_an_environment_and_random_numbers_of_their_own():
    with started_template(["numpy", "xml.dom.minidom"], thread_env(1)) as template:
        assert template is not None
        workers_template = template.pids[1]
        with Cluster(num_devices=2, template=template) as cluster:
            cluster.prepare("forks", Forked, processes=[Process(0, 0, (0,)), Process(1, 0, (1,))])
            forks = cluster.launch("forks", Forked, processes=[Process(0, 0, (0,)), Process(1, 0, (1,))])
            assert forks.call(Forked.parent) == [workers_template] * 2
            assert forks.call(Forked.loaded) == [True, True]
            assert forks.call(Forked.rank) == [0, 1]
            names = ("RANK", "CUDA_VISIBLE_DEVICES")
            assert forks.call(Forked.environment, *names) == [
                dict(zip(names, values, strict=True)) for values in (("0", "0"), ("1", "1"))
            ]
            assert forks.call(Forked.group) == forks.pids()
            first, second = forks.call(Forked.draws)
            assert first[0] != second[0]
            assert first[1] != second[1]
            # A library may read any variable when it is loaded, so this one is no fork.
            other = cluster.launch("other", Forked, env={"SOME_SETTING": "1"})
            assert other.call(Forked.parent) != [workers_template]
            assert other.call(Forked.loaded) == [False]
            assert other.call(Forked.environment, "SOME_SETTING") == [{"SOME_SETTING": "1"}]
            (before,) = forks.on(1).call(Forked.pid)
            forks.restart(1)
            assert forks.on(1).call(Forked.parent) == [workers_template]
            assert forks.on(1).call(Forked.pid) != [before]
            # Without its template a worker is an ordinary process.
            os.kill(workers_template, 9)
            wait_until(lambda: process_state(workers_template) == "gone")
            assert forks.call(Forked.rank) == [0, 1]
            late = cluster.launch("late", Forked)
            assert late.call(Forked.loaded) == [False]
        pids = template.pids
    assert [pid for pid in pids if process_state(pid) != "gone"] == []


PROGRAM = """
import json, numpy, os, random, signal, sys, threading, torch

def files():
    links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd") if int(fd) > 2]
    paths = [os.readlink(link) for link in links if os.path.lexists(link)]  # the list itself is closed again
    # On some CPUs a library that torch loads keeps files of /sys open.
    return sorted(path for path in paths if path != "/dev/null" and not path.startswith("/sys/"))

def last():
    threading.main_thread().join()
    print("last", flush=True)

if sys.argv[1] == "raise":
    raise ValueError("of the program")
if sys.argv[1] == "words":
    sys.exit("words")
print(json.dumps({
    "parent": os.getppid(),
    "argv": sys.argv,
    "path": sys.path,
    "is_loaded": "xml.dom.minidom" in sys.modules,
    "draws": [random.random(), numpy.random.random(), float(torch.rand(1))],
    "threads": torch.get_num_threads(),
    "files": files(),
    "env": {name: os.environ.get(name) for name in ("OPENBLAS_NUM_THREADS", "PYTHONPATH")},
    "group": [os.getpid(), os.getpgid(0)],
    "signals": [signal.getsignal(number) == each for number, each in (
        (signal.SIGINT, signal.default_int_handler), (signal.SIGTERM, signal.SIG_DFL))],
}))
threading.Thread(target=last).start()
sys.exit(int(sys.argv[1]))
"""


def is_listening(address: str) -> bool:
    """Tell whether a process listens there: its file is there a moment earlier."""
    sockets = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()]
    return any(fields[-1] == address and fields[3] == "00010000" for fields in sockets)


@pytest.mark.long
@pytest.mark.slow
def test_programs_that_are_forked_from_a_template_are_like_others(tmp_path):
    program = tmp_path / "main.py"
    program.write_text(PROGRAM)
    template = Template(["torch", "numpy", "xml.dom.minidom"], thread_env(1))
    env = {**os.environ, **thread_env(1)}

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, *template.for_workers, str(program), *arguments]
        return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, env=env)

    try:
        wait_until(lambda: is_listening(template.for_workers[-1]))
        done, third, words, raised = runs = [run(argument) for argument in ("0", "3", "words", "raise")]
        assert [each.returncode for each in runs] == [0, 3, 1, 1]
        assert (done.stderr, third.stderr, words.stdout, words.stderr, raised.stdout) == ("", "", "", "words\n", "")
        assert raised.stderr.endswith("ValueError: of the program\n")
        first, second = (each.stdout.split("\n") for each in (done, third))
        assert first[1:] == second[1:] == ["last", ""]
        seen, other = json.loads(first[0]), json.loads(second[0])
        assert seen["parent"] == template.pids[1]
        assert seen["argv"] == [str(program), "0"]
        assert seen["path"][0] == str(tmp_path)
        assert not {"", os.path.dirname(sys.executable)} & set(seen["path"])
        assert seen["is_loaded"]
        assert len({*seen["draws"], *other["draws"]}) == 6
        assert seen["threads"] == 1
        assert seen["files"] == []
        assert seen["group"][0] == seen["group"][1]
        assert seen["signals"] == [True, True]
    finally:
        pids = template.pids
        template.close()
    assert [pid for pid in pids if process_state(pid) != "gone"] == []


LATE_MODULE = """
import pathlib, time

folder = pathlib.Path(__file__).parent
(folder / "loading").touch()
while not (folder / "go").exists():
    time.sleep(0.01)
"""


def test_a_fork_that_comes_after_the_end_of_the_driver_ends_with_the_template(tmp_path):
    """The guard has ended the processes of the session by then: it does not see this one."""
    (tmp_path / "late_module.py").write_text(LATE_MODULE)
    (tmp_path / "program.py").write_text("import time; time.sleep(3600)")
    address, mark = str(tmp_path / "socket"), f"{os.getpid()}-{time.monotonic_ns()}"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path]), "TEST_TEMPLATE": mark}
    command = [sys.executable, "-P", template_process.__file__, address, "--", "late_module"]
    template = subprocess.Popen(command, stdin=subprocess.PIPE, env=env)
    try:
        wait_until(lambda: is_listening(address))
        program = ["setup_worker.py", str(tmp_path / "program.py")]
        asker = subprocess.Popen([sys.executable, "-I", "-S", forked.__file__, address, *program], env=env)
        wait_until((tmp_path / "loading").exists)
        asker.kill()
        asker.wait()
        template.stdin.close()
        (tmp_path / "go").touch()
        assert template.wait(60) == 0
        wait_until(lambda: not marked("TEST_TEMPLATE", [mark]))
    finally:
        end_marked("TEST_TEMPLATE", [mark])
        template.wait(60)


def test_a_module_that_cannot_be_loaded_is_left_to_the_process_that_needs_it(tmp_path, monkeypatch):
    (tmp_path / "not_for_this_machine.py").write_text("raise RuntimeError('no such device')")
    monkeypatch.syspath_prepend(tmp_path)
    load(["not_for_this_machine", "not_installed", "xml.dom.minidom"])
    assert "xml.dom.minidom" in sys.modules
    with pytest.raises(RuntimeError, match="no such device"):
        importlib.import_module("not_for_this_machine")


def test_there_is_no_template_where_it_is_of_no_use_or_switched_off(monkeypatch):
    with started_template(["json"], {}, is_useful=False) as template:
        assert template is None
    monkeypatch.setenv(SWITCH, "0")
    with started_template(["json"], {}) as template:
        assert template is None


@pytest.mark.skipif(not template_module.can_fork(), reason="processes cannot be forked here")
def test_one_that_was_started_ahead_is_used_if_it_loads_the_same():
    end = start_ahead(["json"], thread_env(1))
    with started_template(["json"], thread_env(1)) as template:
        assert template is not None
        assert end == template.close
        pids = template.pids
        assert {process_state(pid) for pid in pids} == {"running"}
    assert {process_state(pid) for pid in pids} == {"gone"}
    start_ahead(["json"], thread_env(1))
    ahead = template_module._ahead[2].pids
    with started_template(["csv"], thread_env(1)) as template:
        assert {process_state(pid) for pid in ahead} == {"gone"}
        assert template.pids != ahead


@pytest.mark.skipif(not template_module.can_fork(), reason="processes cannot be forked here")
def test_one_whose_driver_was_killed_removes_its_folder():
    template = Template(["json"], thread_env(1))
    folder = Path(template._directory)
    try:
        for process in template._processes:
            assert process.stdin is not None
            process.stdin.close()
        wait_until(lambda: not folder.exists())
    finally:
        template.close()


def test_variables_that_ray_and_we_set_for_each_process_may_differ():
    ours = {"HOME": "/home", "RAY_NODE_ID": "1", "OMP_NUM_THREADS": "2", "HF_HOME": "/a"}
    assert (
        differing(ours, {**ours, "RAY_NODE_ID": "2", "RANK": "1", "HOTSEAT_WORKER": "a:b", "OMP_NUM_THREADS": "1"})
        == set()
    )
    assert differing(ours, {**ours, "HF_HOME": "/b", "TORCH_LOGS": "all"}) == {"HF_HOME", "TORCH_LOGS"}
    assert differing(ours, {"HOME": "/home"}) == {"HF_HOME"}


def test_a_process_knows_whether_it_has_a_file_open(tmp_path):
    with (tmp_path / "device-uvm").open("w"):
        assert has_open(str(tmp_path / "device-uvm"))
        assert has_open(str(tmp_path / "device"))
        assert not has_open(str(tmp_path / "device-uvm-tools"))
    assert not has_open(str(tmp_path / "device"))


@pytest.mark.parametrize(("how_it_began", "is_forkable"), [("SIG_DFL", True), ("SIG_IGN", False)])
def test_a_template_that_does_not_hear_of_the_end_of_forks_makes_none(how_it_began, is_forkable):
    """As the child of a process that ignores its children, or after a library has done so."""
    code = f"""
import runpy, signal, sys
signal.signal(signal.SIGCHLD, signal.{how_it_began})
print(runpy.run_path(sys.argv[1])["is_forkable"]())
"""
    command = [sys.executable, "-c", code, template_process.__file__]
    assert subprocess.check_output(command, text=True) == f"{is_forkable}\n"
