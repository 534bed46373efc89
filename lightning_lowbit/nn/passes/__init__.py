"""What a pass of a converted layer can be part of, and what it refuses: derivatives, tracing, odd tensors."""
