"""The journey: each file is one stage, none imports another, and `aiockpt.engine` strings them together.

snapshot (live tensors → slabs) · serialize (slabs → checksums) · upload (slabs → data files) · commit (votes → manifest)
and back: discover (which steps are there) · fetch (files → memory, verified) · place (memory → live tensors) · collect.
"""
