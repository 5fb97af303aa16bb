"""The stages of a save: snapshot (live tensors → slabs) · upload (slabs → files and their checksums) · commit · lineage.

And back: discover (the steps of a place) · receipts (manifests and receipts, read) · fetch (files → memory, verified) · copy
(a step to another place) · collect (retention, garbage). For people: step_info · unfinished · wrong_places.
`aiockpt.engine` connects them.
"""
