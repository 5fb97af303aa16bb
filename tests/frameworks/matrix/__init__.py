"""What each framework saves loads under each other one: the programs of both sides, for test_matrix.py."""
