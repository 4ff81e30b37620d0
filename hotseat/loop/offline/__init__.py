"""Work on models before and after training, in one process, without Ray.

options      command lines -> a config, refused early; needs neither torch nor Ray
group_file   finished groups on disk, from which a killed command resumes, and the choice of what is written
answering    prompts -> answers with their rewards, by one engine; shared by all that sample
generate     answers -> JSON lines: all, the best of each prompt, or pairs for preference optimisation
evaluate     answers -> accuracy, pass@k, lengths, and a page
chat         a conversation in a terminal
merge        adapters -> a plain model
"""
