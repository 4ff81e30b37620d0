"""Processes of ours: how they are started, talked to, waited for, and ended."""
