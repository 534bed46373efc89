"""The subcommand ``lowbit estimate``."""
