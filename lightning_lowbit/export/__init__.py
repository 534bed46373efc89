"""Exports trained models to the formats that inference engines load, with the outputs of the training."""
