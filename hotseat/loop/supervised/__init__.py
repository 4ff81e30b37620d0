"""Supervised training: SFT, reward models."""
