"""`hotseat serve-rm`: a reward model behind HTTP.

model.py      the model: texts in, rewards out
batching.py   joins the texts of concurrent requests
server.py     routes, answers, metrics, and the life of the server
"""
