"""OpenRLHF's `serve_rm` on Hotseat: its flags, old and dotted, for the server of `hotseat serve-rm`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from hotseat.cli import serving
from hotseat.cli.ending import reported
from hotseat.errors import UserError

# Flags that are read and change nothing here, and why.
_NO_EFFECT = {
    "flash_attn": "torch's own attention is used, which is a flash attention where the device has one",
    "attn_implementation": "torch's own attention is used, which is a flash attention where the device has one",
    "experts_implementation": "transformers chooses it",
    "disable_fast_tokenizer": "the checkpoint's own tokenizer is used",
    "packing_samples": "texts of like length are padded together",
    "batch_size": "batches are cut by their tokens, over all requests: --max_batch_tokens",
}


def make_parser() -> argparse.ArgumentParser:
    """Make the parser: every flag in both of OpenRLHF's spellings, with its defaults."""
    parser = argparse.ArgumentParser(
        prog="serve_rm",
        description="Serve a reward model as OpenRLHF does: POST /get_reward with query, prompts and labels.",
        epilog="`hotseat serve-rm --help` describes the same server with our own options.",
        allow_abbrev=False,
    )
    parser.add_argument("--reward_pretrain", "--reward.model_name_or_path", dest="model", metavar="MODEL")
    parser.add_argument("--normalize_reward", "--reward.normalize_enable", dest="normalize", action="store_true")
    parser.add_argument("--value_head_prefix", "--ds.value_head_prefix", default="score")
    parser.add_argument("--max_len", "--data.max_len", dest="max_length", type=int, default=2048)
    parser.add_argument("--port", type=int, default=5000)
    parser.add_argument("--host", help="default: 0.0.0.0, as in OpenRLHF, which needs a token here")
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--param_dtype", "--ds.param_dtype", dest="dtype", choices=["bf16", "fp16", "fp32"])
    parser.add_argument("--load_in_4bit", "--ds.load_in_4bit", action="store_true")
    parser.add_argument("--use_ms", action="store_true")
    parser.add_argument("--flash_attn", action="store_true")
    parser.add_argument("--attn_implementation", "--ds.attn_implementation")
    parser.add_argument("--experts_implementation", "--ds.experts_implementation")
    parser.add_argument("--disable_fast_tokenizer", "--data.disable_fast_tokenizer", action="store_true")
    parser.add_argument("--packing_samples", "--ds.packing_samples", action="store_true")
    parser.add_argument("--batch_size", type=int)
    parser.add_argument("--max_batch_tokens", type=int, default=16_384, help="tokens scored at a time (not OpenRLHF's)")
    parser.set_defaults(max_request_mib=16.0, device=None, threads=None, trust_remote_code=False)
    return parser


def main(argv: Sequence[str]) -> int:
    """Serve until the process is told to stop, and return the exit code."""
    arguments = make_parser().parse_args(argv)
    is_newer = any(token.startswith("--") and "." in token for token in argv)
    return reported("serve_rm", lambda: _serve(arguments, is_newer=is_newer))


def _serve(arguments: argparse.Namespace, *, is_newer: bool) -> int:
    """Serve. is_newer: the dotted spelling is used, whose default type is bf16."""
    if arguments.model is None:
        raise UserError("--reward_pretrain is not set: give the folder or the hub name of a reward model")
    if arguments.load_in_4bit:
        raise UserError("--load_in_4bit is not part of this version: its rewards would differ from the model's own")
    if arguments.use_ms:
        raise UserError("--use_ms is not part of this version: give a folder")
    for name, because in _NO_EFFECT.items():
        if getattr(arguments, name):
            print(f"no effect here: --{name} because {because}", file=sys.stderr)
    hint = "--host 127.0.0.1; OpenRLHF's default is 0.0.0.0" if arguments.host is None else "--host 127.0.0.1"
    arguments.host = arguments.host or "0.0.0.0"
    arguments.dtype = arguments.dtype or ("bf16" if arguments.bf16 or is_newer else "fp32")
    return serving.run_serve_rm(arguments, hint)
