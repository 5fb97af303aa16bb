"""WHO moves WHICH bytes? Pure functions from descriptions to plans; `pipeline/` executes them."""
