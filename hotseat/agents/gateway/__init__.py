"""The gateway: programs that speak OpenAI's or Anthropic's protocol reach the policy, one token for each episode.

gateway_server.py      HTTP: tokens, retries, clients that hang up, errors
chat_completions.py, responses.py, anthropic_messages.py      the protocols: a request in, a reply out
program_session.py     one episode: contexts for the engine, stop strings, tool calls, what was recorded
"""
