"""Further training of a pretrained model: adapters, preferences, and distillation into few bits."""
