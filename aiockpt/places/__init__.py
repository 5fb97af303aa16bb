"""More than one place and one reader: tiers, repair, and readers beside the run."""
