"""A float32 forward of a policy's weights, against one by hand, and what it refuses."""

import copy

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from hotseat.errors import RunError
from hotseat.model_source import ModelSource
from hotseat.train.exact import Fp8Parts, exact_log_probs, missing_bytes, round_cache, rounded_rows

CPU = torch.device("cpu")
SEQUENCES, STARTS = [[3, 1, 4, 1, 5, 9, 2, 6], [5, 3, 5]], [3, 1]


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def model(request, tmp_path_factory) -> tuple[ModelSource, LlamaForCausalLM]:
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(
        vocab_size=17, **shape, initializer_range=0.5, tie_word_embeddings=request.param, bos_token_id=None
    )
    path = tmp_path_factory.mktemp("model")
    policy = LlamaForCausalLM(config).eval()
    policy.save_pretrained(path)
    return ModelSource(str(path)), policy


def test_log_probs_are_those_of_the_weights_that_are_handed_in(model):
    source, policy = model
    weights = [(name, (weight.detach() * 1.5).bfloat16()) for name, weight in policy.named_parameters()]
    state = torch.random.get_rng_state()
    found = exact_log_probs(source, weights, SEQUENCES, STARTS, 0.7, dtype=torch.bfloat16, device=CPU)
    assert torch.equal(torch.random.get_rng_state(), state)  # nothing was drawn
    expected, rounded = [], []
    policy = copy.deepcopy(policy)  # other tests have it too
    with torch.no_grad():
        for (_, mine), (_, theirs) in zip(policy.named_parameters(), weights, strict=True):
            mine.copy_(theirs)
        for sequence, start in zip(SEQUENCES, STARTS, strict=True):
            logits = policy(torch.tensor([sequence])).logits[0]
            for token in range(start, len(sequence)):
                row = logits[token - 1]
                expected.append(float((row / 0.7).log_softmax(-1)[sequence[token]]))
                rounded.append(float((row.bfloat16().float() / 0.7).log_softmax(-1)[sequence[token]]))
    assert found.log_probs == pytest.approx(expected, abs=1e-4)
    assert found.with_rounded_logits == pytest.approx(rounded, abs=5e-2)
    assert found.with_rounded_logits != found.log_probs


def test_rows_are_rounded_to_three_bits_of_mantissa_by_scales_of_their_own():
    # The first row has scale 1: its largest is the largest number. Steps are 32 from 256 on, 2 from 16, 1/8 from 1.
    rows = torch.tensor([[448.0, 300.0, 17.2, -1.2], [0.0, 0.0, 0.0, 0.0], [-0.448, 0.3, 0.0172, 0.0012]])
    expected = torch.tensor([[448.0, 288.0, 18.0, -1.25], [0.0, 0.0, 0.0, 0.0], [-0.448, 0.288, 0.018, 0.00125]])
    torch.testing.assert_close(rounded_rows(rows), expected)


