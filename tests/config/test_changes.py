"""What may be another when a run resumes."""

import pytest

from hotseat.cli.main import main
from hotseat.config import loads, loads_saved, to_saved
from hotseat.config.changes import Change, changes_between, may_change
from hotseat.config.load import fields_of, valid_keys
from hotseat.config.schema import Config
from hotseat.errors import ConfigError, UserError
from hotseat.openrlhf.translate import translate

RESUMED = "checkpoint.resume=true"


def between(then: str, *overrides: str, allowed: str = "") -> list[Change]:
    allow = [f"checkpoint.allow_changes=[{allowed}]"] if allowed else []
    return changes_between(to_saved(loads(then)), loads(then, [RESUMED, *allow, *overrides]))


@pytest.mark.parametrize(
    ("key", "value", "before"),
    [
        ("actor.optimizer.learning_rate", 5e-7, 1e-6),
        ("actor.optimizer.schedule", "constant", "cosine"),
        ("algorithm.kl.coef", 0.01, 0.0),
        ("train.num_episodes", 3, 1),
        ("eval.path", "held_out.jsonl", None),
        ("log.every", 5, 1),
        ("checkpoint.every", 10, None),
        ("cluster.threads_per_process", 2, 1),
        ("rollout.engine", "vllm", "transformers"),
        ("rollout.num_slots", 8, None),
        ("actor.enable_offload", True, None),
    ],
)
def test_settings_that_may_change_do(key, value, before):
    assert between("", f"{key}={str(value).lower() if isinstance(value, bool) else value}") == [
        Change(key, before, value)
    ]


def test_a_placement_changes_role_by_role():
    found = between("cluster: {component_placement: {actor: 0-3}}", "cluster.component_placement={rollout: 4-7}")
    assert found == [
        Change("cluster.component_placement.rollout", None, "4-7"),
        Change("cluster.component_placement.actor", "0-3", None),
    ]


def test_what_is_learned_from_and_how_is_refused_key_by_key():
    with pytest.raises(UserError) as caught:
        between("", "seed=1", "rollout.temperature=0.5", "log.every=3")
    assert str(caught.value) == (
        "this run cannot be resumed with another config:\n"
        "  seed: 42 when the checkpoint was written, now 1\n"
        "  rollout.temperature: 1.0 when the checkpoint was written, now 0.5\n"
        "set seed back and repeat the command with --allow-change rollout.temperature, or start a new run"
    )
    with pytest.raises(UserError) as caught:
        between("", "algorithm.clip_high=0.3", "rollout.temperature=0.5", "log.every=3", allowed="algorithm")
    assert str(caught.value).splitlines()[-1] == (
        "set them back, or start a new run; to resume anyway, with different results, repeat the command with"
        " --allow-change algorithm.clip_high --allow-change rollout.temperature"
    )


@pytest.mark.parametrize("key", ["rollout.quantization", "rollout.kv_cache_dtype"])
def test_fp8_changes_the_correction_and_takes_permission(key):
    off, on = "rollout: {engine: vllm}", f"rollout: {{engine: vllm, {key.removeprefix('rollout.')}: fp8}}"
    for then, change, before, after in ((off, f"{key}=fp8", None, "fp8"), (on, f"{key}=null", "fp8", None)):
        with pytest.raises(UserError, match=f"{key}: {before} when the checkpoint was written, now {after}"):
            between(then, change)
        assert between(then, change, allowed=key) == [Change(key, before, after, is_allowed=True)]
    to_other = [RESUMED, "rollout.engine=transformers"]  # which has no such option, so that it is unset
    with pytest.raises(UserError, match=f"{key}: fp8 when the checkpoint was written, now None") as caught:
        changes_between(to_saved(loads(on)), loads_saved(to_saved(loads(on)), to_other))
    assert str(caught.value).endswith(f"repeat the command with --allow-change {key}")
    [_, change] = changes_between(
        to_saved(loads(on)), loads_saved(to_saved(loads(on)), [*to_other, f"checkpoint.allow_changes=[{key}]"])
    )
    assert change == Change(key, "fp8", None, is_allowed=True)


@pytest.mark.parametrize(("key", "then", "now"), [("seed", "42", "1"), ("task", "rl", "sft")])
def test_another_seed_or_task_is_refused_whatever_is_allowed(key, then, now):
    with pytest.raises(UserError) as caught:
        between("", f"{key}={now}", allowed=key)
    assert f"{key}: {then} when the checkpoint was written, now {now}" in str(caught.value)
    assert "--allow-change" not in str(caught.value)


def test_what_the_user_allows_is_marked():
    assert between("", "rollout.temperature=0.5", "log.every=3", allowed="rollout.temperature") == [
        Change("rollout.temperature", 1.0, 0.5, is_allowed=True),
        Change("log.every", 1, 3),
    ]
    [section] = between("", "algorithm.clip_high=0.3", allowed="algorithm")
    assert section.is_allowed
    with pytest.raises(UserError, match="seed: 42 when"):  # one of two
        between("", "rollout.temperature=0.5", "seed=1", allowed="rollout.temperature")


