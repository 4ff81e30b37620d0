"""Models that see: transformers' own forward, the trainer in every layout and the engine give the same log-probs."""

import importlib.util
from types import SimpleNamespace

import image_cases as tiny
import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoTokenizer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hotseat.config.schema.rollout_options import EnvConfig
from hotseat.data.frames import FramePreparer
from hotseat.data.images import ImageLimits, ImageStore, load_processor, prepare_rows
from hotseat.data.prompts import make_prompts
from hotseat.data.rows import Row
from hotseat.envs.family_loading import SimulatorSettings
from hotseat.envs.simulator import ActionSpec, Observation
from hotseat.errors import DataError, RunError, UserError
from hotseat.loop.workers.observations import Reader, SimulationSettings
from hotseat.model_source import ModelSource
from hotseat.rollout import SlotOptions, TransformersEngine
from hotseat.train.attention import IMAGE_ATTENTION, image_attention
from hotseat.train.backend import AdamW, TrainOptions
from hotseat.train.exact import round_cache
from hotseat.train.export import write_model
from hotseat.train.packing import join, model_input, take, with_ends
from hotseat.train.policy_models import load_model, prepare_model
from hotseat.types import MicroBatch, Request, Sampling
from hotseat.vision import Vision, encoder_of, pixels_of, placeholder_ids, policy_class, sees_images

pytestmark = pytest.mark.slow

IMAGES = ([tiny.drawn(0)], [tiny.drawn(1), tiny.drawn(2, 84, 28)], [])
ANSWERS = ([5, 6, 7, 8, 9], [10, 11, 12], [13, 14])
TOLERANCE = 1e-5  # of log-probs in fp32
ASKED = tuple(enumerate(ANSWERS))  # the number of a prompt, and an answer to it


def texts(family):
    place = tiny.PLACE[family]
    return [f"ab{place}count a?", f"{place}cc{place}: count b?", "only text"]


# Qwen3-VL is the second family with positions in three dimensions.
FAMILIES = [
    *(pytest.param(each, marks=pytest.mark.long if each == "qwen3_vl" else ()) for each in tiny.FAMILIES),
    pytest.param(
        "smolvlm",
        marks=[
            pytest.mark.long,
            pytest.mark.skipif(importlib.util.find_spec("num2words") is None, reason="num2words is not installed"),
        ],
    ),
]


@pytest.fixture(scope="module", params=FAMILIES)
def seeing(request, tmp_path_factory):
    """A tiny model of a family, and three prompts: with one image, with two, with none."""
    family = request.param
    folder = tmp_path_factory.mktemp(family)
    name = tiny.save(family, folder / "model")
    tokenizer = AutoTokenizer.from_pretrained(name)
    processor = load_processor(ModelSource(name), tokenizer)
    store = ImageStore(folder / "images", processor, ImageLimits(2, 10**6, 10**6))
    rows = [
        Row({"input": text, "images": images}, "x", at, has_line=True)
        for at, (text, images) in enumerate(zip(texts(family), IMAGES, strict=True))
    ]
    prompts, _ = make_prompts(
        prepare_rows(rows, store, "images", "input", is_chat=False), tokenizer, image_key="images"
    )

    def load():
        return policy_class(AutoConfig.from_pretrained(name)).from_pretrained(name).eval()

    assert (tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id) == (family == "llava")
    return SimpleNamespace(family=family, name=name, load=load, prompts=prompts, processor=processor, folder=folder)


def by_transformers(seeing, model, asked=ASKED, *, has_gradient=False):
    """Compute log-probs of answers from what the family's own processor and forward make of texts and images."""
    scores = []
    for made, answer, num_prompt in made_by_processor(seeing, asked):
        with torch.set_grad_enabled(has_gradient):
            log_probs = model(**made, use_cache=False).logits[0].log_softmax(-1)
        scores.append(log_probs[num_prompt - 1 : -1].gather(1, torch.tensor(answer)[:, None])[:, 0])
    return scores


