"""Memory of models that see images: the visual encoder and pixels are terms of their own."""

import pytest

from hotseat.cli.main import main
from hotseat.config import loads
from hotseat.errors import PlacementError
from hotseat.placement import GIB, Part
from hotseat.placement.memory import estimate
from hotseat.placement.memory_settings import EngineMemory, ForwardMemory, Layout, TrainMemory
from hotseat.placement.shapes import KNOWN_SHAPES, from_hf_config, known_shape
from hotseat.planning.role_specs import role_specs

ALONE = Layout(num_procs=1, device_gib=141.0)
SHAPE = KNOWN_SHAPES["Qwen2.5-VL-3B"]
TRAIN = TrainMemory(max_tokens=1000, micro_batch=2, weight_bytes=2, master_bytes=0, image_share=0.25)
# Of each of 32 layers: attention 4 h (h + 1), a gated MLP 3 h m + 2 m + h, two norms 2 h, where h = 1280, m = 3420.
LAYER = 4 * 1280 * 1281 + 3 * 1280 * 3420 + 2 * 3420 + 1280 + 2 * 1280
# Patches of 2 x 14 x 14 pixels in three colours; a norm; two linear layers, of four patches to 2048.
ENCODER = 32 * LAYER + 1176 * 1280 + 1280 + 5120 * 5121 + 5120 * 2048 + 2048


def terms(found):
    return {term.name: term for term in found}


def test_a_shape_has_the_parameters_of_the_public_model():
    assert SHAPE.num_vision_parameters == ENCODER
    assert SHAPE.num_parameters == 3_754_622_976  # as the hub counts
    assert known_shape("Qwen/Qwen2.5-VL-3B-Instruct")[1] == "Qwen2.5-VL-3B"
    assert known_shape("Qwen/Qwen2.5-VL-7B-Instruct")[1] == "Qwen2.5-VL-7B"
    assert known_shape("Qwen/Qwen2.5-VL-72B-Instruct") is None
    assert known_shape("Qwen/Qwen2.5-3B-Instruct")[0].vision is None


def test_a_config_of_the_hub_has_its_keys_in_one_object_or_in_two():
    text = {
        "num_hidden_layers": 36,
        "hidden_size": 2048,
        "intermediate_size": 11008,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
    }
    vision = {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "out_hidden_size": 2048, "patch_size": 14}
    whole = {"model_type": "qwen2_5_vl", "tie_word_embeddings": True, "vision_config": vision}
    assert from_hf_config({**text, **whole}) == SHAPE
    assert from_hf_config({**whole, "text_config": {**text, "model_type": "qwen2_5_vl_text"}}) == SHAPE
    with pytest.raises(PlacementError, match=r"a vision_config of mllama: the visual encoders of qwen2_5_vl, .* are"):
        from_hf_config({**text, "model_type": "mllama", "vision_config": vision})


def test_weights_of_the_encoder_and_pixels_are_named_in_every_role():
    trained = estimate("actor", TRAIN, SHAPE, ALONE)
    scored = estimate("reference", ForwardMemory(max_tokens=1000, micro_batch=2, image_share=0.25), SHAPE, ALONE)
    sampled = estimate("rollout", EngineMemory(1000, 8, encodes_by_prompt=True, image_share=0.25), SHAPE, ALONE)
    for each in (trained, scored, sampled):
        weights = terms(each.parts[Part.WEIGHTS])
        assert weights["visual encoder"].gib == ENCODER * 2 / GIB
        assert weights["weights"].gib == (SHAPE.num_parameters - ENCODER) * 2 / GIB
    # A quarter of 2,000 tokens, each for four patches of 1,176 fp32 numbers; an engine encodes
    # one prompt at a time, or small ones with 1,024 tokens in all.
    assert terms(trained.working["train"])["pixels"].gib == 500 * 4 * 1176 * 4 / GIB
    assert terms(scored.working["forward"])["pixels"].gib == 500 * 4 * 1176 * 4 / GIB
    assert terms(sampled.working["generate"])["pixels"].gib == 256 * 4 * 1176 * 4 / GIB
    for slots, num_tokens in ((8, 8 * 250), (64, 8192)):  # those of a step, which has 8,192 at most
        together = estimate("rollout", EngineMemory(1000, slots, image_share=0.25), SHAPE, ALONE)
        assert terms(together.working["generate"])["pixels"].gib == num_tokens * 4 * 1176 * 4 / GIB
    # With recomputation an encoder keeps the input of each of 32 layers, and of one layer all.
    layer = 2 * (4 + 2) * 1280 + 4 * 2 * 1280 + 4 * 2 * 3420
    kept = terms(trained.working["train"])["visual encoder activations"].gib
    assert kept == pytest.approx(2000 * (32 * 1280 * 2 + 1.5 * layer) / GIB)
    without = estimate("actor", TrainMemory(max_tokens=1000, micro_batch=2), SHAPE, ALONE)
    assert "pixels" not in terms(without.working["train"])


