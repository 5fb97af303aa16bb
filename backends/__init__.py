"""Storage backends: one module for each kind of place, all behind the contract of `aiockpt.storage.backend`.

Backends import nothing of each other, and nothing imports them but `aiockpt.storage.open`, when a URL asks for one.
"""
