"""Kernels: one call for what touches every element of an operand or a parameter."""
