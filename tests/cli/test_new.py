"""`hotseat new`: what it writes is what the pages show, and runs and learns as it is."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from pages import texts_of

from hotseat.cli.main import main
from hotseat.cli.new import KINDS, REWARD, texts, write_files
from hotseat.cli.starter_task import questions
from hotseat.config import load
from hotseat.config.conflicts import missing
from hotseat.errors import UserError
from hotseat.loop.run import start
from hotseat.observe import read_lines

ROOT = Path(__file__).parents[2]
HERE = ["cluster.runtime=local"]


def first_rows(text: str) -> str:
    return "".join(text.splitlines(keepends=True)[:3])


@pytest.mark.parametrize("kind", KINDS)
def test_a_page_shows_the_files_of_every_kind(kind):
    page, files = ROOT / "docs" / "first-run.md", texts(kind)
    assert files[f"{kind}.yaml"] in texts_of(page, "yaml")
    data = next(name for name in files if name.endswith(".jsonl"))
    assert first_rows(files[data]) in texts_of(page, "json")


def test_a_page_shows_the_first_reward():
    assert texts("rl")["reward.py"] in texts_of(ROOT / "docs" / "first-run.md", "python")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("model", [None, "org/Some-Model"])
def test_configs_are_complete_and_about_ten_lines(tmp_path, kind, model):
    files = texts(kind, model)
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert 8 <= len(files[f"{kind}.yaml"].splitlines()) <= 12
    assert all(len(line) <= 120 for line in files[f"{kind}.yaml"].splitlines())
    config = load(tmp_path / f"{kind}.yaml")
    assert missing(config) == []
    assert config.actor.model == (model or "tiny_model")
    named = [config.data.path, config.eval.path, *([config.reward.function] if config.task == "rl" else [])]
    assert set(named) == set(files) - {f"{kind}.yaml"}


def test_a_pretrained_model_gets_another_learning_rate_and_room_for_answers(tmp_path):
    assert main(["new", "rl", str(tmp_path), "--model", "org/Some-Model"]) == 0
    config = load(tmp_path / "rl.yaml")
    assert (config.actor.optimizer.learning_rate, config.data.max_length) == (1e-6, 1024)
    assert not (tmp_path / "tiny_model").exists()


def test_held_out_questions_are_never_trained_on():
    learned, held_out = questions()
    assert (len(learned), len(held_out)) == (64, 16)
    assert not dict(learned).keys() & dict(held_out).keys()
    assert learned[0] == ("How do you write 2?", "two")


def test_of_a_pair_one_answer_is_right():
    rows = [json.loads(line) for line in texts("rm")["pairs.jsonl"].splitlines()]
    right = dict(questions()[0])
    assert all(row["chosen"] == right[row["prompt"]] != row["rejected"] for row in rows)


def test_the_reward_is_1_for_the_right_word_alone():
    made: dict = {}
    exec(REWARD, made)
    answers = ["two<|end|>", " Two.\n<|im_end|>", "It is two", "three<|end|>", "twotwo", "<|end|>"]
    queries = ["Q:" + answer for answer in answers]
    assert made["reward_func"](queries, ["Q:"] * 6, ["two"] * 6) == [1.0, 1.0, 0.2, 0.0, 0.0, 0.0]


def test_what_is_next_is_printed(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "first" / "runs" / "sft-1").mkdir(parents=True)
    assert main(["new", "sft", "first", "--model", "m"]) == 0
    out = capsys.readouterr().out
    assert "first: sft.yaml, chats.jsonl, held_out_chats.jsonl\n" in out
    assert "  cd first\n  hotseat run sft.yaml\n  hotseat report runs/sft-2" in out
    assert main(["new", "rm", "--model", "m"]) == 0
    assert "cd" not in capsys.readouterr().out


def test_nothing_is_overwritten(tmp_path, capsys):
    assert main(["new", "rl", str(tmp_path), "--model", "m"]) == 0
    (tmp_path / "reward.py").write_text("mine")
    (tmp_path / "rl.yaml").unlink()
    assert main(["new", "rl", str(tmp_path), "--model", "m"]) == 2
    assert f"this is here already: {tmp_path / 'reward.py'}; give another folder" in capsys.readouterr().err
    assert (tmp_path / "reward.py").read_text() == "mine"
    assert not (tmp_path / "rl.yaml").exists()


def test_a_config_is_never_taken_for_ones_own(tmp_path):
    write_files("rl", tmp_path, "m")
    with pytest.raises(UserError, match=r"rl\.yaml"):
        write_files("rl", tmp_path, "m")


def test_kinds_share_what_is_alike(tmp_path):
    write_files("rl", tmp_path, "m")
    assert write_files("ppo", tmp_path, "m") == ["ppo.yaml", "reward.py", "prompts.jsonl", "held_out.jsonl"]


def test_a_file_is_no_folder(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="file is a file: give a folder"):
        write_files("rl", tmp_path / "file", "m")


@pytest.mark.parametrize("model", ["org/Some-Model", "~/my: model #2", "{x}", "2024", "on"])
def test_any_name_of_a_model_survives_yaml(tmp_path, model):
    write_files("sft", tmp_path, model)
    assert load(tmp_path / "sft.yaml").actor.model == model


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"file/below cannot be written: Not a directory; give another folder"):
        write_files("rl", tmp_path / "file" / "below", "m")


def test_a_refusal_loads_nothing_heavy(tmp_path):
    (tmp_path / "rl.yaml").write_text("")
    code = f"import sys; from hotseat.cli.main import main; print(main(['new', 'rl', {str(tmp_path)!r}]))\n"
    code += "print(sorted({'torch', 'ray', 'transformers'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert result.stdout.splitlines() == ["2", "[]"], result.stderr


# --- the runs ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """One folder with the files of all four kinds, and one model that they share."""
    path = tmp_path_factory.mktemp("first")
    for kind in KINDS:
        assert main(["new", kind, str(path)]) == 0
    return path


@pytest.mark.slow
def test_a_model_of_another_kind_is_not_replaced(tmp_path):
    (tmp_path / "tiny_model").mkdir()
    (tmp_path / "tiny_model" / "config.json").write_text("{}")
    with pytest.raises(UserError, match="tiny_model; give another folder"):
        write_files("rl", tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tiny_model"]


@pytest.mark.long
@pytest.mark.slow
def test_grpo_learns_as_it_is_written(folder, monkeypatch):
    monkeypatch.chdir(folder)
    final = start(load("rl.yaml", HERE))
    before, *_ = read_lines(folder / "runs" / "rl-1" / "metrics.jsonl")
    assert before["eval/accuracy"] < 0.3  # measured: 0.09
    assert final["eval/accuracy"] > 0.6  # measured: 1.0
    assert (folder / "runs" / "rl-1" / "report.html").is_file()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "short", "metric"),
    [
        ("rl", ["train.num_episodes=2"], "eval/accuracy"),  # it learns in the long test above
        ("ppo", ["train.num_episodes=2"], "value_loss"),
        ("sft", ["train.max_epochs=1"], "eval/loss"),
        ("rm", ["train.max_epochs=1"], "eval/accuracy"),
        ("dpo", ["train.max_epochs=1"], "eval/accuracy"),
    ],
)
def test_every_kind_runs_as_it_is_written(folder, monkeypatch, kind, short, metric):
    monkeypatch.chdir(folder)
    start(load(f"{kind}.yaml", [*HERE, f"name={kind}", *short]))
    assert metric in read_lines(folder / "runs" / kind / "metrics.jsonl")[-1]
    assert (folder / "runs" / kind / "model" / "model.safetensors").is_file()
