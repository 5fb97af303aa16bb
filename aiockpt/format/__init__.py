"""The stored form of a checkpoint: names, dtypes, checksums, data files, manifests; docs/format.md in code, without I/O."""