def made_by_processor(seeing, asked=ASKED):
    """Yield the arguments of a forward for each prompt and its answer, the answer, and the length of the prompt."""
    for number, answer in asked:
        text, images = texts(seeing.family)[number], IMAGES[number]
        made = dict(
            seeing.processor(
                text=[text], images=[images] if images else None, return_tensors="pt", add_special_tokens=False
            )
        )
        made.pop("attention_mask")
        num_prompt = made["input_ids"].shape[1]
        made["input_ids"] = torch.cat([made["input_ids"], torch.tensor([answer])], dim=1)
        if "mm_token_type_ids" in made:
            zeros = torch.zeros(1, len(answer), dtype=torch.int64)
            made["mm_token_type_ids"] = torch.cat([made["mm_token_type_ids"], zeros], dim=1)
        yield made, answer, num_prompt


def batch_of(pairs):
    return MicroBatch.from_segments(
        [torch.tensor([*prompt.token_ids, *answer]) for prompt, answer in pairs],
        [torch.arange(len(prompt.token_ids) + len(answer)) >= len(prompt.token_ids) for prompt, answer in pairs],
        [str(index) for index in range(len(pairs))],
        images=[prompt.images for prompt, _ in pairs],
    )


def test_every_layout_of_the_trainer_gives_what_transformers_gives(seeing):
    model = seeing.load()
    expected = torch.cat(by_transformers(seeing, model))
    policy, layout = prepare_model(model, TrainOptions(), torch.device("cpu"))
    assert layout == "auto"
    vision = Vision.of(model)
    pairs = [*zip(seeing.prompts, ANSWERS, strict=True), (seeing.prompts[0], [20, 21]), (seeing.prompts[1], [22])]
    batch = batch_of(pairs)
    with torch.no_grad():
        padded, packed, shared = (
            policy(model_input(batch, kind, vision=vision), 1.0)["log_probs"] for kind in ("padded", "packed", "shared")
        )
        # Of each two segments that differ in their images alone, neither shares the other's context.
        other = join(
            [take(batch, [0]), MicroBatch(**vars(take(batch, [0])) | {"images": (seeing.prompts[1].images[:1],)})]
        )
        mine, theirs = policy(model_input(other, "shared", vision=vision), 1.0)["log_probs"].chunk(2)
    assert torch.allclose(padded[: len(expected)], expected, rtol=0, atol=TOLERANCE)
    assert torch.allclose(packed, padded, rtol=0, atol=TOLERANCE)
    assert torch.allclose(shared, padded, rtol=0, atol=TOLERANCE)
    assert torch.allclose(mine, expected[: len(mine)], rtol=0, atol=TOLERANCE)
    assert (mine - theirs).abs().max() > 1e-3  # the answer depends on the pixels
    # Shared contexts stand there once, and so do their images.
    pixels = [model_input(batch, kind, vision=vision).pixels["pixel_values"].numel() for kind in ("packed", "shared")]
    assert pixels[0] == 2 * pixels[1]
    # With fillers behind them, as for varlen attention, they have the same images.
    flash = [model_input(batch, kind, vision=vision, has_flash=True).pixels for kind in ("packed", "shared")]
    assert [pixels["pixel_values"].numel() for pixels in flash] == pixels


