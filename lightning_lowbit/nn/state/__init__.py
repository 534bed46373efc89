"""State that lives between steps: keys of random bits, and amaxes."""
