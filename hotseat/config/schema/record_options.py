"""Checkpoints, metrics and trackers."""

from __future__ import annotations

from typing import Annotated

from hotseat.config import conditions as when
from hotseat.config.annotations import RL
from hotseat.config.schema.section import AboveZero, Amount, NotNegative, Port, Positive, Section
from hotseat.config.store_urls import is_store_url

DEFAULT_MINUTES = 10.0  # between checkpoints, where the config does not say when to save


class RunConfig(Section):
    max_restarts: NotNegative = 3
    """Restarts without a new checkpoint, of a model's processes or of the run, after which it is given up; 0: none."""
    standby: bool = False
    """Have the next driver load its libraries ahead, in case this one dies; takes about 1 GiB of host memory."""


class CheckpointConfig(Section):
    path: Annotated[str | None, when.SAVES_OR_RESUMES] = None
    """Folder, or URL such as s3://BUCKET/FOLDER, for checkpoints; unset is `checkpoints` in the run directory."""
    every: Positive | None = None
    """Steps between checkpoints; unset: by time alone. The model is exported at the end in any case."""
    every_minutes: Amount | None = None
    """Minutes between checkpoints, 0: none by time; unset: 10 if `every` is unset, or more if saving takes over 5%."""
    keep_last: Annotated[Positive, when.SAVES_OR_RESUMES] = 3
    """Checkpoints kept, besides the best."""
    keep_final: Annotated[bool, when.SAVES_OR_RESUMES] = True
    """Make and keep a checkpoint of the last step, to extend the run; false deletes all that hold no exported model."""
    memory_every: Annotated[Positive | None, when.SAVES] = None
    """Steps between memory snapshots, from which what died continues; unset: from the newest checkpoint on disk."""
    memory_path: Annotated[str, when.SNAPSHOTS] = "/dev/shm"
    """Folder on a tmpfs, or on a fast disk of the driver's machine, for memory snapshots."""
    max_gib: Annotated[AboveZero | None, when.SAVES_OR_RESUMES] = None
    """Disk space all checkpoints may take; unset is no bound."""
    resume: bool = False
    """Resume from the newest checkpoint; without any, start from the first step."""
    allow_changes: Annotated[list[str], when.RESUMES] = []
    """Keys that may differ from the checkpoint, although results then differ from an uninterrupted run's."""
    best_metric: Annotated[str | None, when.EVALUATION] = None
    """Evaluation metric whose best checkpoint is kept; unset is the first one, `none` keeps no best."""
    save_state: Annotated[bool, when.SAVES_OR_RESUMES] = True
    """Save the state that resuming needs, not only the model."""
    background: Annotated[bool | None, when.SAVES] = None
    """Write checkpoints while training continues, from a copy in host memory; unset: where there is room for one."""
    export_each: Annotated[bool, when.SAVES_OR_RESUMES] = False
    """Export a Hugging Face model with each checkpoint."""
    export_path: str | None = None
    """Where the final Hugging Face model goes; unset is `model` in the run directory."""
    push_to_hub: str | None = None
    """Repository, NAME or USER/NAME, to push the final model to, with a card of the run; needs HF_TOKEN."""
    push_private: Annotated[bool, when.PUSHED] = True
    """Make the repository private, if it does not exist yet."""
    export_critic: Annotated[bool, RL, when.CRITIC] = False
    """Export the critic too: as `critic` beside `model`, or `export_path` with `_critic` at its end."""

    @property
    def url(self) -> str | None:
        """Return the URL to which checkpoints are uploaded; None if they are not."""
        return self.path if self.path is not None and is_store_url(self.path) else None

    @property
    def folder(self) -> str | None:
        """Return the folder that is set for checkpoints; None if they are in the run's directory."""
        return None if self.url is not None else self.path

    @property
    def minutes(self) -> float | None:
        """Minutes between checkpoints; None: none are made by time."""
        if self.every_minutes is None:
            return DEFAULT_MINUTES if self.every is None else None
        return self.every_minutes or None

    @property
    def is_made(self) -> bool:
        """Checkpoints are made, by steps or by time."""
        return self.every is not None or self.minutes is not None

    @property
    def is_used(self) -> bool:
        """Checkpoints are made, or one is looked for to resume from."""
        return self.is_made or self.resume

    @property
    def is_asked_for(self) -> bool:
        """The user set when to save; default checkpoints are skipped where they would cost too much."""
        return self.every is not None or bool(self.every_minutes)


