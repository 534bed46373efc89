"""The subcommand ``lowbit consolidate``."""
