"""The laboratory: commands that compare runs, estimate a step, and inspect weights. Nothing outside imports it."""
