"""Reading a config: every problem in one error, each with its place, what was given and what would fit."""

import pytest
from pydantic import ValidationError

from hotseat.config import Config, load, loads, loads_saved, to_saved, to_yaml
from hotseat.config.load import fields_of, valid_keys
from hotseat.config.yaml_lines import parse_value
from hotseat.errors import ConfigError
from hotseat.registry.engines import ENGINES


def problems_of(text: str, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        loads(text, overrides, file="run.yaml")
    return [str(problem) for problem in caught.value.problems]


def test_an_empty_config_is_the_defaults():
    assert loads("") == Config()


def test_a_config_is_frozen():
    with pytest.raises(ValidationError):
        Config().seed = 1


def test_every_field_has_a_one_line_docstring():
    for key, info in fields_of(Config):
        assert info.description, key
        assert "\n" not in info.description, key


def test_all_problems_come_in_one_error_with_line_key_and_nearest_key():
    text = """\
task: rl
actr: {model: x}
rollout:
  temprature: 1
  top_p: 1.5
  batch_size: true
  engine: vlm
  enforce_eager: true
critic:
  optimizer:
    learning_rate: 1e-5
"""
    assert problems_of(text, "rollout.top_k=-1", "train.deepspeed.zero_stage=3") == [
        "run.yaml:2: actr: unknown key; did you mean actor?",
        "run.yaml:4: rollout.temprature: unknown key; did you mean rollout.temperature?",
        "run.yaml:5: rollout.top_p: given 1.5, must be at most 1.0",
        "run.yaml:6: rollout.batch_size: given true, must be a whole number",
        f"run.yaml:7: rollout.engine: given 'vlm', must be one of {', '.join(ENGINES)}; did you mean vllm?",
        "run.yaml:8: rollout.enforce_eager: has no effect: rollout.engine is transformers; this is for vllm; remove it",
        "run.yaml:11: critic.optimizer.learning_rate: has no effect: algorithm.estimator is group_norm, which has no"
        " critic; only gae has one; remove it",
        "override rollout.top_k=-1: rollout.top_k: given -1, must be at least 0",
        "override train.deepspeed.zero_stage=3: train.deepspeed.zero_stage: has no effect: train.backend is fsdp;"
        " remove it",
    ]


def test_the_message_counts_and_lists():
    with pytest.raises(ConfigError, match=r"2 problems in the config:\n  run.yaml:1: sed: .*seed.*\n  run.yaml:2: nam"):
        loads("sed: 1\nnam: x", file="run.yaml")


def test_an_unknown_key_that_stands_elsewhere_is_pointed_there():
    assert problems_of("actor: {learning_rate: 1e-5}") == [
        "run.yaml:1: actor.learning_rate: unknown key; did you mean actor.optimizer.learning_rate?"
    ]


def test_an_unknown_key_like_no_other_lists_its_section():
    [problem] = problems_of("reference: {zzz: 1}")
    assert problem.endswith(
        "reference.zzz: unknown key; reference has: model, teachers, teacher_weights, engine, enable_offload"
    )


def test_an_unknown_key_in_a_list_of_sections_is_found():
    [problem] = problems_of("cluster:\n  node_groups:\n    - label: a\n      node_rank: 3")
    assert problem == (
        "run.yaml:4: cluster.node_groups[0].node_rank: unknown key; did you mean cluster.node_groups[0].node_ranks?"
    )


def test_a_missing_key_of_a_pool_placement_is_named():
    [problem] = problems_of("cluster:\n  component_placement:\n    actor: {node_group: a}")
    assert problem == "run.yaml:3: cluster.component_placement.actor.placement: must be given"


def test_a_key_given_twice_is_a_problem():
    assert problems_of("seed: 1\nseed: 2") == ["run.yaml:2: seed: given twice, first on line 1"]


def test_a_wrong_length_is_a_problem():
    [problem] = problems_of("reward: {clip: [1, 2, 3], function: r.py}")
    assert problem.startswith("run.yaml:1: reward.clip")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [1", "run.yaml:1: not YAML: expected ',' or ']'"),
        ("- 1", "run.yaml:1: a config is a mapping of keys to values"),
    ],
)
def test_a_file_that_is_no_config_says_so(text, message):
    assert message in problems_of(text)[0]


