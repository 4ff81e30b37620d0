"""The commands themselves: what they print, what they start, what they refuse, and with which exit code."""

import os
import re
import shlex
import subprocess
import sys

import pytest
from model_shells import make_shell

from hotseat.config import loads
from hotseat.config.load import valid_keys
from hotseat.config.unsupported import UNSUPPORTED, unsupported
from hotseat.errors import BatchError, DataError, DeadlineError
from hotseat.openrlhf.argv import hide_secrets
from hotseat.openrlhf.flags import COMMANDS
from hotseat.openrlhf.help import EXAMPLES, GROUPS, MEANINGS, NO_EFFECT, NOT_BUILT, WIDTH, group_of, render_help
from hotseat.openrlhf.run_command import begin, is_launched, main
from hotseat.openrlhf.translate import translate

COMPLETE = {
    "train_ppo_ray": "--pretrain m --prompt_data d --remote_rm_url r.py --advantage_estimator reinforce"
    " --backend fsdp --engine transformers",
    "train_sft": "--pretrain m --dataset d --backend fsdp",
}
LAUNCHED = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}


class Starter:
    """Stands in for what starts a run."""

    def __init__(self, error=None):
        self.calls = []
        self.error = error

    def __call__(self, config, launched):
        self.calls.append((config, launched))
        if self.error:
            raise self.error


def go(command, text, env=None, starter=None):
    starter = starter or Starter()
    return main(command, text.split(), {} if env is None else env, starter), starter.calls


@pytest.mark.parametrize("command", COMPLETE)
def test_a_complete_command_starts_the_run_that_its_config_describes(command, capsys):
    code, calls = go(command, COMPLETE[command])
    assert code == 0
    main(command, [*COMPLETE[command].split(), "--print_config"], {})
    assert calls == [(loads(capsys.readouterr().out), False)]


def test_printing_starts_nothing(capsys):
    assert go("train_sft", COMPLETE["train_sft"] + " --print_config") == (0, [])
    assert capsys.readouterr().out.startswith("task: sft\n")


def test_a_run_without_what_it_needs_is_refused_by_flag(capsys):
    assert go("train_ppo_ray", "--advantage_estimator group_norm") == (2, [])
    said = capsys.readouterr().err
    for flag in ("--pretrain: not set", "--prompt_data: not set", "--n_samples_per_prompt: 1: a group of one"):
        assert f"\n  {flag}" in said
    assert "set --remote_rm_url, --reward_pretrain or --agent_func_path; a config may also have reward.graders," in said


def test_without_vllm_a_command_says_what_to_install_in_flags(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "vllm", None)  # Python's own way to say that there is no such module
    monkeypatch.chdir(tmp_path)
    make_shell(tmp_path / "m")
    (tmp_path / "d").mkdir()
    (tmp_path / "r.py").write_text("def reward_func(queries, prompts, labels): return [0.0] * len(queries)\n")
    text = COMPLETE["train_ppo_ray"].replace(" --engine transformers", "")
    assert main("train_ppo_ray", text.split(), {}) == 2
    said = capsys.readouterr().err
    assert "--engine: vLLM is not installed: pip install 'hotseat[vllm]'" in said
    assert "or set --engine to transformers" in said


def test_what_is_not_built_prints_but_does_not_start(capsys):
    text = COMPLETE["train_ppo_ray"] + " --use_ms"
    assert go("train_ppo_ray", text + " --print_config")[0] == 0
    assert loads(capsys.readouterr().out).use_modelscope
    assert go("train_ppo_ray", text) == (2, [])
    said = capsys.readouterr().err
    assert said.startswith("train_ppo_ray: not part of this version:\n")
    assert "  --use_ms: ModelScope; fetch the model with `modelscope download`, and give its folder\n" in said


def test_flags_without_effect_are_listed_once_on_stderr(capsys):
    text = COMPLETE["train_ppo_ray"] + " --zero_stage 3 --normalize_reward --critic_learning_rate 9e-6"
    assert go("train_ppo_ray", text)[0] == 0
    out, err = capsys.readouterr()
    assert out == ""
    assert err == (
        "no effect here: --zero_stage because --backend is fsdp\n"
        "no effect here: --normalize_reward because rewards do not come from a model (--reward_pretrain is not set)\n"
        "no effect here: --critic_learning_rate because --advantage_estimator is reinforce, which has no critic;"
        " only gae has one\n"
    )


def test_an_unknown_flag_is_refused_with_the_nearest(capsys):
    assert go("train_sft", "--learning_rat 1") == (2, [])
    assert "--learning_rat: unknown flag; did you mean --learning_rate?" in capsys.readouterr().err


@pytest.mark.parametrize(("error", "code"), [(DataError("no such file"), 2), (DeadlineError("rank 1 is silent"), 1)])
def test_what_ends_a_run_decides_the_exit_code(error, code, capsys):
    assert go("train_sft", COMPLETE["train_sft"], starter=Starter(error))[0] == code
    assert capsys.readouterr().err == f"train_sft: {error}\n"


