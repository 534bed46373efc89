"""The subcommand ``lowbit inspect``."""
