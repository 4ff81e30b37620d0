"""`hotseat serve-rm`'s server in a process of its own, with a model that counts sevens, and so without torch.

python counting_server.py PORT
"""

import sys

from hotseat.loop.serving.reward_server import ROUTE, ServerOptions, bound_socket, run_server


class CountsSevens:
    max_length = None

    def tokenize(self, texts):
        return [[ord(letter) for letter in text] for text in texts]

    def score(self, sequences):
        return [float(sequence.count(ord("7"))) for sequence in sequences]


if __name__ == "__main__":
    options = ServerOptions(port=int(sys.argv[1]))
    with bound_socket(options) as bound:
        host, port = bound.getsockname()
        run_server(CountsSevens(), bound, options, lambda: print(f"serving at http://{host}:{port}{ROUTE}", flush=True))
