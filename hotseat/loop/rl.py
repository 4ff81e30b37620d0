"""The reinforcement loop.

    Prompt --agent x engine--> Episode --reward--> scored Episode --grouped--> Group
           --algorithms--> Experience --packing--> MicroBatch --update--> WeightVersion --push--> engines

`train_rl` is the whole of it. Each phase takes its turn on the devices (`seats`); the driver sees facts, tensors travel
between the groups.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from hotseat import faults
from hotseat.algorithms import AdaptiveKl, FixedKl
from hotseat.algorithms.spread import quantile
from hotseat.cluster import Cluster, Group, Ref
from hotseat.config import Config
from hotseat.config.batches import BatchAlgebra
from hotseat.config.roles import ESTIMATORS_WITH_GROUP, has_reference
from hotseat.data import PromptOrder, digest_of
from hotseat.loop import settings
from hotseat.loop.alarms import Alarms
from hotseat.loop.checkpoints import Checkpoint
from hotseat.loop.collect import Collected, Collector, Keep, evaluation_metrics, rollout_metrics
from hotseat.loop.experience import assign
from hotseat.loop.host import GroupFacts, HostSettings, RolloutHost
from hotseat.loop.ledger import Ledger
from hotseat.loop.memory import DeviceWatch, group_memory, has_gpu
from hotseat.loop.planning import are_devices_logical
from hotseat.loop.push import Canary, PushReport, ask_canary, push_weights
from hotseat.loop.records import Chosen, SampleRecord, choose, failures, gaps, written
from hotseat.loop.revival import Revival, start_up
from hotseat.loop.saving import BACKEND, IS_WRITTEN, Parts, Saver
from hotseat.loop.seats import Seats
from hotseat.loop.workers import ActorWorker, EngineWorker, ModelWorker
from hotseat.observe import Journal
from hotseat.placement import Plan
from hotseat.train.backend import UpdateReport
from hotseat.types import Prompt
from hotseat.weights import LOOPBACK, TIMEOUT_S

COLUMNS = {
    "reward": "reward {:.3f}",
    "length": "length {:.1f}",
    "kl": "kl {:.4f}",
    "eval/accuracy": "accuracy {:.3f}",
    "tokens_per_s": "{:,.0f} tokens/s",
    "step_s": "{:.2f} s",
}
NUM_CANARIES = 4
NUM_RECORDED = 200  # steps of which samples are recorded, before that becomes more seldom
CANARY_TOLERANCE = {"fp32": 1e-3, "bf16": 0.25, "fp16": 0.1}


def train_rl(run: RlRun, journal: Journal, saver: Saver, found: Checkpoint | None) -> dict[str, float]:
    """Every step of a run, or those that are left after a checkpoint; the last evaluation."""
    if found is not None:
        run.go_on(found)
    journal.phase("sync")
    run.push()
    if found is None:
        journal.phase("evaluate")
    final = dict(found.state["evaluation"]) if found is not None else run.evaluate()
    if found is None:
        journal.step(0, final)
    for step in range(1 if found is None else found.step + 1, run.num_steps + 1):
        started = time.monotonic(), time.process_time()
        journal.phase("rollout")
        collected = run.collect()
        journal.phase("prepare")
        collected = run.prepare(collected, step)
        journal.phase("update")
        reports = run.update()
        journal.phase("sync")
        pushed = run.push()
        metrics = run.metrics(collected, reports, pushed, *started) | saver.metrics()
        if run.is_evaluated(step):
            journal.phase("evaluate")
            final = run.evaluate()
            metrics |= final
        journal.step(step, metrics)
        run.tell(step, collected, metrics)
        saver.after_step(step, run.parts(final), final if run.is_evaluated(step) else {}, journal)
    return final


class RlRun:
    """The groups of a run and what each phase asks of them."""

    def __init__(
        self,
        config: Config,
        plan: Plan,
        algebra: BatchAlgebra,
        cluster: Cluster,
        prompts: list[Prompt],
        eval_prompts: list[Prompt],
        eos_token_ids: tuple[int, ...],
        ledger: Ledger,
        journal: Journal,
        logs: Path,
        stack: ExitStack,
    ):
        assert algebra.num_steps is not None
        assert algebra.schedule_length is not None
        self._config = config
        self._plan = plan
        self._algebra = algebra
        self.num_steps = algebra.num_steps
        self._timeout_s = config.cluster.call_timeout_s
        self._phase_s: dict[str, float] = {}
        self._memory: dict[str, float] = {}
        self._journal = journal
        self._kl: AdaptiveKl | FixedKl = (
            FixedKl(config.algorithm.kl.coef)
            if config.algorithm.kl.target is None
            else AdaptiveKl(config.algorithm.kl.coef, config.algorithm.kl.target, config.algorithm.kl.horizon)
        )

        groups: dict[str, Group] = {}

        def launch(role: str, cls: type, *args: Any) -> Group:
            group = cluster.launch(
                role,
                cls,
                args=args,
                processes=plan.role(role).processes,
                num_threads=config.cluster.threads_per_process,
                timeout_s=self._timeout_s,
                wait=False,  # they start together
            )
            groups[role] = group
            return group

        self._say_fault = partial(journal.say, kind="fault")
        trust = config.trust_remote_code
        self._engines = launch("rollout", EngineWorker, settings.engine_settings(config, eos_token_ids, logs))
        # vLLM sizes its cache by what it finds on its device: nobody else may come or go there meanwhile.
        self._measures_its_device = config.rollout.engine == "vllm" and not are_devices_logical(cluster)
        if self._measures_its_device:
            start_up(self._engines, self._say_fault)
            for device in sorted({d for process in plan.role("rollout").processes for d in process.devices}):
                memory = cluster.device_memory(device)
                if memory is not None:
                    journal.say(f"with its engines started, device {device} has {memory.used / 2**30:.1f} GiB in use")
        options = settings.train_options(config, algebra.schedule_length)
        self._actor = launch("actor", ActorWorker, config.actor.model, options, settings.engine_dtype(config), trust)
        self._reference: Group | None = None
        if has_reference(config):
            frozen = settings.train_options(config, algebra.schedule_length, is_trained=False)
            self._reference = launch(
                "reference", ModelWorker, config.reference.model or config.actor.model, frozen, trust
            )
        self._hosts = cluster.launch(
            "agents", RolloutHost, args=(_host_settings(config),), timeout_s=self._timeout_s, wait=False
        )
        faults.reach("start-up")
        for group in (self._engines, self._hosts):
            start_up(group, self._say_fault)
        for group in groups.values():
            group.ready()
        self._hosts.call("connect", self._engines)
        self._groups = groups
        self._seats = Seats(
            plan,
            groups,
            timeout_s=self._timeout_s,
            is_gone=cluster.is_gone,
            measure=cluster.device_memory,
            timeline=journal.timeline,
        )
        stack.callback(self._seats.close)
        devices = sorted({d for role in plan.roles for process in role.processes for d in process.devices})
        self._watch = DeviceWatch(devices, cluster.device_memory)
        stack.callback(self._watch.close)

        self._order = PromptOrder(len(prompts), config.seed, digest_of(prompts))
        self._collector = Collector(self._hosts, prompts, self._timeout_s)
        self._evaluator = Collector(self._hosts, eval_prompts, self._timeout_s) if eval_prompts else None
        self._keep = _keep(config)
        self._policy = self._policy_settings()
        self._canary = Canary(
            tuple(prompt.token_ids for prompt in prompts if len(prompt.token_ids) > 1)[:NUM_CANARIES],
            config.rollout.temperature,
            CANARY_TOLERANCE[config.train.dtype],
        )
        self._version = 0
        self._pushed: PushReport | None = None
        self._canary_gap: float | None = None  # the last that is known
        self._lanes = settings.weight_lanes(config, plan, self._actor.call("device_type")[0] == "cuda")
        self._sender_host = _sender_host(plan, cluster)
        self._ledger = ledger
        self._revive = Revival(
            self._engines,
            self._hosts,
            self._seats,
            reconnect=self._reconnect,
            push=lambda: self._push(self._version - 1),
            say=self._say_fault,
            measures_its_device=self._measures_its_device,
        )
        self._sample_again: Callable[[], Collected] | None = None
        self._hosts_at_collect = 0  # restarts of hosts until then
        self._alarms = Alarms(
            journal.say,
            has_groups=config.algorithm.estimator in ESTIMATORS_WITH_GROUP,
            spike_factor=config.train.spike_factor,
            on_spike=config.train.on_spike,
        )
        self._told: list[tuple[Chosen, SampleRecord]] = []  # of the step under way

    # --- the phases, in order -----------------------------------------------------------------------------------------

    def collect(self) -> Collected:
        """rollout: sample and score the groups of a step."""
        faults.reach("generation.before")
        self._phase_s.clear()  # an evaluation and a save since the last step are no part of this one
        self._seats.spent()
        before, order = self._order.state(), self._order

        def sample() -> Collected:
            # Whatever is sampled again comes out the same: a request's seed is made from its key.
            self._order = order.at(before)
            with self._sampling():
                return self._collector.collect(
                    self._order,
                    self._config.rollout.batch_size,
                    self._config.rollout.samples_per_prompt,
                    settings.sampling(self._config),
                    self._keep,
                )

        def collect() -> Collected:
            collected = self._revive.during(sample)
            self._hosts_at_collect = self._revive.num_host_restarts
            return collected

        self._sample_again = collect
        return collect()

    def prepare(self, collected: Collected, step: int) -> Collected:
        """prepare: reference log-probs, then the actor turns its groups into experience.

        Returns what was prepared: if the groups were lost with their host, they were sampled again.
        """
        faults.reach("prepare.before")

        def hand_out() -> tuple[int, list[list[Ref]]]:
            nonlocal collected
            if self._revive.num_host_restarts > self._hosts_at_collect:
                assert self._sample_again is not None
                collected = self._sample_again()
            if self._is_recorded(step):
                chosen = choose(collected, step, self._config.log.samples_per_step)
                self._told = list(zip(chosen, self._hosts.call("tell", [c.key for c in chosen])[0], strict=True))
            return self._hand_out(collected)

        self._told = []
        num_steps, shares = self._revive.during(hand_out)
        self._prepare(num_steps, shares, [str(c.key) for c, _ in self._told if c.state == "trained"])
        self._revive.during(lambda: self._collector.forget([*collected.groups, *(f for f, _ in collected.dropped)]))
        self._revive.start_counting()
        return collected

    def _hand_out(self, collected: Collected) -> tuple[int, list[list[Ref]]]:
        """(number of optimizer steps, the share of each data-parallel rank of the actor)."""
        sizes = [len(facts.rewards) for facts in collected.groups]
        has_budget = self._config.train.max_tokens_per_device is not None
        tokens = [sum(facts.num_tokens) for facts in collected.groups] if has_budget else None
        ranks, steps = assign(sizes, self._algebra.samples_per_optimizer_step, self._algebra.num_ranks, tokens)
        shares = []
        for members in ranks:
            keys = [collected.groups[index].key for index in members]
            [share] = self._hosts.start("share", keys, [steps[index] for index in members], keep=True).result()
            shares.append([share])
        return 1 + max(step for group in steps for step in group), shares

    def _prepare(self, num_steps: int, shares: list[list[Ref]], record: list[str]) -> None:
        num_sharing = self._config.train.sequence_parallel_size
        scored: list[Ref] = []
        if self._reference is not None:
            with self._turn("prepare", "reference"):
                scored = self._reference.start_scatter(
                    "score",
                    _repeated(_spread(shares, self._reference.size // num_sharing), num_sharing),
                    cut=self._policy.score,
                    temperature=self._policy.temperature,
                    keep=True,
                ).result()[::num_sharing]
        with self._turn("prepare", "actor"):
            self._actor.start_scatter(
                "prepare",
                _repeated(shares, num_sharing),
                num_steps=num_steps,
                settings=self._policy,
                reference=scored,
                record=record,
            ).result()

    def update(self) -> list[UpdateReport]:
        """update: every optimizer step of the rollout."""
        faults.reach("update.before")
        with self._turn("update", "actor"):
            reports: list[UpdateReport] = self._actor.call("update", self._policy)[0]
        kl = _mean(reports, "kl")
        if kl is not None:
            self._kl = self._kl.updated(kl, self._algebra.samples_per_step)
            self._policy = self._policy_settings()
        return reports

    def push(self) -> PushReport:
        """sync: the new weights to every engine, checked."""
        faults.reach("push.before")
        report = self._revive.during(lambda: self._push(self._version), is_push=True)
        self._version += 1
        faults.reach("push.after")
        return report

    def _push(self, version: int) -> PushReport:
        audience = self._lanes.audience(
            # Engines that were replaced must be met anew.
            self._revive.num_restarts,
            self._sender_host,
            min(TIMEOUT_S, self._timeout_s),
        )
        with self._turn("sync", "actor"):
            self._pushed = push_weights(self._actor, self._engines, version, self._canary, self._lanes, audience)
        self._seats.given_weights("rollout")
        self._canary_gap = self._pushed.canary_gap if self._pushed.canary_gap is not None else self._canary_gap
        unseen = sorted(self._pushed.undigested)
        if unseen and version == 0:
            self._journal.say(
                f"no digest reaches {len(unseen)} weights of the engines, as {unseen[0]}: the canary does"
            )
        return self._pushed

    @contextmanager
    def _sampling(self) -> Iterator[None]:
        """The engines' turn. A save or an export since the last push may have taken the place of their weights."""
        if not self._seats.has_weights("rollout"):
            self._push(self._version - 1)
        with self._turn("rollout", "rollout"):
            if self._pushed is not None and self._pushed.canary_gap is None:
                self._pushed = ask_canary(self._engines, self._pushed, self._canary)
                self._canary_gap = self._pushed.canary_gap
            yield

    # --- beside the phases --------------------------------------------------------------------------------------------

    def _reconnect(self) -> None:
        """Hosts and engines, after some were replaced. What engines still do for earlier connections is of no use."""
        self._engines.call("drop_requests")
        self._hosts.call("connect", self._engines)

    def evaluate(self) -> dict[str, float]:
        if self._evaluator is None:
            return {}
        evaluator, num_samples = self._evaluator, self._config.eval.samples_per_prompt

        def sample() -> list[GroupFacts]:
            with self._sampling():
                return evaluator.evaluate(
                    num_samples, settings.eval_sampling(self._config), self._config.reward.max_failed_fraction
                )

        return evaluation_metrics(self._revive.during(sample), num_samples)

    def tell(self, step: int, collected: Collected, metrics: Mapping[str, float]) -> None:
        """What became of the samples of a step: of all to the ledger, of some to be read. The last push came later."""
        self._ledger.record(step, self._version - 2, collected)
        self._alarms.look(step, metrics, collected)
        groups = collected.groups
        spread: dict[str, list[float]] = {
            "reward": [reward for facts in groups for reward in facts.rewards],
            "length": [length for facts in groups for length in facts.num_sampled],
        }
        if self._is_recorded(step):
            tokens = {name: found for rank in self._actor.call("recorded") for name, found in rank.items()}
            lines = [written(step, chosen, record, tokens.get(str(chosen.key))) for chosen, record in self._told]
            lines += failures(collected, step, self._config.log.samples_per_step)
            self._journal.samples(lines)
            spread["engine_gap"] = gaps((record, tokens.get(str(chosen.key))) for chosen, record in self._told)
        self._journal.distributions(step, spread)

    def _is_recorded(self, step: int) -> bool:
        log = self._config.log
        # Twice as seldom each time a run has become twice as long, so that the file does not grow as the run does.
        every = log.samples_every << (step // (NUM_RECORDED * log.samples_every)).bit_length()
        return log.samples_per_step > 0 and (step == 1 or step % every == 0)

    def parts(self, evaluation: dict[str, float]) -> Parts:
        """What a checkpoint is made of."""

        def write(path: Path, method: str = "save") -> None:
            # Before the ranks, which may go on writing when this returns.
            self._ledger.copy_to(path)
            with self._seats.turn("update", "actor"):
                self._actor.call(method, str(path / BACKEND))

        def snapshot(path: Path) -> Callable[[], bool]:
            write(path, "snapshot")
            return lambda: all(self._actor.call(IS_WRITTEN))

        return Parts(
            num_bytes=lambda: sum(self._actor.call("saved_bytes")),
            write=write,
            snapshot=snapshot,
            export=self.export,
            state=lambda: {
                "order": self._order.state(),
                "kl_coefficient": self._kl.coefficient,
                "version": self._version - 1,  # the last that was pushed
                "evaluation": evaluation,
                "num_ranks": self._actor.size,
            },
        )

    def go_on(self, found: Checkpoint) -> None:
        """From where a checkpoint was made."""
        state = found.state
        self._order = self._order.at(state["order"])
        self._kl = replace(self._kl, coefficient=float(state["kl_coefficient"]))
        self._policy = self._policy_settings()
        self._version = int(state["version"])
        self._ledger.go_back(found.path)
        with self._turn("update", "actor"):
            self._actor.call("load", str(found.path / BACKEND))

    def is_evaluated(self, step: int) -> bool:
        every = self._config.eval.every
        return step == self.num_steps or (every is not None and step % every == 0)

    def export(self, path: Path, is_averaged: bool = False) -> None:
        with self._seats.turn("update", "actor"):
            self._actor.call("export", str(path), is_averaged)

    def metrics(
        self,
        collected: Collected,
        reports: list[UpdateReport],
        pushed: PushReport,
        started_s: float,
        process_started_s: float,
    ) -> dict[str, float]:
        """Everything that is known of a step that ends now."""
        seconds = time.monotonic() - started_s
        metrics = rollout_metrics(collected)
        last = reports[-1]
        metrics |= {
            "loss": sum(report.loss for report in reports) / len(reports),
            "grad_norm": sum(report.grad_norm for report in reports) / len(reports),
            "learning_rate": last.learning_rate,
            # The means below are over these: samples whose loss has no gradient are left out.
            "learned_tokens": float(sum(report.num_sampled for report in reports)),
            "skipped_updates": float(last.num_skipped),
            "version": float(pushed.version),
            "engine_restarts": float(self._revive.num_restarts),
            "host_restarts": float(self._revive.num_host_restarts),
            "sync/gb": pushed.num_bytes / 1e9,
            "sync/transfer_ms": pushed.transfer_s * 1e3,
            "sync/proof_ms": pushed.proof_s * 1e3,
            "sync/gb_per_s": pushed.num_bytes / 1e9 / pushed.transfer_s,
            "step_s": seconds,
            "time/driver_cpu": time.process_time() - process_started_s,  # of this process's own work
            "tokens_per_s": metrics["sampled_tokens"] / seconds,
        }
        for name in ("clipped", "policy_kl", "engine_gap", "corrected", "kl", "entropy"):
            mean = _mean(reports, name)
            if mean is not None:
                metrics[name] = mean
        if "aux_loss" in reports[0].metrics:
            metrics["aux_loss"] = sum(report.metrics["aux_loss"] for report in reports) / len(reports)
        metrics |= _gap_spread(reports)
        # Of this step's push, or, where engines answer when their cache is back, of the one before.
        if self._canary_gap is not None:
            metrics["canary_gap"] = self._canary_gap
        if self._reference is not None:
            metrics["kl_coefficient"] = self._kl.coefficient
        metrics |= {f"time/{phase}": spent for phase, spent in self._phase_s.items()} | self._memory
        handed = self._seats.spent()
        for name in ("put_aside", "bring_back"):
            if f"{name}_s" in handed:
                metrics[f"time/{name}"] = handed[f"{name}_s"]
        metrics |= {f"handover/{name}": handed[name] for name in ("gib", "gib_copied") if name in handed}
        return metrics

    @contextmanager
    def _turn(self, phase: str, role: str) -> Iterator[None]:
        with self._seats.turn(phase, role):
            self._forget_memory()
            started_s = time.monotonic()
            yield
            self._phase_s[phase] = self._phase_s.get(phase, 0.0) + time.monotonic() - started_s
        self._note_memory(phase, role)

    def _forget_memory(self) -> None:
        """What was in use until now, while parts came and went, is not this turn's."""
        self._watch.peaks_gib()
        if has_gpu():
            for group in self._groups.values():
                group_memory(group)

    def _note_memory(self, phase: str, role: str) -> None:
        """Of each role, and of each device: there without what allocators hold and nobody used."""
        peaks = self._watch.peaks_gib()
        for name, group in self._groups.items():
            found = group_memory(group)
            if found is None:
                continue
            if name == role or not has_gpu():
                self._memory[f"memory/{phase}/{name}"] = sum(held for held, _ in found)
            for process, (_, unused) in zip(self._plan.role(name).processes, found, strict=False):
                if len(process.devices) == 1 and process.devices[0] in peaks:  # what spans several has several of them
                    peaks[process.devices[0]] -= unused
        self._memory |= {f"memory/{phase}/device {device}": gib for device, gib in peaks.items()}

    def _policy_settings(self) -> Any:
        return settings.policy_settings(self._config, self._algebra.optimizer_steps_per_step, self._kl.coefficient)


def _mean(reports: list[UpdateReport], name: str) -> float | None:
    """Per token that was learned from, over all optimizer steps of a rollout."""
    if any(name not in report.metrics for report in reports):
        return None
    return sum(report.metrics[name] for report in reports) / max(1, sum(report.num_sampled for report in reports))


def _gap_spread(reports: list[UpdateReport]) -> dict[str, float]:
    """How far engine and trainer are apart on the worst tokens of the first update, when both have the same weights."""
    first = reports[0].metrics
    if "engine_gap_counts" not in first:
        return {}
    return {"engine_gap_p99": quantile(first["engine_gap_counts"], 0.99), "engine_gap_max": first["engine_gap_max"]}


def _spread(shares: list[list[Any]], num_ranks: int) -> list[list[Any]]:
    """The shares of the actor's ranks over another number of ranks."""
    return [[share for group in shares[rank::num_ranks] for share in group] for rank in range(num_ranks)]


def _repeated(shares: list[list[Any]], num_sharing: int) -> list[list[Any]]:
    """A share for each rank: those that share sequences, next to each other, get the same."""
    return [share for share in shares for _ in range(num_sharing)]


def _sender_host(plan: Plan, cluster: Cluster) -> str:
    """Where engines on other devices meet the actor's first rank."""
    node = plan.role("actor").processes[0].node
    if all(process.node == node for process in plan.role("rollout").processes):
        return LOOPBACK
    return cluster.nodes[node].address


def _keep(config: Config) -> Keep:
    filtering = config.algorithm.filtering
    return Keep(
        min_samples=2 if config.algorithm.estimator in ESTIMATORS_WITH_GROUP else 1,
        low=filtering.low if filtering.enabled else None,
        high=filtering.high if filtering.enabled else None,
        max_failed_fraction=config.reward.max_failed_fraction,
    )


def _host_settings(config: Config) -> HostSettings:
    assert config.actor.model is not None
    return HostSettings(
        tokenizer=config.actor.model,
        run_seed=config.seed,
        max_length=config.data.max_length,
        agent=config.agent.path,
        max_turns=config.agent.max_steps,
        max_concurrent=config.agent.max_concurrent or settings.episodes_per_engine(config),
        episode_timeout_s=config.agent.timeout_s,
        reward=config.reward.function,
        reward_timeout_s=config.reward.timeout_s,
        reward_retries=config.reward.retries,
        reward_max_bytes=None if config.reward.max_memory_gib is None else int(config.reward.max_memory_gib * 2**30),
        trust_remote_code=config.trust_remote_code,
    )
