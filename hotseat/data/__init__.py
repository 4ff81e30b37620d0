"""Data: rows are read from files and become the prompts, examples or pairs of a run, rendered and tokenised once.

    load_rows      files, saved data sets, hub names -> rows, each with its file and line
    make_prompts   rows -> prompts (rl)
    columns_of     the columns that reward functions can get, which are called by names
    make_examples  rows -> token sequences with a mask of what to learn (sft)
    make_pairs     rows -> a better and a worse answer each (rm, dpo)
    PromptOrder    the order in which prompts are used
    SampledOrder   the same, chosen by a user's function
    check_saved    refuses an order that was saved with other prompts or another seed
    digest_of      digest by which a resumed run checks that its data is unchanged

All problems of the data raise one `DataError` that names file, line and key. None of this needs a model.
"""

from hotseat.data.chat_rendering import ChatTemplate
from hotseat.data.columns import columns_of
from hotseat.data.examples import Example, make_examples
from hotseat.data.order import PromptOrder, SampledOrder, check_saved, digest_of
from hotseat.data.pairs import Pair, make_pairs
from hotseat.data.prompts import make_prompts
from hotseat.data.row_problems import RowReport, check_lost
from hotseat.data.rows import Row, load_rows

__all__ = [
    "ChatTemplate", "Example", "Pair", "PromptOrder", "Row", "RowReport", "SampledOrder", "check_lost", "check_saved",
    "columns_of", "digest_of", "load_rows", "make_examples", "make_pairs", "make_prompts",
]  # fmt: skip