def test_a_file_that_is_not_there_says_so(tmp_path):
    with pytest.raises(ConfigError, match=r"none.yaml: cannot be read: No such file"):
        load(tmp_path / "none.yaml")


def test_a_binary_file_says_so(tmp_path):
    (tmp_path / "model.bin").write_bytes(b"\xff\xfe\x00\x80")
    with pytest.raises(ConfigError, match="is not a text file"):
        load(tmp_path / "model.bin")


def test_an_override_replaces_the_file_and_makes_sections():
    config = loads("seed: 1\nactor: {model: a}", ["actor.model=b", "actor.optimizer.learning_rate=3e-4", "seed=7"])
    assert (config.actor.model, config.actor.optimizer.learning_rate, config.seed) == ("b", 3e-4, 7)


def test_an_override_without_equals_is_a_problem():
    assert problems_of("", "nonsense") == ["command line: 'nonsense' is not key=value"]


@pytest.mark.parametrize("value", ["[1,", '"x', "*x", "!foo x", ": :"])
def test_an_override_that_is_no_value_is_a_problem(value):
    [problem] = problems_of("", f"name={value}")
    assert problem.startswith(f"override name={value}: name: ")
    assert "is not a value" in problem


def test_a_selection_needs_no_quotes_on_the_command_line():
    config = loads("", ["cluster.component_placement.rollout=@actor"])
    assert config.cluster.component_placement == {"rollout": "@actor"}


def test_an_override_below_a_value_is_a_problem_of_the_override():
    [problem] = problems_of("rollout: {batch_size: 8}", "rollout.batch_size.x=3")
    assert problem.endswith("rollout.batch_size.x: rollout.batch_size is a value, 8, and has no keys below it")
    assert problem.startswith("override rollout.batch_size.x=3: ")
    [problem] = problems_of("", "cluster.node_groups=[{label: a, env_configs: [{env_vars: [{X: 1}]}]}]")
    assert problem.startswith("override cluster.node_groups=")


def test_an_unknown_section_in_an_override_is_blamed_on_the_override():
    assert problems_of("seed: 1", "rolout.x=1") == ["override rolout.x=1: rolout: unknown key; did you mean rollout?"]


def test_an_override_fills_an_empty_section():
    assert loads("rollout:", ["rollout.batch_size=8"]).rollout.batch_size == 8


@pytest.mark.parametrize(
    "text",
    [
        "seed: !foo 3",
        "seed: !!python/object:os.system x",
        "rollout: {<<: 3}",
        "a: \x01",
        "rollout: &a {foo: *a}",
        "[" * 3000,
    ],
)
def test_a_file_that_no_config_can_be_made_of_says_so(text):
    [problem] = problems_of(text)
    assert problem.startswith("run.yaml")
    assert "not" in problem


def test_merged_keys_can_be_replaced():
    text = """
algorithm: {estimator: gae}
actor: {optimizer: &shared {learning_rate: 1e-5, weight_decay: 0.1}}
critic:
  optimizer:
    <<: *shared
    learning_rate: 2e-5
"""
    config = loads(text)
    assert (config.critic.optimizer.learning_rate, config.critic.optimizer.weight_decay) == (2e-5, 0.1)


def test_a_section_keeps_its_other_defaults_when_one_key_is_set():
    assert (
        loads("algorithm: {estimator: gae}\ncritic: {optimizer: {weight_decay: 0.1}}").critic.optimizer.learning_rate
        == 9e-6
    )


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1:0", "1:0"),
        ("0-7", "0-7"),
        ("1e-6", 1e-6),
        ("5E3", 5000.0),
        ("010", 10),
        ("0x10", "0x10"),
        (".5", 0.5),
        ("-3", -3),
        ("true", True),
        ("off", False),
        ("null", None),
        ("2x8", "2x8"),
        ("[1, a]", [1, "a"]),
        (".inf", float("inf")),
    ],
)
def test_values_mean_what_people_who_write_configs_mean(text, value):
    assert parse_value(text) == value


