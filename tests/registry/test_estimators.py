"""The tables of estimators, policy losses and losses of preferences, and one of each that is added from outside."""

import ast
from pathlib import Path

import pytest
import torch
from loop_cases import make_task, rl_yaml, same, weights

import hotseat
from hotseat.algorithms.advantages import compute_advantages
from hotseat.algorithms.baselines import group_mean_centred
from hotseat.algorithms.corrections import correction_weights
from hotseat.algorithms.policy_loss import ppo_loss
from hotseat.algorithms.supervised_loss import PreferenceLoss
from hotseat.cli.completion import keys
from hotseat.cli.options_view import options
from hotseat.config import loads
from hotseat.config.conflicts import conflicts, missing
from hotseat.config.presence import compares_with_reference
from hotseat.config.schema.algorithm_options import DpoConfig
from hotseat.errors import ConfigError, UserError
from hotseat.extensions import load
from hotseat.loop.settings.training_settings import policy_settings
from hotseat.loop.start import start
from hotseat.loop.workers.preferences import Answers, PreferenceObjective
from hotseat.observe import read_lines
from hotseat.planning.config_plan import make_plan
from hotseat.registry.correction_kinds import CORRECTIONS, CorrectionEntry
from hotseat.registry.estimators import ESTIMATORS, EstimatorEntry, estimator_entry
from hotseat.registry.policy_losses import POLICY_LOSSES, PolicyLossEntry, policy_loss_entry
from hotseat.registry.preference_losses import PREFERENCE_LOSSES, PreferenceLossEntry, preference_loss_entry
from hotseat.registry.tasks import TASKS, TaskEntry
from hotseat.types import TokenLayout

PACKAGE = Path(hotseat.__file__).parent
BUILT_IN_LOSSES = tuple(POLICY_LOSSES)
TABLES = (ESTIMATORS, POLICY_LOSSES, PREFERENCE_LOSSES, CORRECTIONS)

# The estimators, the losses and the correction of the test: these functions and their entries are all that it takes.


def half(rewards, groups):
    return group_mean_centred(rewards, groups) / 2


def per_length(rewards, groups, lengths):
    return rewards / lengths


def half_loss(log_probs, old_log_probs, advantages, layout, *, eps_low, eps_high, dual_clip):
    return ppo_loss(log_probs, old_log_probs, 2 * advantages, layout.mask, eps_low=eps_low, eps_high=eps_high).loss


def hinge(chosen, rejected, *, beta, gamma):
    return PreferenceLoss((gamma - beta * (chosen - rejected)).relu(), beta * chosen, beta * rejected)


def only_low(ratio, *, low, high):
    return ratio.clamp(min=low)


ADDED = (
    EstimatorEntry("half", "Half of dr_grpo's.", "(r − mean) / 2", "none", compare=f"{__name__}:half"),
    EstimatorEntry("per_length", "By length.", "r / n", "", compare=f"{__name__}:per_length", compares_episodes=True),
)
LOSS = PolicyLossEntry("twice", "PPO's, twice.", "2 · ppo", "none", f"{__name__}:half_loss", has_dual_clip=True)
HINGE = PreferenceLossEntry("hinge", "Hinge.", f"{__name__}:hinge", options=frozenset({"gamma"}))
LOW = CorrectionEntry("low", "Bounded below.", f"{__name__}:only_low")


@pytest.fixture
def added(monkeypatch):
    monkeypatch.setitem(CORRECTIONS, "low", LOW)
    for entry in ADDED:
        monkeypatch.setitem(ESTIMATORS, entry.name, entry)
    monkeypatch.setitem(POLICY_LOSSES, "twice", LOSS)
    monkeypatch.setitem(PREFERENCE_LOSSES, "hinge", HINGE)


def test_an_estimator_and_a_loss_are_a_function_and_an_entry_each(tmp_path, added):
    """Half the advantages and twice the loss are the whole of what dr_grpo and ppo learn."""
    make_task(tmp_path)
    steps = {"half": "twice", "dr_grpo": "ppo", "per_length": "twice"}
    for estimator, loss in steps.items():
        algorithm = f"{{estimator: {estimator}, policy_loss: {loss}, aggregation: token_mean}}"
        start(loads(rl_yaml(tmp_path, name=estimator, algorithm=algorithm)))
    assert same(weights(tmp_path, "half"), weights(tmp_path, "dr_grpo"))
    assert not same(weights(tmp_path, "half"), weights(tmp_path, "per_length"))
    records = [read_lines(tmp_path / "runs" / name / "metrics.jsonl") for name in ("dr_grpo", "half", "per_length")]
    assert all(all(record["grad_norm"] > 0 for record in each if "grad_norm" in record) for each in records)


def test_what_is_added_is_checked_offered_and_listed_by_its_entry(tmp_path, added):
    text = rl_yaml(make_task(tmp_path), algorithm="{estimator: half, policy_loss: twice}")
    assert missing(loads(text, ["algorithm.dual_clip=3"])) == []
    for change, why in (
        ("algorithm.gamma=0.9", "algorithm.estimator half does not discount; gae and reinforce do"),
        ("critic.warmup_steps=1", "algorithm.estimator is half, which has no critic; only gae has one"),
        ("algorithm.std_norm=false", "algorithm.estimator half does not divide by a deviation"),
        ("algorithm.time_step=chunk", "algorithm.policy_loss twice has ratios of its own; set policy_loss to ppo"),
    ):
        with pytest.raises(ConfigError, match=why):
            loads(text, [change])
    with pytest.raises(ConfigError, match="'hlf', must be one of gae, .*, per_length, or FILE.*; did you mean half"):
        loads(text.replace("estimator: half", "estimator: hlf"))
    assert {"half", "per_length"} <= set(keys()["algorithm.estimator"])
    [row] = options("algorithm.policy_loss")
    assert row["takes"] == " | ".join([*BUILT_IN_LOSSES, "twice", "text"])
    assert row["meaning"].endswith("twice: PPO's, twice.")


