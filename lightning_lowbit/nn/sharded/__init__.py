"""Layers whose weights are sharded over processes: tensor parallelism and the quantized all-gather."""
