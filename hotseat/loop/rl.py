"""The reinforcement loop.

    Prompt --agent x engine--> Episode --reward--> scored Episode --grouped--> Group
           --algorithms--> Experience --packing--> MicroBatch --update--> WeightVersion --push--> engines

`train_rl` is the whole of it. Each phase takes its turn on the devices (`seats`); the driver sees facts, tensors travel
between the groups.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from hotseat import faults
from hotseat.algorithms import AdaptiveKl, FixedKl
from hotseat.cluster import Cluster, Group, Ref
from hotseat.config import Config, loads_saved
from hotseat.config.batches import BatchAlgebra, token_budget
from hotseat.config.roles import ESTIMATORS_WITH_GROUP
from hotseat.data import PromptOrder, digest_of
from hotseat.loop import settings
from hotseat.loop.alarms import Alarms
from hotseat.loop.budgets import Use, least_tokens, lowered_note, lowered_until, smallest, uses, with_budget
from hotseat.loop.canary import CanaryGuard
from hotseat.loop.checkpoints import Checkpoint
from hotseat.loop.collect import Collected, Collector, Keep, evaluation_metrics, rollout_metrics
from hotseat.loop.experience import assign
from hotseat.loop.groups import launch_groups
from hotseat.loop.host import GroupFacts, Job
from hotseat.loop.ledger import Ledger
from hotseat.loop.memory import DeviceWatch, group_memory, has_gpu
from hotseat.loop.metrics import (
    critic_metrics,
    engine_gap_statistics,
    hand_over_metrics,
    mean,
    policy_metrics,
    push_metrics,
)
from hotseat.loop.push import PushReport, push_weights
from hotseat.loop.records import Chosen, SampleRecord, choose, failures, gaps, written
from hotseat.loop.revival import Revival
from hotseat.loop.saving import BACKENDS, IS_WRITTEN, Parts, Saver, critic_folder
from hotseat.loop.seats import Seats
from hotseat.observe import Journal
from hotseat.placement import Plan
from hotseat.train.backend import UpdateReport
from hotseat.types import Prompt, Sampling
from hotseat.weights import LOOPBACK, TIMEOUT_S, Lanes

COLUMNS = {
    "reward": "reward {:.3f}",
    "length": "length {:.1f}",
    "kl": "kl {:.4f}",
    "eval/accuracy": "accuracy {:.3f}",
    "tokens_per_s": "{:,.0f} tokens/s",
    "step_s": "{:.2f} s",
}
NUM_RECORDED = 200  # steps of which samples are recorded, before that becomes more seldom
Shares = list[list[Ref]]  # what each rank of a group is given


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
        updates = run.update(step)
        run.keep_budgets(saver.keep)
        journal.phase("sync")
        pushed = run.push()
        metrics = run.metrics(collected, updates, pushed, *started) | saver.metrics()
        if run.is_evaluated(step):
            journal.phase("evaluate")
            final = run.evaluate()
            metrics |= final
        journal.step(step, metrics)
        run.tell(step, collected, metrics)
        saver.after_step(step, run.parts(final), final if run.is_evaluated(step) else {}, journal)
    return final


@dataclass(frozen=True)
class Updates:
    """What the optimizer steps of a rollout did, the same on every rank; none of a role that did not learn."""

    actor: list[UpdateReport]
    critic: list[UpdateReport]


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
        self._num_sharing = config.train.num_sharing  # ranks of a model that get the same samples
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

        self._say_fault = partial(journal.say, kind="fault")
        groups = launch_groups(
            config, plan, algebra.schedule_length, cluster, eos_token_ids, logs, journal.say, self._say_fault
        )
        self._engines, self._hosts, self._actor = groups.engines, groups.hosts, groups.actor
        self._critic, self._reference, self._reward = groups.critic, groups.reference, groups.reward
        self._inference = groups.inference
        self._groups = groups.seated
        self._seats = Seats(
            plan,
            self._groups,
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
        self._collector = Collector(self._answer, self._hosts, prompts)
        self._evaluator = Collector(self._answer, self._hosts, eval_prompts) if eval_prompts else None
        self._keep = _keep(config)
        self._policy = self._policy_settings()
        self._critic_settings = settings.critic_settings(config)
        self._reward_settings = settings.reward_settings(config)
        self._num_optimizer_steps = 0  # of the rollout that is prepared, in one pass over it
        self.has_devices = is_cuda = self._actor.call("device_type")[0] == "cuda"
        self._guard = CanaryGuard(
            settings.canary_settings(config, is_cuda),
            prompts,
            self._actor,
            self._engines,
            self._inference,
            self._turn,
            partial(journal.say, kind="warning"),
        )
        self._version = 0
        self._lanes = settings.weight_lanes(config, plan, is_cuda)
        self._lanes_to_inference: Lanes | None = None
        if self._inference is not None:
            self._lanes_to_inference = settings.weight_lanes(config, plan, is_cuda, "inference")
        self._sender_host = _sender_host(plan, cluster)
        self._ledger = ledger
        self._revive = Revival(
            self._engines,
            self._hosts,
            self._seats,
            reconnect=self._reconnect,
            push=lambda: self._push(self._version - 1),
            say=self._say_fault,
            measures_its_device=groups.measures_its_device,
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

    # --- the size of micro-batches ------------------------------------------------------------------------------------

    @property
    def config(self) -> Config:
        """The run's config, with the token budgets that are in use."""
        return self._config

    def try_budgets(self, keep: Callable[[Config], object]) -> None:
        """Before the first step: see that micro-batches as large as the budgets fit beside what else is on the devices.

        Those that do not are halved until they do. `keep` gets the config with what came out.
        """
        scored = ["reward", "reference", "critic", "actor" if self._inference is None else "inference"]
        config, least = self._config, least_tokens(self._config)
        with_entropy = config.algorithm.entropy_coef is not None
        trials: dict[Use, list[tuple[str, str]]] = {
            "rollout": [(role, "prepare") for role in scored if role in self._groups],
            "train": [(role, "update") for role in self._trained],
        }
        for use in ("rollout", "train"):
            for role, phase in trials[use] if use in uses(config) else ():

                def fits(tokens: int, group: Group = self._groups[role], is_update: bool = use == "train") -> bool:
                    num_tokens = tokens * config.train.sequence_parallel_size
                    length = config.data.max_length
                    return all(group.call("fits", num_tokens, length, is_update, with_entropy and is_update))

                with self._turn(phase, role):
                    tokens = lowered_until(fits, token_budget(getattr(self._config, use)) or least, least)
                self._use_budget(use, tokens, f"{role}: tried out")
        keep(self._config)

    def keep_budgets(self, keep: Callable[[Config], object]) -> None:
        """Use, from now on, budgets that were lowered since memory ran out, and have them kept."""
        if not uses(self._config):
            return
        before = self._config
        models = [name for name in self._groups if name != "rollout"]
        for role, calls in [(name, self._groups[name].start("lowered")) for name in models]:
            for use, tokens in smallest(calls.result()).items():
                self._use_budget(use, tokens, f"{role} ran out of device memory, and did its work again")
        if self._config is not before:
            keep(self._config)

    def _use_budget(self, use: Use, tokens: int, why: str) -> None:
        before = token_budget(getattr(self._config, use))
        if before is None or tokens >= before:
            return
        self._config = with_budget(self._config, use, tokens)
        self._policy = self._policy_settings()
        self._critic_settings = settings.critic_settings(self._config)
        self._reward_settings = settings.reward_settings(self._config)
        self._journal.say(lowered_note(why, use, tokens, before), kind="warning")

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

    def _answer(self, jobs: Sequence[Job], sampling: Sampling) -> list[GroupFacts]:
        """Have prompts answered and the answers scored: by the hosts, or by a reward model in its own turn."""
        with self._sampling():
            facts: list[GroupFacts]
            [facts] = self._hosts.call("collect", jobs, sampling)
        if self._reward is None or facts:  # `eval.reward` has scored them
            return facts
        with self._turn("prepare", "reward"):
            num_ranks = self._reward.size // self._num_sharing
            waiting = [self._hosts.start("to_score", rank, num_ranks, keep=True).result() for rank in range(num_ranks)]
            found = self._reward.scatter("rewards", self._for_ranks(waiting), settings=self._reward_settings)
        rewards = {name: reward for rank in found for name, reward in rank.items()}
        [facts] = self._hosts.call("take_rewards", rewards)
        return facts

    def prepare(self, collected: Collected, step: int) -> Collected:
        """prepare: log-probs of the reference, values of the critic, then the actor turns its groups into experience.

        Returns what was prepared: if the groups were lost with their host, they were sampled again.
        """
        faults.reach("prepare.before")

        def hand_out() -> dict[int, Shares]:
            nonlocal collected
            if self._revive.num_host_restarts > self._hosts_at_collect:
                assert self._sample_again is not None
                collected = self._sample_again()
            if self._is_recorded(step):
                chosen = choose(collected, step, self._config.log.samples_per_step)
                self._told = list(zip(chosen, self._hosts.call("tell", [c.key for c in chosen])[0], strict=True))
            groups = [g for g in (self._actor, self._critic, self._reference, self._inference) if g is not None]
            return {n: self._hand_out(collected, n) for n in {group.size // self._num_sharing for group in groups}}

        self._told = []
        shares = self._revive.during(hand_out)
        self._prepare(shares, [str(c.key) for c, _ in self._told if c.state == "trained"])
        self._revive.during(lambda: self._collector.forget([*collected.groups, *(f for f, _ in collected.dropped)]))
        self._revive.start_counting()
        return collected

    def _hand_out(self, collected: Collected, num_ranks: int) -> Shares:
        """A share for each of so many ranks. Which optimizer step a sample is in does not depend on their number."""
        sizes = [len(facts.rewards) for facts in collected.groups]
        has_budget = token_budget(self._config.train) is not None
        tokens = [sum(facts.num_tokens) for facts in collected.groups] if has_budget else None
        ranks, steps = assign(sizes, self._algebra.samples_per_optimizer_step, num_ranks, tokens)
        self._num_optimizer_steps = 1 + max(step for group in steps for step in group)
        shares = []
        for members in ranks:
            keys = [collected.groups[index].key for index in members]
            [share] = self._hosts.start("share", keys, [steps[index] for index in members], keep=True).result()
            shares.append([share])
        return shares

    def _prepare(self, shares: Mapping[int, Shares], record: list[str]) -> None:
        def for_ranks(group: Group) -> Shares:
            return self._for_ranks(shares[group.size // self._num_sharing])

        def ask(role: str, group: Group | None, method: str, **arguments: Any) -> list[Ref]:
            """What a role has to say of every sample, in its turn; nothing of one that is not there."""
            if group is None:
                return []
            with self._turn("prepare", role):
                found = group.start_scatter(method, for_ranks(group), keep=True, **arguments).result()
            return found[:: self._num_sharing]

        policy = {"cut": self._policy.score, "temperature": self._policy.temperature}
        scored = ask("reference", self._reference, "score", **policy)
        values = ask("critic", self._critic, "values", settings=self._critic_settings)
        old = ask("inference", self._inference, "score", **policy)
        # With old log-probs at hand the actor computes nothing here.
        with self._turn("prepare", "actor") if self._inference is None else nullcontext():
            self._actor.scatter(
                "prepare",
                for_ranks(self._actor),
                num_steps=self._num_optimizer_steps,
                settings=self._policy,
                reference=scored,
                record=record,
                critic=values,
                inference=old,
            )

    def _for_ranks(self, shares: Shares) -> Shares:
        """A share for each rank: those that share sequences, next to each other, get the same."""
        return [share for share in shares for _ in range(self._num_sharing)]

    def update(self, step: int) -> Updates:
        """update: every optimizer step of the rollout, the critic's first. While the critic warms up, only those."""
        faults.reach("update.before")
        critic: list[UpdateReport] = []
        actor: list[UpdateReport] = []
        if self._critic is not None:
            returns = self._actor.start("returns", keep=True).result()[:: self._num_sharing]
            with self._turn("update", "critic"):
                critic = self._critic.call("update", returns, self._num_optimizer_steps, self._critic_settings)[0]
        if self._critic is None or step > self._config.critic.warmup_steps:
            with self._turn("update", "actor"):
                actor = self._actor.call("update", self._policy)[0]
        kl = mean(actor, "kl")
        if kl is not None:
            self._kl = self._kl.updated(kl, self._algebra.samples_per_step)
            self._policy = self._policy_settings()
        return Updates(actor, critic)

    def push(self) -> PushReport:
        """sync: the new weights to every engine, checked."""
        faults.reach("push.before")
        report = self._revive.during(lambda: self._push(self._version), is_push=True)
        self._version += 1
        if not self._guard.is_started:
            self._revive.during(lambda: self._guard.start(self._version - 1))
        faults.reach("push.after")
        return report

    def _push(self, version: int) -> PushReport:
        audience = self._lanes.audience(
            # Engines that were replaced must be met anew.
            self._revive.num_restarts,
            self._sender_host,
            min(TIMEOUT_S, self._timeout_s),
        )
        canary, to_inference = self._guard.canary, None
        with self._turn("sync", "actor"):
            pushed = push_weights(self._actor, self._engines, version, canary, self._lanes, audience)
            if self._inference is not None and self._lanes_to_inference is not None:
                lanes = self._lanes_to_inference
                audience = lanes.audience(0, self._sender_host, min(TIMEOUT_S, self._timeout_s))
                to_inference = push_weights(
                    self._actor, self._inference, version, canary, lanes, audience, "inference rank"
                )
        self._seats.given_weights("rollout")
        self._guard.check(pushed, to_inference)
        unseen = sorted(pushed.undigested)
        if unseen and version == 0:
            self._journal.say(
                f"no digest reaches {len(unseen)} weights of the engines, as {unseen[0]}: the canary does"
            )
        return pushed

    @contextmanager
    def _sampling(self) -> Iterator[None]:
        """The engines' turn. A save or an export since the last push may have taken the place of their weights."""
        if not self._seats.has_weights("rollout"):
            self._push(self._version - 1)
        self._guard.ask()
        with self._turn("rollout", "rollout"):
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
            return evaluator.evaluate(
                num_samples, settings.eval_sampling(self._config), self._config.reward.max_failed_fraction
            )

        has_full_reward = self._reward is None or self._config.eval.reward is not None
        return evaluation_metrics(self._revive.during(sample), num_samples, has_full_reward=has_full_reward)

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
            for role, group in self._trained.items():
                with self._seats.turn("update", role):
                    group.call(method, str(path / BACKENDS[role]))

        def snapshot(path: Path) -> Callable[[], bool]:
            write(path, "snapshot")
            return lambda: all(all(group.call(IS_WRITTEN)) for group in self._trained.values())

        def export(path: Path) -> None:
            self.export(path)
            if self._config.checkpoint.export_critic:
                self.export(critic_folder(path), role="critic")

        return Parts(
            num_bytes=lambda: sum(sum(group.call("saved_bytes")) for group in self._trained.values()),
            write=write,
            snapshot=snapshot,
            export=export,
            state=lambda: {
                "order": self._order.state(),
                "kl_coefficient": self._kl.coefficient,
                "version": self._version - 1,  # the last that was pushed
                "evaluation": evaluation,
                "canary": self._guard.state(),
                "num_ranks": self._actor.size,
            },
        )

    def go_on(self, found: Checkpoint) -> None:
        """From where a checkpoint was made."""
        state = found.state
        self._order = self._order.at(state["order"])
        if loads_saved(str(state["config"])).algorithm.kl.coef == self._config.algorithm.kl.coef:  # else it begins anew
            self._kl = replace(self._kl, coefficient=float(state["kl_coefficient"]))
        self._policy = self._policy_settings()
        self._version = int(state["version"])
        self._guard.restore(state.get("canary"))
        self._ledger.go_back(found.path)
        for role, group in self._trained.items():
            with self._turn("update", role):
                group.call("load", str(found.path / BACKENDS[role]))

    @property
    def _trained(self) -> dict[str, Group]:
        """The roles that learn, in the order in which they do."""
        return {role: self._groups[role] for role in ("critic", "actor") if role in self._groups}

    def is_evaluated(self, step: int) -> bool:
        every = self._config.eval.every
        return step == self.num_steps or (every is not None and step % every == 0)

    def export(self, path: Path, is_averaged: bool = False, role: str = "actor") -> None:
        with self._seats.turn("update", role):
            self._groups[role].call("export", str(path), is_averaged)

    def metrics(
        self,
        collected: Collected,
        updates: Updates,
        pushed: PushReport,
        started_s: float,
        process_started_s: float,
    ) -> dict[str, float]:
        """Everything that is known of a step that ends now."""
        seconds = time.monotonic() - started_s
        metrics = rollout_metrics(collected)
        metrics |= policy_metrics(updates.actor) | critic_metrics(updates.critic) | push_metrics(pushed)
        metrics |= {
            "engine_restarts": float(self._revive.num_restarts),
            "host_restarts": float(self._revive.num_host_restarts),
            "step_s": seconds,
            "time/driver_cpu": time.process_time() - process_started_s,  # of this process's own work
            "tokens_per_s": metrics["sampled_tokens"] / seconds,
        }
        # Of this step's push, or, where engines answer when their cache is back, of the one before.
        metrics |= self._guard.metrics()
        gaps = engine_gap_statistics(updates.actor)
        use = None if gaps is None or not self._are_gaps_comparable() else self._guard.use(gaps)
        if use is not None:
            metrics["engine_gap_use"] = use
        if self._reference is not None:
            metrics["kl_coefficient"] = self._kl.coefficient
        metrics |= {f"time/{phase}": spent for phase, spent in self._phase_s.items()} | self._memory
        return metrics | hand_over_metrics(self._seats.spent())

    def _are_gaps_comparable(self) -> bool:
        """Tell whether gaps of a step compare with the canary's: of the whole distribution, and without dropout."""
        drops = self._config.train.lora.rank > 0 and self._config.train.lora.dropout > 0
        return not settings.is_filtered(self._config) and (not drops or self._policy.needs_old_log_probs)

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


def _sender_host(plan: Plan, cluster: Cluster) -> str:
    """Where those that get weights on other devices meet the actor's first rank."""
    node = plan.role("actor").processes[0].node
    takers = [role for role in plan.roles if role.name in ("rollout", "inference")]
    if all(process.node == node for role in takers for process in role.processes):
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
