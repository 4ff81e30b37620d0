"""Chat templates of several shapes with a tokenizer for each, and answers as an engine would sample them."""

from __future__ import annotations

import functools
import importlib.util
import random
import re
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

# The shape of Mistral's: tools before the last user message, the system prompt inside of it, so history is rewritten.
MISTRAL = """\
{%- set system = messages[0].content if messages[0].role == 'system' else '' -%}
{%- set loop_messages = messages[1:] if messages[0].role == 'system' else messages -%}
{%- set ns = namespace(last=0) -%}
{%- for m in loop_messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor -%}
{{ bos_token }}
{%- for m in loop_messages -%}
{%- if m.role == 'user' -%}
{%- if loop.index0 == ns.last and tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif -%}
[INST]{% if loop.index0 == ns.last and system %}{{ system }}\n\n{% endif %}{{ m.content }}[/INST]
{%- elif m.role == 'assistant' -%}
{%- if m.tool_calls %}[TOOL_CALLS]{{ m.tool_calls | tojson }}{% else %}{{ m.content }}{% endif %}{{ eos_token }}
{%- elif m.role == 'tool' %}[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]
{%- endif -%}
{%- endfor -%}
"""

SMOLLM2 = """\
{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system
You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>
' }}{% endif %}{{'<|im_start|>' + message['role'] + '
' + message['content'] + '<|im_end|>' + '
'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant
' }}{% endif %}"""

# Name -> the text of the token that ends an answer. The first two are above, the others come with TRL.
STOPS = {
    "smollm2": "<|im_end|>",
    "mistral": "</s>",
    "qwen2_5": "<|im_end|>",
    "qwen3": "<|im_end|>",
    "qwen3_training": "<|im_end|>",
    "qwen3_5_think": "<|im_end|>",
    "llama3": "<|eot_id|>",
    "llama3_1": "<|eot_id|>",
    "gemma": "<end_of_turn>",
    "phi3": "<|end|>",
    "glm4moe": "<|user|>",
    "deepseekv3": "<｜end▁of▁sentence｜>",
    "gptoss": "<|return|>",
}
_UNWRITTEN = {"gptoss": ("<|constrain|>",)}  # markers that a policy writes and its template does not
_ANY = re.compile(
    r"<\|[\w ]+?\|>|<｜[^｜]+｜>|</?s>|<(?:start|end)_of_turn>|\[/?[A-Z_]+\]|</?(?:think|tool_call|tool_response)>"
)


@functools.cache
def tokenizer_of(name: str) -> PreTrainedTokenizerFast:
    """A token for every byte, for some pairs of them, and for the template's markers."""
    template = {"mistral": MISTRAL, "smollm2": SMOLLM2}.get(name) or _of_trl(name)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = [(a, b) for a in "abcdeĠ" for b in "abcde"]
    vocabulary = {text: at for at, text in enumerate([*alphabet, *(a + b for a, b in pairs)])}
    backend = Tokenizer(models.BPE(vocabulary, pairs))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    markers = sorted({*_ANY.findall(template), *_UNWRITTEN.get(name, ()), STOPS[name], "<s>", "<|endoftext|>"})
    backend.add_special_tokens([AddedToken(text, normalized=False) for text in markers])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token=STOPS[name])
    tokenizer.chat_template = template
    return tokenizer


def _of_trl(name: str) -> str:
    spec = importlib.util.find_spec("trl")
    assert spec is not None
    assert spec.origin is not None
    return (Path(spec.origin).parent / "chat_templates" / f"{name}.jinja").read_text()


def sampled(name: str, rng: random.Random) -> tuple[tuple[int, ...], bool]:
    """Return tokens as a policy may sample them, and whether the last one ended the answer.

    They are text, thinking, markers in wrong places, tokens no tokenizer would choose, and bytes that are no text.
    """
    tokenizer = tokenizer_of(name)
    ids: list[int] = []
    for _ in range(rng.randint(0, 4)):
        kind = rng.randrange(6)
        if kind == 0:
            ids += tokenizer("<think>abc</think>\n\n", add_special_tokens=False)["input_ids"]
        elif kind == 1:
            ids += [rng.randrange(len(tokenizer)) for _ in range(3)]
        elif kind == 2:
            ids += [tokenizer.convert_tokens_to_ids(text) for text in "abc"]
        else:
            ids += tokenizer(rng.choice(["bad cab ", " é", "  dad\n"]), add_special_tokens=False)["input_ids"]
    stop = tokenizer.convert_tokens_to_ids(STOPS[name])
    ids = [token for token in ids if token != stop]
    is_cut = bool(ids) and rng.random() < 0.2
    return tuple(ids if is_cut else [*ids, stop]), not is_cut
