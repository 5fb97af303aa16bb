"""What can the command line do? One module for each kind of command; importing one registers its commands."""
