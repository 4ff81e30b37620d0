"""What would end a run is refused before anything loads: weights, spellings, the user's agent, host memory."""

import json
import os
import re
import shutil
import struct
import sys
import types
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from loop_cases import make_task, rl_yaml, sft_yaml
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from hotseat.agents.loading_trial import problem_of, undefined_names
from hotseat.checks.agent_trial import agent_trial
from hotseat.checks.named_files import model_problem
from hotseat.checks.pipeline import check_config
from hotseat.checks.plans import engine_memory, host_memory, loading_memory, memory_snapshots
from hotseat.checks.stage import DeviceContext, PlanContext
from hotseat.checks.weight_files import INDEX, SINGLE, loaded_bytes
from hotseat.config import loads
from hotseat.config.batches import warmup_steps
from hotseat.errors import UserError
from hotseat.loop.inputs import supervised_inputs
from hotseat.loop.offline.answering import on_this_device
from hotseat.placement import Inventory
from hotseat.planning.config_plan import host_needs, make_plan
from hotseat.train.schedule import Schedule


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_task(tmp_path_factory.mktemp("task"))


@pytest.fixture
def model(task: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(task / "model", tmp_path / "model"))


# --- weights ----------------------------------------------------------------------------------------------------------


def shard(model: Path) -> list[Path]:
    """Move the weights of a model into two files with an index, by hand."""
    data = (model / SINGLE).read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    tensors = {name: facts for name, facts in json.loads(data[8 : 8 + length]).items() if name != "__metadata__"}
    names, files, weight_map = sorted(tensors), [], {}
    for number, chosen in enumerate((names[::2], names[1::2]), 1):
        header, body = {}, b""
        for name in chosen:
            first, last = tensors[name]["data_offsets"]
            part = data[8 + length + first : 8 + length + last]
            header[name] = {**tensors[name], "data_offsets": [len(body), len(body) + len(part)]}
            body += part
        text = json.dumps(header).encode()
        files.append(model / f"model-{number:05}-of-00002.safetensors")
        files[-1].write_bytes(struct.pack("<Q", len(text)) + text + body)
        weight_map |= dict.fromkeys(chosen, files[-1].name)
    (model / SINGLE).unlink()
    (model / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return files


def test_whole_weights_in_one_file_or_several_are_fine(model):
    assert model_problem(str(model)) is None
    shard(model)
    assert model_problem(str(model)) is None


def test_a_folder_without_weights_is_refused(model):
    (model / SINGLE).unlink()
    assert model_problem(str(model)) == (
        f"{model} has a config.json but no weights: there is neither {SINGLE} nor {INDEX} in it"
    )
    (model / "pytorch_model.bin").touch()
    assert "has weights as pytorch_model.bin only" in model_problem(str(model))


def test_weights_that_are_cut_short_are_named_with_the_size_that_they_should_have(model):
    file = model / SINGLE
    whole = file.stat().st_size
    os.truncate(file, whole - 1)
    said = f"{file} is cut short: it has {whole - 1:,} bytes, and its header says {whole:,}; copy or download it again"
    assert model_problem(str(model)) == said
    os.truncate(file, 20)
    assert model_problem(str(model)).startswith(f"{file} is cut short within its header: it has 20 bytes")
    os.truncate(file, 0)
    assert model_problem(str(model)).startswith(f"{file} is no safetensors file (0 bytes)")
    file.write_text("version https://git-lfs.github.com/spec/v1\n")
    assert "is a pointer of Git LFS" in model_problem(str(model))


def test_shards_that_the_index_lists_are_there_and_whole(model):
    first, second = shard(model)
    kept = second.read_bytes()
    second.write_bytes(kept[:-4])
    assert model_problem(str(model)).startswith(f"{second} is cut short: it has {len(kept) - 4:,} bytes")
    second.write_bytes(first.read_bytes())
    assert re.match(rf"{second} has no \S+, which {model / INDEX} says is in it", model_problem(str(model)))
    second.unlink()
    assert model_problem(str(model)) == (
        f"{model / INDEX} lists 2 files, and {second.name} is missing: copy or download it again"
    )


def test_a_run_with_such_weights_is_refused_by_its_key(task, model):
    os.truncate(model / SINGLE, 1000)
    with pytest.raises(UserError, match=r"actor\.model: .*model\.safetensors is cut short"):
        check_config(loads(sft_yaml(task), [f"actor.model={model}"]))


# --- spellings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (
            "exact_macth",
            r"must be FILE\.py or FILE\.py:NAME, .*exact_match or number_match; did you mean exact_match\?",
        ),
        ("reward", r"did you mean reward\.py\?"),
        ("reward:reward_func", r"did you mean reward\.py:reward_func\?"),
        ("reward.reward_func", r"did you mean reward\.py:reward_func\?"),
        ("reward.py:a.b", r"after \.py: comes the name of a function"),
        ("reward.py,other.py", "which is several: give one function"),
        ("http://localhost:1/score", "is an address: set reward.url to it"),
        ("reward.py:absent", r"has no absent\(queries, prompts, labels\)"),
        ("absent.py:reward_func", "there is no file absent.py"),
    ],
)
@pytest.mark.parametrize("key", ["reward.function", "eval.reward"])
def test_a_reward_that_is_none_is_refused_however_it_is_spelled(task, monkeypatch, key, value, said):
    monkeypatch.chdir(task)
    with pytest.raises(UserError, match=rf"{key}: .*{said}"):
        check_config(loads(rl_yaml(task), [f"eval.path={task}/prompts.jsonl", f"{key}={value}"]))


