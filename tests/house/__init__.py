"""The size and shape of the source: measured figures and their ceilings (`make house`)."""
