"""Callbacks for loss spikes, signals and crashes."""
