"""Programs that check on other machines: with a GPU, another Python, or an AWS account."""
