"""Framework state → the neutral language of `aiockpt.state`, and back."""
