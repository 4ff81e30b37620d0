"""Undoes past corrections one by one, and checks that a test fails each time.

    .venv/bin/python bench/mutants.py            # all, and prints the table of bench/results/mutants.txt
    .venv/bin/python bench/mutants.py packing    # those in files whose path contains the word

Each mutant replaces a text that stands exactly once in a file, and names the test functions that have to notice. These
have to pass before. Files are restored however the run ends, short of SIGKILL; a tree with uncommitted changes is
refused, so that `git checkout .` restores them then.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parent.parent
TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Mutant:
    """A correction that is undone."""

    file: str  # in hotseat
    words: str
    old: str
    new: str
    tests: str  # names of test functions, separated by spaces

    @property
    def path(self) -> Path:
        return ROOT / "hotseat" / self.file

    def line(self) -> int:
        """Return the line at which the text stands. Exits if it does not stand there exactly once."""
        text = self.path.read_text()
        if text.count(self.old) != 1:
            sys.exit(f"hotseat/{self.file}: stands there {text.count(self.old)} times, has to once: {self.old!r}")
        return text[: text.index(self.old)].count("\n") + 1

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Have the file mutated inside the context."""
        text = self.path.read_text()
        try:
            self.path.write_text(text.replace(self.old, self.new))
            yield
        finally:
            self.path.write_text(text)


