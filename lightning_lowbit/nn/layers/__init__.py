"""Converted layers. Importing this package registers every kind of them."""

from lightning_lowbit.nn.layers import convolution, experts, known_linears, multihead

__all__ = ["convolution", "experts", "known_linears", "multihead"]
