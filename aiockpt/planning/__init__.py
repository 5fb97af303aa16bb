"""Plans of which rank moves which bytes: pure functions from descriptions to plans; `pipeline/` executes them."""