def test_what_a_run_refuses_is_said_in_flags(capsys):
    error = BatchError(
        "train.batch_size 64 is not a multiple of 8 ranks x train.micro_batch_size 16; see rollout.top_k"
    )
    assert go("train_sft", COMPLETE["train_sft"], starter=Starter(error))[0] == 2
    said = "--train_batch_size 64 is not a multiple of 8 ranks x --micro_train_batch_size 16; see rollout.top_k"
    assert capsys.readouterr().err == f"train_sft: {said}\n"


# --- launchers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "env", "launched"),
    [
        ("", {}, False),
        ("", LAUNCHED, True),
        ("--local_rank=1", {}, True),
        ("--local-rank=1", {}, True),
        ("--local_rank -1", {}, False),
        ("", {"RANK": "0", "WORLD_SIZE": "2"}, False),  # some clusters set these for every process
    ],
)
def test_a_launched_process_is_one_rank(argv, env, launched):
    code, calls = go("train_sft", f"{COMPLETE['train_sft']} {argv}", dict(env))
    assert code == 0
    assert [was for _, was in calls] == [launched]


def test_the_launcher_is_not_part_of_the_config(capsys):
    plain, launched = (
        go("train_sft", f"{COMPLETE['train_sft']} {argv}", env)[1][0][0]
        for argv, env in (("", {}), ("--local_rank 0", LAUNCHED | {"RANK": "0"}))
    )
    assert plain == launched
    assert capsys.readouterr().err == ""  # the launcher's own flag is not a flag without effect


def test_only_the_first_rank_speaks(capsys):
    env = LAUNCHED | {"RANK": "1", "LOCAL_RANK": "1"}
    for extra in ("", " --print_config"):
        assert go("train_sft", COMPLETE["train_sft"] + " --local_rank=1 --zero_stage 3" + extra, env)[0] == 0
    assert capsys.readouterr() == ("", "")


def test_rl_starts_its_own_processes():
    assert not is_launched("train_ppo_ray", LAUNCHED, 0)
    assert go("train_ppo_ray", COMPLETE["train_ppo_ray"], dict(LAUNCHED))[1][0][1] is False


# --- secrets ----------------------------------------------------------------------------------------------------------


def test_a_key_is_put_into_the_environment_only_when_a_run_begins(capsys):
    """Scenario 46."""
    env, starter = {}, Starter()
    argv = [*COMPLETE["train_sft"].split(), "--use_wandb", "s3cret"]
    main("train_sft", [*argv, "--print_config"], env)
    assert env == {}
    begin(translate("train_sft", argv, env), env, False, starter)
    assert env == {"WANDB_API_KEY": "s3cret"}
    assert "s3cret" not in "".join(capsys.readouterr()) + repr(starter.calls)


def test_arguments_are_forgotten_where_they_are_secret():
    given = ["--use_wandb", "s3cret", "--seed", "1", "--logger.wandb.key=s3cret", "--use_wandb", "--bf16"]
    assert hide_secrets("train_sft", given) == [
        "--use_wandb",
        "***",
        "--seed",
        "1",
        "--logger.wandb.key=***",
        "--use_wandb",
        "--bf16",
    ]


@pytest.mark.slow
def test_the_process_forgets_its_secrets_before_anything_else_runs():
    """Scenario 46."""
    code = (
        "import sys; sys.argv = ['x', '--use_wandb', 's3cret', '--print_config']\n"
        "from hotseat.openrlhf.run_command import entry\n"
        "try: entry('train_sft')\n"
        "except SystemExit: print(sys.argv)"
    )
    assert python("-c", code).stdout.splitlines()[-1] == "['x', '--use_wandb', '***', '--print_config']"


@pytest.mark.parametrize("text", ["--use_wandb s3cret extra", "--use-wandb s3cret", "--use-wandb=s3cret"])
def test_a_refusal_does_not_repeat_a_key(text, capsys):
    assert go("train_sft", text)[0] == 2
    assert "s3cret" not in "".join(capsys.readouterr())


# --- processes --------------------------------------------------------------------------------------------------------


def python(*argv):
    return subprocess.run([sys.executable, *argv], capture_output=True, text=True, timeout=300, env=dict(os.environ))


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_is_a_module(command):
    done = python("-m", f"hotseat.cli.{command}", "--print_config", "--pretrain", "m")
    assert done.returncode == 0
    assert loads(done.stdout).actor.model == "m"


def test_a_run_that_was_stopped_and_saved_exits_with_130(capsys):
    def stopped(config, launched):
        raise KeyboardInterrupt

    command = ["--pretrain", "m", "--dataset", "d", "--input_key", "question", "--output_key", "answer"]
    assert main("train_sft", command, {}, start=stopped) == 130
    assert capsys.readouterr().err.splitlines()[-2] == "train_sft: stopped"


@pytest.mark.slow
def test_help_needs_no_heavy_import():
    heavy = {"torch", "ray", "transformers", "vllm", "deepspeed"}
    code = (
        "import sys, runpy; sys.argv = ['x', '--help']\n"
        "try: runpy.run_module('hotseat.cli.train_ppo_ray', run_name='__main__')\n"
        f"except SystemExit as end: print(end.code, sorted({heavy!r} & set(sys.modules)))"
    )
    assert python("-c", code).stdout.splitlines()[-1] == "0 []"


