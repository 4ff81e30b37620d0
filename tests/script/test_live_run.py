"""Runs from Python with objects, callbacks and a handle: the bits of the same run from files, stopped and steered."""

import json
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest
from loop_cases import rl_yaml, sft_yaml
from safetensors.torch import load_file

import hotseat
from hotseat import Callback, ConfigError, EarlyStopping, RunError, StopAt, UserError

pytestmark = pytest.mark.slow

OPTIMIZER = "{learning_rate: 1e-2, schedule: constant, warmup_ratio: 0.0}"


def rows_of(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def reward_of(task: Path):
    """The function of the task's file, as one of a script."""
    names: dict = {"__name__": "__main__"}
    exec((task / "reward.py").read_text(), names)
    return names["reward_func"]


def weights(run: hotseat.Run) -> dict:
    return load_file(run.model / "model.safetensors")


def are_equal(one: hotseat.Run, other: hotseat.Run) -> bool:
    first, second = weights(one), weights(other)
    return first.keys() == second.keys() and all((first[name] == second[name]).all() for name in first)


class Recorder(Callback):
    """Keeps the moments of a run."""

    def __init__(self):
        self.moments: list = []

    def on_start(self, run):
        self.moments.append("start")
        assert run.is_running

    def on_step(self, run, step, metrics):
        self.moments.append(step)
        return {"mine/steps": float(len(self.moments))}

    def on_evaluation(self, run, step, metrics):
        self.moments.append(f"evaluation {step}: {'mine/steps' in metrics}")

    def on_checkpoint(self, run, step, path):
        self.moments.append(f"checkpoint {step}: {(path / 'manifest.json').is_file() or path.is_dir()}")

    def on_end(self, run):
        self.moments.append(f"end: {type(run.error).__name__}")


def objects(task: Path) -> dict:
    return {"train": rows_of(task / "prompts.jsonl"), "reward": reward_of(task)}


def without_files(task: Path, **changes: str) -> str:
    """The task's config, in which objects take the place of files."""
    return four_steps(task, **{"data": "{label_key: label, max_length: 16}", "reward": ""} | changes)


def four_steps(task: Path, **changes: str) -> str:
    fixed = {
        "actor": f"{{model: {task}/model, optimizer: {OPTIMIZER}}}",
        "train": "{dtype: fp32, batch_size: 16, micro_batch_size: 8, num_episodes: 2}",
    }
    return rl_yaml(task, **fixed | changes)


@pytest.mark.long
def test_a_run_with_objects_is_to_the_last_bit_that_with_files(task):
    files = hotseat.run(four_steps(task, name="files", eval=f"{{path: {task}/prompts.jsonl}}"))
    recorder = Recorder()
    script = hotseat.run(
        without_files(task, name="script"), eval=rows_of(task / "prompts.jsonl"), callbacks=[recorder], **objects(task)
    )
    assert are_equal(files, script)
    assert recorder.moments[:3] == ["start", "evaluation 0: False", 1]
    assert [each for each in recorder.moments if isinstance(each, int)] == [1, 2, 3, 4]
    assert recorder.moments[-2:] == ["checkpoint 4: True", "end: NoneType"]
    assert script.metrics()[1]["mine/steps"] == 3.0
    assert list(script.frame()["reward"][1:]) == [line["reward"] for line in files.metrics()[1:]]


def test_a_run_is_watched_stopped_and_resumed_to_the_same_bits(task):
    whole = hotseat.run(without_files(task, name="whole"), **objects(task))
    run = hotseat.start(without_files(task, name="parts"), **objects(task))
    with pytest.raises(UserError, match="another run is under way in this process"):
        hotseat.run(without_files(task, name="other"), **objects(task))
    steps = []
    for metrics in run:
        steps.append(metrics["step"])
        if metrics["step"] == 1:
            run.stop()
    assert run.wait() is run
    assert not run.is_running
    assert steps[0] == 0
    last = steps[-1]
    assert not (run.path / "model").exists() or last == 4
    resumed = hotseat.run(without_files(task, name="parts", checkpoint="{resume: true}"), **objects(task))
    assert [line["step"] for line in resumed.metrics()] == [0, 1, 2, 3, 4]
    assert are_equal(whole, resumed)


def test_the_command_says_what_only_a_script_has(task, capsys):
    run = hotseat.run(without_files(task), callbacks=[StopAfter(2)], **objects(task))
    from hotseat.cli.main import main

    assert main(["resume", str(run.path)]) == 2
    told = capsys.readouterr().err
    assert "reward.function: there is no file" in told
    assert "it was an object of a Python script" in told
    assert "data.path: no such file or folder" in told


class StopAfter(Callback):
    """Stops, finishes or changes a run after a step."""

    def __init__(self, step, do=lambda run: run.stop()):
        self.step, self.do = step, do

    def on_step(self, run, step, metrics):
        if step == self.step:
            self.do(run)


@pytest.mark.long
def test_a_run_that_is_finished_early_is_saved_and_exported(task):
    run = hotseat.run(without_files(task), callbacks=[StopAfter(2, lambda run: run.finish())], **objects(task))
    assert [line["step"] for line in run.metrics()] == [0, 1, 2]
    assert (run.model / "model.safetensors").is_file()
    assert [entry["state"] for entry in run.ledger()] == ["trained"] * 8
    extended = hotseat.run(without_files(task, checkpoint="{resume: true}"), **objects(task))
    assert [line["step"] for line in extended.metrics()] == [0, 1, 2, 3, 4]
    assert are_equal(extended, hotseat.run(without_files(task, name="whole"), **objects(task)))


@pytest.mark.long
def test_a_change_takes_effect_from_the_next_step_as_by_resuming(task):
    rate = "actor.optimizer.learning_rate=5e-3"
    changed = hotseat.run(
        without_files(task, name="changed"), callbacks=[StopAfter(2, lambda run: run.change(rate))], **objects(task)
    )
    assert [line["learning_rate"] for line in changed.metrics()[1:]] == [1e-2, 1e-2, 5e-3, 5e-3]
    stopped = hotseat.run(without_files(task, name="stopped"), callbacks=[StopAfter(2)], **objects(task))
    resumed = hotseat.run(without_files(task, name="stopped", checkpoint="{resume: true}"), rate, **objects(task))
    assert are_equal(changed, resumed)
    assert stopped.path == resumed.path


@pytest.mark.long
def test_what_may_not_change_is_refused_and_ends_the_run(task):
    change = StopAfter(1, lambda run: run.change("seed=4"))
    with pytest.raises(UserError, match="seed: 3 when the checkpoint was written, now 4"):
        hotseat.run(without_files(task), callbacks=[change], **objects(task))


@pytest.mark.long
def test_an_error_of_a_callback_ends_the_run_with_its_name(task):
    recorder = Recorder()
    broken = StopAfter(2, lambda run: 1 / 0)
    run = hotseat.start(without_files(task), callbacks=[recorder, broken], **objects(task))
    with pytest.raises(RunError, match="StopAfter.on_step raised ZeroDivisionError: division by zero"):
        list(run)
    with pytest.raises(RunError):
        run.wait()
    assert recorder.moments[-1] == "end: RunError"
    assert hotseat.run(without_files(task, name="next"), **objects(task)).model.is_dir()  # the process is free again


def test_a_metric_of_a_callback_does_not_replace_one_of_the_run(task):
    class Same(Callback):
        def on_step(self, run, step, metrics):
            return {"reward": 1.0}

    with pytest.raises(RunError, match="Same.on_step returned 'reward', which is a metric already"):
        hotseat.run(without_files(task), callbacks=[Same()], **objects(task))


def test_what_is_no_callback_or_returns_no_numbers_is_refused(task):
    class Text(Callback):
        def on_step(self, run, step, metrics):
            return "all is well"

    for given, shown in ((Recorder, "class"), ([Recorder], "class"), (Recorder(), "object"), ([print], "print")):
        with pytest.raises(UserError, match=f"callbacks: given .*{shown}.*, must be a list of objects"):
            hotseat.run(without_files(task), callbacks=given, **objects(task))
    with pytest.raises(RunError, match="Text.on_step returned 'all is well': return a dict of numbers, or nothing"):
        hotseat.run(without_files(task), callbacks=[Text()], **objects(task))


def test_a_key_is_not_set_twice(task):
    with pytest.raises(ConfigError, match=r"data\.path: set in the config and by train=: give one of them"):
        hotseat.run(rl_yaml(task), train=rows_of(task / "prompts.jsonl"))
    with pytest.raises(ConfigError, match=r"actor\.model: set in the config and by model="):
        hotseat.run({}, "actor.model=m", model="other")
    both = {"reward": {"functions": [{"function": "r.py"}]}}
    with pytest.raises(ConfigError, match=r"reward\.functions: set in the config and by reward="):
        hotseat.run(both, reward=[reward_of(task)])


def test_nothing_of_a_run_that_was_stopped_or_failed_is_left_in_the_process(task):
    before = {thread.name for thread in threading.enumerate()}
    children = len(psutil.Process().children(recursive=True))
    hotseat.run(without_files(task, name="stopped"), callbacks=[StopAfter(1)], **objects(task))
    with pytest.raises(RunError):
        hotseat.run(without_files(task, name="failed"), callbacks=[StopAfter(1, lambda run: 1 / 0)], **objects(task))
    assert {thread.name for thread in threading.enumerate()} <= before
    assert len(psutil.Process().children(recursive=True)) == children


SCRIPT = """
import hotseat

rows = [{{"input": "1+2=", "label": "3"}}, {{"input": "2+3=", "label": "5"}}] * 16


def long(queries, prompts, labels):
    return [float(len(query)) for query in queries]


run = hotseat.start({config!r}, "train.num_episodes=50", train=rows, reward=long)
for metrics in run:
    if metrics["step"] == 2:
        break
"""


@pytest.mark.long
def test_a_program_that_ends_before_its_run_has_it_saved(task):
    script = task / "script.py"
    script.write_text(SCRIPT.format(config=without_files(task)))
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=600, cwd=task)
    assert done.returncode == 0, done.stderr
    assert "the program ends, so the run ends after its current step" in done.stdout
    assert list((task / "runs" / "run" / "checkpoints").glob("step-*"))
    assert not list((task / "runs").glob(".*.python"))
    assert "died" not in done.stderr


