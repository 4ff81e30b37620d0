"""Any command line at all: it is refused by flag, or it prints what was understood."""

import re

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hotseat.config import loads
from hotseat.errors import ConfigError
from hotseat.openrlhf.argv import parse
from hotseat.openrlhf.flags import COMMANDS, SCHEDULES
from hotseat.openrlhf.translate import translate

WORDS = {
    "--advantage_estimator": ["gae", "reinforce", "rloo", "reinforce_baseline", "group_norm", "dr_grpo"],
    "--kl_estimator": ["k1", "k2", "k3"],
    "--policy_loss_type": ["ppo", "gspo"],
    "--param_dtype": ["bf16", "fp16"],
    "--grad_accum_dtype": ["bf16", "fp32"],
    "--backend": ["fsdp", "deepspeed"],
    "--engine": ["vllm", "transformers"],
    "--vllm_sync_backend": ["nccl", "gloo"],
    "--vllm_is_correction_type": ["tis", "icepop", "seq-mask-tis"],
    "--remote_rm_url": ["r.py", "http://a", "http://a,http://b"],
    "--loss": ["sigmoid", "logexp"],
    "--input_template": ["Q {} A", "-- {} --"],
    "--lr_scheduler": list(SCHEDULES),
    "--actor.lr_scheduler": list(SCHEDULES),
    "--critic.lr_scheduler": list(SCHEDULES),
}
TEXT = ["m", "None", "", "1e6", "a,b", "null", "{}", "a: b"]
NUMBERS = {"int": ["1", "2", "8", "1000", "0", "-1"], "float": ["0.1", "0.5", "1", "0", "-0.5", "1e-6", "inf", "nan"]}
A_KEY = re.compile(
    r"(?<![-\w.])(actor|critic|reward|rollout|train|data|algorithm|checkpoint|overlap|eval|log|agent)\.[a-z_]+"
)


@st.composite
def lines(draw, max_flags):
    """(command, arguments, environment), mostly of values that fit."""
    command = draw(st.sampled_from(list(COMMANDS)))
    argv = []
    for flag in draw(st.lists(st.sampled_from(COMMANDS[command]), max_size=max_flags)):
        spelling = draw(st.sampled_from(flag.spellings))
        values = list(flag.choices) if flag.choices else WORDS.get(flag.name) or NUMBERS.get(flag.kind, TEXT)
        least, most = flag.num_values
        given_values = draw(st.lists(st.sampled_from(values), min_size=least, max_size=min(most, 3)))
        if len(given_values) == 1 and draw(st.booleans()):
            argv.append(f"{spelling}={given_values[0]}")
        else:
            argv += [spelling, *given_values]
    env = draw(st.sampled_from([{}, {"OPENRLHF_ASYNC_QUEUE_SIZE": "3"}, {"OPENRLHF_ASYNC_NUM_TASKS": "many"}]))
    return command, argv, env


def understood(command, argv, env):
    try:
        return translate(command, argv, env)
    except ConfigError as error:
        for problem in error.problems:
            assert problem.key.startswith(("--", "OPENRLHF_")), problem
            assert not A_KEY.search(problem.message), problem
        return None


def without(command, argv, spelling):
    """The command line, each flag once, less one."""
    rest = []
    for each in parse(command, argv).arguments.values():
        if each.spelling != spelling:
            values = [] if each.flag.kind == "switch" else each.value if isinstance(each.value, list) else [each.value]
            texts = ["" if value is None else str(value) for value in values]
            rest += [f"{each.spelling}={texts[0]}"] if len(texts) == 1 else [each.spelling, *texts]
    return rest


@pytest.mark.slow
@settings(max_examples=80, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(lines(max_flags=12))
def test_what_is_printed_loads_as_what_was_understood(line):
    found = understood(*line)
    if found is not None:
        assert loads(found.yaml) == found.config


@pytest.mark.slow
@settings(max_examples=50, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(lines(max_flags=6))
def test_a_flag_that_is_listed_as_without_effect_can_be_left_out(line):
    command, argv, env = line
    found = understood(command, argv, env)
    if found is None:
        return
    spelled = {each.spelling for each in found.line.arguments.values()}
    for name, because in found.no_effect:
        assert not A_KEY.search(because), because
        # A dotted flag chooses defaults by being there at all; a template without {} turns the usual one off.
        if name in spelled and "." not in name and name != "--input_template":
            assert translate(command, without(command, argv, name), env).config == found.config, name


@pytest.mark.parametrize("command", COMMANDS)
def test_every_default_written_out_changes_nothing(command):
    argv = []
    for flag in COMMANDS[command]:
        # Newer flags bring newer defaults, and a reward model that is sized is asked for.
        if "." in flag.name or flag.name.startswith("--reward_num"):
            continue
        if flag.default is not None and flag.kind != "switch":
            values = flag.default if isinstance(flag.default, list) else [flag.default]
            argv += [flag.name, *(str(value) for value in values)]
    assert translate(command, argv, {}).config == translate(command, [], {}).config
