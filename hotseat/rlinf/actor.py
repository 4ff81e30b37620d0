"""An actor worker in the place of RLinf's `FSDPActor`: it learns from trajectories with Hotseat's FSDP trainer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypedDict

import torch
from torch import Tensor

from hotseat.algorithms.advantages import Moments, moments, normalise_by
from hotseat.algorithms.baselines import group_normalised
from hotseat.errors import DataError, UserError
from hotseat.loop.devices.held_memory import device_of_process
from hotseat.loop.workers.cutting import BatchSettings
from hotseat.loop.workers.losses import ADVANTAGES, OLD_LOG_PROBS, ROLLOUT_LOG_PROBS, PolicyObjective
from hotseat.placement.role_names import Part
from hotseat.rlinf.channel import Channel
from hotseat.rlinf.configs import section
from hotseat.rlinf.rlinf_worker import Worker
from hotseat.train.backend import PARTS, AdamW, Backend, LoraOptions, TrainOptions
from hotseat.train.make import make_backend
from hotseat.train.schedule import Schedule
from hotseat.types import MicroBatch

_PRECISIONS = {"fp32": "fp32", "32": "fp32", "bf16": "bf16_master"}
# Settings of RLinf that would change what is learned, with the values that each may have here.
_FIXED: Mapping[str, tuple[Any, ...]] = {
    "algorithm.adv_type": ("grpo",),
    "algorithm.use_reinpp_baseline": (False,),
    "algorithm.reinpp_kl_beta": (0,),
    "algorithm.loss_type": ("actor", "grpo"),
    "algorithm.loss_agg_func": ("token-mean",),
    "algorithm.logprob_type": ("token_level",),
    "algorithm.kl_beta": (0,),
    "algorithm.entropy_bonus": (0,),
    "algorithm.n_minibatches": (1,),
    "actor.training_backend": ("fsdp", "fsdp2"),
    "actor.model.lora_path": (),
    "actor.lr_sched.lr_decay_style": ("constant",),
    "actor.lr_sched.lr_warmup_fraction": (0,),
    "actor.lr_sched.lr_warmup_iters": (0,),
}
# Settings that are read. All others of the sections actor and algorithm have no effect, which is logged.
_READ = frozenset(
    f"{at}.{name}"
    for at, names in {
        "actor": "group_name global_batch_size micro_batch_size enable_offload seed gradient_checkpointing",
        "actor.model": "model_path path precision is_lora lora_rank",
        "actor.optim": "lr adam_beta1 adam_beta2 adam_eps weight_decay clip_grad",
        "actor.fsdp_config": "gradient_checkpointing",
        "algorithm": "group_size ratio_clip_eps clip_ratio_low clip_ratio_high clip_ratio_c update_epoch"
        " normalize_advantages",
        "algorithm.sampling_params": "temperature",
    }.items()
    for name in names.split()
)


class Trajectory(TypedDict, total=False):
    """One sample. Rollout workers put lists of them, whole groups, into the actor's channel.

    Entries of lists belong to tokens.
    """

    input_ids: Sequence[int]
    loss_mask: Sequence[bool]  # the tokens that the policy sampled
    prev_logprobs: Sequence[float]  # when they were sampled; 0 for other tokens
    rewards: float
    advantages: float  # absent: from the rewards of its group


class FSDPActor(Worker):
    """The policy under training, one rank per device.

    An item of its channel is a group: a list of `algorithm.group_size` trajectories, which are compared with each
    other. So it does not matter which rank takes it, or in what order producers put them in.

    It reads the settings in `_READ` and `rollout.group_name` of a config, refuses those in `_FIXED` if they have other
    values, and logs the rest of the sections `actor` and `algorithm` as without effect.
    """

    def __init__(self, cfg: Any):
        super().__init__()
        self.cfg = cfg
        self._actor = section(cfg, "actor")
        self._algorithm = section(cfg, "algorithm")
        self._rollout_group = str(section(cfg, "rollout").get("group_name", "RolloutGroup"))
        self._temperature = float(section(self._algorithm, "sampling_params").get("temperature", 1.0))
        self._global_step = 0
        self._trajectories: list[Trajectory] = []
        self._loaded: Backend | None = None
        batch_size = int(self._actor.get("global_batch_size", self._world_size))
        if batch_size % self._world_size:
            raise UserError(
                f"actor.global_batch_size is {batch_size}, which {self._world_size} ranks cannot share evenly: set it"
                f" to a multiple of {self._world_size}"
            )
        share, self._group_size = batch_size // self._world_size, int(self._algorithm.get("group_size") or 1)
        if share % self._group_size:
            raise UserError(
                f"actor.global_batch_size is {batch_size}: {share} trajectories on each of {self._world_size} ranks, in"
                f" groups of algorithm.group_size {self._group_size}; set it to a multiple of"
                f" {self._world_size * self._group_size}, so that each rank has whole groups"
            )
        self._num_groups = share // self._group_size
        self._num_epochs = int(self._algorithm.get("update_epoch") or 1)
        self._is_offloaded = bool(self._actor.get("enable_offload"))  # between the calls that need the model
        settings = {**_leaves(self._actor, "actor"), **_leaves(self._algorithm, "algorithm")}
        _refuse_unknown_maths(settings)
        dual = settings.get("algorithm.clip_ratio_c")
        if dual is not None and float(dual) <= 1:
            raise UserError(
                f"algorithm.clip_ratio_c is {dual}: it bounds ratios of bad answers from above; set it above 1"
            )
        idle = sorted(settings.keys() - _READ - _FIXED.keys())
        if idle and self._rank == 0:
            self.log_warning(f"no effect here: {', '.join(idle)}, which this actor does not read")

    # --- RLinf's methods ------------------------------------------------------------------------------------------

    def init_worker(self) -> None:
        """Load the model and its optimizer. All ranks together."""
        model = section(self._actor, "model")
        path = model.get("model_path") or model.get("path")
        if not path:
            raise UserError("actor.model.model_path is not set: give the folder or the name of the model to train")
        seed = self._actor.get("seed")
        if seed is not None:
            torch.manual_seed(int(seed) + self._rank)
        self._loaded = make_backend(str(path), self._options(model), device=device_of_process())
        self._offload()

    def set_global_step(self, global_step: int) -> None:
        self._global_step = global_step

    def recv_rollout_trajectories(self, input_channel: Channel) -> int:
        """Take this rank's share of a batch from the channel, whole groups; return how many trajectories it has now."""
        for _ in range(self._num_groups):
            group = input_channel.get()
            if not isinstance(group, list | tuple) or len(group) != self._group_size:
                item = f"a list of {len(group)}" if isinstance(group, list | tuple) else f"a {type(group).__name__}"
                raise DataError(
                    f"channel {input_channel.name!r} has {item}: put whole groups into it, each a list of"
                    f" algorithm.group_size {self._group_size} trajectories"
                )
            self._trajectories += group
        return len(self._trajectories)

    def compute_advantages_and_returns(self) -> dict[str, float]:
        """Compute advantages from rewards, by GRPO; return the mean reward of this rank."""
        rewards = torch.tensor([float(each["rewards"]) for each in self._trajectories], dtype=torch.float64)
        advantages = group_normalised(rewards, torch.arange(len(rewards)) // self._group_size)
        self._trajectories = [
            {**each, "advantages": float(value)} for each, value in zip(self._trajectories, advantages, strict=True)
        ]
        return {"rewards": float(rewards.mean())}

    @Worker.timer("run_training")
    def run_training(self, input_channel: Channel | None = None) -> dict[str, float]:
        """Make an optimizer step on the trajectories of all ranks, holding the devices meanwhile. All ranks together.

        With a channel, this rank's share is taken from it first. `algorithm.update_epoch` makes as many steps on the
        same trajectories. Returns the metrics of the last.
        """
        if input_channel is not None:
            self.recv_rollout_trajectories(input_channel)
        if any("advantages" not in each for each in self._trajectories):
            self.compute_advantages_and_returns()
        batch = self._weighted(self._normalised(self._batch(self._trajectories)))
        self._trajectories = []
        cut = BatchSettings(int(self._actor.get("micro_batch_size", 1)), None).cut
        with self.device_lock:
            self._backend.onload(PARTS)
            for _ in range(self._num_epochs):
                report = self._backend.update(cut(batch), self._objective(), self._temperature)
            self._offload()
        return {
            "actor/loss": report.loss,
            "actor/grad_norm": report.grad_norm,
            "actor/lr": report.learning_rate,
            "actor/num_tokens": report.num_sampled,
            "actor/version": report.version,
        }

    def sync_model_to_rollout(self) -> int:
        """Send the weights, by name, from rank 0 to rank 0 of the rollout group; return their number. All ranks."""
        self._backend.onload([Part.WEIGHTS])
        weights = {name: weight.detach().cpu().clone() for name, weight in self._backend.weights()}
        self._offload()
        if self._rank == 0:
            self.send(weights, self._rollout_group, 0)
        return len(weights)

    def save_checkpoint(self, save_path: str, step: int | None = None) -> None:
        """Write weights and optimizer, each rank its share. All ranks together."""
        Path(save_path).mkdir(parents=True, exist_ok=True)
        self._backend.onload(PARTS)
        self._backend.save(save_path)
        self._offload()

    def load_checkpoint(self, load_path: str) -> None:
        """Load what `save_checkpoint` wrote, also with another number of ranks. All ranks together."""
        self._backend.onload(PARTS)
        self._backend.load(load_path)
        self._offload()

    def close(self) -> None:
        if self._loaded is not None:
            self._loaded.close()
        super().close()

    # --- how ------------------------------------------------------------------------------------------------------

    @property
    def _backend(self) -> Backend:
        if self._loaded is None:
            raise UserError(f"{self._group_name} has no model yet: call init_worker().wait() first")
        return self._loaded

    def _offload(self) -> None:
        if self._is_offloaded:
            self._backend.offload(PARTS)

    def _adapters(self, model: Mapping[str, Any]) -> LoraOptions | None:
        """Return RLinf's adapters, whose alpha is their rank; None: all weights are trained."""
        if not model.get("is_lora"):
            return None
        rank = model.get("lora_rank")
        if not rank:
            raise UserError("actor.model.is_lora is true, and lora_rank is not set: set it, usually to 32")
        return LoraOptions(int(rank), alpha=int(rank), seed=int(self._actor.get("seed") or 0))

    def _options(self, model: Mapping[str, Any]) -> TrainOptions:
        precision, optim = str(model.get("precision", "fp32")), section(self._actor, "optim")
        if precision not in _PRECISIONS:
            raise UserError(f"actor.model.precision is {precision}: choose one of {', '.join(_PRECISIONS)}")
        clip = optim.get("clip_grad", 1.0)
        return TrainOptions(
            precision=_PRECISIONS[precision],  # type: ignore[arg-type]
            optimizer=AdamW(
                betas=(float(optim.get("adam_beta1", 0.9)), float(optim.get("adam_beta2", 0.95))),
                eps=float(optim.get("adam_eps", 1e-8)),
                weight_decay=float(optim.get("weight_decay", 0.0)),
            ),
            schedule=Schedule("constant", peak=float(optim.get("lr", 1e-6))),
            max_grad_norm=None if clip is None else float(clip),
            lora=self._adapters(model),
            gradient_checkpointing=bool(
                self._actor.get("gradient_checkpointing")
                or section(self._actor, "fsdp_config").get("gradient_checkpointing")
            ),
        )

    def _objective(self) -> PolicyObjective:
        low, high = (self._algorithm.get(f"clip_ratio_{side}") for side in ("low", "high"))
        both = self._algorithm.get("ratio_clip_eps")
        epsilon, dual = 0.2 if both is None else both, self._algorithm.get("clip_ratio_c")
        return PolicyObjective(
            policy_loss="ppo",
            clip_low=float(epsilon if low is None else low),
            clip_high=float(epsilon if high is None else high),
            dual_clip=None if dual is None else float(dual),
            correction=None,
            correction_low=0.0,
            correction_high=1.0,
            kl_estimator="k1",
            kl_coefficient=0.0,
            entropy_coefficient=None,
        )

    def _batch(self, trajectories: Sequence[Trajectory]) -> MicroBatch:
        tokens: list[Tensor] = []
        masks: list[Tensor] = []
        fields: dict[str, list[Tensor]] = {ADVANTAGES: [], OLD_LOG_PROBS: [], ROLLOUT_LOG_PROBS: []}
        for number, each in enumerate(trajectories):
            ids, mask = torch.as_tensor(each["input_ids"]), torch.as_tensor(each["loss_mask"], dtype=torch.bool)
            old = torch.as_tensor(each["prev_logprobs"], dtype=torch.float32)
            if not len(ids) == len(mask) == len(old):
                raise DataError(
                    f"trajectory {number}: {len(ids)} input_ids, {len(mask)} entries of loss_mask and {len(old)} of"
                    " prev_logprobs; each token has one of each"
                )
            tokens.append(ids.to(torch.int64))
            masks.append(mask)
            fields[ADVANTAGES].append(mask * float(each["advantages"]))
            fields[OLD_LOG_PROBS].append(old)
            fields[ROLLOUT_LOG_PROBS].append(old)
        ids_of = [f"{self._global_step}:{self._rank}:{number}" for number in range(len(trajectories))]
        return MicroBatch.from_segments(tokens, masks, ids_of, fields)

    def _normalised(self, batch: MicroBatch) -> MicroBatch:
        """Normalise advantages over the tokens of all ranks, if the config says so."""
        if not self._algorithm.get("normalize_advantages"):
            return batch
        advantages = batch.fields[ADVANTAGES]
        shares = self._backend.gather_facts(moments(advantages, batch.mask), "add up the advantages of a step")
        whole = sum(shares, Moments(0, 0.0, 0.0))
        return replace(batch, fields={**batch.fields, ADVANTAGES: normalise_by(advantages, batch.mask, whole)})

    def _weighted(self, batch: MicroBatch) -> MicroBatch:
        """Weight every sampled token alike: the mean over the tokens of all ranks."""
        counts = self._backend.gather_facts(int(batch.mask.sum()), "count the tokens of an optimizer step")
        return replace(batch, weights=batch.mask.to(torch.float32) / max(1, sum(counts)))


def _leaves(values: Mapping[str, Any], at: str) -> dict[str, Any]:
    """Return the settings of a section by their dotted keys, without those that are null."""
    leaves: dict[str, Any] = {}
    for name, value in values.items():
        key = f"{at}.{name}"
        if isinstance(value, Mapping):
            leaves |= _leaves(value, key)
        elif value is not None:
            leaves[key] = value
    return leaves


def _refuse_unknown_maths(settings: Mapping[str, Any]) -> None:
    """Raise for settings that would be learned by, and are not."""
    for key, neutral in _FIXED.items():
        value = settings.get(key)
        if value is not None and value not in neutral:
            fitting = " or ".join(map(str, neutral)) + ", or leave it out" if neutral else "null, or leave it out"
            raise UserError(f"{key} is {value}, which this actor does not have: set it to {fitting}")