def test_a_value_model_gives_what_transformers_head_gives_and_is_loaded_again_as_it_was_written(seeing):
    options = TrainOptions(head="value", optimizer=AdamW())
    model = load_model(seeing.name, options, torch.float32).eval()
    assert type(model).__name__.endswith("ForSequenceClassification")
    with torch.no_grad():
        model.score.weight.mul_(30.0)
        # Its own forward reads the score at the last token.
        expected = torch.cat([model(**made).logits[0] for made, _, _ in made_by_processor(seeing)])
    critic, layout = prepare_model(model, TrainOptions(head="value"), torch.device("cpu"))
    assert layout == "auto"
    pairs = [*zip(seeing.prompts, ANSWERS, strict=True), (seeing.prompts[0], [20, 21]), (seeing.prompts[1], [22])]
    answers = batch_of(pairs)

    def values(batch, kind):
        with torch.no_grad():
            return critic(model_input(batch, kind, vision=Vision.of(model)))["values"]

    assert torch.allclose(values(with_ends(answers), "padded")[: len(expected)], expected, atol=2e-6)
    for batch in (answers, with_ends(answers)):  # the values of a critic, and rewards
        for kind in ("packed", "shared"):
            assert torch.allclose(values(batch, kind), values(batch, "padded"), atol=2e-6)
    weights = dict(model.state_dict())
    write_model(seeing.folder / "value", model, weights, options, {"mean": 0.5, "std": 2.0, "pad_token_id": 1})
    written = load_model(str(seeing.folder / "value"), TrainOptions(head="value"), torch.float32)
    assert all(torch.equal(weight, weights[name]) for name, weight in written.state_dict().items())
    assert (written.config.mean, written.config.get_text_config().pad_token_id) == (0.5, 1)
    assert (seeing.folder / "value" / "processor_config.json").is_file()


def test_the_engine_samples_and_scores_with_images(seeing):
    model = seeing.load()
    expected = by_transformers(seeing, model)
    prompts = seeing.prompts
    engine = TransformersEngine(model, max_length=128, num_slots=4)
    try:
        images = [prompt.images for prompt in prompts]
        scores = engine.score([[*p.token_ids, *a] for p, a in zip(prompts, ANSWERS, strict=True)], 1.0, images)
        for prompt, score, right in zip(prompts, scores, expected, strict=True):
            assert torch.allclose(torch.tensor(score[len(prompt.token_ids) :]), right, rtol=0, atol=TOLERANCE)
        requests = [
            Request(f"{at}/{seed}", prompt.token_ids, Sampling(12), 7 * seed + at, prompt.images)
            for at, prompt in enumerate(prompts)
            for seed in range(6)
        ]
        together = engine.generate(requests)
        alone = [engine.generate([request])[0] for request in requests[:7:3]]
        assert [(each.token_ids, each.log_probs) for each in together[:7:3]] == [
            (each.token_ids, each.log_probs) for each in alone
        ]
        whole = [(*request.token_ids, *made.token_ids) for request, made in zip(requests, together, strict=True)]
        again = engine.score(whole, 1.0, [request.images for request in requests])
        # The visual encoder leaves with the rest, and comes back.
        num_bytes = sum(weight.numel() * 4 for weight in {id(weight): weight for weight in model.parameters()}.values())
        assert engine.offload(["weights"], keep_weights=True).num_bytes >= num_bytes
        engine.onload(["weights"])
        assert engine.score(whole, 1.0, [request.images for request in requests]) == again
        for request, made, score in zip(requests, together, again, strict=True):
            assert made.log_probs == pytest.approx(score[len(request.token_ids) :], abs=2e-6)
            # A placeholder that is sampled ends the answer.
            assert not set(made.token_ids[:-1]) & set(placeholder_ids(model.config))
    finally:
        engine.close()


def test_contexts_with_images_of_one_shape_share_forwards_and_no_bit_depends_on_the_company(seeing):
    tokenizer, place = AutoTokenizer.from_pretrained(seeing.name), tiny.PLACE[seeing.family]
    store = ImageStore(seeing.folder / "company", seeing.processor, ImageLimits(2, 10**6, 10**6))
    # Answers of other lengths, pixels of other values; every fourth image of another size, if the family has sizes.
    rows = [
        Row(
            {"input": f"a{place} {'bc?'[: at % 4]}", "images": [tiny.drawn(at, 56, 28 if at % 4 else 42)]},
            "x",
            at,
            has_line=True,
        )
        for at in range(21)
    ]
    prompts, _ = make_prompts(
        prepare_rows(rows, store, "images", "input", is_chat=False), tokenizer, image_key="images"
    )
    asked = [([*prompt.token_ids, 5, 6, 7 + at % 3], prompt.images) for at, prompt in enumerate(prompts)]
    model, encoded = seeing.load(), []
    encoder_of(model).register_forward_pre_hook(lambda *_: encoded.append(1))
    engine = TransformersEngine(model, max_length=256, num_slots=4)

    def score(chosen):
        encoded.clear()
        return engine.score([tokens for tokens, _ in chosen], 1.0, [images for _, images in chosen])

    def sample(chosen):
        requests = [Request(f"{at}", tuple(tokens), Sampling(1), 3, images) for at, (tokens, images) in chosen]
        return [(each.token_ids, each.log_probs) for each in engine.generate(requests)]

    try:
        together = score(asked)
        is_tiled = seeing.family in ("idefics3", "smolvlm")  # images that are cut into tiles are encoded by themselves
        assert len(encoded) == 21 if is_tiled else 0 < len(encoded) < 21 / 4
        assert [score([each])[0] for each in asked] == together
        assert score(asked[::-1])[::-1] == together
        numbered = list(enumerate(asked))
        sampled = sample(numbered)
        assert [sample([each])[0] for each in numbered[::5]] == sampled[::5]
    finally:
        engine.close()