def test_prompts_of_llava_that_share_a_forward_on_a_gpu_are_counted():
    text = {"num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32}
    llava = from_hf_config({"model_type": "llava", "text_config": {**text, "vocab_size": 32064}, "vision_config": {}})

    def generating(slots, layout=ALONE, by_prompt=True, image_share=0.5):
        memory = EngineMemory(1000, slots, encodes_by_prompt=by_prompt, image_share=image_share)
        found = estimate("rollout", memory, llava, layout)
        return terms(found.working["generate"])

    # Keys and values of a token: 2 of 32 layers of 4,096 numbers of 2 bytes. A patch: 3 x 14 x 14 fp32 numbers.
    for slots, num_tokens in ((1, 1000), (8, 8000), (64, 32768)):
        seen = generating(slots)
        assert seen["pixels"].gib == max(num_tokens, 1024) / 2 * 588 * 4 / GIB
        assert seen["KV cache of prompts"].gib == 2 * num_tokens * 2 * 32 * 4096 * 2 / GIB
        assert seen["engine workspace"].formula.startswith(f"{num_tokens:,} tokens x ")
    on_host = generating(64, Layout(num_procs=1, has_device=False))
    for other in (on_host, generating(64, by_prompt=False), generating(64, image_share=0.0)):
        assert "KV cache of prompts" not in other
        assert other["engine workspace"].formula.startswith("8,192 tokens x ")
    assert on_host["pixels"].gib == 512 * 588 * 4 / GIB
    sampled = estimate("rollout", EngineMemory(1000, 64, encodes_by_prompt=True, image_share=0.25), SHAPE, ALONE)
    assert "KV cache of prompts" not in terms(sampled.working["generate"])  # Qwen's own forward


def test_a_frozen_encoder_has_no_gradients_and_no_optimizer_state():
    frozen = TrainMemory(max_tokens=1000, master_bytes=0, image_share=0.25, has_frozen_encoder=True)
    found = estimate("actor", frozen, SHAPE, ALONE)
    assert terms(found.parts[Part.OPTIMIZER])["optimizer moments"].gib == (SHAPE.num_parameters - ENCODER) * 8 / GIB
    assert terms(found.parts[Part.WEIGHTS])["visual encoder"].gib == ENCODER * 2 / GIB
    trained = terms(estimate("actor", TRAIN, SHAPE, ALONE).working["train"])
    kept = terms(found.working["train"])["visual encoder activations"].gib
    assert kept < trained["visual encoder activations"].gib / 2


def test_plan_names_them(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    (tmp_path / "images.yaml").write_text(
        "task: rl\nactor: {model: Qwen/Qwen2.5-VL-3B-Instruct}\nreward: {function: reward.py}\n"
        "data: {path: x.jsonl, max_length: 2048, image_key: images, max_images_per_prompt: 1}\n"
        "rollout: {engine: transformers, max_new_tokens: 512}\n"
    )
    assert main(["plan", str(tmp_path / "images.yaml"), "--inventory", "1x1xH200-141G", "--explain"]) == 0
    shown = capsys.readouterr().out
    assert f"{ENCODER:,} parameters x 4 B" in shown
    for name in ("visual encoder", "visual encoder activations", "pixels"):
        assert name in shown


def test_environments_may_show_images_in_every_turn():
    text = (
        "task: rl\nactor: {model: Qwen/Qwen2.5-VL-3B-Instruct}\nreward: {function: reward.py}\n"
        "data: {path: x.jsonl, max_length: 2048, image_key: images, max_images_per_prompt: 8}\n"
        "rollout: {engine: transformers, max_new_tokens: 512}\n"
    )
    for agent, num_tokens in (("", 2048 - 512), ("agent: {path: agent.py}\n", 2048)):
        specs = {spec.name: spec for spec in role_specs(loads(text + agent))}
        assert specs["actor"].memory.image_share == num_tokens / 2048
