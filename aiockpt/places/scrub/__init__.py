"""Is what lies there still what was saved? Steps are read again, and what is bad is taken from another copy."""
