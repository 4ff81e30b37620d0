"""The `hotseat` command: what it prints, and its exit codes."""

import json
import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hotseat.cli import help_texts
from hotseat.cli.ending import FAILED, OK, REFUSED, STOPPED
from hotseat.cli.main import main, make_parser, parse
from hotseat.cli.options_view import options
from hotseat.config import loads, to_saved

PLANS = Path(__file__).parent.parent.parent / "examples" / "plans"


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(
        "rollout: {batch_size: 32, samples_per_prompt: 8}\ntrain: {batch_size: 64}\ndata: {max_samples: 100}\n"
    )
    return str(path)


def test_help_answers_at_once_and_loads_nothing_heavy():
    code = "import sys; from hotseat.cli.main import main\ntry: main(['--help'])\nexcept SystemExit: pass\n"
    code += "print(sorted({'torch', 'ray', 'pydantic', 'rich', 'transformers'} & set(sys.modules)))"
    started = time.monotonic()
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert result.stdout.splitlines()[-1] == "[]"
    assert "explain" in result.stdout
    assert time.monotonic() - started < 100  # measured 0.1 s alone; generous, because this is no benchmark


def test_every_command_documents_every_option():
    parser = make_parser()
    commands = next(action for action in parser._actions if action.dest == "==SUPPRESS==" or action.choices)
    for name, command in commands.choices.items():
        assert command.description, name
        for action in command._actions:
            assert action.help, f"{name} {action.dest}"


def examples_in(text: str) -> list[list[str]]:
    """The words of each `hotseat` command in a help text, without `hotseat` and what stands behind it as a comment."""
    lines = [re.split(r"\s{3,}", line.strip())[0] for line in text.splitlines() if line.startswith("  hotseat ")]
    return [shlex.split(re.split(r" && | \| | > ", line)[0])[1:] for line in lines]


def test_the_examples_of_every_help_are_commands_that_exist():
    for name, text in [("", help_texts.MAIN), *help_texts.EPILOGS.items()]:
        found = examples_in(text)
        assert found or name == "completion"
        for words in found:
            assert words[0] == name or not name
            arguments = parse(words)
            loads("", getattr(arguments, "overrides", []))  # keys and values that exist


def test_the_values_that_help_mentions_are_taken(config):
    for override in ("rollout.temperature=0.8", "eval=null", "cluster.component_placement={actor: all}"):
        assert override in help_texts.EPILOGS["run"]
        loads("", [override])


@pytest.mark.parametrize("command", ["", "run", "resume"])
def test_help_says_what_exit_codes_mean(command, capsys):
    with pytest.raises(SystemExit) as ended:
        main([*([command] if command else []), "--help"])
    assert ended.value.code == 0
    out = capsys.readouterr().out
    for code in (OK, FAILED, REFUSED, STOPPED):
        assert re.search(rf"^  {code} +[a-z]", out, re.MULTILINE)


def test_help_of_a_command_names_the_list_of_keys(capsys):
    for command in ("run", "plan", "explain", "config"):
        with pytest.raises(SystemExit):
            main([command, "--help"])
        assert "`hotseat options` lists every key" in capsys.readouterr().out


def test_plan_prints_the_table(capsys):
    assert main(["plan", str(PLANS / "embodied_hybrid_8.yaml")]) == 0
    out = capsys.readouterr().out
    assert "hybrid on 1 node x 8 devices" in out
    assert "node 0: 4-7" in out


def test_plan_in_a_pipe_has_at_most_100_columns():
    command = [sys.executable, "-m", "hotseat", "plan", str(PLANS / "ppo_hybrid_8.yaml"), "--inventory", "1x8xA100-80G"]
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    widths = [len(line.rstrip()) for line in result.stdout.splitlines()]
    assert 80 < max(widths) <= 100


def test_plan_that_does_not_fit_exits_with_2(capsys):
    plan = ["plan", str(PLANS / "llama70b_hybrid_16.yaml"), "train.micro_batch_size=4", "--inventory", "2x8xA100-80G"]
    assert main(plan) == 2
    out = capsys.readouterr().out
    assert "does not fit" in out
    assert "as arguments: train.micro_batch_size=auto" in out


def test_plan_that_is_refused_exits_with_2_and_says_why(capsys):
    assert main(["plan", str(PLANS / "multi_node_40.yaml"), "--inventory", "4x8"]) == 2
    assert "need 40 devices and the inventory has 32" in capsys.readouterr().err


def test_plan_says_by_how_much_an_engine_does_not_fit_its_share(tmp_path, capsys):
    (tmp_path / "plan.yaml").write_text(
        "actor: {model: org/Llama-3-8B}\n"
        "rollout: {engine: vllm, memory_share: 0.01}\n"
        "cluster: {component_placement: {actor: 0, rollout: 1}}\n"
    )
    assert main(["plan", str(tmp_path / "plan.yaml"), "--inventory", "1x2xH200"]) == 2
    out = " ".join(capsys.readouterr().out.split())
    assert "rollout does not fit on node 0: 1: the engine's memory share has no room for its weights and one" in out
    # 8.03e9 parameters of 2 bytes are 15.0 GiB alone.
    found = re.search(r"they take ([\d.]+) GiB, 0.01 of ([\d.]+) GiB is 1.4 GiB, ([\d.]+) GiB too little", out)
    assert 15.0 < float(found[1]) < 20.0
    assert float(found[3]) == pytest.approx(float(found[1]) - 0.01 * float(found[2]), abs=0.11)


