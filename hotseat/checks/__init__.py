"""Checks before a run: each finds what would stop the run, before anything is done that takes longer than the check.

To add one, write a function from the context of its stage to problems, and add it to that stage in `pipeline.py`:

    def warmup_is_short_enough(context: TrainingContext) -> Iterator[Problem]:
        if context.config.critic.warmup_steps >= context.num_steps:
            yield Problem("critic.warmup_steps", "what was given, what would fit, and what to change")

The problems of one stage are raised together; the stages after it are not reached. Rules between fields, which need
nothing but the config, are in `hotseat.config.conflicts`.
"""
