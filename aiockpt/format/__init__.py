"""How is a checkpoint written down? Names, dtypes, checksums, data files, manifests; docs/format.md in code, without I/O."""
