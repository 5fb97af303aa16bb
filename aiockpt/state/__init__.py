"""The state that is checkpointed: boxes, shards and the tree of values; pure, and without torch."""
