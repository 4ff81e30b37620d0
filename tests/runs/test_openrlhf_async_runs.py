"""The commands of asynchronous and of hybrid agent training, run whole with a tiny model.

Numbers of devices, ranks, engines, samples and tokens are cut to two cores; every flag stays.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from environments import own_environment
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from hotseat.demo import make_model
from hotseat.observe import read_lines

ROOT = Path(__file__).parents[2]
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"

ASYNC = """
    --ref_num_nodes 1 --ref_num_gpus_per_node 1 --actor_num_nodes 1 --actor_num_gpus_per_node 1
    --vllm_num_engines 1 --vllm_tensor_parallel_size 1 --colocate_all_models
    --micro_train_batch_size 4 --train_batch_size 16 --micro_rollout_batch_size 4 --rollout_batch_size 8
    --n_samples_per_prompt 2 --max_epochs 1 --prompt_max_len 32 --max_samples 24 --generate_max_len 32
    --advantage_estimator reinforce_baseline --zero_stage 3 --bf16 --actor_learning_rate 1e-6 --init_kl_coef 1e-3
    --use_kl_loss --kl_estimator k2 --input_key context_messages --apply_chat_template --normalize_reward
    --adam_offload --gradient_checkpointing --packing_samples --async_train
"""
HYBRID = """
    --ref_num_nodes 1 --ref_num_gpus_per_node 2 --actor_num_nodes 1 --actor_num_gpus_per_node 2
    --vllm_num_engines 2 --vllm_tensor_parallel_size 1 --colocate_all_models --vllm_gpu_memory_utilization 0.6
    --init_kl_coef 1e-3 --use_kl_loss --kl_estimator k3 --advantage_estimator group_norm --save_hf_ckpt
    --micro_train_batch_size 4 --train_batch_size 16 --micro_rollout_batch_size 4 --rollout_batch_size 8
    --n_samples_per_prompt 2 --max_epochs 1 --prompt_max_len 32 --max_samples 16 --generate_max_len 32
    --zero_stage 3 --bf16 --actor_learning_rate 5e-7 --critic_learning_rate 9e-6 --input_key context_messages
    --apply_chat_template --gradient_checkpointing --packing_samples --vllm_sync_backend nccl --enforce_eager
    --vllm_enable_sleep --deepspeed_enable_sleep
"""


def make_chat_task(folder: Path) -> None:
    """Write a tiny model with a chat template, and prompts as messages."""
    make_model(folder / "demo", 0)
    tokenizer = AutoTokenizer.from_pretrained(folder / "demo")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder / "model")
    shape = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=512, tie_word_embeddings=True, **shape)
    config.eos_token_id, config.pad_token_id, config.bos_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id, None
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    rows = [{"context_messages": [{"role": "user", "content": f"{a}+{b}="}]} for a in range(6) for b in range(4)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("flags", "staleness"), [(ASYNC, 1), (HYBRID, None)], ids=["async", "hybrid"])
def test_the_command_runs_to_its_end(tmp_path, flags, staleness):
    make_chat_task(tmp_path)
    (tmp_path / "agent_func.py").write_text((ROOT / "examples" / "agents" / "try_again.py").read_text())
    argv = [
        *("--pretrain", str(tmp_path / "model"), "--agent_func_path", str(tmp_path / "agent_func.py")),
        *("--save_path", str(tmp_path / "out"), "--prompt_data", str(tmp_path / "prompts.jsonl")),
        *flags.split(),
    ]
    env = own_environment()
    env |= {"OPENRLHF_ASYNC_NUM_TASKS": "128", "OPENRLHF_ASYNC_QUEUE_SIZE": "1"}
    command = [sys.executable, "-m", "hotseat.cli.train_ppo_ray", *argv]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1700, env=env, cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    [metrics] = tmp_path.glob("runs/*/metrics.jsonl")
    rows = [row for row in read_lines(metrics) if row["step"] > 0]
    assert len(rows) == (3 if staleness else 2)
    assert [row.get("staleness_max") for row in rows] == ([0, 1, 1] if staleness else [None, None])
    assert (tmp_path / "out" / "config.json").is_file()
