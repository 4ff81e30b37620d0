"""`hotseat serve-rm`: its arguments, and the server's start."""

from __future__ import annotations

import argparse

from hotseat.errors import UserError
from hotseat.model_source import ModelSource
from hotseat.rewards.addresses import TOKEN, bearer_token


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("model", metavar="MODEL", help="reward model: a folder or a hub name")
    command.add_argument(
        "--host",
        default="127.0.0.1",
        help=f"address to listen on (default: %(default)s); any other than this machine's own needs {TOKEN}",
    )
    command.add_argument("--port", type=int, default=5000, help="port (default: %(default)s); 0 takes a free one")
    command.add_argument(
        "--max-length", type=int, metavar="N", help="tokens of a text at most (default: the model's positions)"
    )
    command.add_argument(
        "--max-batch-tokens",
        type=int,
        default=16_384,
        metavar="N",
        help="tokens scored at a time, with padding (default: %(default)s)",
    )
    command.add_argument(
        "--max-request-mib", type=float, default=16.0, metavar="N", help="size of a request (default: %(default)s)"
    )
    command.add_argument("--dtype", choices=["fp32", "bf16", "fp16"], help="default: bf16 on GPUs, fp32 elsewhere")
    command.add_argument("--device", metavar="NAME", help="such as cuda:1 or cpu (default: the first GPU, else cpu)")
    command.add_argument("--threads", type=int, metavar="N", help="threads of the model on a CPU (default: torch's)")
    command.add_argument(
        "--value-head-prefix",
        default="score",
        metavar="NAME",
        help="name of the head's weights, where config.json does not say it (default: %(default)s)",
    )
    command.add_argument(
        "--normalize", action="store_true", help="subtract the mean and divide by the std that config.json holds"
    )
    command.add_argument("--trust-remote-code", action="store_true", help="run code that comes with the model")


def run_serve_rm(arguments: argparse.Namespace, hint: str = "--host 127.0.0.1") -> int:
    """Serve until the process is told to stop, and return the exit code. hint: how to serve only this machine."""
    for name in ("max_length", "max_batch_tokens", "max_request_mib", "threads"):
        value = getattr(arguments, name)
        if value is not None and value <= 0:
            raise UserError(f"--{name.replace('_', '-')} {value}: must be above 0")
    if not 0 <= arguments.port < 2**16:
        raise UserError(f"--port {arguments.port}: must be from 0 to 65535")
    from hotseat.checks.named_files import model_problem
    from hotseat.loop.serving.reward_server import ROUTE, ServerOptions, bound_socket, run_server

    options = ServerOptions(
        host=arguments.host,
        port=arguments.port,
        token=bearer_token(),
        max_batch_tokens=arguments.max_batch_tokens,
        max_request_bytes=int(arguments.max_request_mib * 2**20),
    )
    if (problem := model_problem(arguments.model)) is not None:
        raise UserError(problem)
    with bound_socket(options, hint) as bound:
        print(f"loading {arguments.model}", flush=True)
        import torch

        from hotseat.loop.serving.served_model import ModelOptions, RewardModel

        if arguments.threads is not None:
            torch.set_num_threads(arguments.threads)
        model = RewardModel(
            ModelOptions(
                model=ModelSource(arguments.model, arguments.trust_remote_code),
                max_length=arguments.max_length,
                dtype=arguments.dtype,
                device=arguments.device,
                value_head_prefix=arguments.value_head_prefix,
                normalize=arguments.normalize,
            )
        )
        host, port = bound.getsockname()[:2]
        place = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        guarded = f", with the token of {TOKEN}" if options.token is not None else ""
        ready = f"serving {arguments.model} ({model.description}) at http://{place}{ROUTE}{guarded}"
        run_server(model, bound, options, lambda: print(ready, flush=True))
    print("stopped: all requests that had arrived are answered", flush=True)
    return 0
