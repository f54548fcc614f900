"""The dialect of Triton's generate extension."""