def test_allowing_what_is_unknown_or_needs_no_leave_is_refused():
    with pytest.raises(UserError, match="--allow-change rollout.temprature: unknown key; did you mean rollout.temp"):
        between("", allowed="rollout.temprature")
    for key in ("log.every", "seed"):
        with pytest.raises(UserError, match=f"--allow-change {key} has no effect"):
            between("", "log.every=3", allowed=key)
    with pytest.raises(ConfigError, match="checkpoint.resume is false, so the run starts anew"):
        loads("checkpoint: {allow_changes: [seed]}")


def test_hotseat_run_takes_the_flag_that_a_refusal_names(tmp_path, capsys):
    (tmp_path / "config.yaml").write_text("task: sft\n")
    assert main(["run", str(tmp_path / "config.yaml"), "--allow-change", "seed"]) == 2
    assert "checkpoint.resume is false, so the run starts anew" in capsys.readouterr().err


def test_what_a_change_leaves_without_effect_is_no_change_and_in_nobodys_way():
    """An engine with slots of its own becomes vLLM; a KL that adapts is turned off, and the reference with it."""
    then = to_saved(
        loads(
            "rollout: {num_slots: 8}\nreference: {model: m}\nalgorithm: {kl: {coef: 0.1, target: 1.0, estimator: k3}}\n"
        )
    )
    config = loads_saved(then, [RESUMED, "rollout.engine=vllm", "algorithm.kl.coef=0"])
    assert (config.rollout.num_slots, config.reference.model) == (None, None)
    assert changes_between(then, config) == [
        Change("rollout.engine", "transformers", "vllm"),
        Change("algorithm.kl.coef", 0.1, 0.0),
    ]
    with pytest.raises(ConfigError, match="rollout.num_slots: has no effect"):  # what is given now, is looked at
        loads_saved(then, [RESUMED, "rollout.engine=vllm", "rollout.num_slots=4"])


STAGES = {
    "fsdp": "train: {backend: fsdp}",
    **{f"zero {stage}": f"train: {{backend: deepspeed, deepspeed: {{zero_stage: {stage}}}}}" for stage in range(4)},
    "zero 3 with more": "train: {backend: deepspeed, deepspeed: {zero_stage: 3, zpg: 2, adam_offload: true}}",
}


@pytest.mark.parametrize("now", STAGES)
@pytest.mark.parametrize("then", STAGES)
def test_every_stage_of_either_backend_resumes_every_other(then, now):
    """As docs/training.md says: a checkpoint holds every weight and its state by name, whoever wrote it."""
    saved = to_saved(loads(STAGES[then]))
    wanted = loads(STAGES[now]).train
    overrides = [f"train.backend={wanted.backend}"]
    if wanted.backend == "deepspeed":
        values = wanted.deepspeed.model_dump(mode="json").items()
        overrides += [f"train.deepspeed.{key}={'null' if value is None else value}" for key, value in values]
    config = loads_saved(saved, [RESUMED, *overrides])
    assert config.train == wanted
    assert not any(change.is_allowed for change in changes_between(saved, config))


def test_passes_are_steps_in_supervised_training_and_maths_in_rl():
    assert between("task: sft", "train.max_epochs=3") == [Change("train.max_epochs", 1, 3)]
    with pytest.raises(UserError, match="train.max_epochs: 1 when"):
        between("", "train.max_epochs=3")


def test_every_listed_key_exists():
    known = list(valid_keys())
    sections = {key.rpartition(".")[0] for key in known} | {key.partition(".")[0] for key, _ in fields_of(Config)}
    for _, keys in may_change():
        assert set(keys) <= {*known, *sections}


def test_help_lists_what_may_change(capsys):
    with pytest.raises(SystemExit):
        main(["resume", "--help"])
    out = " ".join(capsys.readouterr().out.split())
    assert "learning rate and schedule: actor.optimizer.learning_rate, actor.optimizer.schedule" in out
    for subject, keys in may_change():
        assert f"{subject}: {', '.join(keys)}" in out
    assert "--allow-change KEY" in out


def test_openrlhfs_commands_resume_the_same_way():
    line = ["--pretrain", "m", "--dataset", "d", "--save_steps", "10"]
    then = to_saved(translate("train_sft", line, {}).config)
    config = translate(
        "train_sft", [*line, "--load_checkpoint", "--learning_rate", "1e-5", "--max_epochs", "5"], {}
    ).config
    assert {change.key for change in changes_between(then, config)} == {
        "actor.optimizer.learning_rate",
        "train.max_epochs",
    }
    other = [*line, "--load_checkpoint", "--train_batch_size", "64"]
    refused = translate("train_sft", other, {})
    with pytest.raises(UserError, match="train.batch_size: 128 when") as caught:
        changes_between(then, refused.config)
    said = refused.rename_keys(str(caught.value))
    assert "  --train_batch_size: 128 when the checkpoint was written, now 64" in said
    assert said.endswith("repeat the command with --allow_change train.batch_size")  # which takes a key, not a flag
    allowed = translate("train_sft", [*other, *said.partition("command with ")[2].split()], {}).config
    assert changes_between(then, allowed) == [Change("train.batch_size", 128, 64, is_allowed=True)]
    made = translate("train_sft", [*line, "--allow_change", "train.batch_size"], {})
    assert made.no_effect == [("--allow_change", "--load_checkpoint is false, so the run starts anew")]
