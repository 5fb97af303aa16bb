"""Scrubbing: steps are read again and verified, and what is bad is repaired from another copy."""
