"""Text to ids to shards to batches; knows no model and no training."""
