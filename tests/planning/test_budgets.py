"""Micro-batches that choose themselves: what is chosen, and what happens when memory runs out."""

import json
from dataclasses import dataclass, field, replace

import pytest
import torch
from loop_cases import make_group, make_segment, make_task, rl_yaml, sft_yaml
from safetensors.torch import load_file

from hotseat import faults
from hotseat.cli.main import main
from hotseat.config import load, loads, to_saved
from hotseat.config.changes import changes_between
from hotseat.errors import BudgetError, ConfigError, DeviceMemoryError, PlacementError, WorkerError
from hotseat.faults import Fault
from hotseat.loop.run import start
from hotseat.loop.workers.cutting import BatchSettings, MicroBatcher
from hotseat.loop.workers.experience import flatten
from hotseat.observe import read_lines
from hotseat.openrlhf.translate import translate
from hotseat.placement import GIB
from hotseat.planning.budgets import (
    CPU_TOKENS,
    MAX_TOKENS,
    UNPRICED_TOKENS,
    describe,
    lowered_until,
    smaller_budget_kept,
    smallest,
    with_budget,
    with_budgets_of,
)
from hotseat.planning.config_plan import make_plan, with_budgets
from hotseat.train.headroom import Peak, is_out_of_memory, trial_batch
from hotseat.types import MicroBatch

# --- episodes of several sequences ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "cut", [BatchSettings(2, None), BatchSettings(None, 12), BatchSettings(None, 12, is_chosen=True)]
)
def test_an_episode_that_is_larger_than_a_micro_batch_is_one_by_itself(cut):
    """An agent that rewrote its context twice, between answers of one sequence; each sequence has five tokens."""
    groups = [make_group(0, [1.0, 0.0]), make_group(1, [1.0, 0.0])]
    rewritten = replace(groups[0].samples[1].episode, segments=tuple(make_segment(3, 2) for _ in range(3)))
    samples = (groups[0].samples[0], replace(groups[0].samples[1], episode=rewritten))
    batch = flatten([replace(groups[0], samples=samples), groups[1]])
    pieces = sorted((sorted(piece.sample_ids) for piece in cut.cut(batch)), key=len)
    assert pieces[-1] == ["0/0/1"] * 3
    assert sorted(name for piece in pieces[:-1] for name in piece) == ["0/0/0", "0/1/0", "0/1/1"]
    assert all(len(piece) <= 2 for piece in pieces[:-1])


# --- what is chosen ---------------------------------------------------------------------------------------------------

SHAPE = (
    "{hidden_size: 1536, num_hidden_layers: 28, num_attention_heads: 12, num_key_value_heads: 2,"
    " intermediate_size: 8960, vocab_size: 151936}"
)
RL = f"""
actor: {{shape: {SHAPE}}}
rollout: {{engine: vllm, batch_size: 64, samples_per_prompt: 8, memory_share: 0.6, enable_offload: true}}
train: {{batch_size: 256}}
data: {{max_length: 2048}}
"""


def budgets(text: str, inventory: str | None, *overrides: str) -> tuple[int | None, int | None]:
    made = with_budgets(loads(text, overrides), inventory).config
    return made.train.chosen_tokens_per_device, made.rollout.chosen_tokens_per_device


def used_in(text: str, inventory: str, step: str, *overrides: str) -> float:
    [group] = make_plan(loads(text, overrides), inventory).groups
    return next(found.used_gib for found in group.steps if found.step == step) / group.memory_gib


def test_the_largest_budget_that_fits_is_chosen():
    train, rollout = budgets(RL, "1x1xA100-80G")
    assert 2048 < train < MAX_TOKENS
    assert rollout == MAX_TOKENS  # a forward alone takes little
    exactly = f"train.chosen_tokens_per_device={train}"
    more = f"train.chosen_tokens_per_device={train + 256}"
    score = f"rollout.chosen_tokens_per_device={rollout}"
    assert used_in(RL, "1x1xA100-80G", "update", exactly, score) <= 0.9
    assert used_in(RL, "1x1xA100-80G", "update", more, score) > 0.9


