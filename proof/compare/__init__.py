"""This server compared with others on one machine, in turns: `python -m proof.compare.NAME`, from a checkout."""
