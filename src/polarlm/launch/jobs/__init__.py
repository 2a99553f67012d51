"""Jobs of PBS and Slurm: the script, the chain, and the record of what became of them."""