def test_a_placeholder_that_ends_an_answer_is_learned_like_any_other_token(seeing):
    model = seeing.load()
    policy, _ = prepare_model(model, TrainOptions(), torch.device("cpu"))
    batch = batch_of([(seeing.prompts[0], [5, placeholder_ids(model.config)[0]])])
    with torch.no_grad():
        [last] = policy(model_input(take(batch, [0]), "packed", vision=Vision.of(model)), 1.0)["log_probs"][-1:]
    assert torch.isfinite(last)


def test_gradients_reach_the_visual_encoder_unless_it_is_frozen(seeing):
    gradients = []
    for is_frozen in (False, True):
        model = seeing.load()
        policy, _ = prepare_model(
            model, TrainOptions(gradient_checkpointing=True, freeze_visual_encoder=is_frozen), torch.device("cpu")
        )
        batch = batch_of(list(zip(seeing.prompts, ANSWERS, strict=True)))
        policy(model_input(batch, "packed", vision=Vision.of(model)), 1.0)["log_probs"].sum().backward()
        named = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
        gradients.append({name for name, gradient in named.items() if gradient.abs().max() > 0})
    trained, frozen = gradients
    encoder = {
        name for name in trained if any(part in name for part in (".visual.", ".vision_tower.", ".vision_model."))
    }
    assert encoder
    assert trained - frozen == encoder


def test_every_layout_has_the_gradients_of_transformers(seeing):
    # Two answers to each prompt, as in a group: the shared layout reads a prompt and its images once for both.
    asked = [*ASKED, (0, [20, 21]), (1, [22]), (2, [23, 24, 25])]
    weights = torch.linspace(-1.0, 1.0, sum(len(answer) for _, answer in asked))
    model = seeing.load()
    (torch.cat(by_transformers(seeing, model, asked, has_gradient=True)) * weights).sum().backward()
    expected = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    batch = batch_of([(seeing.prompts[number], answer) for number, answer in asked])
    for kind in ("padded", "packed", "shared"):
        model = seeing.load()
        policy, _ = prepare_model(model, TrainOptions(), torch.device("cpu"))
        log_probs = policy(model_input(batch, kind, vision=Vision.of(model)), 1.0)["log_probs"]
        (log_probs * weights).sum().backward()
        found = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
        assert set(found) >= set(expected)
        for name, gradient in expected.items():
            scale = float(gradient.abs().max())
            assert torch.allclose(found[name], gradient, rtol=1e-4, atol=1e-5 * max(scale, 1.0)), (kind, name)


