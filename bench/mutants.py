"""Undoes past corrections one by one, and checks that a test fails each time.

    .venv/bin/python bench/mutants.py            # all, and prints the table of bench/results/mutants.txt
    .venv/bin/python bench/mutants.py packing    # those in files whose path contains the word

Each mutant replaces a text that stands exactly once in a file, and names the test functions that have to notice. These
have to pass before. Only a test that fails has caught a mutant: one that hangs or crashes does not say what is wrong,
and is listed as such. Files are restored however the run ends, short of SIGKILL; a tree with uncommitted changes is
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
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from xml.etree import ElementTree

ROOT = Path(__file__).parent.parent
LIMIT_S, ALL_S = 600.0, 3600.0  # of a test without a mutant, and of all of them
LEAST_LIMIT_S = 180.0  # of a test with one
START_S = 300.0  # for pytest to import and collect
NO_TESTS = 5  # pytest's exit code where it has found none

# Errors of a mutant that is no program any more: a test that fails by them has noticed nothing.
NO_CATCH = ("NameError", "UnboundLocalError", "SyntaxError", "IndentationError", "ImportError", "ModuleNotFoundError")


@dataclass(frozen=True)
class Outcome:
    """What became of tests with a mutant.

    kind: `caught`, a test has failed; `NOT CAUGHT`; `hung`, a test or pytest had to be ended, so that no test has said
    what is wrong; `crashed`, pytest did not come to its end; `broken`, the mutant does not run. shown: pytest's output.
    """

    kind: Literal["caught", "NOT CAUGHT", "hung", "crashed", "broken"]
    detail: str = ""  # the first test that failed, and by what
    longest_s: float = 0.0  # that a test took
    shown: str = ""

    def __str__(self) -> str:
        return f"{self.kind} by {self.detail}" if self.kind == "caught" else f"{self.kind} {self.detail}".rstrip()


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
        "algorithms/baselines.py",
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
        "loop/settings/training_settings.py",
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
        "rollout/stop_strings.py",
        "a token that is a part of a character completes no stop string",
        'is_unclear = not text or _NO_TEXT in text or " " in self._ends',
        'is_unclear = not text or " " in self._ends',
        "test_the_first_token_that_completes_a_string",
    ),
    Mutant(
        "loop/settings/rollout_settings.py",
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
        "test_tensors_of_several_types_begin_where_a_view_of_any_type_may",
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
        "loop/state/background_save.py",
        "an error of torch that is no `Exception` ends the thread of a save without a word",
        "        except BaseException as error:  # torch raises errors",
        "        except Exception as error:  # torch raises errors",
        "test_an_error_in_the_background_is_raised_by_the_next_save_as_it_is",
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
        "agent=None, scorers=ScorerSettings())",
        "agent=None)",
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
        "while self._waiting and self._jobs.num_playing < self._max_concurrent and self._jobs.closed is None:",
        "while self._waiting and self._jobs.num_playing < self._max_concurrent:",
        "test_what_waits_for_a_place_does_not_begin_when_the_host_closes",
    ),
    Mutant(
        "agents/thinking.py",
        "an answer that ended because its time was over is asked to go on",
        "len(completion.token_ids) == asked and left > 0",
        "left > 0",
        "test_a_shorter_answer_is_sampled_in_one_call",
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
    Mutant(
        "loop/inputs.py",
        "columns that no reward function can get are left out without a word",
        "return [*too_long, *left_out_notes(config, source, report.left_out)]",
        "return too_long",
        "test_a_column_that_no_function_gets_is_named_once_for_each_data_set",
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
        "is_idle = key in idle and key not in FP8_KEYS",
        "is_idle = key in idle",
        "test_fp8_changes_the_correction_and_takes_permission",
    ),
    Mutant(
        "config/changes.py",
        "a budget that the run chose before is a change of the config",
        "is_taken_over = is_left or (",
        "is_taken_over = (",
        "test_what_a_checkpoint_chose_is_no_change_of_the_config",
    ),
    Mutant(
        "config/changes.py",
        "engines that the run chose before are a change of the config",
        'key in ("rollout.num_engines", "rollout.num_slots")',
        'key == "rollout.num_slots"',
        "test_the_choice_is_no_change_when_the_run_resumes",
    ),
    Mutant(
        "model_source.py",
        "positions that are stretched already are stretched once more",
        'if before.get("rope_type") == "linear":',
        "if False:",
        "test_stretched_positions_allow_longer_sequences",
    ),
    Mutant(
        "config/conflicts.py",
        "bounds that drop every second answer are taken",
        'if reject == "k1" and not low < 1 < high:',
        'if reject == "k1" and not low <= 1 <= high:',
        "test_values_that_contradict_each_other_are_an_error",
    ),
    Mutant(
        "planning/role_specs.py",
        "the plan prices blocks for sending weights for critics, too",
        'sends_weights=config.has_rollouts and role == "actor"',
        "sends_weights=config.has_rollouts",
        "test_only_the_actor_sends_weights",
    ),
    Mutant(
        "planning/role_specs.py",
        "only prompts are assumed to have images where an agent may show some in every turn",
        "data.image_key is not None and not has_agent(config)",
        "data.image_key is not None",
        "test_environments_may_show_images_in_every_turn",
    ),
    Mutant(
        "planning/config_plan.py",
        "engines are recommended to runs without rollouts, which ends them",
        "    if count == 1:\n        return []\n",
        "",
        "test_another_engine_is_recommended_for_small_models",
    ),
    Mutant(
        "planning/engine_counts.py",
        "a device gets engines for which a step has too few sequences",
        "range(min(most_engines(config), num_sequences // MIN_SEQUENCES), 1, -1)",
        "range(most_engines(config), 1, -1)",
        "test_there_are_no_more_than_have_sequences_to_work_on",
    ),
    Mutant(
        "placement/plan.py",
        "each of several engines on a device takes all of the default share of its memory",
        "return replace(spec, share=spec.share / max(counts.values(), default=1))",
        "return spec",
        "test_small_models_get_several_engines_on_a_gpu_and_the_plan_fits",
    ),
    Mutant(
        "checks/plans.py",
        "weights that may stay in their files are refused for want of memory",
        "loaded_bytes(Path(model), dtype, are_kept=True)",
        "loaded_bytes(Path(model), dtype)",
        "test_ranks_that_load_a_model_together_need_host_memory_for_all_of_them",
    ),
    # --- script, trl, verl
    Mutant(
        "api.py",
        "the config of a script is checked without what its keywords stand for, too",
        "return loads(text, [*overrides, *added], file)",
        "return loads(text, overrides, file) and loads(text, [*overrides, *added], file)",
        "test_options_of_the_config_have_an_effect_with_what_keywords_stand_for",
    ),
    Mutant(
        "script/objects.py",
        "the record of a run has the values that a function of the script reads",
        'seen[name] = f"sha256 {hashlib.sha256(text.encode()).hexdigest()}"',
        "seen[name] = text",
        "test_values_that_a_function_reads_are_not_kept",
    ),
    Mutant(
        "trl/conversions.py",
        "a generation of several optimizer steps has the prompts of one",
        "samples = draft.samples_per_update * max(1, per_rollout // accumulated)",
        "samples = draft.samples_per_update",
        "test_a_generation_of_several_optimizer_steps_and_passes",
    ),
    Mutant(
        "verl/key_values.py",
        "mini-batches are taken that leave prompts of a batch over",
        "if batch % prompts:",
        "if prompts > batch:",
        "test_a_mini_batch_counts_prompts_as_in_verl",
    ),
    Mutant(
        "verl/key_values.py",
        "the critic beside an actor with adapters gets some though verl would train all of it",
        "if has_critic(line) and rank > 0 and not line.has(of_critic):",
        "if False:",
        "test_a_critic_beside_adapters_has_some_too",
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


def run_tests(names: Sequence[str], limit_s: float, all_s: float) -> Outcome:
    """Run test functions up to the first that fails. Exits if they cannot be run.

    limit_s: of each test. all_s: of all together, for what no limit of a test can end.
    """
    with tempfile.TemporaryDirectory() as folder:
        report, log = Path(folder) / "report.xml", Path(folder) / "log"
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "", "-p", "no:cacheprovider", "--tb=short"]
        # -k takes parts of names, too; the names of functions are long enough.
        command += [f"--timeout={limit_s:.0f}", f"--junitxml={report}", *test_files(names), "-k", " or ".join(names)]
        # A file compiled from a mutant must not outlive it, and processes of a test must not import another tree.
        env = os.environ | {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(ROOT)}
        with log.open("wb") as output:
            process = subprocess.Popen(
                command, cwd=ROOT, env=env, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
            try:
                code = process.wait(all_s)
            except subprocess.TimeoutExpired:
                return Outcome("hung", f"no end within {all_s:.0f} s")
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        shown = log.read_text(errors="replace")[-3000:]
        if code == NO_TESTS:
            sys.exit(f"{' '.join(command)} ended with {code}:\n{shown}")
        if code not in (0, 1) or not report.exists():
            return Outcome("crashed", f"pytest ended with {code}", shown=shown)
        return outcome_of(list(ElementTree.parse(report).iter("testcase")), shown)


def outcome_of(cases: Sequence[ElementTree.Element], shown: str) -> Outcome:
    """Read the cases of a report. Exits if all were skipped."""
    if cases and all(case.find("skipped") is not None for case in cases):
        sys.exit(f"skipped on this machine: {' '.join(case.get('name', '') for case in cases)}")
    longest_s = max((float(case.get("time", 0)) for case in cases), default=0.0)
    for case in cases:
        for found in (case.find("failure"), case.find("error")):
            if found is None:
                continue
            test, message = case.get("name", "").partition("[")[0], found.get("message", "")
            if "from pytest-timeout" in message:
                return Outcome("hung", f"{test}: no end within {longest_s:.0f} s")
            # pytest leaves the name out where it has taken the statement apart.
            kind = "AssertionError" if message.startswith("assert ") else re.split(r"[:\s]", message)[0].split(".")[-1]
            return Outcome("broken" if kind in NO_CATCH else "caught", f"{test}: {kind}", shown=shown)
    return Outcome("NOT CAUGHT", longest_s=longest_s)


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
    before = run_tests(names, LIMIT_S, ALL_S)
    if before.kind != "NOT CAUGHT":
        sys.exit(f"fails without a mutant: {before}\n{before.shown}")
    # A test that takes ten times as long as the longest did is taken to hang, whatever else the machine does.
    limit_s = max(LEAST_LIMIT_S, 10 * before.longest_s)
    kinds: Counter[str] = Counter()
    for mutant, line in zip(chosen, lines, strict=True):
        with mutant.applied():
            outcome = run_tests(mutant.tests.split(), limit_s, START_S + 4 * limit_s)
        kinds[outcome.kind] += 1
        print(f"hotseat/{mutant.file}:{line}\n    {mutant.words}\n    {outcome}", flush=True)
        if outcome.kind == "NOT CAUGHT":
            print(f"    by {mutant.tests}", flush=True)
    print(f"\n{len(chosen)} mutants: {', '.join(f'{count} {kind}' for kind, count in kinds.items())}")
    if kinds["caught"] < len(chosen):
        sys.exit(1)


if __name__ == "__main__":
    main()
