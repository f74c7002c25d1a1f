"""Every verb of the command, by family: each a function of its words, its rooms imported inside."""
