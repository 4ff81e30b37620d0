"""verl's package, for `python -m verl.trainer.main_ppo` on Hotseat."""

from hotseat.verl.shim import refuse_another_verl

refuse_another_verl()
