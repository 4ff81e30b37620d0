"""Errors that tell of a death, and errors that would come again."""

import os
import socket
import subprocess
import sys
import textwrap

import pytest

from hotseat import errors
from hotseat.deaths import DEATHS, comes_again, reporter_of


def caused(error: Exception, by: BaseException) -> Exception:
    error.__cause__ = by
    return error


def dead(error: errors.RunError) -> errors.RunError:
    error.is_death = True
    return error


@pytest.mark.parametrize(
    "error",
    [
        errors.ClusterError("Ray's GCS server ended"),
        errors.DeadlineError("actor rank 0: no answer"),
        dead(errors.WorkerError("actor rank 1: its process died")),
        caused(errors.CheckpointError("not written"), dead(errors.WorkerError("actor rank 1: its process died"))),
        caused(errors.RunError("the model could not be exported"), errors.ClusterError("Ray ended")),
        errors.BudgetError("does not fit", "train", 512),  # it resumes with the smaller budget
        ConnectionResetError("[Errno 104] Connection reset by peer"),
        caused(errors.RunError("a push failed"), BrokenPipeError(32, "Broken pipe")),
    ],
)
def test_deaths_do_not_come_again(error):
    assert not comes_again(error)


@pytest.mark.parametrize(
    "error",
    [
        errors.ConfigError([]),
        errors.DataError("line 3"),
        errors.RewardError("too many failed"),
        errors.NonFiniteError("3 updates"),
        errors.WeightError("digests differ"),
        errors.CheckpointError("the disk is full"),
        errors.DeviceMemoryError("one sample does not fit"),
        errors.RunError("a fault at update.before"),
        errors.WorkerError("actor rank 0: 'update' raised KeyError: 'x'"),
        caused(errors.RewardError("too many failed"), ConnectionResetError()),
        KeyError("x"),
        MemoryError(),
        OSError(28, "No space left on device"),
    ],
)
def test_what_a_run_would_meet_again(error):
    assert comes_again(error)


def test_every_error_of_ours_is_judged():
    """None of them is left to its text but the two that tell of others."""
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.HotseatError)]
    unjudged = {kind.__name__ for kind in kinds if kind.comes_again is None}
    assert unjudged == {"HotseatError", "RunError", "WorkerError"}


# --- what libraries write, by the libraries themselves ----------------------------------------------------------------

RANK = """
import datetime, os, signal, sys, torch, torch.distributed as dist
rank = int(sys.argv[1])
store = dist.TCPStore("127.0.0.1", 0 if rank == 0 else int(sys.argv[2]), 2, rank == 0, datetime.timedelta(seconds=60),
                      wait_for_workers=False)
if rank == 0:
    print(store.port, flush=True)
try:
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=2, timeout=datetime.timedelta(seconds=float(sys.argv[3]))
    )
    x = torch.ones(4)
    dist.all_reduce(x)
    if rank == 1:
        if sys.argv[4] == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        signal.pause()
    dist.all_reduce(x)
except Exception as error:
    print(f"{type(error).__name__}: {error}", flush=True)
"""


@pytest.mark.parametrize(("timeout_s", "what"), [("60", "kill"), pytest.param("5", "hang", marks=pytest.mark.long)])
def test_gloo_tells_of_a_rank_that_died_or_hangs(timeout_s, what):
    env = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}

    def rank(number: int, port: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", RANK, str(number), port, timeout_s, what]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=env)

    with rank(0, "0") as first, rank(1, first.stdout.readline().strip()) as second:
        text = first.stdout.read()
        second.kill()
    assert reporter_of(text) is not None, text
    assert not comes_again(errors.WorkerError(f"actor rank 0: 'update' raised {text}"))


@pytest.mark.long
def test_a_store_whose_server_is_gone_is_a_death():
    code = """
        import datetime, subprocess, sys, torch.distributed as dist
        limit = datetime.timedelta(seconds=2)
        server = subprocess.Popen([sys.executable, "-c",
            "import torch.distributed as dist, sys;"
            "s = dist.TCPStore('127.0.0.1', 0, None, True, wait_for_workers=False);"
            "print(s.port, flush=True); sys.stdin.read()"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        client = dist.TCPStore("127.0.0.1", int(server.stdout.readline()), None, False, limit)
        for end in (lambda: None, server.kill):
            end()
            try:
                client.get("never")
            except Exception as error:
                print(f"{type(error).__module__}.{type(error).__name__}: {error}".replace("\\n", " "))
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=280)
    found = done.stdout.splitlines()
    assert len(found) == 2, done.stderr
    assert [reporter_of(text) for text in found] == ["torch's store"] * 2, found


def test_a_connection_that_breaks_is_a_death():
    ours, its = socket.socketpair()
    with ours:
        its.close()
        with pytest.raises(OSError) as caught:
            ours.sendall(b"x")
    assert not comes_again(caught.value)


@pytest.mark.ray
@pytest.mark.slow
def test_ray_tells_of_an_actor_that_died():
    code = """
        import os, signal, ray
        ray.init(num_cpus=1, include_dashboard=False, logging_level="error", log_to_driver=False)
        @ray.remote
        class Worker:
            def end(self): os.kill(os.getpid(), signal.SIGKILL)
        try:
            ray.get(Worker.remote().end.remote(), timeout=60)
        except Exception as error:
            print(f"{type(error).__module__}.{type(error).__name__}: {error}".replace("\\n", " "))
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=280)
    assert reporter_of(done.stdout.splitlines()[-1]) == "Ray", done.stdout + done.stderr


def test_names_of_rays_errors_exist():
    exceptions = pytest.importorskip("ray.exceptions")
    names = [
        "RayActorError",
        "ActorDiedError",
        "ActorUnavailableError",
        "NodeDiedError",
        "WorkerCrashedError",
        "RaySystemError",
    ]
    names += [
        "LocalRayletDiedError",
        "OwnerDiedError",
        "ObjectLostError",
        "ObjectFetchTimedOutError",
        "OutOfMemoryError",
    ]
    for name in names:
        kind = getattr(exceptions, name)
        assert reporter_of(f"{kind.__module__}.{kind.__qualname__}: x") in DEATHS, name


def test_vllm_tells_of_an_engine_that_died():
    module = pytest.importorskip("vllm.v1.engine.exceptions")
    assert reporter_of(str(module.EngineDeadError())) == "vLLM"


@pytest.mark.parametrize(
    ("text", "of"),
    [
        ("torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:3690, ncclRemoteError", "NCCL"),
        ("[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE)", "NCCL"),
        ("torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered", "the GPU"),
        ("torch.AcceleratorError: CUDA error: device-side assert triggered", None),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB", None),
        ("KeyError: 'label'", None),
    ],
)
def test_what_cannot_be_made_here(text, of):
    assert reporter_of(text) == of