def test_an_estimator_of_whole_episodes_gets_their_lengths(added):
    layout = TokenLayout(torch.ones(4, dtype=torch.bool), torch.tensor([0, 1, 4]), torch.tensor([0, 1]), 2)
    rewards, groups = torch.tensor([1.0, 6.0]), torch.tensor([0, 0])
    given = compute_advantages("per_length", layout, rewards, groups=groups)
    assert given.advantages.tolist() == [1, 2, 2, 2]


def test_a_loss_of_preferences_is_a_function_and_an_entry(added):
    config = loads("task: dpo\nalgorithm: {dpo: {loss: hinge, gamma: 2.0, beta: 0.5}}")
    assert not compares_with_reference(config)
    with pytest.raises(ConfigError, match=r"algorithm.dpo.loss is hinge; this is for dpo"):
        loads("task: dpo\nalgorithm: {dpo: {loss: hinge, label_smoothing: 0.1}}")
    # 2 - (-1 + 2) / 2 and 2 - 6 / 2, which is below 0
    answers = Answers(torch.tensor([[-1.0, -2.0], [-1.0, -7.0]]), torch.ones(2, 2))
    result = PreferenceObjective(DpoConfig(loss="hinge", beta=0.5, gamma=2.0)).loss_of_pairs(answers)
    assert result.loss.tolist() == [1.5, 0]


def test_a_correction_is_a_function_and_an_entry(added):
    config = loads("algorithm: {correction: {kind: low, low: 0.5, high: 2.0}}")
    assert conflicts(config) == []
    assert policy_settings(config, 1, 0.0).objective.correction == "low"
    with pytest.raises(ConfigError, match="low weighs tokens, and algorithm.policy_loss gspo has one ratio per sequ"):
        loads("algorithm: {policy_loss: gspo, correction: {kind: low}}")
    with pytest.raises(ConfigError, match="'lo', must be one of none, tis, .*, rollout-ratio, low; did you mean low"):
        loads("algorithm: {correction: {kind: lo}}")
    layout = TokenLayout(torch.ones(2, dtype=torch.bool), torch.tensor([0, 2]), torch.tensor([0]), 1)
    corrected = correction_weights(torch.tensor([4.0, 0.25]).log(), torch.zeros(2), layout, "low", low=0.5, high=2.0)
    assert corrected.weights.tolist() == pytest.approx([4.0, 0.5])
    assert corrected.changed.tolist() == [False, True]


def test_a_task_is_its_functions_and_an_entry(monkeypatch):
    """A config with it is checked by its facts, and planned by its flow."""
    clone = TaskEntry("clone", "As sft.", "examples", ("input_key",), "hotseat.placement.flow:sft_phases", "none:none")
    monkeypatch.setitem(TASKS, "clone", clone)
    config = loads("{task: clone, actor: {model: any}, data: {path: rows, multiturn: true}}")
    assert [phase.name for phase in make_plan(config, "1x1xH200").flow.phases] == ["update"]
    with pytest.raises(ConfigError, match="task is clone; this is for rm or dpo"):
        loads("{task: clone, data: {chosen_key: best}}")


def test_a_name_that_no_table_has_is_an_error_with_the_nearest_one():
    with pytest.raises(UserError, match=r"no advantage estimator 'rlo': choose one of gae, .*; did you mean rloo\?"):
        estimator_entry("rlo")
    with pytest.raises(UserError, match=f"no policy loss 'x': choose one of {', '.join(BUILT_IN_LOSSES)}$"):
        policy_loss_entry("x")
    with pytest.raises(UserError, match=r"no loss of preferences 'dop': .*; did you mean dpo\?"):
        preference_loss_entry("dop")


def test_entries_are_under_their_names_and_what_they_point_to_exists():
    assert all(name == entry.name for table in (*TABLES, TASKS) for name, entry in table.items())
    estimators, losses = ESTIMATORS.values(), (*POLICY_LOSSES.values(), *PREFERENCE_LOSSES.values())
    paths = [path for entry in estimators for path in (entry.compare, entry.returns) if path is not None]
    paths += [path for task in TASKS.values() for path in (task.flow, task.data) if path]
    corrections = [entry.function for entry in CORRECTIONS.values() if entry.function is not None]
    assert all(callable(load(path)) for path in (*paths, *corrections, *(entry.function for entry in losses)))


# Where they may be named: where others' names are translated, and in what a command is about.
HOMES = ("registry/", "openrlhf/", "rlinf/", "trl/", "verl/")
OTHERWISE = {
    "cli/new.py": {"ppo", *TASKS},  # kinds of new configs
    "cli/cluster_runs.py": {"rl", "sft"},  # the same
    "cli/demo_command.py": {"sft"},
    "processes/supervisor.py": {"rm"},  # a container engine's command
}


def test_no_other_file_names_an_estimator_a_loss_a_correction_or_a_task():
    # "none" has other meanings, too.
    names, found = {name for table in (*TABLES, TASKS) for name in table} - {"none"}, {}
    for path in sorted(PACKAGE.rglob("*.py")):
        file = path.relative_to(PACKAGE).as_posix()
        if not file.startswith(HOMES):
            words = {node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)}
            found[file] = (words & names) - OTHERWISE.get(file, set())
    assert not {file: words for file, words in found.items() if words}
