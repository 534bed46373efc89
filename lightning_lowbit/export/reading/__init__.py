"""Folders of ``transformers``, read with checks: nothing in a file is believed before it is compared with the model."""
