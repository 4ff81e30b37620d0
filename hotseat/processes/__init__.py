"""Processes of ours: how they are started, asked, waited for, and ended."""

from hotseat.processes.child_process import ChildProcess, Closed, ProtocolError, WorkerDied, WorkerTimeout, exit_words

__all__ = ["ChildProcess", "Closed", "ProtocolError", "WorkerDied", "WorkerTimeout", "exit_words"]
