"""What vLLM does while it starts is shown by the messages that it logs."""

import json
import logging
import logging.config
from pathlib import Path

from hotseat.rollout.vllm_engine import log_to
from hotseat.rollout.vllm_progress import stages_shown


def test_messages_of_vllm_show_what_it_does(tmp_path):
    settings = json.loads(Path(log_to(tmp_path / "rollout-0.log")["VLLM_LOGGING_CONFIG_PATH"]).read_text())
    logging.config.dictConfig(settings)
    logger, shown = logging.getLogger("vllm.v1.worker.gpu_model_runner"), []
    try:
        with stages_shown(shown.append):
            logger.info("Starting to load model %s...", "first/model")
            logger.info("Model loading took %.1f GiB", 0.3)
            logger.info("something else")
            logger.info("GPU KV cache size: %s tokens", "1,000")
        logger.info("Starting to load model %s...", "second/model")
    finally:
        logging.getLogger("vllm").handlers.clear()
    assert shown == ["loading weights", "compiling", "capturing CUDA graphs"]
    assert "something else" in (tmp_path / "rollout-0.log").read_text()
