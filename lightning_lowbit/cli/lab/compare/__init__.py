"""The subcommand ``lowbit compare``."""