@pytest.mark.parametrize("value", ["reward.py", "reward.py:reward_func", "exact_match", "number_match"])
def test_a_reward_that_is_one_is_not_refused(task, monkeypatch, value):
    monkeypatch.chdir(task)
    check_config(loads(rl_yaml(task), [f"reward.function={value}"]))


def test_an_agent_that_is_spelled_as_a_module_is_refused(task, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "game.py").write_text(AGENT)
    with pytest.raises(UserError, match=r"agent\.path: given 'game:Game', must be .* did you mean game\.py:Game\?"):
        check_config(loads(rl_yaml(task), ["agent.path=game:Game"]))


# --- the user's agent -------------------------------------------------------------------------------------------------

AGENT = """
import hotseat

class Game(hotseat.Environment):
    def reset(self, prompt):
        return prompt.text

    def step(self, answer):
        return hotseat.Step(reward=score(answer))

def score(answer):
    return float(len(answer))
"""


def test_an_agent_that_loads_has_no_problem(tmp_path):
    file = tmp_path / "game.py"
    file.write_text(AGENT)
    assert problem_of(str(file), None) == {"problem": None, "absent": False, "note": None}


@pytest.mark.parametrize(
    ("text", "name", "said"),
    [
        (AGENT + "\nlimit = LIMIT\n", None, "game.py: NameError: name 'LIMIT' is not defined at line 14"),
        (
            AGENT.replace("score(answer)", "socre(answer)", 1),
            None,
            "game.py:9: step uses the name 'socre', which nothing",
        ),
        (
            AGENT.replace("hotseat.Step(", "hotseat.StepResult("),
            None,
            "game.py:9: step uses the name 'hotseat.StepResult', which nothing",
        ),
        (AGENT, "Chess", "no agent or environment 'Chess' in it; it has: Game"),
        ("import nowhere_to_be_found\n", None, "ModuleNotFoundError: No module named 'nowhere_to_be_found'"),
        ("x = 1\n", None, "no agent in it; what would fit: a subclass of hotseat.Environment"),
    ],
    ids=["at the top", "in a method", "not of hotseat", "no such class", "no package", "no agent"],
)
def test_what_is_wrong_with_an_agent_is_found_by_loading_it(tmp_path, text, name, said):
    file = tmp_path / "game.py"
    file.write_text(text)
    found = problem_of(str(file), name)
    assert said in found["problem"]
    assert found["absent"] == ("nowhere" in text)


def test_modules_beside_an_agent_are_checked_with_it(tmp_path):
    file, helper = tmp_path / "game.py", tmp_path / "scores_of_game.py"
    file.write_text(AGENT.replace("def score", "from scores_of_game import score\n\ndef unused"))
    text = "def score(answer):\n    return float(lenght(answer))\n"
    helper.write_text(text)
    said = f"{helper}:2: score uses the name 'lenght', which nothing defines"
    assert problem_of(str(file), None) == {"problem": said, "absent": False, "note": None}
    del sys.modules["scores_of_game"]
    file.write_text(file.read_text() + "import scores_of_game\n\ndef begin():\n    scores_of_game.lenght = len\n")
    assert problem_of(str(file), None) == {"problem": None, "absent": False, "note": None}
    del sys.modules["scores_of_game"]


