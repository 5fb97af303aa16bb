"""The stages of a save and a load, one a file: no stage imports another, `aiockpt.engine` connects them.

snapshot (live tensors → slabs) · serialize (slabs → checksums) · upload (slabs → data files) · commit (votes → manifest)
and back: discover (which steps are there) · fetch (files → memory, verified) · place (memory → live tensors) · collect.
"""
