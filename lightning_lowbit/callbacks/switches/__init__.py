"""Callbacks that change the precision or the weight decay during training."""
