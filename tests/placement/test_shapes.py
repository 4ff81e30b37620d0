import pytest
from placement_cases import refused, shape

from hotseat.placement.shapes import KNOWN_SHAPES, ModelShape, from_hf_config, known_shape

# As published on the models' own pages, in billions.
PUBLISHED = {
    "CodeLlama-7B": 6.74,
    "DeepSeek-Math-7B": 6.91,
    "DeepSeek-R1-Distill-Qwen-1.5B": 1.78,
    "Llama-2-7B": 6.74,
    "Llama-2-13B": 13.02,
    "Llama-2-70B": 68.98,
    "Llama-3-8B": 8.03,
    "Llama-3-70B": 70.55,
    "Llama-3.1-405B": 405.85,
    "Llama-3.2-1B": 1.236,
    "Llama-3.2-3B": 3.213,
    "Mistral-7B": 7.24,
    "Mixtral-8x7B": 46.70,
    "Qwen2.5-0.5B": 0.494,
    "Qwen2.5-1.5B": 1.54,
    "Qwen2.5-3B": 3.09,
    "Qwen2.5-7B": 7.62,
    "Qwen2.5-14B": 14.77,
    "Qwen2.5-32B": 32.76,
    "Qwen2.5-72B": 72.71,
    "Qwen3-0.6B": 0.596,
    "Qwen3-8B": 8.19,
    "Qwen3-30B-A3B": 30.53,
    "SmolLM2-135M": 0.1345,
    "SmolLM2-1.7B": 1.711,
    "TinyLlama-1.1B": 1.100,
}


@pytest.mark.parametrize(("name", "billions"), PUBLISHED.items())
def test_parameter_counts_are_the_published_ones(name, billions):
    assert shape(name).num_parameters == pytest.approx(billions * 1e9, rel=0.005)


def test_parameters_of_a_small_model_counted_by_hand():
    # embedding 10x4 + head 10x4 + norm 4 = 84; a layer: q 4x4, k and v 4x2 each, output 4x4 = 48, norms 8, MLP 3x4x6
    small = ModelShape(2, 4, 6, 2, 1, 2, 10)
    assert small.num_parameters == 84 + 2 * (48 + 8 + 72)
    assert small.with_scalar_head().num_parameters == 84 - 40 + 4 + 2 * 128
    # 3 experts of 3x4x5, a router 4x3, the shared expert 3x4x7 with its gate 4, instead of the MLP of one of two layers
    mixture = ModelShape(
        2, 4, 6, 2, 1, 2, 10, num_experts=3, experts_per_token=2, moe_intermediate_size=5, shared_expert_size=7,
        shared_expert_gate=True, num_dense_layers=1,
    )  # fmt: skip
    assert mixture.num_parameters == 84 + (48 + 8 + 72) + (48 + 8 + 3 * 60 + 12 + 84 + 4)
    assert mixture.mlp_width == 2 * 5 + 7


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("OpenRLHF/Llama-3-8b-sft-mixture", "Llama-3-8B"),
        ("OpenRLHF/Llama-3-8b-rm-700k", "Llama-3-8B"),
        ("meta-llama/Llama-2-70b-hf", "Llama-2-70B"),
        ("meta-llama/Meta-Llama-3-8B-Instruct", "Llama-3-8B"),
        ("meta-llama/Llama-3.1-8B", "Llama-3.1-8B"),
        ("meta-llama/Llama-3.2-1B", "Llama-3.2-1B"),
        ("./runs/llama3_8b_rlhf/", "Llama-3-8B"),
        ("Qwen/Qwen2.5-Math-7B", "Qwen2.5-7B"),
        ("Qwen/Qwen2.5-1.5B-Instruct", "Qwen2.5-1.5B"),
        ("Qwen/Qwen3-30B-A3B", "Qwen3-30B-A3B"),
        ("deepseek-ai/deepseek-math-7b-rl", "DeepSeek-Math-7B"),
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B", "DeepSeek-R1-Distill-Qwen-1.5B"),
        ("codellama/CodeLlama-7b-hf", "CodeLlama-7B"),
        ("mistralai/Mistral-7B-v0.1", "Mistral-7B"),
        ("mistralai/Mixtral-8x7B-v0.1", "Mixtral-8x7B"),
        ("HuggingFaceTB/SmolLM2-135M-Instruct", "SmolLM2-135M"),
        ("./reward-model-70b", None),
        ("llama-30b", None),
        ("Qwen/Qwen2.5-VL-7B-Instruct", "Qwen2.5-VL-7B"),
        ("Qwen/Qwen2-VL-7B-Instruct", None),
        ("Qwen/Qwen1.5-7B", None),
        ("", None),
    ],
)
def test_shape_assumed_from_a_name(name, model):
    found = known_shape(name)
    assert (found[1] if found else None) == model


def test_every_known_name_finds_itself():
    for name, known in KNOWN_SHAPES.items():
        assert known_shape(f"someone/{name}-chat")[0] == known, name


LLAMA_3_8B = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
}


