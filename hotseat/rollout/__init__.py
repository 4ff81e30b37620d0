"""Rollout engines: token ids in, sampled token ids and their log-probs out, with weights that change while they run."""

from hotseat.rollout.engine import PARTS, Engine, Health, Part
from hotseat.rollout.transformers_engine import TransformersEngine

__all__ = ["PARTS", "Engine", "Health", "Part", "TransformersEngine"]
