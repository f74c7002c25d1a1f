"""One program -> processes, devices, disk."""