def test_more_memory_is_worth_more_tokens_up_to_what_is_of_use():
    sizes = [budgets(RL, f"1x1x{memory}G")[0] for memory in (60, 80, 100, 140, 1000)]
    assert sizes == sorted(sizes)
    assert sizes[-1] == MAX_TOKENS


def test_a_budget_is_no_larger_than_a_step_and_no_smaller_than_a_sequence():
    assert budgets(RL, "1x1x1000G", "train.batch_size=8")[0] == 8 * 2048
    assert budgets(RL, "1x4x1000G", "train.batch_size=8", "cluster.component_placement.actor=0-3")[0] == 10 * 2048
    assert budgets(RL, "1x1x30G")[0] == 2048  # which does not fit either, as the plan says
    assert make_plan(loads(RL), "1x1x30G").verdict == "does_not_fit"


def test_what_stays_on_the_device_leaves_less_and_nothing_leaves_for_a_larger_micro_batch():
    """The cache of an engine that may not sleep is there in an update; weights that may stay are not copied away."""
    awake = budgets(RL, "1x1xH200", "rollout.enable_offload=false")[0]
    asleep = budgets(RL, "1x1xH200")[0]
    assert awake < asleep
    as_needed = [*("algorithm.kl.coef=0.1", "rollout.enable_offload=null"), "rollout.engine=transformers"]
    text = RL.replace("memory_share: 0.6, ", "")
    least = ["train.chosen_tokens_per_device=2048", "rollout.chosen_tokens_per_device=2048"]

    def copied(*more: str) -> float:
        made = make_plan(loads(text, [*as_needed, *more]), "1x1xA100-80G")
        moves = [move for group in made.groups for passing in group.hand_overs for move in passing.leaves]
        return sum(move.gib for move in moves if move.how == "copied")

    assert copied() == copied(*least)


SIMULATED = f"""
actor: {{shape: {SHAPE}}}
env: {{path: mujoco_warp, tasks: [push-red], num_envs: 16, max_steps: 9, chunk: 2}}
rollout: {{batch_size: 2, samples_per_prompt: 8}}
train: {{batch_size: 4}}
data: {{max_length: 256}}
cluster: {{component_placement: {{actor: 0, env: 0, rollout: 0}}}}
"""


def test_an_episode_has_a_sequence_for_each_decision():
    assert budgets(SIMULATED, "1x1xH200", "env.memory_gib=4")[0] == 4 * 5 * 256
    assert budgets(SIMULATED, "1x1x1000G", "env.memory_gib=4", "env.max_steps=null")[0] == MAX_TOKENS


