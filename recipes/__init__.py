"""Models and data of the ready-made runs; the YAML files beside them put them together."""
