"""How is a checkpoint written down? Names, dtypes, checksums, data files, manifests; FORMAT.md in code, without I/O."""
