"""Reading from a checkpoint how a model was trained, and restoring models that compute the same way."""
