"""Callbacks that measure and log."""