MUTANTS = (
    # --- algorithms
    Mutant(
        "algorithms/advantages.py",
        "rewards are compared without subtracting the group's least: equal ones differ by rounding",
        'return exact - least.scatter_reduce(0, index, exact, "amin")[self.index]',
        "return rewards",
        "test_equal_rewards_have_exactly_no_advantage test_no_credit_of_turns_blows_up",
    ),
    Mutant(
        "algorithms/policy_loss.py",
        "GSPO has the ratio of the episode where its tokens have different advantages, too",
        "of_token = episode_log_ratio.detach() + log_ratio - log_ratio.detach()",
        "of_token = episode_log_ratio",
        "test_gspo_has_one_ratio_per_episode_over_all_its_segments test_surrogates_equal_a_loop_in_loss_and_gradient",
    ),
    Mutant(
        "algorithms/aggregation.py",
        "episodes without sampled tokens count in the mean over episodes",
        "num_episodes=int((layout.sampled_per_episode > 0).sum())",
        "num_episodes=int((layout.sampled_per_episode >= 0).sum())",
        "test_an_empty_episode_counts_in_trl_and_not_here test_weighted_losses_equal_a_loop_from_the_definition",
    ),
    Mutant(
        "algorithms/kl.py",
        "k3 with the sign of its ratio turned",
        "estimate = (-log_ratio).exp() - 1 + log_ratio",
        "estimate = log_ratio.exp() - 1 - log_ratio",
        "test_the_three_estimates_of_two_tokens",
    ),
    # --- train
    Mutant(
        "train/packing.py",
        "samples without images of their own are taken for samples of one prompt",
        "groups.setdefault(images or unit[0], []).append(unit)",
        "groups.setdefault(images, []).append(unit)",
        "test_cutting_by_images_takes_no_more_micro_batches_than_needed",
    ),
    Mutant(
        "train/packing.py",
        "samples with the same images stay together though that takes more micro-batches",
        "bins = min(bins, _filled(in_order, max_tokens, tokens), key=len)",
        "bins = _filled(in_order, max_tokens, tokens)",
        "test_cutting_by_images_takes_no_more_micro_batches_than_needed",
    ),
    Mutant(
        "train/fsdp.py",
        "an offload that is refused has dropped the 16-bit copies before",
        "        check_parts(parts)\n",
        "",
        "test_copies_to_compute_with_are_dropped_before_the_weights_leave_and_made_again",
    ),
    Mutant(
        "loop/settings/training_options.py",
        "a reference model offloads an Adam that it has not",
        "adam_offload=zero.adam_offload and is_trained",
        "adam_offload=zero.adam_offload",
        "test_a_reference_in_bf16_has_no_adam_to_offload",
    ),
    # --- rollout
    Mutant(
        "rollout/llama_slots.py",
        "a hook on the model itself is not seen",
        "modules = [model, *body.modules(), *model.lm_head.modules()]",
        "modules = [*body.modules(), *model.lm_head.modules()]",
        "test_a_model_with_a_hook_anywhere_runs_its_own_forward",
    ),
    Mutant(
        "rollout/vllm_versions.py",
        "a build of vLLM under another name is taken for the one for CPUs",
        '" ".join(_distribution() or ())',
        '" ".join(_distribution() or ("cpu",))',
        "test_the_build_for_cpus_is_known_by_its_package",
    ),
    Mutant(
        "rollout/engine.py",
        "a completion that comes just as the wait ends is lost",
        "                if not unfinished:  # the last one came just then\n",
        "                if False:\n",
        "test_what_finishes_at_the_deadline_is_not_lost",
    ),
    Mutant(
        "loop/settings/engine_settings.py",
        "engines of simulators in stages keep no prompts in the room of slots that they do not use",
        "num_kept_prompts=engine_of(config).num_kept_prompts + all_slots - num_slots",
        "num_kept_prompts=engine_of(config).num_kept_prompts",
        "test_engines_keep_prompts_in_the_room_of_slots_that_a_stage_does_not_need",
    ),
    # --- weights
    Mutant(
        "weights/bucket.py",
        "a bucket is packed into the block that is being read",
        "        self.turn = 1 - self.turn\n",
        "",
        "test_a_bucket_lasts_while_the_next_is_packed",
    ),
    Mutant(
        "weights/bucket.py",
        "tensors begin where the last one ends, so that some are not aligned to their type",
        "end = -(-used // ALIGNMENT) * ALIGNMENT",
        "end = used",
        "test_buckets_keep_the_dtype test_buckets_hold_every_tensor_bit_for_bit_in_order",
    ),
    # --- loop/state
    Mutant(
        "loop/state/run_dir.py",
        "a run that starts anew under its name finds the groups of the one before",
        "    for name in (SPOOL, ROLLOUTS):\n",
        "    for name in (ROLLOUTS,):\n",
        "test_a_run_that_failed_leaves_no_groups_to_the_next_of_its_name",
    ),
    Mutant(
        "loop/state/saving.py",
        "an error of torch that is no `Exception` ends the thread of a save without a word",
        "        except BaseException as error:  # torch raises errors",
        "        except Exception as error:  # torch raises errors",
        "test_a_disk_that_fills_up_in_the_background_raises_the_usual_error",
    ),
    # --- loop/rl
    Mutant(
        "loop/rl/meter.py",
        "the memory of a phase is that of its last turn",
        "self._memory[name] = max(gib, self._memory.get(name, 0.0))",
        "self._memory[name] = gib",
        "test_the_memory_of_a_phase_is_that_of_its_highest_turn_in_this_step",
    ),
    Mutant(
        "loop/rl/meter.py",
        "peaks of memory of an earlier step count in this one",
        "        self._memory.clear()\n",
        "",
        "test_the_memory_of_a_phase_is_that_of_its_highest_turn_in_this_step",
    ),
    Mutant(
        "loop/rl/overlapped.py",
        "the run asks what a batch awaits before it replaces groups that were dropped",
        "                self._begin()\n                while not self._is_scoring_due:\n",
        "                while not self._is_scoring_due:\n",
        "test_every_step_gets_its_batch_whichever_groups_are_dropped",
    ),
    Mutant(
        "loop/rl/launch.py",
        "a replay starts the run's graders",
        "        graders=(),\n",
        "",
        "test_a_replay_starts_no_graders",
    ),
    Mutant(
        "loop/rl/pacer.py",
        "groups in training do not count in how far rollout may run ahead",
        "pace.groups_per_step * (1 + pace.staleness) - held - len(self.training)",
        "pace.groups_per_step * (1 + pace.staleness) - held",
        "test_over_random_schedules_no_sample_is_too_old_none_is_lost_and_nobody_is_stuck",
    ),
    # --- loop/workers
    Mutant(
        "loop/workers/experience.py",
        "what failed samples leave of a step always joins the step before",
        "num_steps = max(1, (2 * position + samples_per_step) // (2 * samples_per_step))",
        "num_steps = max(1, position // samples_per_step)",
        "test_what_is_left_when_samples_failed_is_a_step_or_joins_the_last_one",
    ),
    Mutant(
        "loop/workers/experience.py",
        "the critic does not value what follows an episode that ran out of time",
        "    mask[batch.offsets[1:][is_bootstrap] - 1] = True\n",
        "",
        "test_the_critic_values_what_follows_an_episode_that_ran_out_of_time",
    ),
    # --- rewards, agents, envs
    Mutant(
        "rewards/answers.py",
        "rewards that 32 bits do not hold are taken",
        "return value is not None and abs(value) <= _MAX",
        "return value is not None and math.isfinite(value)",
        "test_a_sample_without_a_finite_reward_or_score_fails_alone",
    ),
    Mutant(
        "agents/gateway/reply.py",
        "a text shorter than a stop string is streamed",
        "return text[: max(0, len(text) - held)]",
        "return text[: len(text) - held] if held else text",
        "test_what_of_a_text_stays",
    ),
    Mutant(
        "agents/gateway/gateway_server.py",
        "a retry gets the answer of an equal request, not that of the one that was given up",
        "        if self.num_given_up:\n",
        "        if False:\n",
        "test_of_equal_requests_at_once_a_retry_gets_the_answer_of_the_one_that_was_given_up",
    ),
    Mutant(
        "agents/host.py",
        "episodes that wait for a place begin though their host closes",
        "while self._waiting and len(self._playing) < self._max_concurrent and self._jobs.closed is None:",
        "while self._waiting and len(self._playing) < self._max_concurrent:",
        "test_what_waits_for_a_place_does_not_begin_when_the_host_closes",
    ),
    Mutant(
        "envs/simulator_child.py",
        "a batch of worlds that returns too few results is taken",
        "if len(results) != len(where):",
        "if False:",
        "test_a_batch_that_returns_too_few_results_fails_its_episodes",
    ),
    # --- data
    Mutant(
        "data/order.py",
        "a pass over the prompts begins before the last one is used up",
        "if self._position == self.num_prompts:",
        "if self._position + num > self.num_prompts:",
        "test_each_pass_is_a_permutation_and_the_tail_goes_before_the_next",
    ),
    Mutant(
        "data/images.py",
        "every image has its tokens to itself in memory",
        "self._token_ids.setdefault(token_ids, token_ids)",
        "token_ids",
        "test_the_largest_image_is_one_that_a_context_has_room_for",
    ),
    # --- cluster
    Mutant(
        "cluster/lease.py",
        "a dead holder that asks again waits for itself",
        "if alive := [holder for holder in state.holders if not self._is_gone(holder)]:",
        "if alive := [*state.holders]:",
        "test_a_dead_holder_that_asks_again_gets_the_device_so_that_the_next_call_to_it_reports_the_death",
    ),
    Mutant(
        "cluster/local.py",
        "a coroutine of a worker that was replaced meanwhile returns its result",
        "await result\n                    self._refuse_if_replaced(rank, called, method)\n",
        "await result\n",
        "test_a_coroutine_that_ends_after_the_restart_fails_too",
    ),
    # --- config, planning
    Mutant(
        "config/load.py",
        "an option that is unset by null is refused as one without effect",
        "elif value is not None or known.get(dotted(here), ...) is not None:",
        "else:",
        "test_an_option_that_is_unset_by_null_is_not_one_that_has_no_effect",
    ),
    Mutant(
        "config/yaml_lines.py",
        "an unknown section of an override is blamed on the file",
        "if path not in self.lines:  # a section that only an override has made",
        "if False:",
        "test_an_unknown_section_in_an_override_is_blamed_on_the_override",
    ),
    Mutant(
        "config/changes.py",
        "another precision of the KV cache needs no permission where the engine has none",
        "is_idle = key in idle and key not in _IN_8_BITS",
        "is_idle = key in idle",
        "test_8_bits_change_the_correction_and_take_permission",
    ),
    Mutant(
        "config/changes.py",
        "a budget that the run chose before is a change of the config",
        "is_taken_over = (is_budget and new is None) or",
        "is_taken_over =",
        "test_what_a_checkpoint_chose_is_no_change_of_the_config",
    ),
    Mutant(
        "config/conflicts.py",
        "bounds that drop every second answer are taken",
        'if reject == "k1" and not low < 1 < high:',
        'if reject == "k1" and not low <= 1 <= high:',
        "test_values_that_contradict_each_other_are_an_error",
    ),
    Mutant(
        "planning/config_plan.py",
        "the plan prices blocks for sending weights for critics, too",
        'sends_weights=config.task == "rl" and role == "actor"',
        'sends_weights=config.task == "rl"',
        "test_only_the_actor_sends_weights",
    ),
    Mutant(
        "planning/config_plan.py",
        "only prompts are assumed to have images where an agent may show some in every turn",
        "data.image_key is not None and not has_agent(config)",
        "data.image_key is not None",
        "test_environments_may_show_images_in_every_turn",
    ),
    # --- rlinf
    Mutant(
        "rlinf/work.py",
        "a coroutine that stops waiting for an operation stops it",
        "        future.set_running_or_notify_cancel()",
        "        _ = future",
        "test_a_coroutine_that_stops_waiting_does_not_stop_the_operation_nor_those_after_it",
    ),
    Mutant(
        "rlinf/keys.py",
        "an empty set has the key of an empty dict",
        "return f\"set({', '.join(sorted(map(key_text, key)))})\"",
        "return f\"{{{', '.join(sorted(map(key_text, key)))}}}\"",
        "test_equal_keys_have_one_text_and_others_another",
    ),
)


