"""Layers whose weights are spread over processes: tensor parallelism and the quantized all-gather."""
