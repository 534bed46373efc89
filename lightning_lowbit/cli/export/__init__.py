"""The subcommand ``lowbit export``."""
