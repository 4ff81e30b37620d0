ray job submit --address="http://127.0.0.1:8265" \
  -- python3 -m openrlhf.cli.train_ppo_ray \
  --load_checkpoint
  --ckpt_path ./checkpoints/llama-70b-ppo
  # ... other args
