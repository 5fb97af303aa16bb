"""Who reads a run while it goes on? Steps are kept for whoever does, and handed to each reader once."""
