"""More than one place and one reader: tiers, scrubbing and repair, and readers beside the run."""
