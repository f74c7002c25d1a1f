"""Side-by-side measurements against the peers. Each module is a command that prints a table and writes JSON."""

from plainvit import device

device.set_environment()  # as `plainvit` does, before a module loads torch, because oneDNN reads it then
