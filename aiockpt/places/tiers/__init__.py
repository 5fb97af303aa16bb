"""Several places for one save: the nearest first, the first durable one commits, the others follow in the background."""