def test_ranks_and_processes_are_not_read_as_base_sixty():
    assert loads("cluster: {component_placement: {actor: 1:0}}").cluster.component_placement["actor"] == "1:0"


def test_the_hybrid_yaml_of_other_users_is_taken_as_written():
    config = loads(
        """
cluster:
  num_nodes: 1
  component_placement:
    actor: 0-7
    env: 0-3
    rollout: 4-7
env:
  enable_offload: True
rollout:
  enable_offload: True
actor:
  enable_offload: True
"""
    )
    assert config.cluster.component_placement == {"actor": "0-7", "env": "0-3", "rollout": "4-7"}
    assert config.env.enable_offload is config.rollout.enable_offload is config.actor.enable_offload is True


def test_yaml_out_and_in_is_the_same_config():
    text = (
        "task: rl\nactor: {model: m, optimizer: {betas: [0.8, 0.9]}}\nreward: {function: r.py, clip: null}\nseed: 3\n"
    )
    config = loads(text)
    assert loads(to_yaml(config)) == config
    assert "rollout" not in to_yaml(config)


def test_valid_keys_are_unique():
    keys = list(valid_keys())
    assert len(keys) == len(set(keys)) > 150


def test_an_override_with_null_clears_a_section():
    text = "{eval: {path: rows.jsonl, every: 5}, seed: 3}"
    assert loads(text, ["eval=null"]) == loads("seed: 3")
    with pytest.raises(ConfigError, match=r"eval.every: has no effect: .* \(eval=null clears the section\); remove it"):
        loads("eval: {every: 5}")


@pytest.mark.parametrize(
    ("text", "overrides"),
    [
        ("eval: {path: rows.jsonl, every: 5}\ncheckpoint: {best_metric: eval/loss}", ["eval.path=null"]),
        ("eval: {path: null, every: 5, split: dev}", []),
        ("eval: {path: rows.jsonl}", ["eval.path=null", "eval.every=5"]),
    ],
)
def test_a_path_of_null_switches_evaluation_off_with_all_that_belongs_to_it(text, overrides):
    config = loads(text, overrides)
    assert config == loads("")
    assert config.eval.is_switched_off
    assert not loads("").eval.is_switched_off
    assert loads(to_yaml(config)) == config


def test_a_path_of_null_hides_no_unknown_key():
    with pytest.raises(ConfigError, match="eval.evry: unknown key; did you mean eval.every"):
        loads("eval: {path: null, evry: 5}")


NAMED = """
cluster:
  component_names: {simulator: env, policy: rollout}
  component_placement: {actor: 0-3, simulator: 0-1, policy: 2-3}
"""


def test_roles_may_have_names_of_ones_own_in_placement_and_flow():
    phases = (
        "{name: play, run: [simulator, policy]}, {name: score, run: {actor: [weights]}}, {name: send, push: [policy]}"
    )
    config = loads(NAMED + "env: {path: gym, tasks: [CartPole-v1]}", [f"flow=[{phases}]"])
    assert config.cluster.component_placement == {"actor": "0-3", "env": "0-1", "rollout": "2-3"}
    assert config.flow is not None
    assert [(phase.run, phase.push) for phase in config.flow] == [
        (["env", "rollout"], []),
        ({"actor": ["weights"]}, []),
        ([], ["rollout"]),
    ]
    assert loads(to_yaml(config)) == config
    same = loads(
        "cluster: {component_names: {learner: actor}, component_placement: {learner: 0, 'rollout': '@learner'}}"
    )
    assert same.cluster.component_placement == {"actor": 0, "rollout": "@actor"}


