"""GEMMs of quantized elements that hardware computes itself: which there are, what they take, and where they run."""
