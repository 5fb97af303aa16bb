"""Memory of the hosts of a job: which there are, which copies whose files, and the copies."""
