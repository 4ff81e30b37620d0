"""Commands of scripts, run as they are written: by `ray job submit`, by `deepspeed` and by `torchrun`.

`cut_commands` makes them fit this machine; tests here show that it changes nothing but sizes. docs/openrlhf_commands.md
has the result of every command.
"""

import json
import re
import subprocess

import pytest
from command_files import COMMANDS
from cut_commands import FOLDERS, LEFT_OUT, LIMITS, PATHS, ROOT, Cut, cut, make_materials, read_words
from ray_head import ray_head, script_environment

from hotseat.cluster.ports import free_port
from hotseat.openrlhf.argv import parse
from hotseat.openrlhf.shim import DIRECTORY

DEVICES = re.compile(r"--((actor|critic|ref|reward)_num_(nodes|gpus_per_node)|vllm_(num_engines|tensor_parallel_size))")
JOBS = [path.stem for path in COMMANDS if "ray job submit" in path.read_text()]


def run(made: Cut, folder, env) -> str:
    """Run a command in a shell, and return what it printed."""
    process = subprocess.run(
        ["bash", "-e", "-c", made.script], cwd=folder, env=env, capture_output=True, text=True, timeout=1700
    )
    printed = process.stdout + process.stderr
    assert process.returncode == 0, printed[-6000:]
    return printed


# --- that nothing but sizes differs -----------------------------------------------------------------------------------

UNDOTTED = sorted(set(PATHS) - {"dotted_grpo"})


@pytest.mark.parametrize("name", UNDOTTED)
def test_a_cut_command_differs_from_the_script_in_sizes_only(name, tmp_path):
    words, exports = read_words(PATHS[name])
    made = cut(name, tmp_path)
    assert made.exports == exports
    launcher, module = words[: made.start], words[made.start].removeprefix("openrlhf.cli.")
    assert [word.replace(str(tmp_path), "/openrlhf") for word in made.words[: made.start]] == launcher
    assert made.words[made.start] == f"hotseat.cli.{module}"
    given = {name: argument.value for name, argument in parse(module, words[made.start + 1 :]).arguments.items()}
    left = {name: argument.value for name, argument in parse(module, made.argv).arguments.items()}
    for flag, value in given.items():
        if flag in LIMITS or DEVICES.fullmatch(flag):
            assert left.pop(flag) <= value
        elif isinstance(value, str) and value.startswith(FOLDERS):
            assert left.pop(flag).removeprefix(str(tmp_path)) in (value.removeprefix(folder) for folder in FOLDERS)
        else:
            assert left.pop(flag) == value
    added = [word for word in LEFT_OUT.get(name, "").split() if word.startswith("--")]
    assert all(flag in LIMITS or DEVICES.fullmatch(flag) or flag in added for flag in left)


def test_flags_are_added_only_to_commands_that_leave_them_out():
    for name, text in LEFT_OUT.items():
        words, _ = read_words(PATHS[name])
        assert not set(words) & {word for word in text.split() if word.startswith("--")}


# --- deepspeed and torchrun -------------------------------------------------------------------------------------------


def launched(made: Cut, *options: str) -> Cut:
    """Give options to the launcher."""
    made.words[1:1] = options
    return made


def check_model(path):
    assert (path / "config.json").is_file()
    assert (path / "model.safetensors").is_file()


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "output", "num_ranks"),
    [
        ("sft", "checkpoint/llama3-8b-sft", 1),
        ("reward_model", "output/llama3-8b-rm", 2),
        ("dpo", "output/llama3-8b-dpo", 2),
    ],
    ids=["sft", "reward_model", "dpo"],
)
def test_deepspeed_runs_a_supervised_command(name, output, num_ranks, tmp_path):
    made = launched(cut(name, tmp_path), "--num_gpus", str(num_ranks), "--master_port", str(free_port("127.0.0.1")))
    make_materials(made, tmp_path)
    run(made, tmp_path, script_environment())
    check_model(tmp_path / output)


@pytest.mark.slow
@pytest.mark.long
def test_torchrun_runs_the_command_of_deepspeed(tmp_path):
    made = cut("dpo", tmp_path)
    assert made.words[:2] == ["deepspeed", "--module"]
    made.words[:2] = ["torchrun", "--nproc-per-node=2", f"--master-port={free_port('127.0.0.1')}", "-m"]
    make_materials(made, tmp_path)
    run(made, tmp_path, script_environment())
    check_model(tmp_path / "output/llama3-8b-dpo")


# --- python ----------------------------------------------------------------------------------------------------------


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(1800)
def test_python_runs_a_command_on_a_cluster_of_its_own(tmp_path):
    made = cut("sync_agent_hybrid", tmp_path, devices=2)
    make_materials(made, tmp_path)
    run(made, tmp_path, script_environment())
    check_model(tmp_path / "examples/test_scripts/final/llama3-8b-rlhf")


# --- ray job submit ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def head(tmp_path_factory):
    with ray_head(tmp_path_factory.mktemp("openrlhf"), num_gpus=5) as started:
        yield started


def submitted(made: Cut, head) -> Cut:
    """Let a command submit its job to this cluster."""
    at = next(index for index, word in enumerate(made.words) if word.startswith("--address="))
    made.words[at] = f"--address={head.address}"
    return made


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", sorted(set(JOBS) - {"dotted_grpo", "resume"}))
def test_a_job_runs_to_its_end(name, head):
    made = submitted(cut(name, head.folder), head)
    make_materials(made, head.folder)
    # Ray keeps one copy of equal working directories, in which two scripts would have their checkpoints at one place.
    (head.folder / "command.sh").write_text(made.script)
    printed = run(made, head.folder, head.env)
    assert re.search(r"Job '\w+' succeeded", printed), printed[-3000:]


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.long
def test_a_job_that_names_openrlhf_runs_with_our_path_in_its_runtime_environment(head):
    made = submitted(cut("hybrid_engine", head.folder, package="openrlhf.cli"), head)
    at = next(index for index, word in enumerate(made.words) if word.startswith("--runtime-env-json="))
    runtime_env = json.loads(made.words[at].partition("=")[2])
    runtime_env["env_vars"] = {"PYTHONPATH": f"{DIRECTORY}:{head.env.get('PYTHONPATH', '')}"}
    made.words[at] = f"--runtime-env-json={json.dumps(runtime_env)}"
    make_materials(made, head.folder)
    assert re.search(r"Job '\w+' succeeded", run(made, head.folder, head.env))


# --- the table --------------------------------------------------------------------------------------------------------


def test_the_table_of_results_has_every_command_with_what_was_added_to_it():
    text = (ROOT / "docs" / "openrlhf_commands.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \|(.*)$", text, re.MULTILINE))
    assert set(rows) == set(PATHS)
    for name, added in LEFT_OUT.items():
        for flag in [word for word in added.split() if word.startswith("--")]:
            assert f"`{flag}" in rows[name], (name, flag)
