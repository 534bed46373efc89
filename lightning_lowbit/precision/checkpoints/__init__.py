"""What a checkpoint says of how it was trained, and models that compute so."""
