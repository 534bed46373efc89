"""GEMMs of quantized elements that the hardware computes itself: the table of them, their operands, their devices."""