def names_missing(text: str) -> list[tuple[str, int, str]]:
    module = types.ModuleType("some")
    code = compile(text, "some.py", "exec")
    exec(code, vars(module))
    return undefined_names(code, vars(module))


def test_names_that_a_function_defines_or_finds_are_not_missed():
    assert names_missing("def f(x):\n    y = x\n    return [y for y in z]\n") == [("z", 3, "f")]
    assert names_missing("from math import *\ndef f():\n    return sin(__name__, len)\n") == []
    assert names_missing("def f():\n    global z\n    z = 1\ndef g():\n    return z\n") == []
    assert names_missing("def f():\n    globals()['z'] = 1\n    return z\n") == []
    assert (
        names_missing("def f():\n    try:\n        return unicode\n    except NameError:\n        return str\n") == []
    )
    optional = "try:\n    import nowhere\nexcept ImportError:\n    pass\ndef f():\n    return nowhere\n"
    assert names_missing(optional) == []
    assert names_missing("if __name__ == '__main__':\n    args = 1\ndef f():\n    return args\n") == []
    assert names_missing("class A:\n    def f(self):\n        return lambda: later\nlater = 1\n") == []


@pytest.mark.slow
def test_a_broken_agent_is_refused_by_a_process_of_its_own(task, tmp_path):
    file = tmp_path / "game.py"
    for text, said in (
        (AGENT.replace("score(answer)", "socre(answer)", 1), r"game\.py:9: step uses the name 'socre'"),
        ("import os\nos._exit(3)\n", r"ends its process when it is loaded \(exit code 3\)"),
    ):
        file.write_text(text)
        config = loads(rl_yaml(task), [f"agent.path={file}"])
        match = rf"this run cannot start:\n  agent\.path: .*{said}"
        with agent_trial(config) as trial, pytest.raises(UserError, match=match):
            trial.notes()


@pytest.mark.long
@pytest.mark.slow
def test_a_step_file_that_takes_long_to_run_gets_one_note_that_names_the_flag(task, tmp_path):
    file = tmp_path / "agent_func.py"
    file.write_text("import time\ntime.sleep(0.25)\ndef step(state, action, label):\n    return 1.0, state, True, {}\n")
    with agent_trial(loads(rl_yaml(task), [f"agent.path={file}"])) as trial:
        [note] = trial.notes()
    assert note.startswith(f"agent.path: {file} is run for every episode")
    assert "SHARED_GLOBALS = True" in note


# --- host memory and short runs ---------------------------------------------------------------------------------------


def test_a_run_on_cpus_that_needs_more_memory_than_there_is_is_refused(task):
    config = loads(sft_yaml(task), ["train.dtype=fp32"])
    plan = supervised_inputs(config).plan
    with safe_open(task / "model" / SINGLE, "np") as stored:
        num_parameters = sum(stored.get_tensor(name).size for name in stored.keys())  # noqa: SIM118
    needed = 16 * num_parameters  # weight, gradient and two moments, each in fp32
    assert sum(host_needs(config, plan).values()) * 2**30 == pytest.approx(needed)
    context = PlanContext(config=config, plan=plan)
    assert list(host_memory(context, available=needed + 1)) == []
    [problem] = host_memory(context, available=needed - 1)
    found = r"actor\.model: weights, gradients and optimizer state take .* on CPUs \(.*\), and"
    assert re.match(found, str(problem))


