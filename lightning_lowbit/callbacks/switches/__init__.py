"""Callbacks that change the precision or the weight decay in mid-training."""