def test_files(names: Sequence[str]) -> list[str]:
    """Return the files that define these test functions, wherever they are. Exits if one is nowhere, or twice."""
    sources = {path: path.read_text() for path in sorted((ROOT / "tests").rglob("test_*.py"))}
    found: dict[str, None] = {}  # an ordered set
    for name in names:
        files = [path for path, text in sources.items() if re.search(rf"^(async )?def {name}\(", text, re.MULTILINE)]
        if len(files) != 1:
            sys.exit(f"{len(files)} files define {name}, has to be one")
        found[str(files[0].relative_to(ROOT))] = None
    return list(found)


def failed_tests(names: Sequence[str]) -> list[str]:
    """Run test functions up to the first that fails; return its name. Exits if they cannot be run."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-x",
            "-m",
            "",
            "-p",
            "no:cacheprovider",
            f"--junitxml={report}",
        ]
        # A file compiled from a mutant must not outlive it.
        env = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}
        # -k takes parts of names, too; the names of functions are long enough.
        command += [*test_files(names), "-k", " or ".join(names)]
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=TIMEOUT_S)
        if done.returncode not in (0, 1):
            sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-3000:]}{done.stderr[-1000:]}")
        cases = list(ElementTree.parse(report).iter("testcase"))
    if cases and all(case.find("skipped") is not None for case in cases):
        sys.exit(f"skipped on this machine: {' '.join(names)}")
    return [case.get("name", "") for case in cases if any(case.find(kind) is not None for kind in ("failure", "error"))]


def refuse_changed_tree() -> None:
    """Exit if there are uncommitted changes."""
    command = ["git", "status", "--porcelain"]
    changes = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    if changes:
        sys.exit(f"uncommitted changes, which mutants could be mixed up with: commit or stash them\n{changes}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("word", nargs="?", default="", help="part of the path of the files to mutate; all by default")
    word = parser.parse_args().word
    refuse_changed_tree()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    chosen = [mutant for mutant in MUTANTS if word in mutant.file]
    lines = [mutant.line() for mutant in chosen]
    names = list(dict.fromkeys(name for mutant in chosen for name in mutant.tests.split()))
    before = failed_tests(names)
    if before:
        sys.exit(f"fails without a mutant: {before[0]}")
    num_survivors = 0
    for mutant, line in zip(chosen, lines, strict=True):
        with mutant.applied():
            failed = failed_tests(mutant.tests.split())
        num_survivors += not failed
        noticed = f"caught by {failed[0].partition('[')[0]}" if failed else f"NOT CAUGHT by {mutant.tests}"
        print(f"hotseat/{mutant.file}:{line}\n    {mutant.words}\n    {noticed}", flush=True)
    print(f"\n{len(chosen)} mutants, {len(chosen) - num_survivors} caught")
    if num_survivors:
        sys.exit(1)


if __name__ == "__main__":
    main()
