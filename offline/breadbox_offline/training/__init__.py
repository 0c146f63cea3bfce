"""Episodes to training batches: pipeline, pre-learner, mixing, cloning; for users."""
