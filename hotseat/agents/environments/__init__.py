"""Environments of other libraries, as they are, each family in one file.

    families              their libraries, and how they are installed
    environment_agent     an agent whose episodes are played by processes with the library; tasks as rows of data
    environment_process   such a process as the rollout host sees it; also one for the function `play` of a user's file
    environment_worker    that process: Python's own library only, under the interpreter that `agent.python` names
    worker_reports        what it reports beside results: prints, what blocks it, which episode ends it
    lazy_certificates     contexts of TLS that read certificates late, as clients in it make one for each episode

A family's file has `NEEDS_NAME`, the error where no name is set, and a class such as
`GymnasiumTasks(name, arguments)`, called after the family:

    prompt(number)          the text with which a task begins; the same number is always the same task
    play(number, policy)    play it with the policy (a `PolicyClient`); return its reward, or a dict as `play` does

Both may block. It is loaded in the process of the environment alone, so it may import the library at its top.
"""