@pytest.mark.long
def test_early_stopping_counts_values_without_a_new_best(task):
    run = hotseat.run(
        without_files(task),
        callbacks=[EarlyStopping("learning_rate", patience=2)],  # constant, so that the third step is the last
        **objects(task),
    )
    assert [line["step"] for line in run.metrics()] == [0, 1, 2, 3]
    with pytest.raises(UserError, match="StopAt: step 1 has no 'rewards'; it has: "):
        hotseat.run(without_files(task, name="b"), callbacks=[StopAt("rewards", 1.0)], **objects(task))


def test_several_rewards_have_weights_and_curves(task):
    def long(completions, **columns):
        return [float(len(text)) for text in completions]

    def sometimes(completions, label, **columns):
        return [1.0 if text else None for text in completions]

    both = hotseat.run(
        without_files(task),
        train=rows_of(task / "prompts.jsonl"),
        reward=[(reward_of(task), 2.0), (long, 0.5), sometimes],
    )
    line = both.metrics()[1]
    parts = {name: value for name, value in line.items() if name.endswith(("reward_func", "long", "sometimes"))}
    assert len(parts) == 3, sorted(line)
    sample = both.samples()[0]
    assert both.config.reward.functions[1].weight == 0.5
    assert sample["reward"] is not None


@pytest.mark.long
def test_a_supervised_run_takes_objects_and_ends_early(task):
    text = sft_yaml(task, data="{output_key: output, max_length: 16}", eval="")
    rows = rows_of(task / "examples.jsonl")
    run = hotseat.run(text, train=rows, eval=rows, callbacks=[StopAfter(3, lambda run: run.finish())])
    assert [line["step"] for line in run.metrics()][-1] == 3
    assert (run.model / "model.safetensors").is_file()


@pytest.mark.long
def test_a_model_and_its_tokenizer_are_saved_once_and_the_run_is_that_of_the_folder(task):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(task / "model")
    tokenizer = AutoTokenizer.from_pretrained(task / "model")
    text = without_files(task, name="loaded", actor=f"{{optimizer: {OPTIMIZER}}}")
    run = hotseat.run(text, model=model, tokenizer=tokenizer, **objects(task))
    assert (run.path / "initial_model" / "model.safetensors").is_file()
    assert are_equal(run, hotseat.run(without_files(task, name="folder"), **objects(task)))
    renamed = hotseat.run(without_files(task, name="renamed"), tokenizer=tokenizer, **objects(task))
    assert are_equal(run, renamed)


def test_signals_stay_with_the_program_while_a_run_is_in_its_thread(task):
    import signal

    before = signal.getsignal(signal.SIGINT)
    run = hotseat.start(without_files(task), **objects(task))
    assert signal.getsignal(signal.SIGINT) == before
    names = {thread.name for thread in threading.enumerate()}
    assert f"run {run.path.name}" in names
    with pytest.raises(TimeoutError, match="has not ended within 0 s"):
        run.wait(0)
    run.wait()
