"""Side-by-side measurements against the peers. Each module is a command that prints a table and writes JSON."""
