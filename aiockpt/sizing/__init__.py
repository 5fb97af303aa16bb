"""What does a run need of memory, disk and time, and have its places that? Said before its first step."""