@pytest.mark.parametrize(("weights", "cache"), [(True, False), (False, True), (True, True)])
def test_fp8_changes_log_probs_by_what_a_rounded_forward_does(model, weights, cache):
    source, policy = model
    named = [(name, weight.detach()) for name, weight in policy.named_parameters()]
    fp8 = Fp8Parts(weights, cache)
    options = {"dtype": torch.bfloat16, "device": CPU, "fp8": fp8}
    scores = exact_log_probs(source, named, SEQUENCES[:1], STARTS[:1], 1.0, **options)
    hidden = policy.model.embed_tokens(torch.tensor(SEQUENCES[0]))
    round_inputs = rounded_rows if weights else lambda values: values
    round_cached = (lambda values: values.to(torch.float8_e4m3fn).float()) if cache else lambda values: values
    config = policy.config
    cos, sin = policy.model.rotary_emb(hidden[None], torch.arange(len(hidden))[None])

    def project(layer, values):
        return round_inputs(values) @ round_inputs(layer.weight.detach()).t()

    def heads(values):
        return values.view(len(values), config.num_attention_heads, -1).transpose(0, 1)

    with torch.no_grad():
        for layer in policy.model.layers:
            attention, normed = layer.self_attn, layer.input_layernorm(hidden)
            q, k, v = (heads(project(getattr(attention, f"{name}_proj"), normed)) for name in "qkv")
            q, k = (each[0] for each in apply_rotary_pos_emb(q[None], k[None], cos, sin))
            q, k, v = (round_cached(each) for each in (q, k, v))
            weight = (q @ k.transpose(1, 2) * attention.scaling).masked_fill(
                torch.ones(len(hidden), len(hidden)).triu(1).bool(), -torch.inf
            )
            mixed = (weight.softmax(-1) @ v).transpose(0, 1).reshape(len(hidden), -1)
            hidden = hidden + project(attention.o_proj, mixed)
            normed, mlp = layer.post_attention_layernorm(hidden), layer.mlp
            gated = torch.nn.functional.silu(project(mlp.gate_proj, normed)) * project(mlp.up_proj, normed)
            hidden = hidden + project(mlp.down_proj, gated)
        logits = policy.lm_head(policy.model.norm(hidden))  # the head stays as it is
    tokens = torch.tensor(SEQUENCES[0])
    expected = logits[:-1].log_softmax(-1).gather(1, tokens[1:, None])[STARTS[0] - 1 :, 0]
    assert scores.with_fp8 == pytest.approx(expected.tolist(), abs=1e-3)
    assert scores.with_fp8 != pytest.approx(scores.log_probs, abs=1e-3)


def test_attention_that_torch_does_not_compute_has_no_8_bit_form(model):
    _, policy = model
    eager = LlamaForCausalLM._from_config(policy.config, attn_implementation="eager")
    with pytest.raises(RunError, match="the attention of LlamaForCausalLM has no form with an FP8 KV cache"):
        round_cache(eager)


def test_a_weight_that_is_missing_or_unknown_is_named(model):
    source, policy = model
    weights = [(name, weight.detach()) for name, weight in policy.named_parameters()]
    score = {"dtype": torch.float32, "device": CPU}
    rest = [each for each in weights if each[0] != "model.norm.weight"]
    with pytest.raises(RunError, match=r"the trainer holds no model\.norm\.weight, which LlamaForCausalLM has"):
        exact_log_probs(source, rest, SEQUENCES, STARTS, 1.0, **score)
    with pytest.raises(RunError, match="LlamaForCausalLM has no weight head, which the trainer holds"):
        exact_log_probs(source, [*weights, ("head", weights[0][1])], SEQUENCES, STARTS, 1.0, **score)


def test_on_a_cpu_there_is_room(model):
    assert missing_bytes(model[0], CPU, longest=8) == 0


@pytest.mark.parametrize("family", ["Gemma2", "Granite", "Cohere"])
def test_what_a_model_does_to_scores_and_logits_is_part_of_it(family, tmp_path):
    import transformers

    common = {"vocab_size": 17, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "eos_token_id": 0}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "pad_token_id": 0, "bos_token_id": 0}
    own = {
        "Gemma2": {"final_logit_softcapping": 3.0, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 8},
        "Granite": {"logits_scaling": 8.0},
        "Cohere": {"logit_scale": 0.25},
    }[family]
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**common, **heads, **own, initializer_range=0.5)
    config._attn_implementation = "eager"
    policy = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    policy.save_pretrained(tmp_path)
    weights = [(name, weight.detach()) for name, weight in policy.named_parameters()]
    [sequence, _], [start, _] = SEQUENCES, STARTS
    found = exact_log_probs(
        ModelSource(str(tmp_path)), weights, [sequence], [start], 1.0, dtype=torch.float32, device=CPU
    )
    with torch.no_grad():
        log_p = policy(torch.tensor([sequence])).logits[0].log_softmax(-1)
    expected = [float(log_p[token - 1, sequence[token]]) for token in range(start, len(sequence))]
    assert found.log_probs == pytest.approx(expected, abs=1e-5)
