"""verl's `main_ppo` on Hotseat. RL: PPO, GRPO, REINFORCE++, RLOO."""

from hotseat.verl.verl_command import entry

if __name__ == "__main__":
    entry()
