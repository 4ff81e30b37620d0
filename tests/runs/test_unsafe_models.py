"""A model's folder that brings code runs none of it."""

import json

import pytest
from loop_cases import make_task, rl_yaml

from hotseat.config import loads
from hotseat.errors import HotseatError
from hotseat.loop.run import start

CODE = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM

Path({traces!r}).touch()


class Config(LlamaConfig):
    model_type = "unheard-of"


class Model(LlamaForCausalLM):
    config_class = Config
"""
AUTO_MAP = {"AutoConfig": "modeling.Config", "AutoModelForCausalLM": "modeling.Model"}


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["llama", "unheard-of"])
def test_code_in_the_folder_of_a_model_is_not_run(tmp_path, model_type):
    """Scenario 43: a model of a known type is loaded by the library's own class, any other is refused."""
    task, traces = make_task(tmp_path), tmp_path / "went off"
    path = task / "model" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_type": model_type, "auto_map": AUTO_MAP}))
    (task / "model" / "modeling.py").write_text(CODE.format(traces=str(traces)))
    config = loads(rl_yaml(task))
    if model_type == "llama":
        start(config)
        assert (task / "runs" / "run" / "model" / "model.safetensors").exists()
    else:
        with pytest.raises(HotseatError):
            start(config)
        assert not (task / "runs" / "run" / "metrics.jsonl").exists()
    assert not traces.exists()