def test_memory_snapshots_that_have_no_place_or_no_room_are_refused(task, tmp_path):
    def problems(*overrides: str, free: int) -> list[str]:
        config = loads(sft_yaml(task), ["train.dtype=fp32", *overrides])
        context = PlanContext(config=config, plan=make_plan(config, Inventory.parse("1x1x24G")))
        return [str(problem) for problem in memory_snapshots(context, free=free)]

    asked = "checkpoint.every=2", "checkpoint.memory_every=1", f"checkpoint.memory_path={tmp_path}"
    with safe_open(task / "model" / SINGLE, "np") as stored:
        num_parameters = sum(stored.get_tensor(name).size for name in stored.keys())  # noqa: SIM118
    needed = 2 * 12 * num_parameters  # two snapshots of weight and two moments, each in fp32
    assert problems(*asked, free=needed) == []
    [problem] = problems(*asked, free=needed - 1)
    assert problem.startswith(
        "checkpoint.memory_every: the last memory snapshot and the one that is being written take"
        f" {needed:,} bytes in {tmp_path}, and {needed - 1:,} are free: make it larger"
    )
    assert problems(*asked, "checkpoint.resume=true", free=needed // 2) == []
    assert problems("checkpoint.every=2", free=0) == []
    [problem] = problems(*asked[:2], f"checkpoint.memory_path={tmp_path}/none", free=0)
    assert f"checkpoint.memory_path: {tmp_path}/none is no folder that can be written" in problem


def test_ranks_that_load_a_model_together_need_host_memory_for_all_of_them(tmp_path):
    task = make_task(tmp_path)
    plan = make_plan(loads(sft_yaml(task), ["cluster.component_placement.actor=0-3"]), Inventory.parse("1x4x24G"))
    assert len(plan.role("actor").processes) == 4
    with safe_open(task / "model" / SINGLE, "np") as stored:
        num_parameters = sum(stored.get_tensor(name).size for name in stored.keys())  # noqa: SIM118

    def problems(available, *keys):
        config = loads(sft_yaml(task), ["train.dtype=null", *keys])
        return [str(each) for each in loading_memory(PlanContext(config=config, plan=plan), available, on_gpu=True)]

    assert problems(1) == []  # they are stored in fp32, and may stay in the file
    model = AutoModelForCausalLM.from_pretrained(task / "model")
    model.to(torch.bfloat16).save_pretrained(task / "model")
    needed = 4 * 4 * num_parameters
    assert problems(needed) == []
    [problem] = problems(needed - 1)
    assert re.match(r"actor\.model: 4 ranks of this machine each load .* as fp32 before they keep", problem)
    assert problems(1, "train.lora.rank=2") == problems(1, "train.fp32_master=false") == []
    assert list(loading_memory(PlanContext(config=loads(sft_yaml(task)), plan=plan), 1, on_gpu=False)) == []


def test_a_command_without_training_is_refused_where_the_weights_do_not_fit(task, monkeypatch):
    config = loads(sft_yaml(task), ["train.dtype=fp32"])
    needed = loaded_bytes(task / "model", "fp32")
    assert needed == 2 * loaded_bytes(task / "model", "bf16") > loaded_bytes(task / "model", "fp32", are_kept=True) == 0
    context = DeviceContext(config=config, on_gpu=False)
    assert list(engine_memory(context, available=needed)) == []
    assert list(engine_memory(replace(context, on_gpu=True), available=1)) == []
    [problem] = engine_memory(context, available=needed - 1)
    assert re.match(r"actor\.model: its weights take .* GiB of host memory as fp32, and .* are available", str(problem))
    assert loaded_bytes(task, "fp32") == 0
    monkeypatch.setattr("hotseat.checks.plans.available_bytes", lambda: needed - 1)
    with pytest.raises(UserError, match="its weights take"):
        on_this_device(config)


def test_a_run_of_one_step_learns_at_the_peak_under_every_schedule(task):
    assert warmup_steps(1, 0.03) == 0
    assert warmup_steps(100, 0.03) == 3
    for kind in ("constant", "linear", "cosine"):
        schedule = Schedule(kind, peak=0.5, num_warmup_steps=warmup_steps(1, 0.03), num_steps=1, min_ratio=0.1)
        assert schedule.learning_rate(0) == 0.5
    options = ["actor.optimizer.schedule=cosine", "actor.optimizer.warmup_ratio=0.03", "data.max_samples=8"]
    inputs = supervised_inputs(loads(sft_yaml(task), [*options, "train.batch_size=8", "train.max_epochs=1"]))
    assert (inputs.algebra.num_steps, inputs.algebra.warmup_steps) == (1, 0)