class WandbConfig(Section):
    enabled: bool = False
    """Report to Weights & Biases; its key comes from WANDB_API_KEY, which also turns this on by itself."""
    org: Annotated[str | None, when.ENABLED] = None
    """Entity (user or team); unset is that of the API key."""
    project: Annotated[str | None, when.ENABLED] = None
    """Project; unset is that in WANDB_PROJECT, or `hotseat`."""
    group: Annotated[str | None, when.ENABLED] = None
    """Group of runs."""
    run_name: Annotated[str | None, when.ENABLED] = None
    """Name of the run in Weights & Biases; unset is the run's own name."""


class MlflowConfig(Section):
    enabled: bool = False
    """Report to MLflow."""
    uri: Annotated[str | None, when.ENABLED] = None
    """Tracking server or data base; unset is MLFLOW_TRACKING_URI, or `mlflow.db` beside the run's directory."""
    experiment: Annotated[str | None, when.ENABLED] = None
    """Experiment; unset is that in MLFLOW_EXPERIMENT_NAME, or `hotseat`."""
    run_name: Annotated[str | None, when.ENABLED] = None
    """Name of the run in MLflow; unset is the run's own name."""


class TrackioConfig(Section):
    enabled: bool = False
    """Report to Trackio, whose files are in TRACKIO_DIR or Hugging Face's cache."""
    project: Annotated[str | None, when.ENABLED] = None
    """Project; unset is that in TRACKIO_PROJECT, or `hotseat`."""
    space: Annotated[str | None, when.ENABLED] = None
    """Hugging Face Space to send the metrics to; unset keeps them on this machine."""
    group: Annotated[str | None, when.ENABLED] = None
    """Group of runs."""
    run_name: Annotated[str | None, when.ENABLED] = None
    """Beginning of the run's name in Trackio, which four digits follow; unset is the run's own name."""


class EndpointConfig(Section):
    port: Port | None = None
    """Port of `/metrics`, for Prometheus, and `/healthz`; 0 takes any that is free, unset serves nothing."""
    host: Annotated[str, when.SERVED] = "127.0.0.1"
    """Address to serve at; one that other machines can reach needs a token, in HOTSEAT_METRICS_TOKEN."""


class LogConfig(Section):
    every: Positive = 1
    """Steps between printed lines of metrics."""
    tensorboard_path: str | None = None
    """Where TensorBoard's files go; unset is `tensorboard` in the run directory."""
    samples_every: Annotated[Positive, RL, when.RECORDED_SAMPLES] = 5
    """Steps between recordings of samples; the first step is always recorded."""
    samples_per_step: Annotated[NotNegative, RL] = 8
    """Samples recorded in such a step, with values for every token, and as many of those that were dropped."""
    keep_rollouts: Annotated[bool, RL] = False
    """Keep all groups in `rollouts`, for `hotseat replay`: 17 bytes for each token, and the texts."""
    openrlhf_names: bool = True
    """Give TensorBoard and the trackers OpenRLHF's names of metrics beside ours, where they mean the same."""
    endpoint: EndpointConfig = EndpointConfig()
    """HTTP endpoint of the run, in the driver's process."""
    wandb: WandbConfig = WandbConfig()
    """Weights & Biases."""
    mlflow: MlflowConfig = MlflowConfig()
    """MLflow."""
    trackio: TrackioConfig = TrackioConfig()
    """Trackio."""