def test_plan_explains_its_figures(capsys):
    main(["plan", str(PLANS / "hybrid_engine_8.yaml"), "--inventory", "1x8xA100-80G", "--explain"])
    assert "8,030,261,248" in capsys.readouterr().out


def test_plan_as_json_is_the_whole_plan(capsys):
    main(["plan", str(PLANS / "embodied_hybrid_8.yaml"), "--json"])
    assert json.loads(capsys.readouterr().out)["label"] == "hybrid"


def test_explain_shows_the_batch_algebra(config, capsys):
    assert main(["explain", config, "--num-rows", "1000", "data.max_samples=null", "train.max_epochs=2"]) == 0
    out = capsys.readouterr().out
    assert "256  32 prompts x 8" in out
    assert "31  1,000 rows x 1 pass / 32, 8 left over and not used" in out
    assert "248  31 steps x 8" in out


def test_explain_refuses_sizes_that_do_not_divide(config, capsys):
    assert main(["explain", config, "train.batch_size=100"]) == 2
    assert "train.batch_size 100 does not divide the 256 samples" in capsys.readouterr().err


def test_explain_refuses_a_number_of_rows_below_one(config, capsys):
    assert main(["explain", config, "--num-rows", "0"]) == 2
    assert "--num-rows 0: must be at least 1" in capsys.readouterr().err


def test_config_prints_what_differs_and_what_is_missing(config, capsys):
    assert main(["config", config]) == 0
    captured = capsys.readouterr()
    assert "samples_per_prompt: 8" in captured.out
    assert "to start this run: actor.model: not set" in captured.err


def test_a_wrong_key_exits_with_2_and_names_the_line(tmp_path, capsys):
    path = tmp_path / "bad.yaml"
    path.write_text("rolout: {}\n")
    assert main(["config", str(path)]) == 2
    assert "bad.yaml:1: rolout: unknown key; did you mean rollout?" in capsys.readouterr().err


def test_options_lists_keys_with_meaning(capsys):
    assert main(["options", "algorithm.kl"]) == 0
    out = capsys.readouterr().out
    assert "algorithm.kl.target" in out
    assert "algorithm.gamma" not in out


def test_options_are_never_cut(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "30")
    assert main(["options"]) == 0
    words = " ".join(capsys.readouterr().out.split())
    for option in options(""):
        assert option["meaning"] in words
        assert f"{option['key']}: {option['takes']}" in words


def test_options_as_json_have_values_as_they_are(capsys):
    assert main(["options", "rollout", "--json"]) == 0
    rows = {row["key"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["rollout.top_p"]["default"] == 1.0
    assert rows["rollout.enforce_eager"] == {
        "key": "rollout.enforce_eager",
        "takes": "true | false",
        "default": False,
        "meaning": "Run vLLM without CUDA graphs.",
        "tasks": ["rl"],
        "if": ["rollout.engine is vllm"],
        "unsupported": None,
    }


def test_options_say_when_they_have_an_effect(capsys):
    assert main(["options", "critic.optimizer.muon.momentum"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "critic.optimizer.muon.momentum: number = 0.95 (rl)" in out
    assert "Only if algorithm.estimator is gae, and critic.optimizer.kind is muon." in out


def test_options_that_need_what_is_not_built_say_so(capsys):
    assert main(["options", "use_modelscope"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "Not part of this version: ModelScope; fetch the model with `modelscope download`" in out


def test_options_of_nothing_names_the_sections(capsys):
    assert main(["options", "foo"]) == 2
    assert "no option 'foo'; the sections are task" in capsys.readouterr().err


def test_the_package_is_the_command():
    result = subprocess.run([sys.executable, "-m", "hotseat", "--version"], capture_output=True, text=True, timeout=300)
    assert re.fullmatch(r"hotseat \d+\.\d+\.\d+\n", result.stdout)


def test_a_finished_run_without_checkpoints_names_its_model(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "done" / "model").mkdir(parents=True)
    (tmp_path / "runs" / "done" / "model" / "config.json").write_text("{}")
    (tmp_path / "runs" / "done" / "config.yaml").write_text(
        to_saved(loads("{task: sft, actor: {model: m}, data: {path: d.jsonl}, train: {batch_size: 4}}"))
    )
    assert main(["resume", "runs/done"]) == 2
    said = capsys.readouterr().err
    assert "runs/done has no checkpoint to resume from: runs/done/checkpoints holds none" in said
    assert "or from its model (actor.model=runs/done/model)" in said


def test_a_command_without_its_file_asks_for_that_alone(capsys):
    with pytest.raises(SystemExit):
        main(["run"])
    assert "the following arguments are required: CONFIG\n" in capsys.readouterr().err
