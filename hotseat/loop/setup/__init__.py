"""Inputs and settings of a run, read and checked before it starts."""
