"""Attention's two products with quantized operands, and which modules compute them."""
