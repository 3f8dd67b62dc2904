"""A torch module's weights as one vector: perturbed for a probe, moved by a commit, never drifting."""