def test_batches_keep_the_images_of_their_segments(seeing):
    batch = batch_of(list(zip(seeing.prompts, ANSWERS, strict=True)))
    one, two, none = (prompt.images for prompt in seeing.prompts)
    assert (len(one), len(two), none) == (1, 2, ())
    assert take(batch, [2, 1]).images == (none, two)
    assert take(batch, [2]).images == ()
    assert join([take(batch, [2]), take(batch, [0])]).images == (none, one)
    assert with_ends(batch).images == batch.to(torch.device("cpu")).images == batch.images


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_an_encoder_attends_to_all_images_at_once_and_computes_the_same_bits(family, tmp_path, monkeypatch):
    model, calls = tiny.make(family), []
    encoder = encoder_of(model)
    images = [
        tiny.write_pixels(tmp_path, 0, 4, 8),
        tiny.write_pixels(tmp_path, 1, 8, 4),
        tiny.write_pixels(tmp_path, 2),
    ]
    pixels = Vision.of(model).arguments(images, None)

    def encoded():
        return encoder(pixels["pixel_values"], pixels["image_grid_thw"]).last_hidden_state

    expected = encoded()
    monkeypatch.setitem(
        ALL_ATTENTION_FUNCTIONS,
        IMAGE_ATTENTION,
        lambda *args, **kwargs: calls.append(kwargs["cu_seq_lens_q"].tolist()) or image_attention(*args, **kwargs),
    )
    prepare_model(model, TrainOptions(), torch.device("cpu"))
    assert torch.equal(encoded(), expected)
    assert len(calls) == model.config.vision_config.depth  # once a layer
    assert calls[-1] == [0, 32, 64, 80]  # patches of whole images


