"""One pass of a quantized layer: three GEMMs of six operands."""
