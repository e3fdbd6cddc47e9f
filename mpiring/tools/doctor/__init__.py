"""Says what is wrong with an MPI launch, or with the machine below it, and how to mend it."""
