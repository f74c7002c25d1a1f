"""python -m plainvit, for torchrun: torchrun --nproc-per-node 2 -m plainvit train digits"""

from plainvit.cli import main

main()
