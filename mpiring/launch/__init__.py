"""How a process was launched: MPI's start, the job's end, nodes, what the disk remembers."""
