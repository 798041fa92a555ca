"""The parts a model is built of, one file a kind. Each has a spec (shapes) and the part that computes."""
