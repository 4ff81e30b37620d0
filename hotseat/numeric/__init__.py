"""Policies that act in numbers: small torch modules for states and actions that are vectors.

A number is a token whose id is the 32 bits of its float32 (`float_tokens`), so that requests, segments, log-probs,
ledger, checkpoints and pushes are those of language models. What differs is the model (`models`), its tokenizer
(`number_tokenizer`), and the engine that runs it.
"""
