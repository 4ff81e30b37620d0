"""Rows from files, and from rows the prompts, examples and pairs that a run uses: rendered and tokenised once.

    load_rows      files, saved data sets, hub names -> rows, each of which knows where it stands
    make_prompts   rows -> prompts (rl)
    make_examples  rows -> token sequences with a mask of what to learn (sft)
    make_pairs     rows -> a better and a worse answer each (rm, dpo)
    PromptOrder    which prompt comes when
    digest_of      tells whether prompts, examples or pairs are the same as before

Everything wrong with the data raises one `DataError` that names file, line and key. None of this needs a model.
"""

from hotseat.data.examples import Example, ExampleReport, make_examples
from hotseat.data.lost import check_lost
from hotseat.data.order import PromptOrder, digest_of
from hotseat.data.pairs import Pair, PairReport, make_pairs
from hotseat.data.prompts import PromptReport, make_prompts
from hotseat.data.rows import Row, load_rows

__all__ = [
    "Example",
    "ExampleReport",
    "Pair",
    "PairReport",
    "PromptOrder",
    "PromptReport",
    "Row",
    "check_lost",
    "digest_of",
    "load_rows",
    "make_examples",
    "make_pairs",
    "make_prompts",
]
