"""The advice of messages, carried out where it is given: the advised line is taken out of the message and run."""
