"""A made-up framework, and its integration."""
