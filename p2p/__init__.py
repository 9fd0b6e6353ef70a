"""Facts and bytes between nodes. Knows nothing of models."""
