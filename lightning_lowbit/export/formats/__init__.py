"""The formats of ``lowbit export``, one file for each family."""
