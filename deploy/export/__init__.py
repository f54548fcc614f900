"""The same resources for those who keep their infrastructure elsewhere: CloudFormation, Terraform."""
