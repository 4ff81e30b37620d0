"""The demo's task, sums of two numbers, for examples and first tries.

make_files        writes a model, SFT examples, prompts, held-out prompts and a reward file into a folder
make_model        writes an untrained model and its tokenizer
question, answer  a sum as a prompt, and its right answer; `careless` forgets the carries
"""

from hotseat.loop.setup.demo import answer, careless, make_files, make_model, question

__all__ = ["answer", "careless", "make_files", "make_model", "question"]