def test_shapes_from_hugging_face_configs():
    assert from_hf_config(LLAMA_3_8B) == shape("Llama-3-8B")
    reward = LLAMA_3_8B | {"architectures": ["LlamaForSequenceClassification"]}
    assert from_hf_config(reward) == shape("Llama-3-8B").with_scalar_head()
    qwen = {
        "model_type": "qwen2", "num_hidden_layers": 28, "hidden_size": 1536, "intermediate_size": 8960,
        "num_attention_heads": 12, "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True,
    }  # fmt: skip
    assert from_hf_config(qwen) == shape("Qwen2.5-1.5B")
    mixtral = LLAMA_3_8B | {
        "model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2, "vocab_size": 32000,
        "head_dim": None,
    }  # fmt: skip
    assert from_hf_config(mixtral).num_parameters == shape("Mixtral-8x7B").num_parameters
    qwen_mixture = {
        "model_type": "qwen3_moe", "num_hidden_layers": 48, "hidden_size": 2048, "intermediate_size": 6144,
        "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936,
        "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "mlp_only_layers": [],
    }  # fmt: skip
    assert from_hf_config(qwen_mixture) == shape("Qwen3-30B-A3B")
    assert from_hf_config(qwen_mixture | {"mlp_only_layers": [0, 5]}).num_dense_layers == 2
    assert from_hf_config(qwen_mixture | {"decoder_sparse_step": 2}).num_dense_layers == 24
    assert from_hf_config(qwen_mixture | {"decoder_sparse_step": 0, "mlp_only_layers": [[0]]}).num_dense_layers == 0
    old = {key: value for key, value in LLAMA_3_8B.items() if key != "num_key_value_heads"}
    assert from_hf_config(old).num_kv_heads == 32


def test_qwen3_5_is_counted_for_text_alone():
    text = LLAMA_3_8B | {"model_type": "qwen3_5_text", "head_dim": 256, "num_attention_heads": 16}
    found = from_hf_config(text)  # every fourth layer has attention, unless the config says something else
    assert (found.num_linear_layers, found.linear.channels) == (24, 2 * 16 * 128 + 32 * 128)
    listed = ["linear_attention", "full_attention"] * 16
    assert from_hf_config(text | {"layer_types": listed}).num_linear_layers == 16
    assert from_hf_config(text | {"full_attention_interval": 2}).num_linear_layers == 16
    assert from_hf_config({"model_type": "qwen3_5", "text_config": text, "vision_config": {"depth": 27}}) == found
    with refused("layer_types conv"):
        from_hf_config(text | {"layer_types": ["conv", "linear_attention"]})


def test_latent_attention_and_its_experts_are_counted():
    lite = LLAMA_3_8B | {
        "model_type": "deepseek_v2", "num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 24,
        "num_attention_heads": 2, "vocab_size": 32, "q_lora_rank": None, "kv_lora_rank": 8, "qk_nope_head_dim": 6,
        "qk_rope_head_dim": 4, "v_head_dim": 5, "n_routed_experts": 3, "n_shared_experts": 2,
        "moe_intermediate_size": 7, "first_k_dense_replace": 1, "num_experts_per_tok": 2,
    }  # fmt: skip
    attention = 16 * 2 * (6 + 4) + 16 * (8 + 4) + 8 * 2 * (6 + 5) + 2 * 5 * 16  # queries, latent, what it makes, output
    norms = 2 * 16 + 8
    dense, mixture = 3 * 16 * 24, 3 * 3 * 16 * 7 + 16 * 3 + 3 * 16 * 2 * 7
    found = from_hf_config(lite)
    assert found.num_parameters == 2 * (attention + norms) + dense + mixture + 2 * 32 * 16 + 16
    assert found.num_adapter_parameters(1) == 2 * (36 + 28 + 30 + 26) + 3 * (16 + 24) + 3 * (16 + 14)
    ranked = from_hf_config(lite | {"q_lora_rank": 3, "model_type": "deepseek_v3", "attention_bias": True})
    more = 16 * 3 + 3 * 20 + 3 - 16 * 20  # two steps to queries, with a norm
    assert ranked.num_parameters == found.num_parameters + 2 * (more + 3 + 12 + 16)
    assert ranked.num_largest_matrix == 16 * 24
    with refused("model config has kv_lora_rank and is of longcat_flash: the latent attention of deepseek_v2"):
        from_hf_config(lite | {"model_type": "longcat_flash"})


def test_unusable_configs_name_the_missing_keys():
    with refused("lacks num_hidden_layers, hidden_size, intermediate_size, num_attention_heads, vocab_size"):
        from_hf_config({"n_layer": 12})
    with refused("model config has layer_types linear_attention: such layers are not described here"):
        from_hf_config(LLAMA_3_8B | {"layer_types": ["linear_attention", "full_attention"]})
    with refused("lacks intermediate_size"):
        from_hf_config({key: value for key, value in LLAMA_3_8B.items() if key != "intermediate_size"})
    with refused("it is in text_config"):
        from_hf_config({"text_config": LLAMA_3_8B})
    with refused("kv_lora_rank", "not checked"):
        from_hf_config(LLAMA_3_8B | {"kv_lora_rank": 512})
