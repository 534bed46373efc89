"""Kernels in Triton, for NVIDIA GPUs from sm_80 on."""
