"""TRL's quick starts, as docs/trl.md changes them, train a tiny model on a few rows of the same form."""

import functools
import re
from pathlib import Path

import datasets
import pytest
import trl

from hotseat import Run
from hotseat.cli.main import main

PAGE = Path(__file__).parents[2] / "docs" / "trl.md"
DIFFS = re.findall(r"```diff[^\n]*\n(.*?)```", PAGE.read_text(), re.DOTALL)
MOST_CHANGED = 6

QUESTION = [{"role": "user", "content": "How do you write 3?"}]
RIGHT, WRONG = ([{"role": "assistant", "content": word}] for word in ("three", "four"))
ROWS = {
    "trl-lib/DeepMath-103K": {"prompt": QUESTION, "solution": "$3$"},
    "trl-lib/Capybara": {"messages": QUESTION + RIGHT},
    "trl-lib/ultrafeedback_binarized": {"chosen": QUESTION + RIGHT, "rejected": QUESTION + WRONG},
}


def side(diff: str, sign: str) -> str:
    return "".join(line[1:] + "\n" for line in diff.splitlines() if line[:1] in (" ", sign))


@pytest.mark.parametrize("diff", DIFFS, ids=["grpo", "sft", "dpo", "rm"])
def test_at_most_six_lines_change_and_both_sides_are_python(diff):
    assert sum(line.startswith("+") for line in diff.splitlines()) <= MOST_CHANGED
    names = set()
    for sign in "+-":
        names |= set(compile(side(diff, sign), "script", "exec").co_names)
    assert {name for name in names if name.endswith(("Trainer", "Config"))} <= set(dir(trl))


@pytest.mark.long
@pytest.mark.parametrize("diff", DIFFS, ids=["grpo", "sft", "dpo", "rm"])
def test_a_quick_start_trains(diff, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["new", "rl", "first"]) == 0
    [model] = re.findall(r"model=\"(.+?)\"\)", side(diff, "+"))
    Path(model).parent.mkdir()
    Path("first/tiny_model").rename(model)
    monkeypatch.setattr(datasets, "load_dataset", lambda name, split: datasets.Dataset.from_list([ROWS[name]] * 32))
    for name in ("GRPOConfig", "SFTConfig", "DPOConfig", "RewardConfig"):
        short = {"max_completion_length": 8, "num_generations": 4} if name == "GRPOConfig" else {}
        quick = {"use_cpu": True, "bf16": False, "num_train_epochs": 1, **short}
        monkeypatch.setattr(trl, name, functools.partial(getattr(trl, name), **quick))
    code = side(diff, "+")
    if "GRPOConfig" in code:
        code = code.replace("*columns", '*columns, "data.max_length=512"')  # the tiny model has 1,024 positions
    exec(compile(code, "script", "exec"), {"__name__": "__main__"})
    [folder] = re.findall(r"Config\(\"(\w+)\"\)", code)
    run = Run(folder)
    assert run.metrics()[-1]["step"] >= 4
    assert (run.model / "model.safetensors").is_file()
