"""The commands: what is read of the command line, whom it is given to, and what is printed. No work is done here."""
