"""The parser of overrides: values in Hydra's syntax, keys, and what is wrong with them, all at once."""

import pytest

from hotseat.errors import ConfigError
from hotseat.verl.overrides import parse, parse_value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1", 1),
        ("-1", -1),
        ("1_024", 1024),
        ("1e-6", 1e-6),
        ("0.5", 0.5),
        (".5", 0.5),
        ("3.", 3.0),
        ("inf", float("inf")),
        ("true", True),
        ("False", False),
        ("null", None),
        ("None", "None"),  # as in Hydra: only null is one
        ("", ""),
        ("'1'", "1"),
        ('"a b"', "a b"),
        (r"'it\'s'", "it's"),
        ("a/b-c.parquet", "a/b-c.parquet"),
        ("~/data/train.parquet", "~/data/train.parquet"),
        ("qwen 3, 4".replace(", 4", ""), "qwen 3"),
        ("[]", []),
        ("[a,b]", ["a", "b"]),
        ("['a', \"b\"]", ["a", "b"]),
        ("[1, [2, 3], null]", [1, [2, 3], None]),
        ("{}", {}),
        ("{a: 1, b: [x, y], c: {d: true}}", {"a": 1, "b": ["x", "y"], "c": {"d": True}}),
        ("${a.b}", "${a.b}"),
        ("[${a.b},c]", ["${a.b}", "c"]),
        ("https://host:80/v1", "https://host:80/v1"),
        ("1.2.3", "1.2.3"),
    ],
)
def test_values_are_read_as_hydra_reads_them(text, value):
    found = parse_value(text)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a,b", "several values, a sweep"),
        ("[a,b", "has no ] at its end"),
        ("{a: 1", "has no } at its end"),
        ("{a}", "not key: value"),
        ("'a", "has no ' at its end"),
        ("[a] b", "after its end"),
    ],
)
def test_what_is_no_value_is_refused(text, problem):
    with pytest.raises(ValueError, match=problem):
        parse_value(text)


@pytest.mark.parametrize("sign", ["", "+", "++"])
def test_a_key_is_set_with_and_without_plus(sign):
    line = parse([f"{sign}data.max_prompt_length=64"])
    assert line["data.max_prompt_length"] == 64
    assert line["data.max_response_length"] == 512  # verl's default


def test_the_last_value_counts_and_the_earlier_one_is_kept_to_be_listed():
    line = parse(["trainer.nnodes=1", "trainer.nnodes=2", "trainer.nnodes=2"])
    assert line["trainer.nnodes"] == 2
    assert line.overridden == [("trainer.nnodes", 1)]


def test_a_reference_has_the_value_of_another_key_given_or_not():
    line = parse(["trainer.project_name=p", "data.max_response_length=${data.max_prompt_length}"])
    assert line["trainer.default_local_dir"] == "checkpoints/p/gsm8k"
    assert line["data.max_response_length"] == 512
    assert line["actor_rollout_ref.rollout.response_length"] == 512


def test_older_names_are_the_same_keys():
    line = parse(["custom_reward_function.path=a.py", "critic.model.fsdp_config.param_offload=True"])
    assert line["reward.custom_reward_function.path"] == "a.py"
    assert line["critic.fsdp.param_offload"] is True
    assert line.spelling("critic.fsdp.param_offload") == "critic.model.fsdp_config.param_offload"


def test_an_older_name_is_overridden_by_the_newer_one():
    line = parse(["custom_reward_function.path=a.py", "reward.custom_reward_function.path=b.py"])
    assert line["reward.custom_reward_function.path"] == "b.py"
    assert line.overridden == [("custom_reward_function.path", "a.py")]


def test_a_section_collects_the_keys_below_it():
    line = parse(
        [
            "+reward.custom_reward_function.reward_kwargs.a.b=1",
            "custom_reward_function.reward_kwargs.c=[x]",
            "actor_rollout_ref.rollout.engine_kwargs.vllm={swap_space: 2}",
        ]
    )
    assert line.section("reward.custom_reward_function.reward_kwargs") == {"a": {"b": 1}, "c": ["x"]}
    assert line.section("actor_rollout_ref.rollout.engine_kwargs.vllm") == {"swap_space": 2}


def test_keys_of_our_own_config_have_a_prefix():
    line = parse(["hotseat.cluster.runtime=local", "+hotseat.reward.kwargs.a=1"])
    assert line.own == {"cluster.runtime": "local", "reward.kwargs.a": 1}


@pytest.mark.parametrize(
    ("token", "problem"),
    [
        ("data.max_prompt_lenght=1", "data.max_prompt_lenght: unknown key; did you mean data.max_prompt_length?"),
        ("actor_rollout_ref.actor.lr=1", "did you mean actor_rollout_ref.actor.optim.lr?"),
        ("++foo.bar=1", "foo.bar: unknown key; --help lists all there are"),
        (
            "algorithm.kl_ctrl={kl_coef: 1}",
            "it is a section: give its keys one by one, such as algorithm.kl_ctrl.kl_coef",
        ),
        ("trainer.nnodes", "'trainer.nnodes' is not KEY=VALUE"),
        ("trainer.nnodes=two", "trainer.nnodes: given 'two', must be a whole number"),
        ("trainer.nnodes=1.5", "given 1.5, must be a whole number"),
        ("trainer.nnodes=null", "given null, must be a whole number"),
        ("trainer.val_before_train=1", "given 1, must be true or false"),
        ("algorithm.gamma=high", "given 'high', must be a number"),
        ("trainer.max_actor_ckpt_to_keep=x", "must be a whole number or null"),
        ("trainer.nnodes=1,2", "is several values, a sweep"),
        ("reward.compute_score_kwargs=3", "must be a mapping"),
        ("trainer.project_name=${oc.env:HOME}", "of interpolations only ${a.b} is read: write the value"),
        ("trainer.project_name=${trainer.nam}", "unknown key; did you mean"),
        ("trainer.project_name=${trainer.project_name}", "which leads back to itself"),
        ("actor@actor_rollout_ref.actor=megatron_actor", "groups of verl's config files are not read"),
        ("--config-name=mine", "configs of your own are not read"),
        ("--multirun", "one command is one run"),
        ("--cfg=job", "--print_config prints the config here"),
        ("--verbose", "unknown option"),
        ("hotseat.cluster.runtim=local", "did you mean cluster.runtime?"),
        ("~hotseat.reward.clip", "give hotseat.reward.clip=null"),
        ("~data.train_batch_size", "a run needs its value"),
    ],
)
def test_what_is_wrong_with_a_token_is_said_by_name(token, problem):
    with pytest.raises(ConfigError) as caught:
        parse([token])
    assert problem in str(caught.value)


def test_all_problems_are_reported_at_once():
    with pytest.raises(ConfigError) as caught:
        parse(["a=1", "trainer.nodes=1", "--x"])
    assert len(caught.value.problems) == 3


def test_a_key_without_effect_may_be_removed():
    assert parse(["~ray_kwargs.timeline_json_file"]).removed[0][0] == "~ray_kwargs.timeline_json_file"
