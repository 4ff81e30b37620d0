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
STAGE = "HOTSEAT_TEST_ZERO_STAGE"


def make(model: PreTrainedModel, options: TrainOptions) -> ZeroBackend:
    zero = options.zero or ZeroOptions(stage=int(os.environ[STAGE]))
    return ZeroBackend(model, replace(options, zero=zero), persistent_size=32)
