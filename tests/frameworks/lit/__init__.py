"""Programs that users of Lightning write, which the tests run, kill and start again."""