def test_llava_samples_alike_by_its_own_forward_and_several_tokens_at_once(tmp_path):
    """A placeholder that is sampled ends an answer, and what was sampled after it is dropped."""
    name = tiny.save("llava", tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(name)
    preparer = FramePreparer(load_processor(ModelSource(name), tokenizer))
    random = np.random.default_rng(0)
    frames = [preparer.prepare(random.integers(0, 256, (28, 28, 3)).astype(np.uint8)) for _ in range(20)]
    requests = [
        Request(
            str(at),
            (5, *frame.token_ids, 6 + at % 3),
            Sampling(9, temperature=1.5, ignore_eos=True),
            at,
            (frame.image,),
        )
        for at, frame in enumerate(frames)
    ]
    made = {}
    for kind, options in {
        "own layers": SlotOptions(),
        "at once": SlotOptions(tokens_at_once=4),
        "own forward": SlotOptions(own_layers=False),
    }.items():
        engine = TransformersEngine(
            policy_class(AutoConfig.from_pretrained(name)).from_pretrained(name),
            max_length=64,
            num_slots=20,
            options=options,
        )
        try:
            assert type(engine._slots).__name__ == ("AnySlots" if kind == "own forward" else "LlamaSlots")
            made[kind] = engine.generate(requests)
        finally:
            engine.close()
    assert made["at once"] == made["own layers"]
    assert {each.finish for each in made["own layers"]} == {"length", "stop"}
    for one, other in zip(made["own layers"], made["own forward"], strict=True):
        assert one.token_ids == other.token_ids
        assert one.log_probs == pytest.approx(other.log_probs, abs=1e-5)


def test_an_8_bit_cache_leaves_the_attention_of_the_visual_encoder_as_it_is(seeing):
    model = seeing.load()
    pixels = Vision(model)

    def features():
        with torch.no_grad():
            return pixels.features(seeing.prompts[0].images, None)

    def scores():
        return torch.cat(by_transformers(seeing, model))

    before, exact = features(), scores()
    round_cache(model)
    assert torch.equal(features(), before)
    assert not torch.allclose(scores(), exact, atol=1e-3)


@pytest.mark.parametrize("own_layers", [True, False])
def test_a_prompt_of_llava_that_ends_with_its_image_is_refused(own_layers, tmp_path):
    """Its last token would be decoded without pixels. Other families write a token after an image."""
    name = tiny.save("llava", tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(name)
    processor = load_processor(ModelSource(name), tokenizer)
    store = ImageStore(tmp_path / "images", processor, ImageLimits(1, 10**6, 10**6))
    rows = [
        Row({"input": text, "images": [tiny.drawn(0)]}, "x.jsonl", at, has_line=True)
        for at, text in enumerate(("count <image>\n", "count <image>"), 1)
    ]
    prepared = prepare_rows(rows, store, "images", "input", is_chat=False)
    with pytest.raises(DataError) as caught:
        make_prompts(prepared, tokenizer, image_key="images")
    assert str(caught.value) == (
        "1 problem in the data:\n  x.jsonl:2: input: the prompt ends with an image, and engines continue text: put text"
        " after it, such as a line break"
    )
    [prompt], _ = make_prompts(prepared[:1], tokenizer, image_key="images")
    engine = TransformersEngine(
        policy_class(AutoConfig.from_pretrained(name)).from_pretrained(name),
        max_length=64,
        num_slots=1,
        options=SlotOptions(own_layers=own_layers),
    )
    try:
        with pytest.raises(UserError, match="request 'a': its prompt ends with an image"):
            engine.submit(Request("a", prompt.token_ids[:-1], Sampling(1), 0, prompt.images))
        [made] = engine.generate([Request("a", prompt.token_ids, Sampling(2), 0, prompt.images)])
        [scores] = engine.score([[*prompt.token_ids, *made.token_ids]], 1.0, [prompt.images])
        assert made.log_probs == pytest.approx(scores[len(prompt.token_ids) :], abs=1e-5)
        if own_layers:  # transformers counts for itself
            num_placeholders = prompt.token_ids.count(store.image_token_id)
            message = f"{num_placeholders - 1} placeholders of images, which have {num_placeholders} features"
            with pytest.raises(RunError, match=message):
                engine.score([[*prompt.token_ids[:-2], 5, 6]], 1.0, [prompt.images])
    finally:
        engine.close()


def test_an_observation_that_is_only_a_picture_is_refused_for_llava(tmp_path):
    name = tiny.save("llava", tmp_path / "model")
    env = SimpleNamespace(action=ActionSpec.numbered(3), num_state_values=None, state_bounds=None)
    settings = SimulationSettings(
        SimulatorSettings("gym"), EnvConfig(num_envs=1, bins=4), 1, False, False, images_for=ModelSource(name)
    )
    reader = Reader(settings, AutoTokenizer.from_pretrained(name), 64, env)
    picture = np.zeros((28, 28, 3), dtype=np.uint8)
    assert reader.read(Observation(instruction="go", image=picture)).images
    with pytest.raises(UserError, match="its observations are pictures alone, and engines continue text"):
        reader.read(Observation(image=picture))


def test_a_model_of_text_takes_no_images(tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=99, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    )
    assert not sees_images(model.config)
    assert Vision.of(model) is None
    engine = TransformersEngine(model, max_length=16, num_slots=1)
    try:
        with pytest.raises(UserError, match="request 'a': it has images, and the model of this engine sees none"):
            engine.submit(Request("a", (1, 2), Sampling(1), 0, ("x",)))
        with pytest.raises(UserError, match="score: images, and the model of this engine sees none"):
            engine.score([[1, 2]], 1.0, [("x",)])
    finally:
        engine.close()
    with pytest.raises(RunError, match="must be on a file system that all machines of the run share"):
        pixels_of(str(tmp_path / "gone.safetensors"))


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_images_that_touch_have_positions_of_their_own(family, tmp_path):
    vision = Vision(tiny.make(family))
    images = [tiny.write_pixels(tmp_path, 0, rows=4, columns=4), tiny.write_pixels(tmp_path, 1, rows=2, columns=4)]
    # A letter, an image of 2 x 2 tokens, one of 1 x 2, a letter, the first image again, two letters.
    tokens = torch.tensor([5, *[vision.image_token_id] * 6, 6, *[vision.image_token_id] * 4, 7, 8])
    assert vision.positions(tokens, [*images, images[0]]).tolist() == [
        [0, 1, 1, 1, 1, 3, 3, 5, 6, 6, 6, 6, 8, 9],
        [0, 1, 1, 2, 2, 3, 3, 5, 6, 6, 7, 7, 8, 9],
        [0, 1, 2, 1, 2, 3, 4, 5, 6, 7, 6, 7, 8, 9],
    ]
