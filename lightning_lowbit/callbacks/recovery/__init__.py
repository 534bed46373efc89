"""Callbacks that bring a run through spikes, signals and crashes."""