@pytest.mark.slow
def test_printing_a_config_needs_no_torch():
    code = (
        "import sys; from hotseat.openrlhf.run_command import main\n"
        "main('train_ppo_ray', ['--print_config']); print(sorted({'torch', 'ray', 'transformers'} & set(sys.modules)))"
    )
    assert python("-c", code).stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("command", COMMANDS)
def test_help_lists_every_flag(command):
    text = render_help(command)
    assert all(spelling in text for flag in COMMANDS[command] for spelling in flag.spellings)
    assert "--print_config" in text


@pytest.mark.parametrize("command", COMMANDS)
def test_help_explains_every_flag_and_shows_its_default(command):
    _, first, listed = render_help(command).partition("Model and data:")
    flags = re.split(r"\n(?=  -)", first + listed)[1:]
    assert len(flags) == len(COMMANDS[command])
    for entry in flags:
        head, _, effect = entry.partition("\n")
        assert re.search(r"\(default: .+\)$", head), head
        assert effect.startswith("      ")
        assert " " in effect.strip()  # more than the name of a field


@pytest.mark.parametrize("command", COMMANDS)
def test_help_sorts_flags_into_groups(command):
    text = render_help(command)
    headings = [line[:-1] for line in text.splitlines() if re.fullmatch(r"[A-Z].*:", line)]
    assert headings == [name for name in (*GROUPS, NOT_BUILT, NO_EFFECT) if name in headings]
    for heading in headings:
        body = re.split(r"\n\n", text.split(f"\n{heading}:\n")[1])[0]
        names = re.findall(r"^  (--[\w.-]+)", body, re.MULTILINE)
        assert names == sorted(names, key=str.lower)
        assert names == sorted((flag.name for flag in COMMANDS[command] if group_of(flag) == heading), key=str.lower)


def test_flags_are_where_people_look_for_them():
    groups = {flag.name: group_of(flag) for flag in COMMANDS["train_ppo_ray"]}
    assert groups["--pretrain"] == groups["--prompt_data"] == groups["--critic_pretrain"] == "Model and data"
    assert groups["--temperature"] == groups["--agent_func_path"] == "Rollout and agents"
    assert groups["--init_kl_coef"] == groups["--value_clip"] == "Algorithm"
    assert groups["--remote_rm_url"] == groups["--reward_pretrain"] == "Reward"
    assert groups["--zero_stage"] == groups["--actor_learning_rate"] == groups["--local_rank"] == "Training"
    assert groups["--save_steps"] == groups["--use_wandb"] == "Evaluation, checkpoints and logging"
    assert groups["--colocate_all_models"] == groups["--vllm_enable_sleep"] == "Placement"
    assert groups["--load_in_4bit"] == "Training"
    assert groups["--use_ms"] == NOT_BUILT
    assert groups["--flash_attn"] == NO_EFFECT


@pytest.mark.parametrize("command", COMMANDS)
def test_help_begins_with_an_example_that_is_complete(command):
    text = render_help(command)
    example = "\n".join(text.splitlines()[2:5])
    assert example == EXAMPLES[command]
    words = shlex.split(example.replace("\\\n", ""))
    assert words[:3] == ["python", "-m", f"hotseat.cli.{command}"]
    started = []

    def start(config, launched):
        started.append(config)

    code = main(command, [word for word in words[3:] if word != "--print_config"], {}, start=start)
    assert (code, len(started)) == (0, 1)


def test_meanings_are_of_flags_that_exist():
    assert set(MEANINGS) <= {flag.name for flags in COMMANDS.values() for flag in flags}
    assert "cluster.component_placement: Devices on each node of the actor." in render_help("train_ppo_ray")


def test_help_has_at_most_100_columns_but_for_long_names():
    for command in COMMANDS:
        effects = [line for line in render_help(command).splitlines() if line.startswith("      ")]
        assert max(map(len, effects)) <= WIDTH


# --- what is not built ------------------------------------------------------------------------------------------------


def test_what_is_not_built_speaks_of_keys_that_exist():
    assert set(UNSUPPORTED) <= set(valid_keys())


def test_a_default_config_asks_for_nothing_that_is_not_built():
    assert unsupported(loads("")) == []


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("train: {backend: deepspeed}", []),
        ("train: {backend: deepspeed, deepspeed: {deepcompile: true}}", []),
        ("overlap: {staleness: 2, queue: 1, order: arrival, in_flight: recompute}", []),
        (
            "use_modelscope: true",
            [("use_modelscope", "ModelScope; fetch the model with `modelscope download`, and give its folder")],
        ),
        ("train: {lora: {rank: 8}, ema: {enabled: true}}", []),
        ("train: {backend: deepspeed, lora: {rank: 8}, ema: {enabled: true}}", []),
        ("task: dpo", []),
        ("cluster: {component_placement: {env: 0}}", []),
    ],
)
def test_what_a_config_asks_for_is_named_by_its_key(text, found):
    config = loads(text)
    assert unsupported(config) == found
