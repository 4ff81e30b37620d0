"""OpenRLHF's `train_ppo_ray` on Hotseat. RL: PPO, GRPO, REINFORCE++, RLOO."""

from hotseat.openrlhf.run_command import entry

if __name__ == "__main__":
    entry("train_ppo_ray")
