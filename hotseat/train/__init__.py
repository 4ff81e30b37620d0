"""Training backends: from micro-batches to new weights. See `backend.Backend` for the contract."""
