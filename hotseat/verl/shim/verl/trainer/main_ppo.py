"""verl's `main_ppo` on Hotseat."""

from hotseat.verl.run_command import entry

if __name__ == "__main__":
    entry()
