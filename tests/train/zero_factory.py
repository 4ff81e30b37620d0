"""Makes DeepSpeed backends for the conformance suite, of the ZeRO stage that the environment names.

With stage 3 norms are whole on every rank and all else is sharded, as in a large model.
"""

from __future__ import annotations

import os
from dataclasses import replace

from transformers import PreTrainedModel

from hotseat.train.backend import TrainOptions, ZeroOptions
from hotseat.train.zero import ZeroBackend

from . import adapters, conformance

PLAIN, ADAPTED = conformance.SCENARIOS, adapters.SCENARIOS
ALL = PLAIN | ADAPTED
# Variants of others in these suites that differ in the model or the layout, which this backend leaves to what FSDP has.
VARIANTS = (
    *("shares_sequences_and_contexts", "shares_sequences_with_few_keys", "shares_sequences_of_a_value_model"),
    *(
        "replays",
        "shares_sequences_and_replays",
        "shares_sequences_of_experts",
        "trains_even",
        "trains_the_first_rank_is_empty",
        "trains_checkpointed",
    ),
    *("trains_adapters", "averages"),
)
SHORT = {name: scenario for name, scenario in ALL.items() if name not in VARIANTS}
LONG = {name: ALL[name] for name in VARIANTS}
STAGE = "HOTSEAT_TEST_ZERO_STAGE"


def make(model: PreTrainedModel, options: TrainOptions) -> ZeroBackend:
    zero = options.zero or ZeroOptions(stage=int(os.environ[STAGE]))
    return ZeroBackend(model, replace(options, zero=zero), persistent_size=32)
