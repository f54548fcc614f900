"""IAM policies for a deployment, and simulation of policies with IAM."""
