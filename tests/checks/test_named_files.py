"""What is refused at once: by key, or by file and line, before a heavy library is imported."""

import json
import os
import shutil
import socket
import subprocess
import sys
import types
from pathlib import Path

import pytest
from model_shells import make_shell

from hotseat.checks.hub import (
    OFFLINE,
    cache_folder,
    data_set_cache,
    is_cached,
    is_data_set_cached,
    is_reachable,
    models_and_data,
)
from hotseat.checks.named_files import looks_like_path, num_positions, num_rows_of
from hotseat.checks.pipeline import check_config
from hotseat.checks.stage import CheckContext
from hotseat.checks.user_files import agent_problem, reward_problem
from hotseat.config import loads
from hotseat.errors import UnsupportedError, UserError
from hotseat.loop.state.run_dir import sole_owner

# Runs commands one after another, then says which heavy libraries came with them.
MANY_COMMANDS = """
import json, sys
from hotseat.cli.main import main
print(json.dumps([main(arguments) for arguments in json.loads(sys.argv[1])]))
print(sorted({"torch", "transformers", "ray", "vllm", "numpy", "datasets"} & set(sys.modules)))
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with a model of 32 positions, rows and a reward file, in which a run could start."""
    make_shell(tmp_path / "model", model_type="llama", max_position_embeddings=32)
    (tmp_path / "rows.jsonl").write_text('{"input": "1+1="}\n')
    (tmp_path / "reward.py").write_text("def reward_func(queries, prompts, labels):\n    return [0.0] * len(queries)\n")
    (tmp_path / "run.yaml").write_text(
        "{actor: {model: model}, data: {path: rows.jsonl, max_length: 16}, reward: {function: reward.py},"
        " rollout: {samples_per_prompt: 8}, name: mine}"
    )
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refusal(here: Path, *overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        check_config(loads((here / "run.yaml").read_text(), overrides))
    return str(caught.value)


def test_what_can_start_is_not_refused(here):
    check_config(loads((here / "run.yaml").read_text()))


@pytest.mark.slow
def test_trivial_refusals_import_nothing_heavy(here):
    (here / "runs" / "mine" / "model").mkdir(parents=True)  # a run of that name was finished
    (here / "runs" / "mine" / "config.yaml").write_text("")
    (here / "broken.py").write_text("def reward_func(queries, prompts, labels)\n")
    commands = [
        ["run", "run.yaml"],
        ["run", "run.yaml", "name=other", "reward.function=none.py"],
        ["run", "run.yaml", "name=other", "data.path=none.jsonl"],
        ["run", "run.yaml", "name=other", "data.max_length=64"],
        ["run", "run.yaml", "name=other", "reward.function=broken.py"],
        ["run", "run.yaml", "name=other", "actor.model=/no/such/folder"],
        ["run", "run.yaml", "rolout.top_p=1"],
        ["run", "none.yaml"],
        ["resume", "runs/none"],
    ]
    command = [sys.executable, "-c", MANY_COMMANDS, json.dumps(commands)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.stdout.splitlines() == ["[2, 2, 2, 2, 2, 2, 2, 2, 2]", "[]"], done.stderr
    for words in (
        "runs/mine holds a run already",
        "reward.function: there is no file none.py",
        "data.path: no such file or folder: none.jsonl",
        "data.max_length: 64 is above the 32 positions of actor.model 'model': set it to 32 or less",
        "reward.function: broken.py:1: not Python: expected ':'",
        "actor.model: there is no folder /no/such/folder: there is no /no either",
        "rolout: unknown key; did you mean rollout?",
        "none.yaml: cannot be read: No such file or directory",
        "runs/none holds no run",
    ):
        assert words in done.stderr


@pytest.mark.slow
def test_openrlhf_commands_refuse_in_the_words_of_their_flags(here):
    code = "import sys; from hotseat.openrlhf.run_command import main\n"
    code += "print(main('train_ppo_ray', sys.argv[1:])); print(sorted({'torch', 'ray'} & set(sys.modules)))"
    flags = ["--pretrain", "./modle", "--prompt_data", "rows.jsonl", "--remote_rm_url", "reward.py"]
    flags += ["--n_samples_per_prompt", "8", "--advantage_estimator", "group_norm"]
    done = subprocess.run([sys.executable, "-c", code, *flags], capture_output=True, text=True, timeout=300)
    assert done.stdout.splitlines()[-2:] == ["2", "[]"], done.stderr
    assert "--pretrain: there is no folder ./modle; did you mean model?" in done.stderr


# --- models -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["/a", "./a", "../a", "~/a", "a/b/c", "a/", "folder/a"])
def test_what_looks_like_a_path(name, tmp_path, monkeypatch):
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    assert looks_like_path(name)


@pytest.mark.parametrize("name", ["gpt2", "Qwen/Qwen3-0.6B", "out/sft"])
def test_what_looks_like_a_name_on_the_hub(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert not looks_like_path(name)


def test_a_model_that_is_not_there_is_named_with_the_nearest_for_every_role(here):
    (here / "out" / "sft-1").mkdir(parents=True)
    critic = ("algorithm.estimator=gae", "critic.model=out/sft")
    reference = ("algorithm.kl.coef=0.1", "reference.model=out/sft")
    reward = ("reward.function=null", "reward.model=out/sft")
    for key, options in {
        "actor.model": ("actor.model=out/sft",),
        "critic.model": critic,
        "reference.model": reference,
        "reward.model": reward,
    }.items():
        assert f"{key}: there is no folder out/sft; did you mean out/sft-1?" in refusal(here, *options)


def test_a_hub_name_that_is_nearly_a_folder_here_gets_it_named(here, monkeypatch):
    monkeypatch.setenv(OFFLINE, "1")
    assert refusal(here, "actor.model=modle").endswith("; did you mean model?")
    assert "did you mean" not in refusal(here, "actor.model=rewards")  # reward.py is no model


def test_a_relative_path_that_is_not_there_says_where_paths_start(here):
    assert f"reward.function: there is no file judge.py (paths start in {here})" in refusal(
        here, "reward.function=judge.py"
    )
    assert "paths start" not in refusal(here, "reward.function=/nobody/judge.py")


def test_rows_of_a_local_file_are_counted(here):
    (here / "rows.jsonl").write_text('{"input": "1+1="}\n\n{"input": "2+1="}\n')
    config = loads((here / "run.yaml").read_text())
    assert num_rows_of(config) == 2
    assert num_rows_of(loads("data: {path: org/rows}")) is None


def test_a_column_that_the_rows_do_not_have_is_named_by_its_key(here):
    assert "data.label_key: the first row of rows.jsonl has no 'label'; it has: input" in refusal(
        here, "data.label_key=label"
    )
    assert (
        "data.input_key: the first row of rows.jsonl has no 'inputs'; did you mean 'input'? it has: input"
        in refusal(here, "data.input_key=inputs")
    )
    (here / "rows.jsonl").write_text("no JSON\n")
    check_config(loads((here / "run.yaml").read_text(), ["data.label_key=label"]))  # refused when it is read


@pytest.mark.parametrize("is_resumed", [False, True])
def test_a_run_that_is_under_way_is_neither_started_again_nor_to_be_removed(here, is_resumed):
    (here / "runs" / "mine").mkdir(parents=True)
    (here / "runs" / "mine" / "config.yaml").write_text("")
    with sole_owner(Path("runs/mine")):
        message = refusal(here, f"checkpoint.resume={str(is_resumed).lower()}")
    assert message.startswith("runs/mine is in use by process ")
    assert message.endswith(", whose run is under way: wait for it, or choose another name")


def test_a_file_and_a_home_folder_are_told_from_a_folder(here, monkeypatch):
    monkeypatch.setenv("HOME", str(here))
    assert "rows.jsonl is a file: give the folder of a checkpoint" in refusal(here, "actor.model=rows.jsonl")
    said = refusal(here, "actor.model=~/model")
    assert f"actor.model: ~/model: ~ is not replaced here; write {here}/model" in said


def test_a_place_to_which_no_model_can_go_is_refused_before_it_is_trained(here, monkeypatch):
    (here / "file").touch()
    (here / "link").symlink_to(here / "nothing")
    for path, problem in (
        ("file", f"{here}/file is a file, so the trained model could not go to {here}/file"),
        ("file/model", f"{here}/file is a file, so the trained model could not go to {here}/file/model"),
        ("link", f"{here}/link is a link to {here}/nothing, which is not there, so the trained model could not go to"),
    ):
        assert f"checkpoint.export_path: {problem}" in refusal(here, f"checkpoint.export_path={path}")
    config = loads((here / "run.yaml").read_text(), ["checkpoint.export_path=new/model"])
    check_config(config)
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != here)
    with pytest.raises(UserError, match=f"{here} cannot be written, so the trained model could not go to {here}/new"):
        check_config(config)
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")  # whose first node may have another disk there
    check_config(config)


def test_the_folder_of_a_run_is_no_checkpoint_but_holds_one(here):
    (here / "runs" / "mine" / "model").mkdir(parents=True)
    (here / "runs" / "mine" / "model" / "config.json").write_text("{}")
    assert "runs/mine is no checkpoint: there is no config.json in it; did you mean runs/mine/model?" in str(
        refusal(here, "actor.model=runs/mine")
    )
    (here / "none").mkdir()
    assert "none is no checkpoint: there is no config.json in it" in str(refusal(here, "actor.model=none"))


def test_everything_is_in_one_error(here):
    said = refusal(here, "actor.model=./none", "data.path=./none", "use_modelscope=true")
    assert said.startswith("this run cannot start:\n")
    assert "actor.model: " in said
    assert "data.path: " in said
    assert "not part of this version:\n" in said
    with pytest.raises(UnsupportedError):
        check_config(loads((here / "run.yaml").read_text(), ["use_modelscope=true"]))


def test_a_flow_that_no_run_can_follow_is_refused(here):
    flow = "flow=[{name: play, run: [rollout]}, {name: learn, train: [actor]}, {name: send, push: [rollout]}]"
    assert "  flow: actor has no work under run, which it has in 'prepare' usually: add it" in refusal(here, flow)


# --- the hub ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def nobody(monkeypatch):
    """An address at which nobody listens; no proxy, an empty cache, and nothing that was imported before."""
    for name in ("http_proxy", "HTTP_PROXY", "no_proxy", "NO_PROXY", OFFLINE, "TRANSFORMERS_OFFLINE"):
        monkeypatch.setenv(name, "")
    monkeypatch.setitem(sys.modules, "huggingface_hub.constants", types.SimpleNamespace(HF_HUB_OFFLINE=False))
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{held.getsockname()[1]}"


def test_a_server_is_reachable_directly_or_by_its_proxy(nobody, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        assert is_reachable(address, 30)
        assert not is_reachable(nobody, 30)
        monkeypatch.setenv("http_proxy", address)
        assert is_reachable("http://hub.invalid", 30)
        monkeypatch.setenv("http_proxy", nobody)
        assert not is_reachable("http://hub.invalid", 30)


def hub_problems(model):
    return list(models_and_data(CheckContext(config=loads(f"actor: {{model: {model}}}"))))


def test_offline_a_model_that_is_not_here_is_refused_and_a_cached_one_is_used(nobody, tmp_path, monkeypatch, here):
    monkeypatch.setenv("HF_ENDPOINT", nobody)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    said = refusal(here, "actor.model=org/name")
    assert said.startswith(
        "actor.model 'org/name': there is no such folder here, and it is not in the cache of the hub"
    )
    assert "this machine is offline: 127.0.0.1 cannot be reached. Give the folder of a checkpoint" in said
    snapshot = tmp_path / "cache" / "models--org--name" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    assert not hub_problems("org/name")
    assert sys.modules["huggingface_hub.constants"].HF_HUB_OFFLINE
    [problem] = hub_problems("org/other")  # from now on nothing is asked for
    assert problem.message.startswith("actor.model 'org/other'")
    assert f"{OFFLINE} is set, so it is not fetched" in problem.message


@pytest.mark.parametrize("key", ["data.path", "eval.path"])
def test_offline_a_data_set_that_is_not_here_is_refused_at_once_and_a_cached_one_is_used(
    nobody, tmp_path, monkeypatch, here, key
):
    monkeypatch.setenv("HF_ENDPOINT", nobody)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "prepared"))
    said = refusal(here, f"{key}=rows.jsonl,org/MyRows@part")
    assert said.startswith(
        f"{key} 'org/MyRows': there is no such file or folder here, and it is not in the caches of the hub"
    )
    assert "this machine is offline: 127.0.0.1 cannot be reached. Give a file or a folder on this machine" in said
    assert said.endswith("on this machine")
    assert "did you mean rows.jsonl?" in refusal(here, f"{key}=rows_jsonl")
    for made in ("cache/datasets--org--MyRows/snapshots/abc", "prepared/org___my_rows"):
        monkeypatch.setenv(OFFLINE, "")
        (tmp_path / made).mkdir(parents=True)
        check_config(loads((here / "run.yaml").read_text(), [f"{key}=org/MyRows"]))
        assert os.environ[OFFLINE] == "1"
        shutil.rmtree(tmp_path / made.split("/")[0])
    monkeypatch.setenv(OFFLINE, "")
    check_config(loads((here / "run.yaml").read_text(), [f"{key}=json@model"]))


def test_folders_ask_nobody(nobody, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", nobody)
    assert not hub_problems(str(tmp_path))


def test_the_cache_is_where_the_hub_has_it():
    assert cache_folder({"HF_HUB_CACHE": "/a"}) == Path("/a")
    assert cache_folder({"HF_HOME": "/b"}) == Path("/b/hub")
    assert cache_folder({"XDG_CACHE_HOME": "/c"}) == Path("/c/huggingface/hub")
    assert not is_cached("org/name", {"HF_HOME": "/none"})
    assert data_set_cache({"HF_HOME": "/b"}) == Path("/b/datasets")
    assert data_set_cache({"HF_HOME": "/b", "HF_DATASETS_CACHE": "/d"}) == Path("/d")
    assert not is_data_set_cached("org/name", {"HF_HOME": "/none"})


# --- lengths ----------------------------------------------------------------------------------------------------------


def test_the_default_length_is_named_as_such(here):
    (here / "run.yaml").write_text((here / "run.yaml").read_text().replace(", max_length: 16", ""))
    said = refusal(here)
    assert "data.max_length: 2048 (its default) is above the 32 positions of actor.model 'model'" in said


def test_positions_are_read_as_families_write_them():
    assert num_positions({"max_position_embeddings": 32}) == 32
    assert num_positions({"n_positions": 1024}) == 1024  # GPT-2
    assert num_positions({"text_config": {"max_position_embeddings": 64}, "max_position_embeddings": 8}) == 64
    scaled = {"max_position_embeddings": 32768, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}
    assert num_positions(scaled) == 131072
    assert num_positions({"model_type": "mamba"}) is None
    assert num_positions({"max_position_embeddings": -1}) is None


# --- the user's code --------------------------------------------------------------------------------------------------

MAKES_A_REWARD = {
    "def": "def reward_func(queries, prompts, labels):\n    return []",
    "async": "async def reward_func(queries, prompts, labels):\n    return []",
    "class": "class reward_func:\n    pass",
    "import": "from elsewhere import score as reward_func",
    "plain import": "from elsewhere import reward_func",
    "assignment": "def score(*_): return []\nreward_func = score",
    "annotated": "reward_func: object = print",
    "tuple": "reward_func, other = print, print",
    "branch": "try:\n    import torch\nexcept ImportError:\n    torch = None\nif torch:\n    reward_func = print",
    "star": "from elsewhere import *",
    "globals": "globals()['reward_' + 'func'] = print",
    "exec": "exec('reward_func = print')",
    "global": "def make():\n    global reward_func\n    reward_func = print\nmake()",
    "module attribute": "import sys\nsys.modules[__name__].reward_func = print",
    "getattr": "def __getattr__(name):\n    return print",
    "walrus": "(reward_func := print)",
    "loop": "for reward_func in (print,):\n    pass",
}


@pytest.mark.parametrize("text", MAKES_A_REWARD.values(), ids=MAKES_A_REWARD)
def test_a_file_that_makes_reward_func_in_any_way_is_taken(text, tmp_path):
    (tmp_path / "reward.py").write_text(text)
    assert reward_problem(tmp_path / "reward.py") is None


def test_a_reward_file_without_its_function_is_told_what_it_has(tmp_path):
    file = tmp_path / "reward.py"
    file.write_text("import math\n\n\ndef score(queries):\n    reward_func = 1\n    return queries\n")
    assert reward_problem(file) == (
        f"{file} has no reward_func(queries, prompts, labels); its functions are: score (line 4). Rename one of them,"
        f" or say which to use: {file}:NAME"
    )
    assert reward_problem(file, "score") is None
    assert "has no other(queries, prompts, labels)" in reward_problem(file, "other")


@pytest.mark.parametrize("problem_of", [reward_problem, agent_problem])
def test_what_is_not_python_is_named_by_its_line(problem_of, tmp_path):
    file = tmp_path / "user.py"
    file.write_text("x = 1\ny = (\n")
    assert problem_of(file).startswith(f"{file}:2: not Python: '(' was never closed")
    file.write_bytes(b"x = 1\0")
    assert "not Python" in problem_of(file) or "cannot be read as Python" in problem_of(file)


MAKES_AN_AGENT = {
    "environment": "from hotseat.agents import Environment\nclass Game(Environment):\n    pass",
    "function": "async def step(state, action, label, **kwargs):\n    return {}",
    "imported function": "from elsewhere import step",
    "type": "from hotseat.agents import Environment\nGame = type('Game', (Environment,), {})",
    "star": "from elsewhere import *",
}


@pytest.mark.parametrize("text", MAKES_AN_AGENT.values(), ids=MAKES_AN_AGENT)
def test_a_file_that_can_be_an_agent_is_taken(text, tmp_path):
    (tmp_path / "agent.py").write_text(text)
    assert agent_problem(tmp_path / "agent.py") is None


def test_a_file_that_is_no_agent_is_told_what_would_fit(tmp_path):
    file = tmp_path / "agent.py"
    file.write_text("LIMIT = 3\n\n\ndef reset(prompt):\n    return prompt\n")
    assert agent_problem(file).startswith(f"{file} has no agent in it; what would fit: a subclass of")
    assert agent_problem(file, "Game") == f"{file} has no class Game"
    assert agent_problem(file, "LIMIT") is None  # the process that loads it tells


def test_user_files_are_looked_at_where_a_config_names_them(here):
    (here / "broken.py").write_text("class Game\n")
    (here / "empty.py").write_text("")
    assert "agent.path: broken.py:1: not Python" in refusal(here, "agent.path=broken.py")
    assert "eval.reward: empty.py has no reward_func" in refusal(here, "eval.reward=empty.py", "eval.path=rows.jsonl")