def test_names_of_roles_are_checked():
    with pytest.raises(ConfigError, match="component_names: env is a role already: choose another name for rollout"):
        loads("cluster: {component_names: {env: rollout}}")
    with pytest.raises(ConfigError, match="component_names: policy is rollout, which .* places twice: keep one"):
        loads("cluster: {component_names: {policy: rollout}, component_placement: {policy: 0, rollout: 1}}")
    with pytest.raises(
        ConfigError, match="component_names.tool: given 'hammer', must be one of actor, critic, reference"
    ):
        loads("cluster: {component_names: {tool: hammer}}")
    with pytest.raises(ConfigError, match=r"flow\[0\].order: given 'turns', must be one of together, in_turn"):
        loads("flow: [{name: play, order: turns}]")


def test_an_override_under_the_role_or_its_name_replaces_the_entry():
    for name in ("simulator", "env"):
        text = NAMED + "env: {path: gym, tasks: [CartPole-v1]}"
        changed = loads(text, [f"cluster.component_placement.{name}=0"])
        assert list(changed.cluster.component_placement.items()) == [("actor", "0-3"), ("env", 0), ("rollout", "2-3")]
        again = loads(to_yaml(changed), [f"cluster.component_placement.{name}=1"])
        assert again.cluster.component_placement["env"] == 1


def test_problems_of_named_roles_are_told_by_their_names():
    text = "cluster:\n  component_names: {simulator: env}\n  component_placement:\n    actor: 0\n    simulator: [1]\n"
    assert problems_of(text)[0].startswith("run.yaml:5: cluster.component_placement.simulator: ")
    phase = "flow: [{name: play, run: {simulator: 3}}]\n"
    assert problems_of(phase + "cluster: {component_names: {simulator: env}}")[0].startswith(
        "run.yaml:1: flow[0].run.simulator: "
    )
    twice = "flow: [{name: play, run: {simulator: [simulator], env: [simulator]}}]\n"
    [problem] = problems_of(twice + "cluster: {component_names: {simulator: env}}")
    assert problem.endswith("flow: phase 'play': simulator is env, which it names twice: keep one of the two entries")
    listed = "flow: [{name: play, run: {simulator: [simulator]}}]\ncluster: {component_names: {simulator: [env]}}"
    assert "cluster.component_names.simulator: " in problems_of(listed)[0]


def test_an_unquoted_comma_in_an_override_is_named():
    text = "task: sft\nactor: {model: m}\ndata: {path: a.jsonl, output_key: output}\n"
    with pytest.raises(ConfigError, match=r"cluster.component_placement\[4\]: given 4, must be text"):
        loads(text, ["cluster.component_placement={env: 0,4}"])


def test_a_class_without_its_name_is_named_once_with_the_form_that_fits():
    [problem] = problems_of("components: {filter: {path: filter.py}}")
    assert problem.endswith("components.filter.path: given 'filter.py', must be FILE.py:CLASS or package.module:CLASS")


def test_a_key_with_dots_in_a_file_gets_the_nested_form_as_its_hint():
    text = "data.max_samples: 64\ntrain: {lora.rank: 8}\ndata.max_sample: 3\n"
    with pytest.raises(ConfigError) as caught:
        loads(text, file="run.yaml")
    assert [str(problem) for problem in caught.value.problems] == [
        "run.yaml:1: data.max_samples: unknown key; in a file sections are nested: data: {max_samples: 64}",
        "run.yaml:2: train.lora.rank: unknown key; in a file sections are nested: train: {lora: {rank: 8}}",
        "run.yaml:3: data.max_sample: unknown key; in a file sections are nested, and data.max_sample is none either;"
        " did you mean data.max_samples?",
    ]


@pytest.mark.parametrize("text", ["", "algorithm: {policy_loss: gspo}", "{task: sft, train: {micro_batch_size: 2}}"])
def test_what_is_saved_is_read_as_it_was(text):
    config = loads(text)
    assert loads_saved(to_saved(config)) == config


def test_another_format_is_refused():
    with pytest.raises(ConfigError, match="saved as 'hotseat config, format 2': read it with the version of Hotseat"):
        loads_saved("# hotseat config, format 2\nseed: 3\n")


def test_overrides_replace_what_was_saved():
    assert (
        loads_saved("train: {micro_batch_size: 4}\n", ["train.micro_batch_size=auto"]).train.micro_batch_size == "auto"
    )
