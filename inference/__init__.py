"""One model shard in one subprocess: models on disk, the runner, and the supervisor that owns it. Knows nothing of peers."""
