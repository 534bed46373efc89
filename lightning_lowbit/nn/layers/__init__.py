"""Layers of many kinds: which classes of modules can be converted, and what they become."""
