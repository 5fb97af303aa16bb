"""Programs for people: the command line, stress tests of storage, examples."""
