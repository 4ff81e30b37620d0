"""Write what the example starts from: a tiny model that sees BabyAI's views, and decisions to imitate.

    python examples/embodied/policy.py FOLDER --task BabyAI-GoToRedBallGrey-v0 --decisions 28800

`FOLDER/model` is a LLaVA with random weights, in which each of the 7 x 7 cells of a view is a patch; its tokenizer has
a token per word of the missions, and the last tokens are the actions. `FOLDER/expert.jsonl` has a row per decision: the
view, the mission, and the actions as tokens. A share of the decisions are of BabyAI's bot, the others are random: a
policy that imitates both has learned to see, but seldom succeeds.
"""

from __future__ import annotations

import argparse
import base64
import io
import itertools
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlavaConfig, LlavaForConditionalGeneration, LlavaProcessor, PreTrainedTokenizerFast
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from hotseat.envs.families import babyai

MISSION = (
    "go to the a pick up put next open door ball box key red green blue purple yellow grey object then and after you"
    " on your left right in front of behind"
)
ACTIONS = [f"<{name}>" for name in babyai.ACTIONS]
IMAGE = "<image>"
INIT = 0.2  # transformers' 0.02 is for wide models: 64 wide ones that begin with it learn several times more slowly
AT_RANDOM_SEED = 5_000  # first of the seeds of episodes played at random, counted from that of the bot's


def make_tokenizer() -> PreTrainedTokenizerFast:
    words = ["<pad>", "<end>", "<unknown>", IMAGE, *dict.fromkeys(MISSION.split())]
    words += reversed(ACTIONS)  # action 0 is the last token
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unknown>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<end>",
        unk_token="<unknown>",
        additional_special_tokens=[IMAGE],
    )


def make_model(tokenizer: PreTrainedTokenizerFast, width: int, seed: int) -> LlavaForConditionalGeneration:
    torch.manual_seed(seed)
    return LlavaForConditionalGeneration(
        LlavaConfig(
            vision_config={
                "model_type": "siglip_vision_model",
                "hidden_size": width,
                "intermediate_size": 2 * width,
                "num_hidden_layers": 1,
                "num_attention_heads": 4,
                "image_size": babyai.REACH * babyai.TILE,
                "patch_size": babyai.TILE,
                "vision_use_head": False,
                "initializer_range": INIT,
            },
            text_config={
                "model_type": "llama",
                "vocab_size": len(tokenizer),
                "hidden_size": width,
                "intermediate_size": 2 * width,
                "num_hidden_layers": 1,
                "num_attention_heads": 4,
                "num_key_value_heads": 4,
                "initializer_range": INIT,
                "max_position_embeddings": 128,
                "bos_token_id": None,
                "eos_token_id": tokenizer.eos_token_id,
                "pad_token_id": tokenizer.pad_token_id,
            },
            image_token_index=tokenizer.convert_tokens_to_ids(IMAGE),
            image_seq_length=babyai.REACH**2,
            vision_feature_layer=-1,
            vision_feature_select_strategy="full",
            initializer_range=INIT,
        )
    )


def make_processor(tokenizer: PreTrainedTokenizerFast) -> LlavaProcessor:
    """Return a processor that takes views as they are: a token for each cell."""
    images = SiglipImageProcessorPil(
        do_resize=False, size={"height": babyai.REACH * babyai.TILE, "width": babyai.REACH * babyai.TILE}
    )
    return LlavaProcessor(
        images,
        tokenizer,
        patch_size=babyai.TILE,
        vision_feature_select_strategy="full",
        image_token=IMAGE,
    )


def decisions(task: str, first_seed: int, max_steps: int, chunk: int, at_random: bool) -> Iterator[dict[str, object]]:
    """Yield a row for each decision of the bot, or of random actions, in episodes of seeds that no run learns from."""
    simulator = babyai.make([task], max_steps, view="pixels")
    generator = np.random.default_rng(first_seed)
    for seed in itertools.count(first_seed):
        seen = simulator.reset(0, seed)
        bot, action = simulator.expert(), None
        is_over = False
        while not is_over:
            view = seen
            taken: list[int] = []
            while len(taken) < chunk and not is_over:
                action = generator.integers(len(ACTIONS)) if at_random else bot.replan(action)
                taken.append(int(action))
                step = simulator.step(np.array([float(action)]))
                seen, is_over = step.seen, step.terminated or step.truncated
            taken += [taken[-1]] * (chunk - len(taken))  # what would follow the end is never carried out
            assert view.image is not None
            words = " ".join(ACTIONS[each] for each in taken)
            yield {"input": f"{IMAGE} {view.instruction}", "images": [_png(view.image)], "output": f" {words}"}


def _png(image: np.ndarray) -> str:
    file = io.BytesIO()
    Image.fromarray(image).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode("ascii")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--task", default="BabyAI-GoToRedBallGrey-v0")
    parser.add_argument("--decisions", type=int, default=38400, help="rows to imitate")
    parser.add_argument("--at-random", type=float, default=0.88, help="share of the decisions that are made at random")
    parser.add_argument("--max-steps", type=int, default=14, help="actions of an episode")
    parser.add_argument("--chunk", type=int, default=1, help="actions of a decision")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    tokenizer = make_tokenizer()
    make_model(tokenizer, arguments.width, arguments.seed).save_pretrained(arguments.folder / "model")
    make_processor(tokenizer).save_pretrained(arguments.folder / "model")
    first_seed = 2_000_000 + 10_000 * arguments.seed
    num_at_random = round(arguments.decisions * arguments.at_random)
    rows: list[dict[str, object]] = []
    for at_random, num_rows in ((False, arguments.decisions - num_at_random), (True, num_at_random)):
        seed = first_seed + AT_RANDOM_SEED * at_random
        made = decisions(arguments.task, seed, arguments.max_steps, arguments.chunk, at_random)
        rows += itertools.islice(made, num_rows)
    (arguments.folder / "expert.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(f"{arguments.folder}: a model, and {len(rows)} decisions, {num_at_random} of them at random")


if __name__ == "__main__":
    main()
