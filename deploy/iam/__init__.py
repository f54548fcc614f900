"""IAM policies for a deployment, and their simulation."""
