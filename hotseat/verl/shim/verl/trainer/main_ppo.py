"""verl's `main_ppo` on Hotseat."""

from hotseat.verl.verl_command import entry

if __name__ == "__main__":
    entry()