def test_simulators_that_nobody_has_measured_are_assumed_to_take_some_memory(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    many = "train.batch_size=16"
    chosen = with_budgets(loads(SIMULATED, [many]), "1x1xH200")
    assert chosen.config.env.memory_gib is None
    tokens = chosen.config.train.chosen_tokens_per_device
    assert tokens == budgets(SIMULATED, "1x1xH200", many, "env.memory_gib=4")[0]
    assert "if each process of simulators takes 4 GiB, which env.memory_gib does not say" in chosen.notes[0]
    on_the_host = with_budgets(loads(SIMULATED, ["env.path=gym", "env.tasks=[CartPole-v1]"]), "1x1xH200")
    assert "if each process of simulators takes 0 GiB" in on_the_host.notes[0]
    # Where so much does not fit, the constant stays: the simulators may be smaller.
    assert budgets(SIMULATED, "1x1x30G", many, "env.memory_gib=4")[0] == 256
    assert budgets(SIMULATED, "1x1x30G", many)[0] == UNPRICED_TOKENS
    # It stays, too, where so much would have to be offloaded and may not be: nobody said that it is there.
    resident = [f"{role}.enable_offload=false" for role in ("actor", "env", "rollout")]
    resident.append("train.gradient_checkpointing=true")
    with pytest.raises(PlacementError, match=r"its simulator \(4.0 GiB\) must leave device 0"):
        budgets(SIMULATED, "1x1x40G", *resident, "env.memory_gib=4")
    assert budgets(SIMULATED, "1x1x40G", *resident)[0] == UNPRICED_TOKENS
    assert make_plan(loads(SIMULATED, resident), "1x1x40G").verdict == "unknown"


RECOMPUTED = "train: {batch_size: 256, gradient_checkpointing: true, checkpointed_layers: auto}"


def layers(inventory: str | None, *overrides: str) -> tuple[int | None, int | None]:
    """Return the layers that are chosen to recompute, and the budget of updates."""
    made = with_budgets(loads(RL.replace("train: {batch_size: 256}", RECOMPUTED), overrides), inventory).config
    return made.train.checkpointed_layers, made.train.chosen_tokens_per_device


def test_as_few_layers_recompute_as_leave_room_for_a_micro_batch_that_keeps_the_device_busy():
    some, tokens = layers("1x1x55G")
    assert 0 < some < 28
    assert tokens >= 2**24 // 1536
    text = RL.replace("train: {batch_size: 256}", RECOMPUTED)
    chosen = [f"train.chosen_tokens_per_device={tokens}", "rollout.chosen_tokens_per_device=2048"]
    assert used_in(text, "1x1x55G", "update", *chosen, f"train.checkpointed_layers={some}") <= 0.9
    busy = [f"train.chosen_tokens_per_device={2**24 // 1536}", "rollout.chosen_tokens_per_device=2048"]
    assert used_in(text, "1x1x55G", "update", *busy, f"train.checkpointed_layers={some - 1}") > 0.9
    assert layers("1x1x30G")[0] is None  # nothing fits, so all do
    counts = [layers(f"1x1x{memory}G")[0] for memory in (55, 60, 80, 140)]
    assert counts == sorted(counts, reverse=True)
    assert counts[-1] == 0


def test_layers_fit_beside_a_micro_batch_of_a_number_of_samples():
    few, none_chosen = layers("1x1x60G", "train.micro_batch_size=2", "rollout.micro_batch_size=2")
    assert none_chosen is None
    assert few <= layers("1x1x60G", "train.micro_batch_size=8", "rollout.micro_batch_size=2")[0]


def test_all_layers_recompute_where_memory_is_not_known_and_on_cpus():
    assert layers(None)[0] is None
    made = with_budgets(loads(RL.replace("train: {batch_size: 256}", RECOMPUTED)), are_devices_logical=True)
    assert made.config.train.checkpointed_layers is None
    assert "train.checkpointed_layers: all" in made.notes


def test_a_resumed_run_keeps_the_layers_that_it_chose():
    config = loads(RL.replace("train: {batch_size: 256}", RECOMPUTED))
    chosen = with_budgets(config, "1x1x60G").config
    assert with_budgets_of(config, chosen) == chosen
    assert changes_between(to_saved(chosen), config) == []
    more = loads(RL.replace("train: {batch_size: 256}", RECOMPUTED), ["train.checkpointed_layers=null"])
    [change] = changes_between(to_saved(chosen), more)
    assert str(change).startswith("train.checkpointed_layers: ")


def test_every_role_has_a_budget_that_fits_it():
    larger = SHAPE.replace("28", "56").replace("1536", "3072")
    ppo = RL + f"critic: {{shape: {larger}}}\nalgorithm: {{estimator: gae}}\n"
    assert budgets(ppo, "1x1xH200")[0] < budgets(RL, "1x1xH200")[0]
    made = make_plan(loads(ppo), "1x1xH200")
    assert made.verdict == "fits"


def test_where_memory_is_not_known_it_is_a_constant_that_says_so():
    for text, inventory in ((RL, None), (RL, "1x1"), ("rollout: {engine: transformers}", "1x1xH200")):
        made = with_budgets(loads(text), inventory)
        assert made.config.train.chosen_tokens_per_device == UNPRICED_TOKENS
        assert "a constant: the plan does not know" in made.notes[0]


def test_on_cpus_it_depends_on_the_model_alone():
    made = with_budgets(loads(RL), are_devices_logical=True)
    other = ["cluster.component_placement.actor=0-1", "cluster.component_placement.rollout=2"]
    again = with_budgets(loads(RL, other), are_devices_logical=True)
    assert made.config.train == again.config.train
    # 28 layers of 2 x 6 x 1536 + 2 x 2 x (1536 + 256) + 4 x 2 x 8960 bytes, 1.15 times: 3.12 MB a token; in 2 GiB 688.
    assert 2 * GIB / (28 * (2 * 6 * 1536 + 4 * 1792 + 8 * 8960) * 1.15) // 256 * 256 == 512
    assert made.config.train.chosen_tokens_per_device == 2048  # one sequence, at least
    small = ["data.max_length=16", "actor.shape.hidden_size=128", "actor.shape.intermediate_size=256"]
    tiny = with_budgets(loads(RL, small), are_devices_logical=True).config
    assert (tiny.train.chosen_tokens_per_device, tiny.rollout.chosen_tokens_per_device) == (CPU_TOKENS, CPU_TOKENS)
    assert describe(tiny) == "updates of at most 8,192 tokens on a device, log-probs of at most 8,192"


def test_a_mixtures_balance_depends_on_the_cut_and_that_is_said():
    made = with_budgets(loads(RL, ["algorithm.aux_loss_coef=0.01"]), "1x1xH200")
    assert "the balancing loss is a mean over micro-batches" in made.notes[1]


def test_numbers_and_budgets_of_the_user_are_left_alone():
    for key in ("micro_batch_size=4", "max_tokens_per_device=4096"):
        config = loads(RL, [f"train.{key}", f"rollout.{key}"])
        assert with_budgets(config, "1x1xH200").config == config


def test_what_a_checkpoint_chose_is_taken_over_unless_the_run_has_chosen():
    old = with_budget(with_budget(loads(RL), "train", 4096), "rollout", 8192)
    assert with_budgets_of(loads(RL), old) == old
    assert with_budgets_of(with_budget(loads(RL), "train", 2048), old) == with_budget(old, "train", 2048)
    fixed = loads(RL, ["train.micro_batch_size=4"])
    assert with_budgets_of(fixed, old).train == fixed.train


def test_what_a_checkpoint_chose_is_no_change_of_the_config():
    saved = to_saved(with_budget(loads(RL), "train", 4096))
    assert changes_between(saved, loads(RL)) == []
    assert [str(change) for change in changes_between(saved, with_budget(loads(RL), "train", 2048))] == [
        "train.chosen_tokens_per_device: 4096 when the checkpoint was written, now 2048"
    ]


def test_a_size_that_is_neither_a_number_nor_auto_is_refused():
    with pytest.raises(ConfigError, match="train.micro_batch_size: given 'many', must be a whole number or auto"):
        loads("train: {micro_batch_size: many}")
    with pytest.raises(ConfigError, match="rollout.micro_batch_size: given 0, must be above 0"):
        loads("rollout: {micro_batch_size: 0}")


def test_openrlhfs_flags_take_a_number_or_auto():
    line = ["--pretrain", "m", "--micro_train_batch_size", "auto", "--micro_rollout_batch_size", "3"]
    config = translate("train_ppo_ray", line, {}).config
    assert (config.train.micro_batch_size, config.rollout.micro_batch_size) == ("auto", 3)
    assert translate("train_sft", ["--pretrain", "m"], {}).config.train.micro_batch_size == 8
    with pytest.raises(ConfigError, match="a whole number or auto"):
        translate("train_ppo_ray", ["--micro_train_batch_size", "some"], {})


def test_an_override_takes_the_place_of_what_was_chosen():
    chosen = "train: {chosen_tokens_per_device: 4096}"
    assert loads(chosen, ["train.micro_batch_size=2"]).train.chosen_tokens_per_device is None
    assert loads(chosen, ["train.max_tokens_per_device=9999"]).train.chosen_tokens_per_device is None


# --- when memory runs out ---------------------------------------------------------------------------------------------


@dataclass
class Device:
    """A backend with memory for so many tokens in a micro-batch, alone or among others."""

    capacity: int
    is_alone: bool = True
    is_padded: bool = False
    broken: list[int] = field(default_factory=list)  # micro-batches, counted over all calls, at which it fails anyhow
    num_seen: int = 0

    def work(self, pieces: list[MicroBatch]) -> list[int]:
        for index, piece in enumerate(pieces):
            self.num_seen += 1
            if piece.num_tokens > self.capacity or self.num_seen in self.broken:
                raise DeviceMemoryError("CUDA out of memory", index, self.is_alone)
        return [piece.num_tokens for piece in pieces]


def batch_of(*lengths: int) -> MicroBatch:
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    count = int(offsets[-1])
    ones = torch.ones(count)
    return MicroBatch(ones.long(), offsets, ones.bool(), ones, {}, tuple(f"s{index}" for index in range(len(lengths))))


CHOSEN = BatchSettings(None, 64, is_chosen=True)


def run(cutter: MicroBatcher, device: Device, batch: MicroBatch, settings: BatchSettings = CHOSEN) -> list[int]:
    return cutter.run("train", settings, lambda cut: cut.cut(batch), device.work)[1]


def test_another_process_on_the_device_lowers_the_budget_and_it_stays_low():
    """Scenario 50."""
    device = Device(capacity=64)
    cutter = MicroBatcher(device)
    assert run(cutter, device, batch_of(*[8] * 8)) == [64]
    device.capacity = 20  # another process came
    assert run(cutter, device, batch_of(*[8] * 8)) == [16] * 4  # 64, 32, then 16
    assert cutter.lowered() == {"train": 16}
    device.capacity = 64  # and went
    assert run(cutter, device, batch_of(*[8] * 8)) == [16] * 4
    assert cutter.lowered(num_devices=4) == {"train": 4}


def test_fragments_lower_the_budget_in_the_middle_of_a_step():
    """Scenario 48: the third micro-batch fails, as large as the two before it: all of them are made again."""
    device = Device(capacity=64, broken=[3])
    cutter = MicroBatcher(device)
    assert run(cutter, device, batch_of(*[16] * 16)) == [32] * 8
    assert cutter.lowered() == {"train": 32}


def test_a_longer_prompt_than_ever_is_a_micro_batch_by_itself():
    """Scenario 49: longer than the budget; and with others in one micro-batch it did not fit."""
    device = Device(capacity=100)
    cutter = MicroBatcher(device)
    assert run(cutter, device, batch_of(*[16] * 8)) == [64, 64]
    assert run(cutter, device, batch_of(90, *[16] * 4)) == [90, 64]
    assert cutter.lowered() == {}
    device.capacity = 60  # as if attention had taken more than before
    assert run(cutter, device, batch_of(40, 16, 8)) == [40, 24]
    assert cutter.lowered() == {"train": 32}
    with pytest.raises(DeviceMemoryError, match="sample s0 with 90 tokens does not fit by itself") as caught:
        run(cutter, device, batch_of(90, 8, 8))
    assert "lower data.max_length, let all layers recompute (train.gradient_checkpointing: true" in str(caught.value)


def test_what_fills_sequences_up_counts_where_a_model_cannot_do_without():
    device = Device(capacity=64, is_padded=True)
    assert run(MicroBatcher(device), device, batch_of(40, 2, 2, 2)) == [40, 6]  # with another it would be two of 40


def test_among_several_ranks_the_error_names_the_smaller_budget():
    device = Device(capacity=20, is_alone=False)
    with pytest.raises(BudgetError) as caught:
        run(MicroBatcher(device), device, batch_of(*[8] * 8), replace(CHOSEN, num_devices=2))
    assert (caught.value.use, caught.value.tokens) == ("train", 16)  # half of 64, on two devices
    assert "out of device memory in an update with a micro-batch of 64 tokens (CUDA out of memory)" in str(caught.value)
    assert "set train.chosen_tokens_per_device to 16, or, if there is a checkpoint, use `hotseat resume`" in str(
        caught.value
    )


def test_what_the_user_set_is_not_changed_and_the_error_says_to_what_it_could_be():
    device = Device(capacity=20)
    batch = batch_of(*[8] * 8)
    with pytest.raises(DeviceMemoryError, match=r"with train.micro_batch_size 4 .*: set it to 2, or to auto$"):
        run(MicroBatcher(device), device, batch, BatchSettings(4, None))
    with pytest.raises(DeviceMemoryError, match=r"train.max_tokens_per_device 64 .*: set it to 32, or remove it and"):
        run(MicroBatcher(device), device, batch, BatchSettings(None, 64))


def test_a_trial_halves_until_it_fits_and_stops_at_one_sequence():
    assert lowered_until(lambda tokens: tokens <= 20, 64, 8) == 16
    assert lowered_until(lambda tokens: False, 64, 10) == 10


def test_the_smallest_budget_of_all_ranks_counts():
    assert smallest([{}, {"train": 8, "rollout": 4}, {"train": 6}]) == {"train": 6, "rollout": 4}


def test_a_run_that_ends_for_memory_keeps_the_smaller_budget():
    kept = []
    config = with_budget(loads(RL), "train", 4096)
    with pytest.raises(WorkerError), smaller_budget_kept(lambda: config, kept.append):
        raise WorkerError("actor rank 1") from BudgetError("too large", "train", 2048)
    assert [found.train.chosen_tokens_per_device for found in kept] == [2048]
    with pytest.raises(WorkerError), smaller_budget_kept(lambda: config, kept.append):
        raise WorkerError("actor rank 1") from ValueError("something else")
    assert len(kept) == 1


def test_errors_of_every_library_that_say_so_are_out_of_memory():
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"))
    assert is_out_of_memory(RuntimeError("CUDA error: out of memory"))
    assert is_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"))
    assert not is_out_of_memory(RuntimeError("CUDA error: an illegal memory access was encountered"))
    assert not is_out_of_memory(ValueError("out of memory"))


def test_a_trial_is_as_large_as_the_budget_and_like_no_special_case():
    batch = trial_batch(100, 30, 97)
    assert (batch.offsets[1:] - batch.offsets[:-1]).tolist() == [30, 30, 30, 10]
    assert batch.mask.sum() == 3 * 15 + 5
    assert int(batch.token_ids.max()) < 97
    assert trial_batch(100, 30, 97, is_padded=True).num_tokens == 90  # what would fill the last one up counts
    assert trial_batch(30, 30, 97).num_segments == 2


def test_a_peak_leaves_a_margin_or_does_not():
    peak = Peak(before=10, most=50, limit=90)
    assert peak.has_headroom()
    assert peak.has_headroom(times=2.0)  # 10 + 2 x 40
    assert not peak.has_headroom(times=2.1)


# --- whole runs -------------------------------------------------------------------------------------------------------


@pytest.fixture
def faulty(tmp_path, monkeypatch):
    """Arms faults of this process."""
    directory = tmp_path / "faults"
    directory.mkdir()
    monkeypatch.setattr(faults, "_directory", directory)
    monkeypatch.setattr(faults, "_seen", {})

    def arm(*armed: Fault) -> None:
        for number, fault in enumerate(armed):
            fault.arm(directory, f"{fault.point}-{number}")

    yield arm
    assert not list(directory.glob("*.fault"))


def weights_of(run_dir):
    return load_file(run_dir / "model" / "model.safetensors")


def same(ours, theirs) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


# Every sample has something to learn from.
REWARD = """
def reward_func(queries, prompts, labels):
    return [float(sum(map(ord, query)) % 101) for query in queries]
"""
AUTO = "{dtype: fp32, batch_size: 16}"


@pytest.mark.slow
def test_an_update_that_runs_out_of_memory_is_made_again_and_the_smaller_budget_kept(tmp_path, faulty, capsys):
    """The run is what it would have been with that budget from the start: weights bit for bit, samples and metrics."""
    task = make_task(tmp_path)

    def config(name: str, tokens: int) -> str:
        train = f"{{dtype: fp32, batch_size: 16, chosen_tokens_per_device: {tokens}}}"
        return rl_yaml(task, name=name, train=train, checkpoint="{every: 1}")

    (task / "reward.py").write_text(REWARD)
    faulty(Fault("update.backward", "out-of-memory", skip=1))
    start(loads(config("short", 48)))  # 16 samples of 5 to 8 tokens: at least two micro-batches
    out = " ".join(capsys.readouterr().out.split())
    assert (
        out.count("actor ran out of device memory, and repeated its work: micro-batches of updates have at most") == 1
    )
    runs = tmp_path / "runs"
    kept = load(runs / "short" / "config.yaml").train.chosen_tokens_per_device
    assert 6 < kept < 48
    state = json.loads((runs / "short" / "checkpoints" / "step-000002" / "state.json").read_text())
    assert loads(state["config"]).train.chosen_tokens_per_device == kept
    start(loads(config("same", kept)))
    assert same(weights_of(runs / "short"), weights_of(runs / "same"))
    timing = ("_s", "_ms", "time/", "memory/", "machine/")
    for file, ignored in (("metrics.jsonl", timing), ("samples.jsonl", ("_s", "turns"))):
        ours, theirs = (
            [{key: value for key, value in line.items() if not any(part in key for part in ignored)} for line in lines]
            for lines in (read_lines(runs / "short" / file), read_lines(runs / "same" / file))
        )
        assert ours == theirs


@pytest.mark.slow
def test_scoring_that_runs_out_of_memory_changes_nothing_but_the_budget(tmp_path, faulty):
    task = make_task(tmp_path)
    rollout = "{batch_size: 4, samples_per_prompt: 4, max_new_tokens: 4, num_slots: 8, chosen_tokens_per_device: 64}"
    sections = {"algorithm": "{kl: {coef: 0.1}}", "rollout": rollout}
    faulty(Fault("score.forward", "out-of-memory", skip=1))
    start(loads(rl_yaml(task, name="short", train=AUTO, **sections)))
    config = load(tmp_path / "runs" / "short" / "config.yaml")
    assert 6 < config.rollout.chosen_tokens_per_device <= 32
    assert config.train.chosen_tokens_per_device == CPU_TOKENS


@pytest.mark.long
@pytest.mark.slow
def test_budgets_are_tried_out_before_the_first_step_and_not_again_when_resumed(tmp_path, faulty, capsys):
    task = make_task(tmp_path)
    text = rl_yaml(task, train="{dtype: fp32, batch_size: 16, num_episodes: 2}", checkpoint="{every: 1}")
    faulty(*(Fault("trial.forward", "out-of-memory", skip=count) for count in (1, 1)))
    start(loads(text))
    out = " ".join(capsys.readouterr().out.split())
    # Scoring was tried first, and fitted; two trials of an update failed.
    assert "micro-batches: updates of at most 8,192 tokens on a device, log-probs of at most 8,192" in out
    assert (
        "actor: tried out: micro-batches of updates have at most 2,048 tokens on a device from now on, not 8,192" in out
    )
    config = load(tmp_path / "runs" / "run" / "config.yaml")
    assert (config.train.chosen_tokens_per_device, config.rollout.chosen_tokens_per_device) == (2048, CPU_TOKENS)
    undisturbed = weights_of(tmp_path / "runs" / "run")
    for step in (3, 4):
        path = tmp_path / "runs" / "run" / "checkpoints" / f"step-{step:06}"
        path.rename(tmp_path / path.name)
    (tmp_path / "runs" / "run" / "model").rename(tmp_path / "model-before")
    assert main(["resume", str(tmp_path / "runs" / "run")]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert (
        "micro-batches: updates of at most 2,048 tokens on a device, log-probs of at most 8,192 (as this run has" in out
    )
    assert same(weights_of(tmp_path / "runs" / "run"), undisturbed)


@pytest.mark.slow
@pytest.mark.long
def test_supervised_training_is_made_again_too(tmp_path, faulty, capsys):
    task = make_task(tmp_path)
    train = "{dtype: fp32, batch_size: 4, max_epochs: 4, chosen_tokens_per_device: TOKENS}"
    start(loads(sft_yaml(task, name="smaller", train=train.replace("TOKENS", "16"))))
    faulty(Fault("update.forward", "out-of-memory"))
    start(loads(sft_yaml(task, name="short", train=train.replace("TOKENS", "64"))))
    assert "the device ran out of memory, and the step was repeated" in " ".join(capsys.readouterr().out.split())
    runs = tmp_path / "runs"
    assert load(runs / "short" / "config.yaml").train.chosen_tokens_per_device == 16
    assert same(weights_of(runs / "short"), weights_of(runs / "smaller"))
    faulty(Fault("trial.forward", "out-of-memory"))
    start(loads(sft_yaml(task, name="tried", train="{dtype: fp32, batch_size: 4}")))
    assert load(runs / "tried" / "config.yaml").train.chosen_tokens_per_device == CPU_TOKENS // 2


@pytest.mark.slow
def test_a_run_that_is_started_again_takes_the_budget_that_it_kept_not_the_checkpoints(tmp_path, capsys):
    """As `hotseat run` with checkpoint.resume=true does it, and OpenRLHF's --load_checkpoint."""
    task = make_task(tmp_path)
    text = sft_yaml(task, train="{dtype: fp32, batch_size: 4, max_epochs: 4}", checkpoint="{every: 4}")
    start(loads(text))
    run_dir = tmp_path / "runs" / "sft"
    state = json.loads((run_dir / "checkpoints" / "step-000008" / "state.json").read_text())
    assert loads(state["config"]).train.chosen_tokens_per_device == CPU_TOKENS
    # As it is when memory ran out after the checkpoint.
    (run_dir / "config.yaml").write_text(to_saved(with_budget(load(run_dir / "config.yaml"), "train", 256)))
    (run_dir / "model").rename(tmp_path / "model-before")
    capsys.readouterr()
    start(loads(text, ["checkpoint.resume=true"]))
    out = " ".join(capsys.readouterr().out.split())
    assert "train.chosen_tokens_per_device: 8192 when the checkpoint was written, now 256" in out
    assert "micro-batches: updates of at most 256 tokens on a device (as this run has chosen before)" in out
    assert load(run_dir / "config.yaml").train.chosen_tokens_per_device == 256


@pytest.mark.slow
def test_a_fixed_size_is_not_changed_behind_the_users_back(tmp_path, faulty):
    task = make_task(tmp_path)
    faulty(Fault("update.forward", "out-of-memory"))
    with pytest.raises(WorkerError, match="with train.micro_batch_size 8 .*: set it to 4, or to auto"):
        start(loads(rl_yaml(task)))


def test_samples_with_the_same_images_share_micro_batches_unless_rows_are_padded():
    lengths = [9, 2, 3, 8, 5, 4]
    batch = MicroBatch.from_segments(
        [torch.ones(length, dtype=torch.int64) for length in lengths],
        [torch.ones(length, dtype=torch.bool) for length in lengths],
        [f"s{index}" for index in range(6)],
        images=[("a",), ("b",)] * 3,
    )
    for settings in (BatchSettings(3, None), BatchSettings(None, 17)):
        assert [piece.images for piece in settings.cut(batch)] == [(("a",),) * 3, (("b",),) * 3]
    # 9, 8, 5 and 4, 3, 2 tokens: rows of like length.
    padded = BatchSettings(3, None, is_padded=True).cut(batch)
    assert [piece.sample_ids for piece in padded] == [("s0", "s3", "s4"), ("s1", "s2", "s5")]
