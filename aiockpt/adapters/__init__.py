"""Conversion of framework state to the neutral types of `aiockpt.state`, and back."""
