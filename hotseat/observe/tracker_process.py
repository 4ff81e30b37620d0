"""The program of the process that runs a tracker: W&B, MLflow or Trackio.

Run by `processes/child.py`. It receives one record per step until the channel closes, and sends at most two messages:
that it started, and the first failure. Once the channel is closed, by `close` or by the death of the run, it has some
seconds to finish, and then ends itself and all that it started.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import select
import threading
import time
from typing import Any

from hotseat.processes.child import FrameChannel
from hotseat.processes.supervisor import TRACKER, end_marked
from hotseat.words import leaves

KEY = "WANDB_API_KEY"
SECRETS = (KEY, "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN", "HF_TOKEN")
PROJECT = "hotseat"
# Numbers and config only: no console, no code, nothing about machine or repository.
SETTINGS = {
    "silent": True,
    "console": "off",
    "save_code": False,
    "disable_code": True,
    "disable_git": True,
    "x_disable_meta": True,
    "x_disable_stats": True,
    "x_disable_machine_info": True,
}


def main(channel: FrameChannel, task: dict[str, Any]) -> None:
    threading.Thread(target=_end_when_alone, args=(channel, task["grace_s"]), daemon=True).start()
    try:
        tracker = TRACKERS[task["kind"]](task)
        channel.send({"started": tracker.where, "id": tracker.run_id})
        with contextlib.suppress(EOFError):
            while True:
                record = channel.receive()
                tracker.log(record["step"], record["values"])
        tracker.finish()
    except BaseException as error:
        with contextlib.suppress(OSError):
            channel.send({"failed": _without_key(f"{type(error).__name__}: {error}")})
    _end(0)


class _Wandb:
    def __init__(self, task: dict[str, Any]):
        import wandb

        settings = {**SETTINGS, "init_timeout": task["start_s"]}
        self.run_id = task["id"] or secrets.token_hex(4)
        self._run = wandb.init(
            id=self.run_id,
            resume="allow",
            entity=task["entity"],
            project=task["project"] or os.environ.get("WANDB_PROJECT") or PROJECT,
            group=task["group"],
            name=task["name"],
            dir=task["dir"],
            config=task["config"],
            settings=wandb.Settings(
                **{name: value for name, value in settings.items() if name in wandb.Settings.model_fields}
            ),
        )
        # W&B's own step counter cannot go back, but a resumed run repeats some steps.
        self._run.define_metric("*", step_metric="step")
        self.where = str(getattr(self._run, "url", None) or getattr(self._run, "dir", ""))

    def log(self, step: int, values: dict[str, float]) -> None:
        self._run.log({**values, "step": step})

    def finish(self) -> None:
        import wandb

        self._run.finish()
        wandb.teardown()  # its service may still hold what it has not written to the disk


class _Mlflow:
    def __init__(self, task: dict[str, Any]):
        from mlflow.entities import Param
        from mlflow.tracking import MlflowClient

        # Runs that stand side by side share a data base, as they would share a server.
        folder = os.path.dirname(os.path.abspath(task["dir"]))
        uri = task["uri"] or os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{folder}/mlflow.db"
        self._client = MlflowClient(tracking_uri=uri)
        project = task["project"] or os.environ.get("MLFLOW_EXPERIMENT_NAME") or PROJECT
        if task["id"]:
            self.run_id = task["id"]
            self._client.update_run(self.run_id, status="RUNNING")
        else:
            experiment = self._client.get_experiment_by_name(project)
            number = experiment.experiment_id if experiment else self._client.create_experiment(project)
            tags = {"group": task["group"]} if task["group"] else {}
            self.run_id = self._client.create_run(number, run_name=task["name"], tags=tags).info.run_id
            settings = {name: value for name, value in leaves(task["config"]) if value is not None and value != {}}
            config = [Param(_mlflow_name(name), str(value)[:500]) for name, value in settings.items()]
            for start in range(0, len(config), 100):  # MLflow's limit of a request
                self._client.log_batch(self.run_id, params=config[start : start + 100])
        self.where = f"{_without_password(uri)}, experiment {project}, run {self.run_id}"

    def log(self, step: int, values: dict[str, float]) -> None:
        from mlflow.entities import Metric

        now_ms = int(time.time() * 1000)
        # "pass@4": it takes letters, digits, spaces and _-.:/ only.
        metrics = [Metric(_mlflow_name(name), float(value), now_ms, step) for name, value in values.items()]
        for start in range(0, len(metrics), 500):
            self._client.log_batch(self.run_id, metrics=metrics[start : start + 500])

    def finish(self) -> None:
        self._client.set_terminated(self.run_id)


class _Trackio:
    def __init__(self, task: dict[str, Any]):
        import trackio

        # A run is known by its name, which another run directory may have too.
        self.run_id = task["id"] or f"{task['name']}-{secrets.token_hex(2)}"
        project = task["project"] or os.environ.get("TRACKIO_PROJECT") or PROJECT
        self._trackio = trackio
        trackio.init(
            project,
            name=self.run_id,
            group=task["group"],
            space_id=task["space"],
            config=task["config"],
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        self.where = f"project {project}, run {self.run_id}; `trackio show --project {project}` shows it"

    def log(self, step: int, values: dict[str, float]) -> None:
        self._trackio.log(values, step=step)

    def finish(self) -> None:
        self._trackio.finish()


TRACKERS: dict[str, Any] = {"wandb": _Wandb, "mlflow": _Mlflow, "trackio": _Trackio}


def _mlflow_name(name: str) -> str:
    return re.sub(r"[^\w\-.:/ ]", "_", name.replace("@", "_at_"))


def _without_password(uri: str) -> str:
    return re.sub(r"//[^/@]*@", "//***@", uri)


def _end_when_alone(channel: FrameChannel, grace_s: float) -> None:
    """Wait until the other end is closed, even if not all is read, and end this process after a grace period."""
    poll = select.poll()
    poll.register(channel.socket, select.POLLRDHUP)
    while not poll.poll():
        pass
    time.sleep(grace_s)
    _end(1)


def _end(code: int) -> None:
    """End this process and all that it started: W&B's service has its own session and group."""
    end_marked(TRACKER, [os.environ[TRACKER]])
    os._exit(code)


def _without_key(text: str) -> str:
    for name in SECRETS:
        if os.environ.get(name):
            text = text.replace(os.environ[name], "***")
    return " ".join(_without_password(text).split())[:300]
