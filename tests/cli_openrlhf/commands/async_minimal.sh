export VLLM_USE_V1=1
ray job submit --address="http://127.0.0.1:8265" \
  --runtime-env-json='{"working_dir": "/openrlhf"}' \
  -- python3 -m openrlhf.cli.train_ppo_ray \
  --agent_func_path /path/to/agent_func.py \
  --async_train \
  --async_queue_size 1 \
  # ... other args
