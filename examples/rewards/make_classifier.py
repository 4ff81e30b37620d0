"""Train a tiny classifier of kind (LABEL_1) and rude (LABEL_0) sentences, in a few seconds on a CPU.

It stands for a real one in reward_func_conversation.py: python make_classifier.py FOLDER
"""

import itertools
import sys

import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

KIND = ("gladly", "thank", "please", "happy", "welcome", "helpful", "of course", "great question")
RUDE = ("stupid", "idiot", "shut", "hate", "useless", "boring", "go away", "whatever")
FRAMES = ("{}", "{} you asked", "i am {} here", "well {} then", "this is {} and so are you", "the answer is {} two")


def main(folder: str) -> None:
    torch.manual_seed(0)
    labelled = [
        (frame.format(word), label)
        for label, words in ((1, KIND), (0, RUDE))
        for word, frame in itertools.product(words, FRAMES)
    ]
    words = sorted({word for text, _ in labelled for word in text.split()})
    vocabulary = {word: index for index, word in enumerate(["[PAD]", "[UNK]", *words])}
    raw = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    raw.normalizer = normalizers.Lowercase()
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token="[PAD]", unk_token="[UNK]", model_max_length=128
    )
    model = BertForSequenceClassification(
        BertConfig(
            vocab_size=len(vocabulary),
            hidden_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=64,
            max_position_embeddings=128,
            num_labels=2,
        )
    )
    batch = tokenizer([text for text, _ in labelled], return_tensors="pt", padding=True)
    labels = torch.tensor([label for _, label in labelled])
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(60):
        loss = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    print(f"{folder}: loss {loss.item():.4f} on {len(labelled)} sentences")


if __name__ == "__main__":
    main(sys.argv[1])
