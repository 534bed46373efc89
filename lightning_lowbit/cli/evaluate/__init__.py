"""The subcommand ``lowbit evaluate``."""
