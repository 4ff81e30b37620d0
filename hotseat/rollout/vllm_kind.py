"""vLLM as a kind of engine: what it cannot do, and how an engine is made from settings."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hotseat.determinism import use_batch_invariant_kernels
from hotseat.rollout import vllm_arguments, vllm_engine, vllm_versions
from hotseat.rollout.engine import Engine
from hotseat.rollout.kinds import EngineKind, EngineProcess, EngineSettings


class VllmKind(EngineKind):
    """The engine on vLLM."""

    def problem(self) -> str | None:
        return vllm_versions.what_is_wrong()

    def refused_arguments(self, arguments: Mapping[str, Any]) -> list[tuple[str, str]]:
        return vllm_arguments.refusals(arguments)

    def check_model(self, config: Any, max_length: int, tensor_parallel_size: int, is_cpu: bool) -> None:
        vllm_versions.check_config(config, is_cpu, tensor_parallel_size)

    def adapter_problem(self, rank: int, dtype: str, is_cpu: bool) -> str | None:
        return vllm_versions.adapter_problem(rank, dtype, is_cpu)

    def make(self, settings: EngineSettings, process: EngineProcess) -> Engine:
        options, on_cpu = settings.options, process.device.type == "cpu"
        if settings.is_deterministic and not on_cpu:
            use_batch_invariant_kernels()
        log = Path(options.logs) / f"{options.role}-{process.rank}.log"
        os.environ.update(vllm_engine.log_to(log))
        adapters = None
        if options.adapter_rank:
            adapters = vllm_versions.AdapterOptions(options.adapter_rank, process.adapted_layers)
        names = vllm_engine.weight_names(settings.model, adapters)
        try:
            core = vllm_versions.Core(settings, adapters, _end_process if process.is_own else None)
        except Exception as error:
            raise vllm_engine.start_error(error, settings.model.name, log) from None
        if process.is_own:
            gc.freeze()  # what vLLM and torch keep for good is not searched for garbage again during a rollout
        try:
            return vllm_engine.VllmEngine(
                core,
                names,
                max_length=settings.max_length,
                num_slots=settings.num_slots,
                eos_token_ids=settings.eos_token_ids,
                num_threads=settings.num_threads if on_cpu else None,
                keeps_cache=settings.keeps_cache,
            )
        except BaseException:
            core.close()
            raise


def _end_process() -> None:
    """End this process, so that the engine is replaced: it has lost one of its tensor-parallel processes."""
    print("a tensor-parallel rank of this engine died, and the engine ends with it", file=sys.stderr, flush=True)
    os._exit(1)
